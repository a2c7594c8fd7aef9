"""What all policies owe that look ahead from a prompt's end: rows as alone, architectures, the prompt's cache as before, refusals."""

import dataclasses

import pytest
import torch

import kvprobe
import tiny
from ahead import HELD, KEEP, N, OPTIONS, SITES, W, Words, kept, spoken
from kvprobe import lookahead
from kvprobe.compression import Engine, compress
from kvprobe.eviction_cache import EvictionCache
from kvprobe.registry import make_policy
from kvprobe.types import Plan

ALL = [*tiny.AHEAD, "lore", "single_continuation"]


def test_all_of_them_are_known():
    assert set(tiny.AHEAD) == {"dapq", "gvote", "kvzip", "laq", "laq_plus"} and set(ALL) == set(OPTIONS)


@pytest.mark.parametrize("name", ALL)
def test_padded_prompts_are_compressed_as_alone(llama, ids, name):
    """Rows of a batch, in any order, one of them too short to lose anything: sets, and what is written on."""
    rows = [ids[0, :N].tolist(), ids[1, : N - 9].tolist(), ids[2, :12].tolist(), ids[1, 3 : N - 17].tolist()]
    both = compress(spoken(llama), rows, policy=name, keep=KEEP, protect_window=W, seed=5, **OPTIONS[name])
    for b, row in enumerate(rows):
        one = compress(spoken(llama), [row], policy=name, keep=KEEP, protect_window=W, seed=5, instances=[b], **OPTIONS[name])
        assert kept(one) == kept(both, b)
    assert kept(both, 2) == {site: list(range(12)) for site in SITES}


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3.5", "qwen3"])
@pytest.mark.parametrize("name", ["laq_plus", "dapq", "kvzip", "gvote"])
def test_architectures(name, kind, ids):
    """Hybrids, with padding, which layers left to transformers must be told of: growing layers alone are scored, rows as alone."""
    model = dataclasses.replace(tiny.pair(kind)[0], tokenizer=Words())
    rows = [ids[0, :N].tolist(), ids[1, :20].tolist()]
    if kind == "gemma3":
        rows[1] = rows[1][:17]
    both = compress(model, rows, policy=name, keep=KEEP, protect_window=W, **OPTIONS[name])
    one = compress(model, rows[1:], policy=name, keep=KEEP, protect_window=W, instances=[1], **OPTIONS[name])
    assert kept(one) == kept(both, 1) and set(kept(one)) == {(layer, h) for layer in model.geometry.kv_layers for h in range(model.geometry.n_kv)}
    if name != "gvote":
        assert bool((both.kept.sum((0, 2)) == KEEP * both.kept[:, 0].numel()).all())


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_sampled_futures_of_padded_hybrids(kind, ids):
    """A prompt shorter than its neighbours' sliding window: padding is hidden from layers that are left to transformers."""
    model = tiny.pair(kind)[0]
    rows = [ids[0, :23].tolist(), ids[1, :5].tolist()]
    made, alone = (compress(model, r, policy="random", keep=1000, instances=i) for r, i in ((rows, [0, 1]), (rows[1:], [1])))
    both, one = (lookahead.sample(model, c.cache, c.logits, 2, 5, seed=1) for c in (made, alone))
    assert torch.equal(both.tokens[1], one.tokens[0])
    assert all(torch.allclose(both.queries[i][1], one.queries[i][0], atol=1e-9) for i in one.queries)


@pytest.mark.parametrize("name", [n for n in ALL if n != "gvote"])  # which looks at the prompt's own queries
def test_nothing_stays_in_the_prompts_cache(llama, ids, name, monkeypatch):
    """States, counts and positions are as before; whatever writes into the cache itself is caught."""
    model = spoken(llama)
    policy = make_policy(name, OPTIONS[name], model)
    cache = EvictionCache(model.model.config, model.geometry, Plan(KEEP, 0, schedule="prompt_end"), policy)
    cache.hold()
    with torch.no_grad():
        logits = model.model(ids[:2, :N], cache=cache, use_cache=True).logits[:, -1]
        engine = Engine(model, cache, logits, 5, tuple(map(tuple, ids[:2, :N].tolist())))
        before = [x.clone() for i in (0, 1) for x in (cache.layers[i].keys, cache.layers[i].values, cache.layers[i].queries if cache.window else cache.layers[i].keys)]
        policy.queries(engine)
        after = [x for i in (0, 1) for x in (cache.layers[i].keys, cache.layers[i].values, cache.layers[i].queries if cache.window else cache.layers[i].keys)]
        assert all(torch.equal(a, b) for a, b in zip(before, after)) and cache.seen == [N, N] and cache.keep_log.fired == ((), ()) and cache.holding
        step = lookahead.step

        def leaky(*given):
            out = step(*given)
            cache.layers[1].keys.mul_(1.0)
            return out

        monkeypatch.setattr(lookahead, "step", leaky)
        with pytest.raises(RuntimeError, match="has changed the prompt's cache"):
            policy.queries(engine)


@pytest.mark.parametrize("name", ALL)
def test_none_of_them_is_for_rounds(llama, ids, name):
    """By name and before any work, in a cache of its own and on a branch."""
    model = spoken(llama)
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        kvprobe.cache(model, policy=name, keep=KEEP, buffer=4, **OPTIONS[name])
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        kvprobe.generate(model, torch.arange(9), policy=name, keep=KEEP, buffer=4, **OPTIONS[name])
    prefix = kvprobe.cache(model, policy="snapkv", window=8, keep=KEEP, buffer=4)
    kvprobe.force(model, prefix, ids[:1, :10])
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        prefix.branch(1, policy=make_policy(name, OPTIONS[name], model))


@pytest.mark.parametrize("name", [n for n in ALL if n != "gvote"])
def test_only_compress_lets_them_look_ahead(llama, ids, name):
    cache = kvprobe.cache(spoken(llama), policy=name, keep=KEEP, schedule="prompt_end", **OPTIONS[name])
    with pytest.raises(ValueError, match=f"{name} looks ahead from the whole prompt"):
        kvprobe.force(llama[0], cache, ids[:1, :N])


@pytest.mark.parametrize("name, bad, say", [
    ("laq", dict(t=0), "t=0"), ("laq", dict(w2=-1), "w2=-1"), ("laq", dict(kernel=4), "kernel=4"), ("laq", dict(window=0), "window=0"), ("laq", dict(window=-1), "window=-1"),
    ("dapq", dict(prefix=0, suffix=0), "prefix=0"), ("dapq", dict(suffix=-1), "suffix=-1"), ("dapq", dict(kernel=0), "kernel=0"),
    ("kvzip", dict(chunk=0), "chunk=0"), ("kvzip", dict(overlap=-1), "overlap=-1"), ("kvzip", dict(across="token"), "across"),
    ("gvote", dict(samples=0), "samples=0"), ("gvote", dict(nucleus=0.0), "nucleus=0.0"), ("gvote", dict(window=-1), "window=-1")])
def test_what_cannot_be_is_refused(name, bad, say):
    with pytest.raises(ValueError, match=say):
        make_policy(name, bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_finite(dtype, ids):
    model = dataclasses.replace(tiny.pair("llama", dtype)[0], tokenizer=Words())
    for name in tiny.AHEAD:
        made = compress(model, ids[:1, :N], policy=name, keep=KEEP, protect_window=W, **OPTIONS[name])
        assert all(set(HELD) <= set(held) for held in kept(made).values())
