"""Random eviction by contiguous blocks (protocols 8) against a plain simulation that remembers which blocks were begun."""

import pytest

import kvprobe
import stub
from oracle import raw_draws


def simulate(block: int, keep: int, buffer: int, total: int, head: int, held=(), banned=(), seed: int = 0) -> list[int]:
    """Positions a head holds after `total` tokens."""
    entries, begun, number = [], set(), 0
    for now in range(1, total + 1):
        entries.append(now - 1)
        if len(entries) < keep + 2 * buffer:
            continue
        candidates, newest = entries[:-buffer], entries[-buffer:]
        draw = dict(zip(candidates, raw_draws(seed, 0, 0, head, number, [p // block for p in candidates])))

        def order(p, draw=draw):
            if p in banned:
                return (0, 0.0, p)
            return (1, 0.0, p) if p // block in begun else (2, draw[p], p)

        gone = sorted((p for p in candidates if p not in held), key=order)[: len(candidates) - keep]
        begun |= {p // block for p in gone if p not in banned}
        entries = [p for p in candidates if p not in gone] + newest
        number += 1
    return entries


def check(block: int, keep: int, buffer: int, total: int, pins=(), **spans) -> None:
    cache = stub.cache(keep, buffer, options=dict(block=block), pins=pins)
    for now in range(keep + 2 * buffer, total + 1, buffer):
        stub.walk(cache, now)
        for head in (0, 1):
            assert stub.held(cache, head=head) == simulate(block, keep, buffer, now, head, **spans), f"after {now} tokens, head {head}"


@pytest.mark.parametrize("block, keep, buffer", [(4, 16, 4), (4, 18, 3), (4, 16, 8), (16, 48, 16), (16, 40, 6), (64, 64, 5), (3, 20, 7)])
def test_blocks(block, keep, buffer):
    check(block, keep, buffer, keep + 12 * buffer)


def test_block_of_one_is_the_default():
    one, default = (stub.walk(stub.cache(16, 4, options=options), 120) for options in (dict(block=1), {}))
    assert (one.keep_log.died == default.keep_log.died).all()
    for head in (0, 1):
        assert stub.held(default, head=head) == simulate(1, 16, 4, 120, head)


@pytest.mark.parametrize("block, keep, buffer", [(4, 16, 4), (8, 20, 3), (16, 48, 5)])
@pytest.mark.parametrize("span", [(5, 7), (4, 7), (2, 13), (0, 6), (8, 16)], ids=str)
def test_held_spans_inside_blocks(block, keep, buffer, span):
    """A block whose pinned entries stay is still begun, also where they are its first ones (a prompt that ends inside a block)."""
    check(block, keep, buffer, keep + 16 * buffer, [kvprobe.SpanPin(*span)], held=range(*span))


@pytest.mark.parametrize("block, keep, buffer", [(4, 16, 4), (8, 20, 3), (16, 48, 5)])
@pytest.mark.parametrize("span", [(5, 7), (4, 7), (2, 13), (0, 6), (8, 16)], ids=str)
def test_banned_spans_inside_blocks(block, keep, buffer, span):
    """What a ban takes out of a block does not begin it."""
    check(block, keep, buffer, keep + 16 * buffer, [kvprobe.SpanPin(*span, frozenset())], banned=range(*span))


def test_overlapping_bans_count_once():
    pins = [kvprobe.SpanPin(8, 11, frozenset()), kvprobe.SpanPin(9, 12, frozenset())]
    check(8, 20, 2, 80, pins, banned=range(8, 12))


def test_bans_and_pins_in_one_block():
    pins = [kvprobe.SpanPin(16, 19), kvprobe.SpanPin(21, 24, frozenset())]
    check(16, 40, 5, 160, pins, held=range(16, 19), banned=range(21, 24))


def test_kept_blocks_stay_whole():
    """After every round at most one block of a head is broken, apart from the one at the buffer's edge."""
    cache = stub.cache(64, 6, options=dict(block=16))
    for total in range(76, 400, 6):
        stub.walk(cache, total)
        for head in (0, 1):
            kept = [p for p in stub.held(cache, head=head) if p < total - 6]
            assert len(kept) == 64
            sizes = {b: sum(p // 16 == b for p in kept) for b in {p // 16 for p in kept} - {(total - 6) // 16}}
            assert sum(size < 16 for size in sizes.values()) <= 1
            assert all(kept[i] % 16 == 15 or kept[i] + 1 == kept[i + 1] for i in range(63)), "a block loses its oldest entries first"


def test_blocks_are_drawn_afresh_and_per_head():
    died = stub.walk(stub.cache(64, 16, options=dict(block=16), layers=2), 480, batch=2).keep_log.died
    whole = died[..., :384].reshape(2, 2, 2, 24, 16)
    assert (whole == whole[..., :1]).all(), "r is a block here: blocks die whole"
    flat = whole[..., 0].reshape(8, 24)
    assert all((flat[i] != flat[j]).any() for i in range(8) for j in range(i))
    shared = stub.walk(stub.cache(64, 16, options=dict(block=16, shared=True)), 480).keep_log.died
    assert (shared[0, 0, 0] == shared[0, 0, 1]).all()


def test_a_block_larger_than_the_budget_is_refused():
    with pytest.raises(ValueError, match="block=17.*keep=16"):
        stub.walk(stub.cache(16, 4, options=dict(block=17)), 24)
    with pytest.raises(ValueError, match="block=0"):
        stub.cache(16, 4, options=dict(block=0))
