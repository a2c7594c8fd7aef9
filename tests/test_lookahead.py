"""Sampled futures: what a plain forward over prompt and continuation says, and nothing of them in the prompt's cache."""

import numpy as np
import pytest
import torch

import kvprobe
import tiny
from kvprobe import compression, lookahead

N, M, T = 23, 4, 5


@pytest.fixture(scope="module")
def prompt(llama, ids):
    """A held cache of the whole prompt [2 N] and its last logits."""
    made = compression.compress(llama[0], ids[:2, :N], policy="random", keep=1000)
    return made.cache, made.logits


@pytest.fixture(scope="module")
def future(llama, prompt):
    return lookahead.sample(llama[0], *prompt, M, T, seed=3)


def whole(llama, ids, future, b, m):
    """Logits [n v] of a plain forward over a row's prompt and one continuation."""
    return llama[1](torch.cat([ids[b, :N], future.tokens[b, m]])[None]).logits[0]


@torch.no_grad()
def test_what_was_sampled_from(llama, ids, future):
    """log q, entropy and varentropy of each token under the logits of a plain forward."""
    for b, m in ((0, 0), (0, 3), (1, 2)):
        logp = torch.log_softmax(whole(llama, ids, future, b, m)[N - 1 : N + T - 1], -1)
        p = logp.exp()
        own = logp.gather(-1, future.tokens[b, m][:, None]).squeeze(-1)
        entropy = -(p * logp).sum(-1)
        assert torch.allclose(future.logq[b, m], own, atol=1e-10)
        assert torch.allclose(future.entropy[b, m], entropy, atol=1e-10)
        assert torch.allclose(future.variance[b, m], (p * logp.square()).sum(-1) - entropy.square(), atol=1e-9)


def test_queries_stand_behind_the_prompt(llama, ids, future):
    """The queries of y_1..y_T at positions n..n+T-1, of every layer."""
    for b, m in ((0, 1), (1, 3)):
        seen = kvprobe.capture(llama[0], torch.cat([ids[b, :N], future.tokens[b, m]])[None], what="q")
        for layer, q in future.queries.items():
            assert q.shape == (2, M, 4, T, 8)
            assert torch.allclose(q[b, m], seen.q[layer][0, :, N:], atol=1e-10)


def test_prefixes_are_nested(llama, prompt, future):
    """Fewer continuations, blocks of them and a row alone are parts of the same draw."""
    fewer = lookahead.sample(llama[0], *prompt, 2, T, seed=3)
    assert torch.equal(fewer.tokens, future.first(2).tokens) and torch.equal(fewer.tokens, future.tokens[:, :2])
    blocks = lookahead.sample(llama[0], *prompt, M, T, seed=3, block=3)
    assert torch.equal(blocks.tokens, future.tokens)
    assert all(torch.allclose(blocks.queries[i], q, atol=1e-12) for i, q in future.queries.items())
    short = future.first(t=2)
    assert short.t == 2 and torch.equal(short.queries[1], future.queries[1][:, :, :, :2])
    with pytest.raises(ValueError, match="1..4"):
        future.first(5)


def test_a_row_ignores_its_neighbours(llama, ids, future):
    alone = compression.compress(llama[0], ids[1:2, :N], policy="random", keep=1000, instances=[1])
    one = lookahead.sample(llama[0], alone.cache, alone.logits, M, T, seed=3)
    assert torch.equal(one.tokens[0], future.tokens[1])


def test_padded_prompts(llama, ids):
    """Prompts of unequal length look ahead as alone."""
    rows = [ids[0, :N].tolist(), ids[1, : N - 7].tolist()]
    made = compression.compress(llama[0], rows, policy="random", keep=1000)
    both = lookahead.sample(llama[0], made.cache, made.logits, 3, T, seed=1)
    single = compression.compress(llama[0], [rows[1]], policy="random", keep=1000, instances=[1])
    one = lookahead.sample(llama[0], single.cache, single.logits, 3, T, seed=1)
    assert torch.equal(one.tokens[0], both.tokens[1])
    assert all(torch.allclose(one.queries[i][0], both.queries[i][1], atol=1e-10) for i in one.queries)


def test_nothing_leaks(llama, ids, prompt):
    """The prompt's cache is bit for bit what it was, and so is what it says next."""
    cache, logits = prompt
    before = [(cache.layers[i].keys.clone(), cache.layers[i].values.clone()) for i in cache.geometry.kv_layers]
    lookahead.sample(llama[0], cache, logits, M, T, seed=9)
    for (k, v), i in zip(before, cache.geometry.kv_layers):
        assert torch.equal(k, cache.layers[i].keys) and torch.equal(v, cache.layers[i].values)
    assert cache.seen == [N, N] and cache.physical == N


def test_an_early_end(llama, prompt, future):
    """Behind an ending token nothing counts; the ending token does."""
    end = int(future.tokens[0, 0, 1])
    ended = lookahead.sample(llama[0], *prompt, M, T, seed=3, eos=(end,))
    for b in range(2):
        for m in range(M):
            at = np.flatnonzero(ended.tokens[b, m].numpy() == end)
            assert ended.valid[b, m].tolist() == [not len(at) or t <= at[0] for t in range(T)]


def test_the_draw_is_the_models_distribution(llama, prompt):
    """First tokens of many continuations: 5 sigma of the model's probabilities."""
    cache, logits = prompt
    n = 3000
    first = lookahead.sample(llama[0], cache, logits, n, 1, seed=11, block=1000).tokens[0, :, 0]
    p = logits[0].double().softmax(-1)
    share = torch.bincount(first, minlength=tiny.VOCABULARY) / n
    assert bool(((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all())


def test_greedy(llama, ids, prompt):
    """Temperature 0 is the model's own greedy text."""
    found = lookahead.sample(llama[0], *prompt, 1, T, temperature=0)
    want = llama[1].generate(ids[:2, :N], max_new_tokens=T, do_sample=False)[:, N:]
    assert torch.equal(found.tokens[:, 0], want)


def test_save_and_load(future, tmp_path):
    future.save(tmp_path / "f.safetensors")
    again = lookahead.Lookahead.load(tmp_path / "f.safetensors")
    assert torch.equal(again.tokens, future.tokens) and torch.equal(again.queries[1], future.queries[1]) and again.valid.dtype == torch.bool
    (tmp_path / "x").write_text("no")
    with pytest.raises(ValueError, match="no lookahead"):
        lookahead.Lookahead.load(tmp_path / "x")


@pytest.mark.parametrize("bad", [dict(m=0), dict(t=0), dict(temperature=-1), dict(block=0)])
def test_refused(llama, prompt, bad):
    with pytest.raises(ValueError, match="lookahead takes"):
        lookahead.sample(llama[0], *prompt, **(dict(m=2, t=2) | bad))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5"])
def test_hybrids_copy_every_layer(kind, ids):
    """Sliding and linear layers look ahead on copies too."""
    model, stock = tiny.pair(kind)
    made = compression.compress(model, ids[:1, :N], policy="random", keep=1000)
    found = lookahead.sample(model, made.cache, made.logits, 2, T, seed=5)
    for m in range(2):
        with torch.no_grad():
            logits = stock(torch.cat([ids[0, :N], found.tokens[0, m]])[None]).logits[0, N - 1 : N + T - 1]
        assert torch.allclose(torch.log_softmax(logits, -1).gather(-1, found.tokens[0, m][:, None]).squeeze(-1), found.logq[0, m], atol=1e-9)
    assert set(found.queries) == set(model.geometry.kv_layers)
