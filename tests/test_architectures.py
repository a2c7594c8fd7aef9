"""Every supported architecture evicts as a per-head mask would; what would be misread is refused with its reason."""

import copy
import re

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import kvprobe
import tiny
from oracle import Reference, cache_sets, random_scores
from sidebyside import feed, walk

KEEP, BUFFER = 10, 4
KINDS = ["llama", "qwen3", "mistral", "phi3", "gemma3", "gemma4", "qwen3.5"]
EVICTED = {"gemma3": (1, 3), "gemma4": (1,), "qwen3.5": (1, 3)}
REASON = {"gemma3": "sliding", "gemma4": "sliding|share|no cache of its own", "qwen3.5": "linear"}
EXACT = {"qwen3.5": 1e-5}  # its linear layers compute in float32, and a chunk otherwise than steps
SITES = {"gemma3": frozenset({(1, 1), (3, 0)}), "gemma4": frozenset({(1, 1)}), "qwen3.5": frozenset({(1, 1), (3, 0)})}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def both(kind):
    return tiny.pair(kind)


def reference_of(both, rows: int, **options) -> Reference:
    model, stock = both
    return Reference(stock, model.geometry.kv_layers, model.geometry.n_kv, KEEP, BUFFER, random_scores(0, range(rows)), **options)


def test_geometry(kind, both):
    """What the model is, and every skipped layer named with its reason."""
    g = both[0].geometry
    assert (g.n_q, g.n_kv, g.group, g.d_head, g.d_model) == (4, 2, 2, 8, 32)
    assert g.kv_layers == EVICTED.get(kind, (0, 1)) and g.n_layers == both[1].config.num_hidden_layers
    assert set(g.skipped) == set(range(g.n_layers)) - set(g.kv_layers)
    assert all(re.search(REASON[kind], why) for why in g.skipped.values())
    for layer in g.skipped:
        with pytest.raises(ValueError, match=f"layer {layer} keeps no growing cache.*({REASON[kind]})"):
            kvprobe.cache(both[0], keep=8, pins=[kvprobe.SpanPin(0, 2, frozenset({(layer, 0)}))])


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
def test_uniform(kind, both, ids, longest):
    cache = kvprobe.cache(both[0], keep=KEEP, buffer=BUFFER)
    assert walk(both[0], cache, reference_of(both, 2), ids[:2, :40], prefill=9, longest=longest, atol=EXACT.get(kind, 1e-10)) == 2 * 6
    for layer in both[0].geometry.kv_layers:
        assert cache.layers[layer].keys.shape == (2, 2, cache.physical, 8)


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
def test_ragged(kind, both, ids, longest):
    """Pins on top of the budget at some sites, in a left-padded batch."""
    sites = SITES.get(kind, frozenset({(0, 1), (1, 0)}))
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, :4] = False
    held = lambda layer, row, head, reference: set(range(2, 6)) if (layer, head) in sites else set()  # noqa: E731
    banned = lambda layer, row, head, reference: set() if (layer, head) in sites else set(range(2, 6))  # noqa: E731
    cache = kvprobe.cache(both[0], keep=KEEP, buffer=BUFFER, pins=[kvprobe.SpanPin(2, 6, sites)], pins_free=True)
    reference = reference_of(both, 2, held=held, banned=banned, free=True)
    assert walk(both[0], cache, reference, ids[:2, :40], prefill=14, longest=longest, mask=mask, atol=EXACT.get(kind, 1e-10)) >= 9


def test_nothing_evicted_is_stock_transformers(kind, both, ids):
    model, stock = both
    full, cache = DynamicCache(config=stock.config), kvprobe.cache(model, keep=60, buffer=4)
    for part in (ids[:2, :20], ids[:2, 20:21], ids[:2, 21:30]):
        with torch.no_grad():
            want = stock(part, cache=full).logits
        assert float((feed(model, cache, part) - want).abs().max()) < 1e-12


def test_generate(kind, both, ids):
    """A padded batch through model.generate: the tokens and keep-sets of the reference."""
    model, _ = both
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :5] = False
    cache, reference = kvprobe.cache(model, keep=KEEP, buffer=BUFFER), reference_of(both, 2)
    out = model.model.generate(ids[:2, :20], attention_mask=mask.long(), cache=cache, max_new_tokens=14, do_sample=False)
    token, wrote = reference.feed(ids[:2, :20], mask)[:, -1:].argmax(-1), []
    for _ in range(13):
        wrote.append(token)
        token = reference.feed(token)[:, -1:].argmax(-1)
    assert torch.equal(out[:, 20:], torch.cat([*wrote, token], 1)) and cache_sets(cache) == reference.kept


def test_beams(both, ids):
    model, stock = both
    options = dict(attention_mask=torch.ones(2, 12, dtype=torch.long), num_beams=2, max_new_tokens=8)
    want = stock.generate(ids[:2, :12], **options)
    assert torch.equal(model.model.generate(ids[:2, :12], cache=kvprobe.cache(model, keep=60, buffer=4), **options), want)


def test_reset(both, ids):
    """B01 for the layers that are left to transformers, too."""
    model, _ = both
    cache = kvprobe.cache(model, keep=KEEP, buffer=BUFFER)
    found = []
    for row in (0, 1, 0):
        cache.reset()
        found.append(torch.cat([feed(model, cache, ids[row : row + 1, a:z]) for a, z in ((0, 20), (20, 21), (21, 24))], 1))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_a_refused_chunk_leaves_no_trace(kind, both, ids):
    """Also not in the layers below the first evicted one, which would take its tokens twice."""
    model, _ = both
    refused, straight = (kvprobe.cache(model, keep=KEEP, buffer=BUFFER) for _ in range(2))
    feed(model, refused, ids[:1, :12])
    with pytest.raises(ValueError, match="feed at most 6"):
        feed(model, refused, ids[:1, 12:19])
    got = feed(model, refused, ids[:1, 12:18])
    feed(model, straight, ids[:1, :12])
    assert torch.equal(got, feed(model, straight, ids[:1, 12:18]))


def test_branches(kind, both, ids):
    """Rows repeated with pins of their own; trunk and branch do not disturb each other, whatever state a layer keeps."""
    model, _ = both
    trunk = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[3])
    kvprobe.force(model, trunk, ids[:1, :15])
    layer = model.geometry.kv_layers[0]
    pins = [[kvprobe.SpanPin(2, 5, frozenset({(layer, 0)}))], [kvprobe.SpanPin(2, 5, frozenset())]]
    script, targets = ids[:1, 15:40], ids[:1, 16:41]
    branch = trunk.branch(2, row_pins=pins)
    got = kvprobe.force(model, branch, script.expand(2, -1), targets=targets.expand(2, -1))
    for row in (0, 1):
        alone = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[3], row_pins=pins[row : row + 1])
        kvprobe.force(model, alone, ids[:1, :15])
        want = kvprobe.force(model, alone, script, targets=targets)
        assert float((got.logp[row] - want.logp[0]).abs().max()) < EXACT.get(kind, 1e-10)
    again = kvprobe.force(model, trunk.branch(1, row_pins=pins[:1]), script, targets=targets)
    assert float((again.logp[0] - got.logp[0]).abs().max()) < EXACT.get(kind, 1e-10)


# -- refusals -------------------------------------------------------------------------------------------------------


def small(config, model, **fields):
    return model(config(vocab_size=97, **fields))


REFUSED = {
    "GPT2": (lambda: small(transformers.GPT2Config, transformers.GPT2LMHeadModel, n_embd=32, n_layer=2, n_head=4), "no rotary positions"),
    "T5": (lambda: small(transformers.T5Config, transformers.T5ForConditionalGeneration, d_model=32, d_kv=8, num_heads=4, num_layers=2), "encoder-decoder"),
    "Gemma2": (lambda: tiny.build("gemma2"), "attn_logit_softcapping=50.0"),
    "GptOss": (lambda: tiny.build("gpt_oss", max_position_embeddings=131072), "attention sinks"),
    "Mistral": (lambda: tiny.build("mistral", sliding_window=8), "nothing to evict.*sliding window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, reason = REFUSED[name]
    model = build()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        kvprobe.prepare(model)
    assert model.config._attn_implementation == before


def test_attention_that_does_more_than_sdpa_is_refused(monkeypatch):
    """A model whose own attention adds a bias by distance, which no name gives away."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def biased(module, query, key, value, mask, scaling, **kwargs):
        distance = torch.arange(key.shape[2], dtype=query.dtype) / 10
        mask = distance if mask is None else mask + distance
        return plain(module, query, key, value, mask, scaling, **kwargs)

    model = tiny.build("llama")
    kvprobe.prepare(copy.deepcopy(model))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    with pytest.raises(ValueError, match="does more than sdpa can"):
        kvprobe.prepare(model)
    assert model.config._attn_implementation == "sdpa"


# -- the registered function ----------------------------------------------------------------------------------------


def test_equals_sdpa_with_padding_and_a_longer_cache(llama, ids):
    """J02: kvprobe's attention with stock caches; without its mask function padding and causality would be lost."""
    model, stock = llama
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :4], mask[2, :9] = 0, 0
    for make in (lambda c: DynamicCache(config=c), lambda c: StaticCache(config=c, max_cache_len=50)):
        mine, theirs = make(model.model.config), make(stock.config)
        for a, z in ((0, 12), (12, 19), (19, 20)):
            with torch.no_grad():
                got = model.model(ids[:, a:z], attention_mask=mask[:, :z], cache=mine).logits
                want = stock(ids[:, a:z], attention_mask=mask[:, :z], cache=theirs).logits
            assert torch.equal(got[mask[:, a:z].bool()], want[mask[:, a:z].bool()])


def test_the_cache_keeps_kv_heads(ids):
    """E01: 8 query heads on 2 KV heads: 2 are stored, and the group shares one choice."""
    model, stock = tiny.pair("llama", num_attention_heads=8, hidden_size=64)
    cache = kvprobe.cache(model, policy="snapkv", keep=KEEP, buffer=BUFFER)
    feed(model, cache, ids[:, :30])
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (3, 2, KEEP + BUFFER, 8)
    random = kvprobe.cache(model, keep=KEEP, buffer=BUFFER)
    reference = Reference(stock, (0, 1), 2, KEEP, BUFFER, random_scores(0, range(3)))
    assert walk(model, random, reference, ids[:, :40], prefill=30, longest=2) == 9


def test_without_grouping(ids):
    """As many KV heads as query heads."""
    model, stock = tiny.pair("llama", num_key_value_heads=4)
    reference = Reference(stock, (0, 1), 4, KEEP, BUFFER, random_scores(0, range(3)))
    assert walk(model, kvprobe.cache(model, keep=KEEP, buffer=BUFFER), reference, ids[:, :30], prefill=20, longest=2) == 9
