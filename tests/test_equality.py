"""The gathered cache computes what a full cache does whose evicted entries are hidden by a mask per KV head (float64)."""

import pytest
import torch
from transformers import DynamicCache

import kvprobe
import tiny
from oracle import Reference, cache_sets, random_scores
from sidebyside import ATOL, feed, walk

KEEP, BUFFER, SEED = 10, 4, 3
BOXES = {"old box": (3, 8), "box across the buffer's edge": (12, 19)}
SITES = frozenset({(0, 1), (1, 0)})
STEPS = {"tokens": 1, "chunks": 64}


def plain_cache(model, **options):
    return kvprobe.cache(model, policy="random", keep=KEEP, buffer=BUFFER, seed=SEED, **options)


def plain_reference(model, stock, rows, **options):
    return Reference(stock, model.geometry.kv_layers, model.geometry.n_kv, KEEP, BUFFER, random_scores(SEED, range(rows)), **options)


def box_rules(box) -> dict:
    """The reference's rules for a box that is held at SITES and banned elsewhere."""
    inside = set(range(*box))
    return dict(held=lambda layer, row, head, reference: inside if (layer, head) in SITES else set(),
                banned=lambda layer, row, head, reference: set() if (layer, head) in SITES else inside)


@pytest.mark.parametrize("longest", STEPS.values(), ids=STEPS)
def test_uniform_counts(llama, ids, longest):
    model, stock = llama
    cache, reference = plain_cache(model), plain_reference(model, stock, 3)
    assert walk(model, cache, reference, ids[:, :50], prefill=6, longest=longest) == 3 * 9
    assert cache.layers[0].keys.shape == (3, 2, cache.physical, 8) and cache.physical <= KEEP + 2 * BUFFER


@pytest.mark.parametrize("longest", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("elsewhere", ["ban", "free"])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_ragged_heads(llama, ids, box, elsewhere, longest):
    """Pins on top of the budget, at some sites only: heads of one layer keep different counts."""
    model, stock = llama
    cache = plain_cache(model, pins=[kvprobe.SpanPin(*box, SITES, elsewhere=elsewhere)], pins_free=True)
    rules = box_rules(box) if elsewhere == "ban" else dict(held=box_rules(box)["held"])
    reference = plain_reference(model, stock, 2, free=True, **rules)
    assert walk(model, cache, reference, ids[:2, :42], prefill=5, longest=longest) >= 2 * 5
    counts = {site: len(held) for site, held in cache_sets(cache).items()}
    assert counts[0, 0, 1] == counts[0, 0, 0] + box[1] - box[0], "the pinned head should hold the box on top"


@pytest.mark.parametrize("longest", STEPS.values(), ids=STEPS)
def test_ragged_rows(llama, ids, longest):
    """Rows of unequal length fire at different steps."""
    model, stock = llama
    mask = torch.ones(3, 44, dtype=torch.bool)
    mask[1, :2], mask[2, :7] = False, False
    cache, reference = plain_cache(model), plain_reference(model, stock, 3)
    walk(model, cache, reference, ids[:, :44], prefill=12, longest=longest, mask=mask)
    fired = [[length for row, length, _ in reference.history if row == r] for r in range(3)]
    assert fired == [[18, 22, 26, 30, 34, 38, 42], [18, 22, 26, 30, 34, 38, 42], [18, 22, 26, 30, 34]]
    assert [list(f) for f in cache.keep_log.fired] == fired


def test_ragged_heads_and_rows(llama, ids):
    model, stock = llama
    mask = torch.ones(3, 44, dtype=torch.bool)
    mask[0, :6] = False
    cache = plain_cache(model, pins=[kvprobe.SpanPin(12, 19, SITES)], pins_free=True)
    reference = plain_reference(model, stock, 3, free=True, **box_rules((12, 19)))
    assert walk(model, cache, reference, ids[:, :44], prefill=9, longest=3, mask=mask) > 15


@pytest.mark.parametrize("prefill", [17, 18, 19, 40])
def test_prefill_that_is_evicted_at_once(llama, ids, prefill):
    """A round never changes the logits of the forward that triggered it."""
    model, stock = llama
    cache, reference = plain_cache(model), plain_reference(model, stock, 3)
    walk(model, cache, reference, ids[:, :prefill], prefill=prefill, longest=1)
    assert cache.physical == (17 if prefill == 17 else 14)


def test_generate(llama, ids):
    """model.generate with the cache writes what the reference writes greedily, prompts of unequal length included."""
    model, stock = llama
    prompt, mask = ids[:, :21], torch.ones(3, 21, dtype=torch.bool)
    mask[0, :4], mask[2, :9] = False, False
    cache, reference = plain_cache(model), plain_reference(model, stock, 3)
    out = model.model.generate(prompt, attention_mask=mask.long(), cache=cache, max_new_tokens=24, do_sample=False)
    logits, wrote = reference.feed(prompt, mask), []
    for _ in range(24):
        wrote.append(logits[:, -1].argmax(-1))
        if len(wrote) < 24:
            logits = reference.feed(wrote[-1][:, None])
    assert out[:, 21:].tolist() == torch.stack(wrote, 1).tolist()
    assert len({tuple(row) for row in out[:, 21:].tolist()}) == 3 and len(set(out[0, 21:].tolist())) > 4, "a text too dull to tell"
    assert cache_sets(cache) == reference.kept and len(reference.history) >= 12


def test_generate_continues_from_an_evicted_cache(llama, ids):
    model, stock = llama
    cache, reference = plain_cache(model), plain_reference(model, stock, 1)
    walk(model, cache, reference, ids[:1, :30], prefill=30, longest=1)
    out = model.model.generate(ids[:1, :31], attention_mask=torch.ones(1, 31, dtype=torch.long), cache=cache, max_new_tokens=5, do_sample=False)
    token, wrote = ids[:1, 30:31], []
    for _ in range(5):
        token = reference.feed(token)[:, -1:].argmax(-1)
        wrote.append(int(token))
    assert out[0, 31:].tolist() == wrote


def test_nothing_evicted_is_stock_transformers(llama, ids):
    """keep >= length: bit for bit on a prefill and on decode steps."""
    model, stock = llama
    cache, full = kvprobe.cache(model, keep=80, buffer=4), DynamicCache(config=stock.config)
    with torch.no_grad():
        for part in (ids[:, :20], ids[:, 20:21], ids[:, 21:22]):
            assert torch.equal(feed(model, cache, part), stock(part, cache=full).logits)
        chunk = feed(model, cache, ids[:, 22:40]) - stock(ids[:, 22:40], cache=full).logits
    assert float(chunk.abs().max()) < 1e-12
    assert cache.keep_log.fired == ((), (), ())


def test_nothing_evicted_generates_as_stock_transformers(llama, ids):
    model, stock = llama
    options = dict(attention_mask=torch.ones(3, 20, dtype=torch.long), max_new_tokens=12)
    want = stock.generate(ids[:, :20], num_beams=3, **options)
    assert torch.equal(model.model.generate(ids[:, :20], cache=kvprobe.cache(model, keep=80, buffer=4), num_beams=3, **options), want)


def scored(model, cache, ids, longest):
    targets = ids[:, 1:]
    return kvprobe.force(model, cache, ids[:, :-1], targets=targets, first=1, longest=longest)


def test_forcing_without_eviction_does_not_depend_on_the_split(llama, ids):
    """One prefill, chunks and token by token give the stock model's log p."""
    model, stock = llama
    with torch.no_grad():
        logits = stock(ids).logits[:, :-1]
    want = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    for longest in (80, 13, 1):
        got = scored(model, kvprobe.cache(model, keep=100, buffer=4), ids, longest)
        assert float((got.logp - want).abs().max()) < ATOL
        assert torch.equal(got.top, logits.argmax(-1) == ids[:, 1:]) and got.top.any()


def test_forcing_with_eviction_does_not_depend_on_the_split(llama, ids):
    model, stock = llama
    reference = plain_reference(model, stock, 3)
    want = torch.cat([reference.feed(ids[:, t : t + 1]) for t in range(79)], 1).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    for longest in (1, 3, 256):
        cache = plain_cache(model)
        got = scored(model, cache, ids, longest)
        assert float((got.logp - want).abs().max()) < ATOL
        assert cache_sets(cache) == reference.kept


@pytest.mark.parametrize("first, count", [(1, 3), (17, 4), (36, 5)], ids=str)
def test_scoring_some_columns(llama, ids, first, count):
    """The asked columns alone, across a round and up to the token just behind the script, are what scoring all gives."""
    model, _ = llama
    every = scored(model, plain_cache(model), ids[:, :41], 256)
    fed = []
    some = kvprobe.force(model, plain_cache(model), ids[:, :40], targets=ids[:, first : first + count], first=first, tick=fed.append)
    here = slice(first - 1, first - 1 + count)
    assert float((some.logp - every.logp[:, here]).abs().max()) < ATOL and torch.equal(some.top, every.top[:, here])
    assert sum(fed) == 3 * 40
    with pytest.raises(ValueError, match=r"must be in 1\.\.40"):
        kvprobe.force(model, plain_cache(model), ids[:, :40], targets=ids[:, :5], first=37)


def test_logits_that_are_not_finite_are_refused(ids):
    model, _ = tiny.pair("llama", torch.float32)
    with torch.no_grad():
        model.model.lm_head.weight[5] = float("nan")
    with pytest.raises(FloatingPointError, match=r"rows \[0, 1\]"):
        scored(model, plain_cache(model), ids[:2, :9], 4)
