"""What a keep log says a policy retained, against slow loops over its keep-sets and closed forms of a uniform draw."""

import numpy as np
import pytest
import torch

import kvprobe
import sidebyside
import stub
from kvprobe import engine, metrics, retention
from kvprobe.keeplog import ALIVE, KeepLog
from kvprobe.registry import make_policy
from kvprobe.simulate import keep_log
from kvprobe.types import Plan

K, R = 12, 4


# -- the slow way: sets, one round, layer and head at a time -------------------------------------------------------------


def sets(log: KeepLog, row: int):
    """Per round and layer: (keep-sets of the heads before it, after it), candidates only."""
    out = []
    for n, length in enumerate(log.fired[row]):
        upto = length - log.buffer
        after = [[{p for p in np.flatnonzero(head) if p < upto} for head in layer] for layer in log.held(row, n)]
        if n:
            new = set(range(log.fired[row][n - 1], length))
            before = [[{p for p in set(np.flatnonzero(head)) | new if p < upto} for head in layer] for layer in log.held(row, n - 1)]
        else:
            before = [[set(range(upto)) for _ in layer] for layer in after]
        out.append(list(zip(before, after)))
    return out


def slow_coverage(log: KeepLog, row: int):
    slots, positions, apart = [], [], []
    for number, layers in enumerate(sets(log, row)):
        for before, after in layers:
            index = set()
            for had, has in zip(before, after):
                index |= {i for i, p in enumerate(sorted(had)) if p in has}
            slots.append(len(index) / max(map(len, before)))
            positions.append(len(set.union(*after)) / len(set.union(*before)))
            apart.append(len(set.union(*after)) / sum(map(len, after)))
    return np.mean(slots), np.mean(positions), np.mean(apart)


def slow_prompt(log: KeepLog, row: int, prompt: int):
    union, head = [], []
    for n in range(len(log.fired[row])):
        kept = [[set(np.flatnonzero(h)) & set(range(prompt)) for h in layer] for layer in log.held(row, n)]
        union.append(np.mean([len(set.union(*layer)) / prompt for layer in kept]))
        head.append(np.mean([len(h) / prompt for layer in kept for h in layer]))
    return union, head


def slow_band(log: KeepLog, row: int, first: int, pinned: int, low: int, high: int) -> dict:
    found = {"head": [], "union": [], "uniform": []}
    for n, length in enumerate(log.fired[row]):
        held = log.held(row, n)
        for p in range(first, length):
            if low <= length - p < high:
                draws = sum(p < log.fired[row][m] - log.buffer for m in range(n + 1))
                found["head"].append(np.mean([p in np.flatnonzero(h) for layer in held for h in layer]))
                found["union"].append(np.mean([any(p in np.flatnonzero(h) for h in layer) for layer in held]))
                found["uniform"].append(((log.keep - pinned) / (log.keep + log.buffer - pinned)) ** draws)
    return {name: np.mean(values) for name, values in found.items()} if found["head"] else {}


# -- logs ----------------------------------------------------------------------------------------------------------------


def by_hand() -> KeepLog:
    """K = 2, r = 1, two heads, one layer, rounds at 4 and 5 tokens; candidates 0..2, then what is left of them and 3."""
    died = np.full((1, 1, 2, 5), ALIVE, dtype=np.int32)
    died[0, 0, 0, 0], died[0, 0, 1, 1] = 0, 0
    died[0, 0, 0, 3], died[0, 0, 1, 0] = 1, 1
    return KeepLog(died, ((4, 5),), (5,), (0,), 2, 1)


def padded(llama, ids, policy: str) -> KeepLog:
    """Rows of different length, so that their rounds differ."""
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1, :3], mask[2, :7] = False, False
    cache = kvprobe.cache(llama[0], policy=policy, keep=K, buffer=R, seed=5)
    with torch.no_grad():
        sidebyside.feed(llama[0], cache, ids[:, :10], mask)
        for t in range(10, 44):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], 1)
            sidebyside.feed(llama[0], cache, ids[:, t : t + 1], mask)
    return cache.keep_log


def unequal() -> KeepLog:
    """Heads of different fill: pins on top of the budget at some sites."""
    pin = kvprobe.SpanPin(2, 6, frozenset({(0, 1), (1, 0)}))
    return stub.walk(stub.cache(10, 4, layers=2, pins_free=True, row_pins=[[pin], []]), 70, 2).keep_log


@pytest.fixture(scope="module")
def logs(llama, ids):
    plain = kvprobe.cache(llama[0], policy="h2o", keep=K, buffer=R, protect_prompt=True)
    engine.force(llama[0], plain, ids[:, :6])
    engine.force(llama[0], plain, ids[:, 6:60])
    return {"by hand": by_hand(), "h2o": plain.keep_log, "padded random": padded(llama, ids, "random"), "padded snapkv": padded(llama, ids, "snapkv"), "unequal": unequal()}


NAMES = ("by hand", "h2o", "padded random", "padded snapkv", "unequal")


@pytest.mark.parametrize("name", NAMES)
def test_every_number_equals_the_slow_way(logs, name):
    log = logs[name]
    for row in range(len(log.fired)):
        found = retention.coverage(log, row)
        assert (found.slots, found.positions, found.decorrelation) == pytest.approx(slow_coverage(log, row))
        for prompt in (1, 3):
            union, head = retention.prompt_survival(log, row, prompt)
            want = slow_prompt(log, row, prompt)
            assert union == pytest.approx(want[0]) and head == pytest.approx(want[1])
        for first, pinned in ((1, 0), (3, 1)):
            sums, oldest = retention.ages(log, row, first, pinned), log.fired[row][-1] - first
            for low, high in ((0, 2), (2, 5), (oldest // 2, oldest), (oldest, oldest + 1), (1, oldest + 1), (oldest + 1, oldest + 9)):
                assert retention.band(sums, low, high) == pytest.approx(slow_band(log, row, first, pinned, low, high))


@pytest.mark.parametrize("name", NAMES)
def test_the_log_counts_tokens_and_kept_and_evicted_are_what_was_seen(logs, name):
    """B19. Where heads hold equal counts each round takes r tokens of each."""
    log = logs[name]
    for row, length in enumerate(log.length):
        died = log.died[:, row, :, :length]
        kept = log.held(row, log.rounds(row) - 1)[..., :length].sum(-1) + length - log.fired[row][-1]
        assert ((died != ALIVE).sum(-1) + kept == length).all()
        if name != "unequal":
            assert ((died != ALIVE).sum(-1) == log.rounds(row) * log.buffer).all() and (kept <= log.keep + 2 * log.buffer).all()


def test_rows_of_a_ragged_batch_have_rounds_of_their_own(logs):
    assert len(set(logs["padded random"].fired)) == 3


def test_the_numbers_of_a_log_made_by_hand():
    """Round 0: heads keep {1, 2} and {0, 2}; round 1: {1, 2} and {2, 3}, out of candidates 0..3."""
    log = by_hand()
    found = retention.coverage(log, 0)
    assert found.slots == pytest.approx((1 + 1) / 2)  # slots 1, 2 and 0, 2 of 3; then 0, 1 of {1, 2, 3} and 1, 2 of {0, 2, 3}
    assert found.positions == pytest.approx((3 / 3 + 3 / 4) / 2) and found.decorrelation == pytest.approx((3 / 4 + 3 / 4) / 2)
    union, head = retention.prompt_survival(log, 0, 2)
    assert union.tolist() == [1, 0.5] and head.tolist() == [0.5, 0.25]
    sums = retention.ages(log, 0, 0)
    assert sums.count.tolist() == [0, 2, 2, 2, 2, 1]
    assert retention.band(sums, 4, 5) == pytest.approx({"head": (0.5 + 0.5) / 2, "union": 1, "uniform": (2 / 3 + (2 / 3) ** 2) / 2})


def test_coverage_of_some_rounds(logs):
    log = logs["h2o"]
    by_round = [retention.coverage(log, 0, only=[n]).positions for n in range(log.rounds(0))]
    assert len(set(by_round)) > 3 and retention.coverage(log, 0, only={1, 4}).positions == pytest.approx((by_round[1] + by_round[4]) / 2)
    assert retention.coverage(log, 0).positions == pytest.approx(np.mean(by_round))


def test_no_round_is_nothing_to_measure():
    log = KeepLog(np.full((1, 1, 2, 5), ALIVE, dtype=np.int32), ((),), (5,), (0,), 2, 1)
    for measure in (retention.coverage, lambda log, row: retention.ages(log, row, 0)):
        with pytest.raises(ValueError, match="row 0 had no round"):
            measure(log, 0)


# -- identities ----------------------------------------------------------------------------------------------------------


def simulated(policy: str, heads: int, options: dict | None = None, keep: int = K, buffer: int = R, rows: int = 1, layers: int = 2, rounds: int = 30, **rest):
    plan = Plan(keep, buffer)
    return keep_log(layers, heads, plan, make_policy(policy, options), tokens=plan.fires_at + (rounds - 1) * buffer, instances=range(rows), **rest)


@pytest.mark.parametrize("heads", [2, 8])
def test_independent_heads_cover_the_slots_that_the_closed_form_says(heads):
    log = simulated("random", heads, keep=8, buffer=8, rows=4, layers=3)
    got = np.mean([retention.coverage(log, row).slots for row in range(4)])
    p = 1 - (1 - 8 / 16) ** heads
    slots = 4 * 3 * 30 * 16  # draws without replacement scatter less than as many coins
    assert abs(got - p) < 4 * np.sqrt(p * (1 - p) / slots)
    kept = np.mean([retention.coverage(log, row).decorrelation for row in range(4)])
    assert 1 / heads < kept < 1


def test_a_shared_draw_keeps_its_share_exactly():
    found = retention.coverage(simulated("random", 8, dict(shared=True)), 0)
    assert found.slots == found.positions == pytest.approx(K / (K + R), abs=1e-15) and found.decorrelation == pytest.approx(1 / 8, abs=1e-15)


def test_recency_keeps_the_newest_in_every_head():
    log = simulated("recency", 4, prompt=3)
    found = retention.coverage(log, 0)
    assert found.slots == pytest.approx(K / (K + R), abs=1e-15) and found.decorrelation == pytest.approx(1 / 4, abs=1e-15)
    union, head = retention.prompt_survival(log, 0, 3)
    assert union.tolist() == head.tolist() == [0.0] * 30  # the first round takes 0..3
    sums = retention.ages(log, 0, 3)
    assert retention.band(sums, 0, K + R + 1)["head"] == 1 and retention.band(sums, K + R + 1, 10**6)["union"] == 0


def test_protection_keeps_the_prompt_and_streaming_llm_its_sinks():
    for policy in ("random", "recency"):
        union, head = retention.prompt_survival(simulated(policy, 2, prompt=5, protect=True), 0, 5)
        assert union.tolist() == head.tolist() == [1.0] * 30
    union, head = retention.prompt_survival(simulated("streaming_llm", 2, prompt=5), 0, 5)
    assert union[-1] == head[-1] == pytest.approx(4 / 5)


def test_disjoint_heads_have_decorrelation_one():
    """Two heads that deal out the candidates by parity."""
    died = np.full((1, 1, 2, 6), ALIVE, dtype=np.int32)
    died[0, 0, 0, 0:4:2], died[0, 0, 1, 1:4:2] = 0, 0
    found = retention.coverage(KeepLog(died, ((6,),), (6,), (0,), 2, 2), 0)
    assert (found.decorrelation, found.slots, found.positions) == (1, 1, 1)


@pytest.mark.parametrize("pinned", [0, 5])
def test_a_uniform_draw_survives_as_its_column_says(pinned):
    """By hand for an age, and on average within 4 sigma over independent rows."""
    log = simulated("random", 4, rows=48, rounds=12, prompt=5, protect=pinned > 0)
    every = [retention.ages(log, row, 5, pinned) for row in range(48)]
    last = log.fired[0][-1]
    for p in (5, 20, 40, last - 1):
        draws = sum(p < length - R for length in log.fired[0])
        alone = retention.ages(KeepLog(log.died, (log.fired[0],) * 48, log.length, log.layers, K, R), 0, p, pinned)  # from p on: of age last - p there is one, at the last round
        assert retention.band(alone, last - p, last - p + 1)["uniform"] == pytest.approx(metrics.survival(K, R, draws, pinned))
        assert metrics.survival(K, R, draws, pinned) == pytest.approx(((K - pinned) / (K + R - pinned)) ** draws)
    for low, high in ((R + 1, 20), (20, 40), (40, last)):
        off = np.array([retention.band(s, low, high)["head"] - retention.band(s, low, high)["uniform"] for s in every])
        assert abs(off.mean()) < 4 * off.std(ddof=1) / np.sqrt(len(off))
