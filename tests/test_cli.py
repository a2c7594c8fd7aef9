"""The command line as a user types it: every command of the README at smoke scale, and refusals that say what is allowed."""

import re
from pathlib import Path

import pytest

from kvprobe import cli, registry

SMOKE = ["--preset", "smoke", "--instances", "2", "--batch-size", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(capsys, *argv) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_run_show_figure_rerun_audit(capsys, tmp_path):
    code, out, _ = call(capsys, "run", "planted_fact", *SMOKE, "--out", "a")
    assert code == 0 and "recall R" in out and "checks of the instrument" in out
    code, shown, _ = call(capsys, "show", "a")
    assert code == 0 and shown == out
    (tmp_path / "a/figures/head_pooling.png").unlink()
    code, out, _ = call(capsys, "figure", "head_pooling", "a")
    assert code == 0 and (tmp_path / "a/figures/head_pooling.png").exists() and "head_pooling.pdf" in out
    code, _, err = call(capsys, "rerun", "a/manifest.json", "--out", "b")
    assert code == 0 and "identical" in err
    code, out, _ = call(capsys, "audit", "a")
    assert code == 0 and re.search(r"largest difference in log p \d", out)


def test_the_default_folder_is_named_by_the_settings(capsys):
    call(capsys, "run", "planted_fact", *SMOKE)
    call(capsys, "run", "planted_fact", *SMOKE, "--seed", "1")
    folders = sorted(p.name for p in Path("runs").iterdir())
    assert len(folders) == 2 and all(re.fullmatch(r"planted_fact-smoke-[0-9a-f]{8}", f) for f in folders)


def test_every_field_is_an_option_with_help(capsys):
    from dataclasses import fields

    from kvprobe.probes.planted_fact import CONFIG

    code, out, _ = call(capsys, "run", "planted_fact", "--help")
    assert code == 0
    for f in fields(CONFIG):
        if f.name != "policy_options":
            assert f"--{f.name.replace('_', '-')}" in out, f.name
    assert "--policy.block" in out and "entries per KV head that survive a round" in out


def test_policy_options_reach_the_policy(capsys):
    import json

    code, _, _ = call(capsys, "run", "planted_fact", *SMOKE, "--policy", "random", "--policy.block", "4", "--out", "x")
    assert code == 0 and json.loads(Path("x/manifest.json").read_text())["policy"]["fields"]["block"] == 4


def test_a_users_policy_file(capsys, tmp_path):
    mine = tmp_path / "oldest.py"
    mine.write_text('''"""Keep the oldest."""
from dataclasses import dataclass
from kvprobe.types import Needs


@dataclass(frozen=True)
class POLICY:
    """Mine."""

    weight: float = 1.0
    """a factor"""

    needs = Needs()

    def score(self, view):
        return -self.weight * view.positions.float()
''')
    code, out, err = call(capsys, "run", "planted_fact", *SMOKE, "--policy", mine, "--policy.weight", "2", "--out", "x")
    assert code == 0, err


@pytest.mark.parametrize("argv, says", [
    (["run", "planted_facts"], f"known: {', '.join(registry.names('probe'))}, or"),
    (["run", "planted_fact", "--preset", "huge"], "smoke, demo, paper"),
    (["run", "planted_fact", *SMOKE, "--polcy", "x"], "--policy"),
    (["run", "planted_fact", *SMOKE, "--policy", "nope"], f"known: {', '.join(registry.names('policy'))}, or"),
    (["run", "planted_fact", *SMOKE, "--policy", "snapkv", "--policy.block", "2"], "its options are: window"),
    (["run", "planted_fact", *SMOKE, "--policy.block", "0"], "at least 1"),
    (["run", "planted_fact", *SMOKE, "--keep", "32", "--keep-ratio", "0.5"], "not both"),
    (["run", "planted_fact", *SMOKE, "--keep", "None"], "give keep"),
    (["run", "planted_fact", *SMOKE, "--keep", "8"], "cannot hold the pinned box of 16"),
    (["run", "planted_fact", *SMOKE, "--buffer", "0"], "at least 1"),
    (["run", "planted_fact", *SMOKE, "--conditions", "0+5"], "KV heads 0..1"),
    (["run", "planted_fact", *SMOKE, "--layers", "0-9"], "layers 0..1"),
    (["run", "planted_fact", *SMOKE, "--model", "nope"], "allowed: 'smollm2'"),
    (["run", "planted_fact", *SMOKE, "--device", "warp"], "available: ['cpu'"),
    (["run", "planted_fact", *SMOKE, "--dtype", "int3"], "float32"),
    (["run", "planted_fact", *SMOKE, "--filler", "none.txt"], "builtin"),
    (["show", "nowhere"], "no run is there"),
    (["frobnicate"], "unknown"),
])
def test_bad_input_is_refused_with_what_is_allowed(capsys, argv, says):
    code, out, err = call(capsys, *argv)
    assert code == 1 and says in err + out and "Traceback" not in err
    assert not Path("runs").exists()


def test_a_failed_check_exits_with_2_and_everything_is_written(capsys):
    code, out, _ = call(capsys, "run", "planted_fact", *SMOKE, "--check-forcing", "-1", "--out", "x")
    assert code == 2 and "[FAIL]" in out and Path("x/figures/head_pooling.png").exists() and Path("x/rows.jsonl").stat().st_size > 0
    assert call(capsys, "show", "x")[0] == 2


def test_list_and_version(capsys):
    code, out, _ = call(capsys, "list")
    assert code == 0 and all(word in out for word in ("snapkv", "streaming_llm", "planted_fact", "head_pooling"))
    assert call(capsys, "--version")[1].startswith("kvprobe 0.")


def test_show_of_an_unfinished_run_says_so(capsys):
    call(capsys, "run", "planted_fact", *SMOKE, "--out", "x")
    text = Path("x/manifest.json").read_text()
    Path("x/manifest.json").write_text(text.replace('"finished"', '"running"'))
    rows = Path("x/rows.jsonl").read_text()
    Path("x/rows.jsonl").write_text(rows[: len(rows) // 2])
    code, out, err = call(capsys, "show", "x")
    assert "not finished" in out and "left out" in err


def test_traces_are_written_and_usable_as_filler(capsys, tmp_path):
    """A random model writes noise, which the screen must refuse; the embedded model's text is in the package."""
    code, _, err = call(capsys, "traces", "--out", "t.jsonl", "--model", "tiny", "--n", "2", "--max-new-tokens", "20", "--batch-size", "2")
    assert code == 1 and "passed the screen" in err and not Path("t.jsonl").exists()
    assert call(capsys, "traces", "--out", "t.txt")[0] == 1


def test_a_figure_taken_for_a_probe_is_told_where_it_is_drawn(capsys):
    assert cli.main(["run", "query_coverage"]) == 1
    told = capsys.readouterr().err
    assert "it is a figure, which `kvprobe run oracle_suite` draws" in told
    assert cli.main(["run", "snapkv"]) == 1 and "it is a policy; known" in capsys.readouterr().err
