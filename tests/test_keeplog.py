"""The keep log rebuilds what the cache held, survives a file, and convicts a log that breaks the pins."""

import dataclasses

import numpy as np
import pytest
import torch

import kvprobe
import stub
from kvprobe.keeplog import ALIVE, audit, gone_by
from oracle import cache_sets

HELD = kvprobe.SpanPin(2, 6, frozenset({(0, 1), (1, 0)}))


def recorded(cache, total: int, batch: int, longest: int):
    """Feed the cache; returns per row the keep-sets seen right after each of its rounds, and per token what it saw."""
    after, saw = [[] for _ in range(batch)], [[] for _ in range(batch)]
    start = 0
    while start < total:
        held = cache_sets(cache) if start else {}
        n = min(longest, cache.room, total - start)
        rounds = [len(f) for f in (cache.keep_log.fired if start else [()] * batch)]
        stub.step(cache, n, batch)
        for row in range(batch):
            mine = {(layer, head): set(v) for (layer, b, head), v in held.items() if b == row}
            saw[row] += [(t, mine, start) for t in range(start, start + n)]
            if len(cache.keep_log.fired[row]) > rounds[row]:
                after[row].append({(layer, head): set(v) for (layer, b, head), v in cache_sets(cache).items() if b == row})
        start += n
    return after, saw


def as_sets(held: np.ndarray, layers) -> dict:
    return {(layers[i], h): set(np.flatnonzero(held[i, h]).tolist()) for i in range(held.shape[0]) for h in range(held.shape[1])}


@pytest.fixture(params=[1, 64], ids=["tokens", "chunks"])
def run(request):
    cache = stub.cache(10, 4, layers=2, pins_free=True, row_pins=[[HELD], [], [dataclasses.replace(HELD, elsewhere="free")]])
    return cache, *recorded(cache, 70, 3, request.param)


def test_every_keep_set_after_every_round(run):
    cache, after, _ = run
    log = cache.keep_log
    for row in range(3):
        assert len(after[row]) == len(log.fired[row]) >= 10
        for number, sets in enumerate(after[row]):
            assert as_sets(log.held(row, number), log.layers) == sets


def test_what_each_token_could_see(run):
    cache, _, saw = run
    log = cache.keep_log
    for row in range(3):
        visible = log.visible(row)
        assert visible.shape == (2, 2, 70, 70)
        for t, held, start in saw[row]:
            for (layer, head), seen in as_sets(visible[:, :, t], log.layers).items():
                assert seen == held.get((layer, head), set()) | set(range(start, t + 1))


def test_counts_of_rounds(run):
    cache, after, _ = run
    log = cache.keep_log
    first = log.fired[0][0]
    assert log.rounds(0) == len(after[0])
    assert (log.rounds(0, before=first - 1), log.rounds(0, before=first), log.rounds(0, before=10**6)) == (0, 1, len(after[0]))
    for wrong in (-1, len(after[0])):
        with pytest.raises(ValueError, match=f"rounds 0..{len(after[0]) - 1}, not {wrong}"):
            log.held(0, wrong)


def test_evicted_and_held_add_up_to_what_was_seen(run):
    """B19: tokens are counted, not lists."""
    log = run[0].keep_log
    alive = (log.died == ALIVE).sum(-1)
    assert ((log.died != ALIVE).sum(-1) + alive == 70).all() and (alive[:, 1] == run[0].physical - 4).all()


def test_a_log_survives_its_file(run, tmp_path):
    log = run[0].keep_log
    log.save(tmp_path / "log.npz")
    back = kvprobe.KeepLog.load(tmp_path / "log.npz")
    assert np.array_equal(back.died, log.died) and back.died.dtype == log.died.dtype
    assert dataclasses.replace(back, died=None) == dataclasses.replace(log, died=None)
    assert [p.name for p in tmp_path.iterdir()] == ["log.npz"]


def test_many_rounds_survive_the_file(tmp_path):
    """More rounds than a short integer counts."""
    died = np.array([[[[0, 40_000, ALIVE, 32_767]]]], dtype=np.int32)
    log = kvprobe.KeepLog(died, ((1, 2),), (4,), (3,), 1, 1)
    log.save(tmp_path / "log.npz")
    assert np.array_equal(kvprobe.KeepLog.load(tmp_path / "log.npz").died, died)


def test_half_a_file_is_refused(run, tmp_path):
    path = tmp_path / "log.npz"
    run[0].keep_log.save(path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"not a log"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="not a whole keep log"):
            kvprobe.KeepLog.load(path)


def test_rows_can_be_selected(run):
    log = run[0].keep_log
    some = log.select([2, 0])
    assert np.array_equal(some.died, log.died[:, [2, 0]]) and some.fired == (log.fired[2], log.fired[0])


# -- the audit ------------------------------------------------------------------------------------------------------


def tampered(log, at: tuple, value: int):
    died = log.died.copy()
    died[at] = value
    return dataclasses.replace(log, died=died)


def test_an_honest_log_passes(run):
    log = run[0].keep_log
    assert audit(log, 0, [HELD]) == [] and audit(log, 1, []) == []
    assert set(gone_by(log, 0, HELD)) == {(0, 0), (1, 1)} and set(gone_by(log, 0, HELD).values()) == {0}


def test_a_pinned_entry_that_died_is_found(run):
    found = audit(tampered(run[0].keep_log, (0, 0, 1, 4), 3), 0, [HELD])
    assert len(found) == 1 and "position 4 is pinned at layer 0 KV head 1 but died in round 3" in found[0]


def test_a_banned_entry_that_lived_is_found(run):
    """Another entry went in its place."""
    for late in (1, ALIVE):
        swapped = tampered(tampered(run[0].keep_log, (1, 0, 1, 3), late), (1, 0, 1, 9), 0)
        found = audit(swapped, 0, [HELD])
        assert len(found) == 1 and "outlived round 0 at layer 1 KV head 1" in found[0]


def test_a_span_that_was_not_pinned_is_found(run):
    """The row without pins fails the pinned row's audit: the audit does not pass whatever it is given."""
    assert audit(run[0].keep_log, 1, [HELD])


def test_gradual_bans_pass_and_say_when_they_were_gone():
    """Two banned spans and r=2: five rounds take the first, then the second, and neither is a breach."""
    pins = [kvprobe.SpanPin(1, 5, frozenset()), kvprobe.SpanPin(7, 12, frozenset())]
    cache = stub.walk(stub.cache(14, 2, pins=pins), 40)
    log = cache.keep_log
    assert [sorted(np.flatnonzero(log.died[0, 0, 0] == number)) for number in range(4)] == [[1, 2], [3, 4], [7, 8], [9, 10]]
    assert audit(log, 0, pins) == []
    assert set(gone_by(log, 0, pins[0]).values()) == {1} and set(gone_by(log, 0, pins[1]).values()) == {4}
    late = tampered(tampered(log, (0, 0, 0, 8), 5), (0, 0, 0, 6), 2)
    assert any("outlived round 2" in line for line in audit(late, 0, pins))


def test_a_banned_span_in_the_buffer_is_no_breach():
    """The first round may take 6 of 6..8 and must leave the two that are in the buffer."""
    pins = [kvprobe.SpanPin(6, 9, frozenset())]
    log = stub.walk(stub.cache(4, 3, pins=pins), 16).keep_log
    assert log.died[0, 0, 0, 6:9].tolist() == [0, 1, 1] and audit(log, 0, pins) == []
    assert audit(tampered(log, (0, 0, 0, 7), 2), 0, pins)


def test_the_prompt_is_audited():
    cache = stub.cache(10, 4, pins=[kvprobe.PromptPin(), kvprobe.SinkPin(2)])
    stub.step(cache, 6)
    log = stub.walk(cache, 40).keep_log
    assert audit(log, 0, cache.common_pins, prompt=6) == []
    assert audit(tampered(log, (0, 0, 0, 5), 0), 0, cache.common_pins, prompt=6)


def test_left_padding_moves_no_position():
    """Positions count the row's own text."""
    cache, mask = stub.cache(6, 2), torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    mask[1, :, :, :3] = False
    stub.step(cache, 8, 2, mask=mask)
    assert cache.positions[0, :, 0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [-1, -1, -1, 0, 1, 2, 3, 4]]
    assert cache.keep_log.length == (8, 5)


def test_a_row_without_rounds_says_so():
    log = kvprobe.KeepLog(np.full((1, 1, 1, 3), ALIVE), ((),), (3,), (0,), 4, 2)
    with pytest.raises(ValueError, match="row 0 had no round"):
        log.held(0, 0)
