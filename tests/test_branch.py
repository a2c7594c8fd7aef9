"""Arms share a prefix and branch off it: a branch is the run that its policy would have had from the start, bit for bit."""

import pytest
import torch

import tiny

import kvprobe
from kvprobe import engine, registry
from kvprobe.comparing import NEVER, Gather
from kvprobe.eviction_cache import EvictionCache
from kvprobe.models import load
from kvprobe.types import Needs, Plan, watches

PLAN = Plan(20, 6)
FIRES = PLAN.fires_at
SHARES = [n for n in registry.available("policy") if n not in tiny.AHEAD and not watches(registry.find("policy", n).POLICY)]
PINS = [[kvprobe.PromptPin()], [kvprobe.SpanPin(8, 12, frozenset({(0, 1)}))], []]


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, 256, (3, 90), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def prefix(lm, text):
    return gathered(lm, text)


def empty(lm, policy, plan=PLAN, **rest) -> EvictionCache:
    return EvictionCache(lm.model.config, lm.geometry, plan, policy, instances=[4, 0, 9], **rest)


def gathered(lm, text, upto: int = FIRES - 1, window: int = 16, attn_mass: bool = True) -> EvictionCache:
    """The shared prefix, in two forwards."""
    cache = empty(lm, Gather(Needs(window=window, attn_mass=attn_mass)), seed=0)
    feed(lm, cache, text, 10, upto)
    return cache


@torch.no_grad()
def feed(lm, cache, text, *stops: int) -> list[torch.Tensor]:
    """Forwards up to each stop, and as rounds allow; logits of each."""
    out = []
    for stop in stops:
        while (at := cache.get_seq_length()) < stop:
            n = min(cache.room or stop, stop - at)
            out.append(lm.model(text[:, at : at + n], cache=cache, use_cache=True).logits)
    return out


def bound(name: str, lm, options: dict | None = None):
    return registry.make_policy(name, options or tiny.WINDOW_ONLY.get(name), lm)


@pytest.mark.parametrize("name", SHARES)
def test_a_branch_is_a_run_from_the_start(lm, text, prefix, name):
    policy = bound(name, lm)
    alone = empty(lm, policy, row_pins=PINS, seed=7)
    feed(lm, alone, text, 10, FIRES - 1)
    branch = prefix.branch(1, row_pins=PINS, policy=policy, seed=7)
    for want, got in zip(feed(lm, alone, text, 60, 90), feed(lm, branch, text, 60, 90), strict=True):
        assert torch.equal(want, got)
    a, b = alone.keep_log, branch.keep_log
    assert (a.died == b.died).all() and a.fired == b.fired and len(a.fired[0]) == (90 - FIRES) // 6 + 1
    assert torch.equal(alone.positions, branch.positions)


def test_a_branch_leaves_its_prefix_and_its_sisters_alone(lm, text, prefix):
    first = prefix.branch(1, policy=registry.make_policy("h2o"), seed=1)
    other = prefix.branch(1, policy=registry.make_policy("random"), seed=1)
    feed(lm, first, text, 90)
    feed(lm, other, text, 90)
    again = prefix.branch(1, policy=registry.make_policy("random"), seed=1)
    feed(lm, again, text, 90)
    assert (again.keep_log.died == other.keep_log.died).all() and (first.keep_log.died != other.keep_log.died).any()
    assert prefix.get_seq_length() == FIRES - 1 and prefix.keep_log.fired == ((), (), ())


@pytest.mark.parametrize("name", ["random", "vase"])
def test_the_seed_decides_the_draws(lm, text, prefix, name):
    logs = []
    for seed in (1, 1, 2):
        cache = prefix.branch(1, policy=registry.make_policy(name), seed=seed)
        feed(lm, cache, text, 60)
        logs.append(cache.keep_log.died)
    assert (logs[0] == logs[1]).all() and (logs[0] != logs[2]).any()


def test_rows_may_be_repeated_with_pins_of_their_own(lm, text, prefix):
    policy = registry.make_policy("h2o")
    pins = [(kvprobe.SpanPin(0, 4),), (), (), (kvprobe.SpanPin(0, 4, frozenset()),), (), ()]
    twice = prefix.branch(2, row_pins=pins, policy=policy, seed=7)
    assert twice.instances == [4, 4, 0, 0, 9, 9]
    feed(lm, twice, text.repeat_interleave(2, 0), 70)
    for k in (0, 3, 4):
        alone = EvictionCache(lm.model.config, lm.geometry, PLAN, policy, instances=[[4, 0, 9][k // 2]], row_pins=[pins[k]], seed=7)
        feed(lm, alone, text[k // 2 : k // 2 + 1], 10, FIRES - 1, 70)
        assert (alone.keep_log.died[:, 0] == twice.keep_log.died[:, k]).all()


def test_under_a_plan_that_never_fires_it_is_the_full_cache(lm, text, prefix):
    full = prefix.branch(1, plan=NEVER, policy=registry.make_policy("random"), seed=0)
    got = torch.cat(feed(lm, full, text, 60, 90), dim=1)
    want = lm.model(text).logits[:, FIRES - 1 :]
    assert torch.allclose(got, want, atol=1e-10) and full.keep_log.fired == ((), (), ())


def test_another_plan_decides_how_many_queries_the_buffer_is(lm, text, prefix):
    """window=-1 counts the buffer of the branch's plan."""
    plan, policy = Plan(14, 9), registry.make_policy("snapkv")
    alone = empty(lm, policy, plan, seed=7)
    feed(lm, alone, text, 10, FIRES - 1, 80)
    branch = prefix.branch(1, plan=plan, policy=policy, seed=7)
    feed(lm, branch, text, 80)
    assert plan.fires_at == FIRES and (alone.keep_log.died == branch.keep_log.died).all()


def test_after_a_round_it_is_refused(lm, text):
    cache = empty(lm, registry.make_policy("random"), seed=0)
    feed(lm, cache, text, FIRES)
    for given in (dict(policy=registry.make_policy("recency")), dict(seed=1), dict(row_pins=[(), (), ()])):
        with pytest.raises(ValueError, match="cannot be set after a round has fired"):
            cache.branch(1, **given)
    cache.branch(1)  # a plain copy is fine


@pytest.mark.parametrize("gather, policy", [(dict(window=5), "snapkv"), (dict(window=0), "vase"), (dict(window=7), "rkv_released"), (dict(attn_mass=False), "h2o"), ({}, "lazyeviction")])
def test_a_prefix_that_gathered_less_is_refused(lm, text, gather, policy):
    cache = gathered(lm, text, 12, **gather)
    with pytest.raises(ValueError, match="did not gather: the prefix must run under a policy that needs as much"):
        cache.branch(1, policy=registry.make_policy(policy))


def test_the_prefix_may_not_reach_a_round(lm, text):
    cache = gathered(lm, text)
    with pytest.raises(RuntimeError, match="must not reach a round"):
        engine.force(lm, cache, text[:, FIRES - 1 : FIRES])
