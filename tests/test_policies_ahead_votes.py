"""KVzip, GVote and LORE's controls against slow plain versions over a stock model with attention written out."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvprobe
from ahead import GROUP, HELD, KEEP, N, OPTIONS, SITES, W, Brute, Words, best, kept, run
from kvprobe import draws
from kvprobe.compression import compress
from kvprobe.inside.sites import rotate
from kvprobe.registry import make_policy
from test_policies import softmax

# -- KVzip ----------------------------------------------------------------------------------------------------------


def repeated(brute, prompt, chunk, overlap, sinks):
    """layer -> [hkv n]: every chunk is asked for in words and repeated; the largest attention over sinks, chunk and what was fed."""
    words, out = Words(), {layer: np.zeros((2, len(prompt))) for layer in (0, 1)}
    for start in range(sinks, len(prompt), chunk):
        stop = min(len(prompt), start + chunk)
        asked = words("\n\nRepeat the previous context exactly.").input_ids if start == sinks else (
            words("\n\nRepeat the part of the previous context exactly, starting with").input_ids + prompt[max(0, start - overlap) : start])
        fed = asked + prompt[start:stop]
        _, seen = brute.feed(fed, {}, spare=True)
        for layer, x in seen.items():
            for h in range(4):
                keys = x["key"][h // GROUP]
                for t, q in enumerate(x["query"][h]):
                    shown = np.concatenate([keys[:sinks], keys[start:stop], keys[len(prompt) : len(prompt) + t + 1]])
                    a = softmax(shown @ q * len(q) ** -0.5)[sinks : sinks + stop - start]
                    out[layer][h // GROUP, start:stop] = np.maximum(out[layer][h // GROUP, start:stop], a)
    for x in out.values():
        x[:, :sinks] = 1
    return out


@pytest.mark.parametrize("options", [{}, dict(chunk=2048), dict(across="layer"), dict(across="head", n_sink=0), dict(n_sink=2, overlap=0), dict(chunk=7, overlap=30)], ids=str)
def test_kvzip(llama, ids, options):
    """Scores, and budgets: the best of all heads and layers together, of a layer's heads, or of each head; totals are exact."""
    options = OPTIONS["kvzip"] | options
    made, scores = run(llama, ids, "kvzip", rows=2, **options)
    across = options.get("across", "model")
    for b in range(2):
        prompt = ids[b, :N].tolist()
        want = repeated(Brute(llama[1], prompt), prompt, options["chunk"], options["overlap"], options.get("n_sink", 4))
        for layer in (0, 1):
            assert np.allclose(scores[layer][b].numpy(), want[layer], atol=1e-12)
        shares = {"model": [SITES], "layer": [SITES[:2], SITES[2:]], "head": [[site] for site in SITES]}[across]
        for sites in shares:
            free = sorted(((want[layer][h, p], p, -layer, -h) for layer, h in sites for p in range(N) if p not in HELD), reverse=True)
            stay = free[: len(sites) * (KEEP - len(HELD))]
            for layer, h in sites:
                assert kept(made, b)[layer, h] == sorted([*HELD, *(p for _, p, i, k in stay if (-i, -k) == (layer, h))])
            assert sum(len(kept(made, b)[site]) for site in sites) == len(sites) * KEEP
    assert across == "head" or len({len(x) for x in kept(made).values()}) > 1, "a test of budgets that differ"


def test_kvzip_never_holds_all_its_queries_at_once(llama, ids, monkeypatch):
    want = run(llama, ids, "kvzip", **OPTIONS["kvzip"])[1]
    monkeypatch.setattr(kvprobe.attention, "BLOCK_BYTES", 8 * 4 * 90 * 3)
    got = run(llama, ids, "kvzip", **OPTIONS["kvzip"])[1]
    assert all(torch.allclose(got[layer], want[layer], atol=1e-14) for layer in (0, 1))


def test_kvzip_asks_in_words(llama, ids):
    with pytest.raises(ValueError, match="kvzip.*has no tokenizer"):
        compress(llama[0], ids[:1, :N], policy="kvzip", keep=KEEP)


# -- GVote-like -----------------------------------------------------------------------------------------------------


def voted(brute, stock, ids, instance, of):
    """layer -> (votes [hkv n], mean attention [hkv n]): hidden states drawn from their Gaussian, projected, turned, asked."""
    hidden: dict = {}
    hooks = [layer.self_attn.q_proj.register_forward_pre_hook(lambda m, x, _i=i: hidden.__setitem__(_i, x[0][0])) for i, layer in enumerate(stock.model.layers)]
    with torch.no_grad():
        stock(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    out = {}
    for layer, x in hidden.items():
        x, first = x[-of.window :], max(0, len(ids) - of.window)
        votes, mean = np.zeros((2, len(ids))), np.zeros((2, len(ids)))
        key = draws.key(5, *(torch.tensor(v) for v in (instance, layer, -1, 0)))
        for s in range(of.samples):
            u = draws.uniform(key, s * 2**32 + torch.arange(first, len(ids)))
            h = x.mean(0) + torch.special.ndtri(u) @ (x - x.mean(0)) / (len(x) - 1) ** 0.5
            q = (stock.model.layers[layer].self_attn.q_proj(h)).view(1, 4, 1, 8)
            cos, sin = stock.model.rotary_emb(h[None, None], torch.tensor([[len(ids) + s]]))
            q = apply_rotary_pos_emb(q, q, cos, sin)[0][0].numpy()
            a = brute.votes(layer, q)[:, 0]
            for head in range(4):
                now = np.sort(brute.prompt[layer]["weights"][head, -1])[::-1]
                size = next(i for i in range(1, len(now) + 1) if now[:i].sum() >= of.nucleus)
                votes[head // GROUP, np.argsort(-a[head])[:size]] += 1
                mean[head // GROUP] += a[head] / (of.samples * GROUP)
        out[layer] = votes, mean
    return out


@pytest.mark.parametrize("options", [{}, dict(capped=True, nucleus=0.9), dict(window=500, samples=1), dict(nucleus=0.05)], ids=str)
def test_gvote(llama, ids, options):
    """What is kept is the union of the votes and the pins, at its own count, or no more than keep."""
    made, scores = run(llama, ids, "gvote", rows=2, **(OPTIONS["gvote"] | options))
    counts = set()
    for b in range(2):
        found = voted(Brute(llama[1], ids[b, :N].tolist()), llama[1], ids[b, :N].tolist(), b, made.policy.inner)
        for layer, (votes, mean) in found.items():
            assert np.allclose(scores[layer][b].numpy(), votes + mean / 2, atol=1e-5)  # the model's own rotary angles are float32
            for h in (0, 1):
                union = sorted({*HELD, *np.flatnonzero(votes[h]).tolist()})
                counts.add(len(union))
                if options.get("capped") and len(union) > KEEP:
                    union = best(votes[h] + mean[h] / 2, KEEP, HELD)
                assert kept(made, b)[layer, h] == union
    assert max(counts) > KEEP if options.get("capped") else min(counts) < N and len(counts) > 1


def test_gvote_draws_by_the_seed(llama, ids):
    a, b, c = (compress(llama[0], ids[:1, :N], policy="gvote", keep=KEEP, protect_window=W, seed=seed, **OPTIONS["gvote"]) for seed in (1, 1, 2))
    assert kept(a) == kept(b) != kept(c)


def test_gvote_draws_have_the_covariance_of_the_prompt(llama, ids):
    """Many draws: mean and covariance of the queries they were fitted to, before RoPE."""
    spy = []
    policy = make_policy("gvote", dict(samples=20000, window=N), llama[0])
    drawn = type(policy).drawn

    def note(self, view):
        spy.append((drawn(self, view), view))
        return spy[-1][0][:, :, :2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy), "drawn", note)
        compress(llama[0], ids[:1, :N], policy=policy, keep=KEEP, protect_window=W)
    got, view = spy[1]
    back = rotate(llama[0], 1, got, -(N + torch.arange(20000)).expand(1, 4, -1))[0]
    seen = rotate(llama[0], 1, view.queries, -torch.arange(N).expand(1, 4, -1))[0]
    for head in range(4):
        scale = float(torch.cov(seen[head].T).diagonal().mean())
        assert torch.allclose(back[head].mean(0), seen[head].mean(0), atol=0.05 * scale**0.5)
        assert torch.allclose(torch.cov(back[head].T), torch.cov(seen[head].T), atol=0.06 * scale)


# -- controls of LORE -----------------------------------------------------------------------------------------------


def test_controls_of_lore(llama, ids):
    """One continuation is lore's first, at weight 1; the window alone is lore with m = 0."""
    def of(name, **options):
        return kept(compress(llama[0], ids[:1, :N], policy=name, keep=KEEP, protect_window=W, seed=5, window=6, **options))

    single = of("single_continuation", t=3)
    assert single == of("lore", m=1, t=3) == of("lore", m=1, t=3, beta=0.0, gamma=0.0) != of("lore", m=2, t=3)
    assert of("window_only") == of("lore", m=0) == of("lore", lam_l=0.0) != single
    assert make_policy("single_continuation").chunk == make_policy("window_only").chunk == make_policy("lore").chunk
