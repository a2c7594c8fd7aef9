"""The probes that compare policies: what is refused, before work where it can be, and options that change what is run."""

import pytest

import compared
import kvprobe

cheap = compared.cheap


def test_audit_says_what_it_can_replay(tmp_path):
    """Branches' logs are not kept, and a probe without log p per token is refused by name, not by a traceback."""
    from kvprobe.audit import audit_run

    kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, policies="recency")
    with pytest.raises(ValueError, match="passcode.*planted_fact"):
        audit_run(tmp_path / "run")


OWN = """from dataclasses import dataclass
from kvprobe.types import Needs

@dataclass(frozen=True)
class POLICY:
    needs = Needs()
    level = "own"

    def score(self, view):
        return view.rand()

    def allocate(self, score, keep, held, real, positions):
        return (keep + 5).clamp(max=int(real.sum(-1).min()))
"""


def test_unequal_budgets_are_refused(tmp_path):
    """H15: a policy that sets its own budget is no arm of a comparison at equal budgets."""
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ValueError, match="budgets of a comparison must be equal"):
        kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, rounds="2", policies=f"{tmp_path / 'own.py'}")


def test_a_finished_run_of_another_policy_file_is_not_current(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(OWN.replace('level = "own"', 'level = "head"').replace("(keep + 5).clamp(max=int(real.sum(-1).min()))", "keep"))
    options = dict(preset="smoke", out=tmp_path / "run", progress=False, instances=2, rounds="2", policies=str(mine))
    kvprobe.run("passcode", **options)
    kvprobe.run("passcode", **options)
    mine.write_text(mine.read_text().replace("view.rand()", "-view.rand()"))
    with pytest.raises(ValueError, match="another version of policy"):
        kvprobe.run("passcode", **options)


def test_a_block_that_fits_no_head_is_refused_before_work(tmp_path):
    with pytest.raises(ValueError, match="block=500"):
        kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, policies="random,random(block=500)")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="keeps"):
        kvprobe.run("blocks", preset="smoke", out=tmp_path / "run", progress=False, keep=32)


def test_endpoints_of_a_protected_distance_are_protected(tmp_path):
    rows = kvprobe.run("distance", preset="smoke", out=tmp_path / "run", progress=False, instances=2, protection="with", factors="once", policies="recency", keep=200, eviction_seeds=1).rows
    assert rows.protect.all() and set(rows.end) == {"", "kept", "deleted"}
