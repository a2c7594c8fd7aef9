"""The arms of a comparison: how policies are written, and which runs they become."""

from pathlib import Path

import pytest

from kvprobe import arms, registry
from kvprobe.arms import Arm, make, policy_of, split
from kvprobe.types import Needs


@pytest.mark.parametrize("text, names", [
    ("random", ["random"]), (" random , h2o ", ["random", "h2o"]), ("random,random", ["random"]), ("rkv(lam=0.1),h2o", ["rkv(lam=0.1)", "h2o"]),
    ("a(b=1,c=2),d,e(f=3)", ["a(b=1,c=2)", "d", "e(f=3)"]), ("random,,h2o,", ["random", "h2o"])])
def test_a_list_is_split_at_the_commas_outside_brackets(text, names):
    assert split(text) == names


def test_all_stands_for_every_installed_policy_and_the_shared_draw():
    at_prompt_end = {"dapq", "gvote", "kvzip", "laq", "laq_plus", "lore", "single_continuation", "window_only"}
    every = [*(n for n in registry.available("policy") if n not in at_prompt_end), "random(shared=True)"]
    assert split("all") == every and split("rkv(lam=0.1),all") == ["rkv(lam=0.1)", *every]
    assert split("h2o,all")[0] == "h2o" and sorted(split("h2o,all")) == sorted(every)


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_refused(text):
    with pytest.raises(ValueError, match="names no policy; known: adakv"):
        split(text)


@pytest.mark.parametrize("name, fields", [
    ("random", dict(shared=False, block=1)), ("random(shared=True)", dict(shared=True)), ("random(shared=true, block=4)", dict(shared=True, block=4)), ("random()", dict(block=1)),
    ("random (block=2)", dict(block=2)), ("rkv(lam=0.1)", dict(lam=0.1)), ("snapkv(pooling=max)", dict(pooling="max")), ("snapkv(pooling='max',kernel=7)", dict(pooling="max", kernel=7))])
def test_options_reach_the_policy(name, fields):
    policy = policy_of(name)
    assert {f: getattr(policy, f) for f in fields} == fields


@pytest.mark.parametrize("name, says", [
    ("nope", "'nope' is unknown; known: adakv"), ("random(size=1)", "has no option 'size'"), ("random(block)", "'block' is not field=value"), ("random(block=x)", "block='x' is not allowed"),
    ("random(block=1", "is not understood"), ("random(block=1)x", "is not understood"), ("random(block=0)", "at least 1"), ("random(shared=1)", "shared=1 is not allowed"),
    ("snapkv(pooling=median)", "'average'"), ("prefix_sliding", "recency with the prompt protected"), ("nope.py", "does not exist")])
def test_what_does_not_exist_is_named(name, says):
    with pytest.raises(ValueError) as error:
        policy_of(name)
    assert says in str(error.value)


def test_only_policies_that_draw_are_repeated():
    found = make(["random", "recency", "vase", "h2o"], "without", 3)
    assert [(a.name, a.draw) for a in found if a.evicts] == [*(("random", d) for d in range(3)), ("recency", 0), *(("vase", d) for d in range(3)), ("h2o", 0)]


@pytest.mark.parametrize("name", registry.available("policy"))
def test_a_policy_says_that_it_draws_if_it_does(name):
    assert policy_of(name).needs.draws == (".rand(" in Path(registry.find("policy", name).__file__).read_text())


@pytest.mark.parametrize("protection, want", [("with", [True]), ("without", [False]), ("both", [False, True])])
def test_protection_is_a_switch_of_the_run(protection, want):
    found = make(["h2o"], protection, 1, full=False)
    assert [a.protect for a in found] == want and len({id(a.policy) for a in found}) == 1
    assert [a.label for a in found] == ["h2o" + " + prompt" * p for p in want]


def test_the_full_cache_comes_first_once_and_unprotected():
    found = make(["random"], "both", 2)
    assert found[0] == Arm(arms.FULL, None, False) and not found[0].evicts and found[0].label == "full"
    assert len(found) == 1 + 2 * 2 and not any(a.name == arms.FULL for a in make(["random"], "both", 2, full=False))


def test_bad_switches_are_refused():
    with pytest.raises(ValueError, match="known: with, without, both"):
        make(["random"], "perhaps", 1)
    with pytest.raises(ValueError, match="eviction_seeds=0"):
        make(["random"], "with", 0)


def test_a_policy_of_a_users_file(tmp_path):
    mine = tmp_path / "oldest.py"
    mine.write_text("from dataclasses import dataclass\nfrom kvprobe.types import Needs\n\n\n@dataclass(frozen=True)\nclass POLICY:\n    weight: float = 1.0\n    needs = Needs(draws=True)\n\n"
                    "    def score(self, view):\n        return -self.weight * view.positions.float()\n")
    assert split(f"random,{mine}(weight=2.0)") == ["random", f"{mine}(weight=2.0)"]
    found = make([f"{mine}(weight=2.0)"], "without", 2, full=False)
    assert [a.policy.weight for a in found] == [2.0, 2.0] and found[0].policy.needs == Needs(draws=True)
