"""When a round fires, what it leaves, what pins do, and what is refused."""

import pytest
import torch

import kvprobe
import stub
from kvprobe import engine, evict
from kvprobe.eviction_cache import EvictionCache
from oracle import cache_sets


def sizes(cache: EvictionCache, steps: int) -> list[int]:
    """Entries per KV head after each of `steps` one-token steps."""
    found = []
    for _ in range(steps):
        stub.step(cache)
        found.append(cache.physical)
    return found


# -- the schedule ---------------------------------------------------------------------------------------------------


def test_a_round_fires_at_keep_plus_twice_the_buffer():
    """B02, B06 in the terms of protocols 1: keep 32, buffer 8 fires at 48 and returns to 40, and so on for ever."""
    cycle = [40, *range(41, 48)]
    assert sizes(stub.cache(32, 8), 80) == [*range(1, 48), *cycle, *cycle, *cycle, *cycle, 40]


def test_rounds_from_an_empty_prompt():
    """methods R3: K=1024, r=64, first round at 1152, 47 rounds in 4096 steps."""
    cache = stub.cache(1024, 64, heads=1)
    largest = max(sizes(cache, 1151))
    assert largest == 1151 and cache.keep_log.fired == ((),)
    assert sizes(cache, 1) == [1088]
    stub.walk(cache, 4096)
    assert cache.keep_log.fired == (tuple(range(1152, 4097, 64)),) and len(range(1152, 4097, 64)) == 47


@pytest.mark.parametrize("length", [31, 32, 33, 47, 48, 49, 63, 64, 200])
def test_prefill_around_the_budget(length):
    """B03: exact counts at, around and far above the budget; below it nothing is evicted."""
    cache = stub.cache(32, 8)
    stub.step(cache, length)
    assert cache.physical == (length if length < 48 else 40)
    assert len(cache.keep_log.fired[0]) == (length >= 48)
    assert stub.held(cache)[-8:] == list(range(length - 8, length)), "the buffer is never evicted"


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
def test_three_prompts_through_one_cache(llama, ids, policy):
    """B01: every text ends at the budget, and is treated as by a new cache."""
    model, _ = llama
    used = kvprobe.cache(model, policy=policy, keep=10, buffer=4, seed=1)
    for row in range(3):
        used.reset()
        fresh = kvprobe.cache(model, policy=policy, keep=10, buffer=4, seed=1)
        for cache in (used, fresh):
            kvprobe.force(model, cache, ids[row : row + 1, : 42 + row], longest=16)
        assert used.physical == fresh.physical <= 18 and used.keep_log.length == (42 + row,) and used.get_seq_length() == 42 + row
        assert cache_sets(used) == cache_sets(fresh) and used.keep_log.fired == fresh.keep_log.fired != ((),)


def test_reset_takes_a_batch_of_another_size():
    cache = stub.cache(8, 2)
    stub.walk(cache, 20, batch=3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.reset()
    stub.walk(cache, 20, batch=1)
    assert cache_sets(cache) == cache_sets(stub.walk(stub.cache(8, 2), 20))


def test_reset_keeps_the_pins_and_instances_it_was_given():
    given = dict(instances=[5, 6], row_pins=[[kvprobe.SpanPin(0, 2)], []])
    cache = stub.walk(stub.cache(8, 2, **given), 20, batch=2)
    want = cache_sets(cache)
    cache.batch_select_indices(torch.tensor([1, 1]))
    cache.reset()
    assert cache_sets(stub.walk(cache, 20, batch=2)) == want


def test_the_next_position_is_the_logical_one(llama, ids):
    """C01: 60 tokens in, 14 held: the next token stands at 60."""
    model, _ = llama
    cache = kvprobe.cache(model, keep=10, buffer=4)
    with torch.no_grad():
        model.model(ids[:1, :60], cache=cache)
        assert (cache.get_seq_length(), cache.physical) == (60, 14)
        default = model.model(ids[:1, 60:61], cache=cache).logits
        again = kvprobe.cache(model, keep=10, buffer=4)
        model.model(ids[:1, :60], cache=again)
        told = model.model(ids[:1, 60:61], position_ids=torch.tensor([[60]]), cache=again).logits
    assert torch.equal(default, told) and cache.positions[0, 0, 0, -1] == 60


def test_prompt_end_evicts_once():
    """Prompt-time eviction: the first forward ends at the budget, the rest of the text is never touched."""
    cache = stub.cache(12, 0, schedule="prompt_end")
    stub.step(cache, 50)
    assert cache.physical == 12 and cache.keep_log.fired == ((50,),) and cache.room is None
    assert sizes(cache, 40) == list(range(13, 53))
    short = stub.cache(12, 0, schedule="prompt_end")
    stub.step(short, 12)
    assert sizes(short, 20) == list(range(13, 33)) and short.keep_log.fired == ((),)


def test_rows_have_rounds_of_their_own(llama, ids):
    model, _ = llama
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[1, :1], mask[2, :5] = 0, 0
    cache = kvprobe.cache(model, keep=10, buffer=4)
    engine.generate(model, cache, ids[:, :30], attention_mask=mask, max_new_tokens=6)
    assert cache.keep_log.fired == ((30, 34), (29, 33), (25, 29))
    assert cache.keep_log.length == (35, 34, 30)


def test_plan_refuses_what_cannot_work():
    for bad in (dict(keep=0), dict(keep=8, buffer=0), dict(keep=8, buffer=-1), dict(keep=8, schedule="sometimes"), dict(keep=8, schedule="prompt_end")):
        with pytest.raises(ValueError, match="keep=0|buffer=|schedule"):
            kvprobe.Plan(**bad)


def test_budget_as_a_number_or_as_a_ratio(llama):
    """K01: both forms give the same plan; both or neither is an error that names them."""
    model, _ = llama
    by_ratio = kvprobe.cache(model, keep_ratio=0.25, length=256)
    assert by_ratio.plan == kvprobe.cache(model, keep=64).plan and by_ratio.plan.keep == 64
    for both_or_neither in (dict(), dict(keep=64, keep_ratio=0.25, length=256)):
        with pytest.raises(ValueError, match="keep.*keep_ratio"):
            kvprobe.cache(model, **both_or_neither)
    with pytest.raises(ValueError, match="length"):
        kvprobe.cache(model, keep_ratio=0.25)
    with pytest.raises(ValueError, match="1.5"):
        kvprobe.cache(model, keep_ratio=1.5, length=10)


# -- pins -----------------------------------------------------------------------------------------------------------


def test_pins_count_inside_the_budget():
    cache = stub.walk(stub.cache(10, 4, pins=[kvprobe.SpanPin(2, 7)]), 62)
    for head in (0, 1):
        assert len(stub.held(cache, head=head)) == 14 and set(range(2, 7)) <= set(stub.held(cache, head=head))


def test_free_pins_come_on_top():
    cache = stub.walk(stub.cache(10, 4, pins=[kvprobe.SpanPin(2, 7)], pins_free=True), 23 + 4 * 9)
    assert cache.keep_log.fired[0][0] == 23 and cache.physical == 19
    assert set(range(2, 7)) <= set(stub.held(cache))


def test_pins_at_sites():
    """Held at the named site, gone everywhere else, from the first round that may take them."""
    cache = stub.walk(stub.cache(10, 4, layers=2, pins=[kvprobe.SpanPin(2, 6, frozenset({(1, 0)}))]), 18)
    found = {(layer, head): set(stub.held(cache, layer, 0, head)) & set(range(2, 6)) for layer in (0, 1) for head in (0, 1)}
    assert found == {(0, 0): set(), (0, 1): set(), (1, 0): set(range(2, 6)), (1, 1): set()}


def test_free_elsewhere_leaves_the_span_to_the_policy():
    """With recency, a span that is pinned at one site is simply old at the others: the oldest four go."""
    cache = stub.walk(stub.cache(10, 4, "recency", pins=[kvprobe.SpanPin(2, 6, frozenset({(0, 0)}), elsewhere="free")]), 18)
    assert stub.held(cache, head=0) == [2, 3, 4, 5] + list(range(8, 18))
    assert stub.held(cache, head=1) == list(range(4, 18))


def test_sinks_windows_and_the_prompt():
    cache = stub.cache(10, 4, pins=[kvprobe.SinkPin(2), kvprobe.WindowPin(6), kvprobe.PromptPin()])
    stub.step(cache, 5)
    for total in range(18, 58, 4):
        stub.walk(cache, total)
        kept = stub.held(cache)
        assert kept[:5] == [0, 1, 2, 3, 4] and kept[-6:] == list(range(total - 6, total)) and len(kept) == 14


def test_prompt_protection_is_a_switch_of_the_run(llama, ids):
    model, _ = llama
    cache = kvprobe.cache(model, policy="recency", keep=10, buffer=4, protect_prompt=True)
    engine.generate(model, cache, ids[:2, :7], max_new_tokens=30)
    assert all(held == [*range(7), *range(27, 36)] for held in cache_sets(cache).values()) and cache.keep_log.fired[0][-1] == 34


def test_banned_spans_go_gradually_oldest_first():
    """A span longer than a round's surplus: r=2 takes two of its entries a round, and nothing else meanwhile."""
    cache = stub.cache(10, 2, pins=[kvprobe.SpanPin(3, 8, frozenset())])
    left = []
    for total in range(14, 22, 2):
        stub.walk(cache, total)
        left.append([p for p in range(total - 2) if p in stub.held(cache)])
    assert left[0] == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert left[1] == [0, 1, 2, 7, 8, 9, 10, 11, 12, 13]
    assert not {3, 4, 5, 6, 7} & set(left[2]) and len(left[2]) == 10 and len({0, 1, 2, 8, 9, 10, 11, 12, 13, 14, 15} & set(left[2])) == 10


def test_a_banned_span_waits_until_it_leaves_the_buffer():
    cache = stub.walk(stub.cache(4, 3, pins=[kvprobe.SpanPin(6, 9, frozenset())]), 10)
    assert cache.keep_log.fired == ((10,),) and {7, 8} <= set(stub.held(cache)) and 6 not in stub.held(cache)
    stub.walk(cache, 13)
    assert not {6, 7, 8} & set(stub.held(cache))


def test_contradicting_pins_raise():
    pins = [kvprobe.SpanPin(2, 6, frozenset({(0, 0)})), kvprobe.SpanPin(5, 9, frozenset({(0, 1)}))]
    with pytest.raises(ValueError, match="two pins disagree"):
        stub.walk(stub.cache(10, 4, pins=pins), 18)


def test_more_pins_than_fit_raise_with_the_numbers():
    with pytest.raises(ValueError, match="keep=10 cannot hold 11 pinned"):
        stub.walk(stub.cache(10, 4, pins=[kvprobe.SpanPin(0, 11)]), 18)
    stub.walk(stub.cache(10, 4, pins=[kvprobe.SpanPin(0, 10)]), 40)


def test_what_only_the_prompt_shows_raises_with_the_numbers():
    """How long it is, and with which other pins it clashes or does not fit."""
    with pytest.raises(ValueError, match="keep=10.* 12 tokens"):
        stub.step(stub.cache(10, 4, pins=[kvprobe.PromptPin()]), 12)
    too_many = stub.cache(10, 4, pins=[kvprobe.PromptPin(), kvprobe.SpanPin(8, 12)])
    clash = stub.cache(10, 4, pins=[kvprobe.PromptPin(), kvprobe.SpanPin(6, 9, frozenset({(0, 1)}))])
    for cache, say in ((too_many, "keep=10 cannot hold 12 pinned"), (clash, r"two pins disagree.*\[0, 0, 0, 6\]")):
        stub.step(cache, 8)
        with pytest.raises(ValueError, match=say):
            stub.walk(cache, 18)


def test_pins_at_sites_that_do_not_exist_are_refused():
    for site, valid in (((0, 2), "0..1"), ((1, 0), "0..0"), ((-1, 0), "0..0")):
        with pytest.raises(ValueError, match=valid):
            stub.cache(10, 4, pins=[kvprobe.SpanPin(0, 1, frozenset({site}))])
    for start, stop in ((3, 3), (-1, 2)):
        with pytest.raises(ValueError, match=str(start)):
            kvprobe.SpanPin(start, stop)


def test_rows_have_pins_of_their_own():
    row_pins = [[kvprobe.SpanPin(0, 3)], [kvprobe.SpanPin(0, 3, frozenset())], []]
    cache = stub.walk(stub.cache(10, 4, row_pins=row_pins, instances=[7, 7, 7]), 18, batch=3)
    assert {0, 1, 2} <= set(stub.held(cache, row=0)) and not {0, 1, 2} & set(stub.held(cache, row=1))
    assert stub.held(cache, row=2) == stub.held(stub.walk(stub.cache(10, 4, instances=[7]), 18))


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_chunk_that_would_cross_a_round_is_refused_with_the_allowed_size():
    cache = stub.cache(10, 4)
    stub.step(cache, 13)
    with pytest.raises(ValueError, match="6 tokens would cross a round: feed at most 5"):
        stub.step(cache, 6)
    stub.step(cache, 5)
    assert cache.keep_log.fired == ((18,),), "the refused chunk must have left no trace"


def test_cropping_is_refused():
    cache = stub.walk(stub.cache(10, 4), 30)
    with pytest.raises(ValueError, match="cropped"):
        cache.crop(-3)
    assert not cache.is_croppable and cache.physical == 14


def test_another_batch_size_is_refused():
    cache = stub.walk(stub.cache(10, 4), 5, batch=2)
    with pytest.raises(ValueError, match="2 rows, the forward has 3"):
        stub.step(cache, 1, batch=3)
    with pytest.raises(ValueError, match="1 instances.*batch of 2"):
        stub.step(stub.cache(10, 4, instances=[3]), 1, batch=2)


def test_another_attention_function_is_refused(llama, ids):
    model, _ = llama
    cache = kvprobe.cache(model, keep=10, buffer=4)
    model.model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(ValueError, match="attention function was changed"):
            model.model(ids[:1, :5], cache=cache)
    finally:
        model.model.set_attn_implementation("kvprobe")


def test_a_forward_that_failed_half_way_poisons_the_cache():
    cache = stub.cache(10, 4, layers=2)
    stub.step(cache, 5)
    cache.update(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), 0, kwargs={})
    with pytest.raises(RuntimeError, match="did not finish"):
        stub.step(cache, 1)


def test_an_empty_cache_says_so():
    cache = stub.cache(10, 4)
    for what in ("keep_log", "positions"):
        with pytest.raises(ValueError, match="empty"):
            getattr(cache, what)
    assert cache.get_seq_length() == 0 and cache.physical == 0


# -- rows of a batch ------------------------------------------------------------------------------------------------


def test_selecting_rows_takes_pins_draws_and_logs_along():
    row_pins = [[kvprobe.SpanPin(0, 3)], [], [kvprobe.SpanPin(1, 4)]]
    order = [2, 0, 0]
    moved = stub.walk(stub.cache(10, 4, row_pins=row_pins, instances=[4, 5, 6]), 25, batch=3)
    moved.reorder_cache(torch.tensor(order))
    stub.walk(moved, 60, batch=3)
    straight = stub.walk(stub.cache(10, 4, row_pins=[row_pins[i] for i in order], instances=[6, 4, 4]), 60, batch=3)
    assert cache_sets(moved) == cache_sets(straight)
    assert (moved.keep_log.died == straight.keep_log.died).all() and moved.keep_log.fired == straight.keep_log.fired


def test_selected_rows_keep_rounds_of_their_own():
    def padded(pads: list[int]) -> EvictionCache:
        mask = torch.ones(len(pads), 1, 8, 8, dtype=torch.bool).tril()
        for row, pad in enumerate(pads):
            mask[row, :, :, :pad] = False
        cache = stub.cache(10, 4, instances=[{0: 4, 3: 5, 5: 6}[pad] for pad in pads])
        stub.step(cache, 8, len(pads), mask=mask)
        return stub.walk(cache, 29, batch=len(pads))

    moved, straight = padded([0, 3, 5]), padded([5, 0, 0])
    assert moved.keep_log.fired == ((18, 22, 26), (18, 22, 26), (18, 22))
    moved.batch_select_indices(torch.tensor([2, 0, 0]))
    for cache in (moved, straight):
        stub.walk(cache, 60, batch=3)
    assert cache_sets(moved) == cache_sets(straight) and moved.keep_log.fired == straight.keep_log.fired
    assert (moved.keep_log.died == straight.keep_log.died).all() and moved.keep_log.length == straight.keep_log.length


def test_branches_share_the_prefix_and_nothing_after_it(llama, ids):
    """A branch with pins per row is what a cache with those pins would be; the trunk stays as it was."""
    model, _ = llama
    trunk = kvprobe.cache(model, policy="h2o", keep=10, buffer=4, instances=[8])
    kvprobe.force(model, trunk, ids[:1, :15])
    pins = [[kvprobe.SpanPin(1, 4)], [kvprobe.SpanPin(1, 4, frozenset())]]
    branch = trunk.branch(2, row_pins=pins)
    got = kvprobe.force(model, branch, ids[:1, 15:59].expand(2, -1), targets=ids[:1, 16:60].expand(2, -1))
    alone = kvprobe.cache(model, policy="h2o", keep=10, buffer=4, row_pins=pins, instances=[8, 8])
    kvprobe.force(model, alone, ids[:1, :15].expand(2, -1))
    want = kvprobe.force(model, alone, ids[:1, 15:59].expand(2, -1), targets=ids[:1, 16:60].expand(2, -1))
    assert float((got.logp - want.logp).abs().max()) < 1e-10 and float((got.logp[0] - got.logp[1]).abs().max()) > 1e-3
    assert cache_sets(branch) == cache_sets(alone)
    assert trunk.physical == 15 and trunk.batch == 1 and trunk.keep_log.fired == ((),)


def test_a_branch_cannot_be_pinned_after_a_round():
    cache = stub.walk(stub.cache(10, 4), 18)
    with pytest.raises(ValueError, match="after a round"):
        cache.branch(2, row_pins=[[], []])
    assert cache.branch(2).batch == 2


@pytest.mark.parametrize("levels", [4, 10**9])
@pytest.mark.parametrize("surplus", [0, 1, 3, 10, 17, 19, 20])
def test_who_goes_among_ties(surplus, levels):
    """The lowest by (score, position), many or few of them, whichever side of the cut is looked for."""
    score = torch.randint(0, levels, (3, 2, 20), generator=torch.Generator().manual_seed(surplus)).double()
    for row, gone in zip(score.flatten(0, 1).tolist(), evict.evicted(score, surplus).flatten(0, 1)):
        assert sorted(sorted(range(20), key=lambda i: (row[i], i))[:surplus]) == gone.nonzero().flatten().tolist()
