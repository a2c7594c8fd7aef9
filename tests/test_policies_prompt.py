"""Policies of prompt compression against plain versions written from methods.md, on captured states of a float64 model with GQA."""

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import allocation, projections, rotary
from kvprobe.compression import compress
from kvprobe.inside.sites import rotate
from kvprobe.registry import make_policy

N, W, KEEP = 40, 6, 18
FREE = range(1, N - W)
HOLD = KEEP - W - 1


@pytest.fixture(scope="module")
def seen(llama, ids):
    """{layer: (q [4 n 8], k [2 n 8], v [2 n 8], W_O [4 8 32])} of the first text, as numpy."""
    states = kvprobe.capture(llama[0], ids[:1, :N])
    return {layer: (*(getattr(states, x)[layer][0].numpy() for x in "qkv"), kvprobe.head_weights(llama[0], "O", layer).numpy()) for layer in (0, 1)}


def kept(llama, ids, policy, **options):
    """{(layer, head): kept positions} and the result; a second row of another length must not matter."""
    made = compress(llama[0], [ids[0, :N].tolist(), ids[1, : N - 5].tolist()], policy=policy, keep=KEEP, protect_window=W, **options)
    return {(layer, h): [p for p in made.cache.positions[layer, 0, h].tolist() if p >= 0] for layer in (0, 1) for h in (0, 1)}, made


def attention(q, k, t):
    """Softmax of query t over the keys it sees, zeros behind."""
    z = k[: t + 1] @ q[t] / np.sqrt(q.shape[-1])
    a = np.exp(z - z.max())
    return np.concatenate([a / a.sum(), np.zeros(len(k) - t - 1)])


def pooled(x, kernel, kind):
    half = kernel // 2
    near = [x[max(0, i - half) : i + half + 1] for i in range(len(x))]
    return np.array([n.max() if kind == "max" else n.sum() / kernel for n in near])


def window(seen, layer, head):
    """[g w n]: attention of the window's queries of both query heads of a KV head."""
    q, k, _, _ = seen[layer]
    return np.array([[attention(q[2 * head + g], k[head], t) for t in range(N - W, N)] for g in (0, 1)])


def snap(seen, layer, head):
    """Mean attention, averaged over neighbours before the window: what the window pays itself is no neighbour."""
    return np.mean([np.append(pooled(a.mean(0)[: N - W], 5, "average"), np.zeros(W)) for a in window(seen, layer, head)], axis=0)


def best(score, count, free=FREE):
    return sorted(sorted(free, key=lambda p: (-score[p], -p))[:count])


def with_pins(free):
    return [0, *sorted(free), *range(N - W, N)]


def l1(seen, layer, head):
    _, _, v, w_o = seen[layer]
    return np.mean([np.abs(v[head] @ w_o[2 * head + g]).sum(-1) for g in (0, 1)], axis=0)


# -- tova, pyramidkv, adakv -----------------------------------------------------------------------------------------


def test_tova(llama, ids, seen):
    sets, _ = kept(llama, ids, "tova")
    for layer in (0, 1):
        q, k, _, _ = seen[layer]
        score = np.mean([attention(q[h], k[h // 2], N - 1) for h in range(4)], axis=0)
        assert sets[layer, 0] == sets[layer, 1] == with_pins(best(score, HOLD))


def test_tova_where_heads_hold_different_entries(llama, ids, monkeypatch):
    """An entry counts by the heads that still hold it."""
    policy, found = make_policy("tova"), []
    score = type(policy).score
    monkeypatch.setattr(type(policy), "score", lambda self, view: found.append((view, score(self, view))) or found[-1][1])
    cache = kvprobe.cache(llama[0], policy=policy, keep=10, buffer=4, pins=[kvprobe.SpanPin(2, 4, frozenset({(0, 0), (1, 0)}))])
    kvprobe.force(llama[0], cache, ids[:1, :40])
    view, got = next((v, s) for v, s in found if v.positions[0, 0].tolist() != v.positions[0, 1].tolist())
    at = [{p: i for i, p in enumerate(view.positions[0, h].tolist())} for h in (0, 1)]
    by_head = [[(view.keys[0, h] @ view.queries[0, 2 * h + g, -1] * view.scaling).softmax(0) for g in (0, 1)] for h in (0, 1)]
    for h in (0, 1):
        for p, i in at[h].items():
            holders = [g for g in (0, 1) if p in at[g]]
            assert float(got[0, h, i]) == pytest.approx(np.mean([float(a[at[g][p]]) for g in holders for a in by_head[g]]), abs=1e-12)


def test_pyramidkv(llama, ids, seen):
    """Layers' shares of 2 * 11 free entries per head: 11 // 20 = 0 for the last, 22 for the first; the model's total as asked."""
    sets, made = kept(llama, ids, "pyramidkv")
    assert int(made.kept[:, 0].sum()) == 4 * KEEP
    for (layer, head), got in sets.items():
        assert got == with_pins(best(snap(seen, layer, head), (2 * HOLD, 0)[layer]))


@pytest.mark.parametrize("n, base", [(24, 25), (25, 25), (26, 25), (49, 25), (33, 25), (200, 25)])
@pytest.mark.parametrize("layers", [4, 5])
def test_pyramid_totals(n, base, layers):
    """B03: at, just above and within twice the budget, the declared total is met, and nothing goes below it."""
    for cases in (False, True):
        got = allocation.pyramid(layers, base, n, 20, cases=cases)
        assert sum(got) == layers * min(base, n) and max(got) <= n and got == sorted(got, reverse=True)


@pytest.mark.parametrize("length", [KEEP - 1, KEEP, KEEP + 1, 2 * KEEP - 1, 2 * KEEP])
@pytest.mark.parametrize("policy", ["pyramidkv", "adakv", "andpro", "defensivekv"])
def test_totals_at_every_length(llama, ids, policy, length):
    made = compress(llama[0], ids[:1, :length], policy=policy, keep=KEEP, protect_window=W)
    assert int(made.kept.sum()) == 4 * min(KEEP, length) and (length > KEEP or not made.keep_log.fired[0])


@pytest.mark.parametrize("policy", ["pyramidkv", "adakv", "andpro", "criticalkv", "defensivekv"])
def test_totals_in_rounds(llama, ids, policy):
    """While text is written, too: rounds come every r tokens and leave K + r entries per head on average at the policy's own level."""
    options = {"criticalkv": dict(adaptive=True), "defensivekv": dict(threshold=0.0)}.get(policy, {})
    cache = kvprobe.cache(llama[0], policy=policy, keep=12, buffer=4, **options)
    kvprobe.force(llama[0], cache, ids[:2])
    held = (cache.positions >= 0).sum(-1)
    assert cache.keep_log.fired == (tuple(range(20, 81, 4)),) * 2
    assert bool((held.sum((0, 2)) == 64).all()) and (policy == "pyramidkv" or bool((held.sum(-1) == 32).all()))
    assert bool((held.amin() < 16).item())


@pytest.mark.parametrize("options", [dict(alpha=0.5), dict(alpha=0.2, form="floor"), dict(alpha=0.0), dict(alpha=1.0)], ids=str)
def test_adakv(llama, ids, seen, options):
    sets, made = kept(llama, ids, "adakv", **options)
    assert bool((made.kept.sum(-1) == 2 * KEEP).all())
    for layer in (0, 1):
        scores = [snap(seen, layer, h) for h in (0, 1)]
        together = sorted(((scores[h][p], h, p) for h in (0, 1) for p in FREE), reverse=True)
        alpha = options["alpha"]
        if options.get("form") == "floor":
            sure = {(h, p) for h in (0, 1) for p in best(scores[h], int(HOLD * alpha))}
            rest = [(h, p) for _, h, p in together if (h, p) not in sure][: 2 * HOLD - len(sure)]
            count = [sum(g == h for g, _ in [*sure, *rest]) for h in (0, 1)]
        else:
            share = [sum(g == h for _, g, _ in together[: 2 * HOLD]) * (1 - alpha) + HOLD * alpha for h in (0, 1)]
            count = [int(np.floor(s + 1e-9)) for s in share]
            left = sorted(((scores[h][p], h) for h in (0, 1) for p in set(FREE) - set(best(scores[h], count[h]))), reverse=True)
            for _, h in left[: 2 * HOLD - sum(count)]:
                count[h] += 1
        assert [sets[layer, h] for h in (0, 1)] == [with_pins(best(scores[h], count[h])) for h in (0, 1)]


# -- criticalkv, defensivekv ----------------------------------------------------------------------------------------


def test_value_norms_by_blocks(monkeypatch):
    """Against the norm written out, however small a block is; methods R6: |W v|_1 of three values."""
    w = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))[None]
    toy = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[None, None]
    assert projections.value_norms(w, toy).tolist() == [[[2.0, 1.0, 3.0]]]
    weights, values = torch.randn(4, 8, 32, dtype=torch.float64), torch.randn(2, 2, 37, 8, dtype=torch.float64)
    want = torch.stack([torch.stack([(values[:, h] @ weights[2 * h + g]).abs().sum(-1) for g in (0, 1)]).mean(0) for h in (0, 1)], 1)
    monkeypatch.setitem(projections.BLOCK_BYTES, "cpu", 5 * 2 * 2 * 32 * 8)
    assert torch.allclose(projections.value_norms(weights, values), want, atol=1e-13)


def test_what_is_made_of_a_projection_is_made_once_and_again_when_it_changes():
    import tiny

    model, calls = tiny.pair("llama")[0], []

    def make(w):
        calls.append(1)
        return w * 2

    first, second = (make_policy("lore", {}, model) for _ in range(2))
    assert projections.kept(first, 1, make) is projections.kept(second, 1, make) and len(calls) == 1
    model.model.model.layers[1].self_attn.o_proj.weight.data.add_(1.0)
    assert torch.equal(projections.kept(first, 1, make), 2 * kvprobe.head_weights(model, "O", 1)) and len(calls) == 2


@pytest.mark.parametrize("form", ["free", "released"])
def test_criticalkv(llama, ids, seen, form):
    sets, _ = kept(llama, ids, "criticalkv", form=form)
    for (layer, head), got in sets.items():
        s = snap(seen, layer, head)
        first = best(s, HOLD // 2 if form == "free" else max(0, KEEP // 2 - W - 1))
        rest = best((s + 1e-4) * l1(seen, layer, head), HOLD - len(first), [p for p in FREE if p not in first])
        assert got == with_pins(first + rest)


def test_criticalkv_epsilon_decides(llama, ids):
    """F06: a named option that changes which tokens win, and is on record."""
    small, large = (kept(llama, ids, "criticalkv", eps=eps, first=0.0) for eps in (0.0, 100.0))
    assert small[0] != large[0] and large[1].policy.eps == 100.0


def test_criticalkv_adaptive(llama, ids, seen):
    sets, made = kept(llama, ids, "criticalkv", adaptive=True, alpha=0.2)
    assert bool((made.kept.sum(-1) == 2 * KEEP).all())
    for layer in (0, 1):
        scores = [snap(seen, layer, h) for h in (0, 1)]
        sure = {(h, p) for h in (0, 1) for p in best(scores[h], int(HOLD * 0.2))}
        rest = sorted(((scores[h][p], h, p) for h in (0, 1) for p in FREE if (h, p) not in sure), reverse=True)[: 2 * HOLD - len(sure)]
        for head in (0, 1):
            count = sum(h == head for h, _ in sure) + sum(h == head for _, h, _ in rest)
            first = best(scores[head], count // 2)
            last = best((scores[head] + 1e-4) * l1(seen, layer, head), count - len(first), [p for p in FREE if p not in first])
            assert sets[layer, head] == with_pins(first + last)


def defensive(seen, layer, form, threshold):
    """(scores [2 n], stage-1 sets of both heads)."""
    scores, sure = [], []
    norms = np.array([l1(seen, layer, h) for h in (0, 1)])
    for head in (0, 1):
        a = window(seen, layer, head)
        rows = np.zeros_like(a)
        for g, t in np.ndindex(a.shape[:2]):
            own = np.zeros(N)
            own[list(FREE)] = a[g, t, list(FREE)]
            smooth = np.zeros(N)
            smooth[list(FREE)] = pooled(own, 5, "average")[list(FREE)]
            rows[g, t] = smooth * own.sum() / smooth.sum()
        worst = rows.max((0, 1))
        scores.append(np.maximum(worst, worst[list(FREE)].mean()) * norms[head] / norms.sum(0))
        mean, rows = a.mean((0, 1)), rows.mean((0, 1))
        pinned = list(range(N - 2 * W, N - W)) if form == "released" else [0, *range(N - W, N)]
        mass, held = 0.0, []
        for p in sorted(FREE, key=lambda p: (-rows[p], -p)):
            mass += rows[p]
            if mass >= threshold - mean[pinned].sum() or len(held) == HOLD:
                break
            held.append(p)
        sure.append(held)
    return scores, sure


@pytest.mark.parametrize("form, threshold", [("free", 0.35), ("released", 0.25), ("free", 0.9), ("free", 0.0)])
def test_defensivekv(llama, ids, seen, form, threshold):
    sets, _ = kept(llama, ids, "defensivekv", form=form, threshold=threshold)
    for layer in (0, 1):
        scores, sure = defensive(seen, layer, form, threshold)
        assert threshold == 0.9 or 0 <= len(sure[0] + sure[1]) < 2 * HOLD
        rest = sorted(((scores[h][p], h, p) for h in (0, 1) for p in FREE if p not in sure[h]), reverse=True)[: 2 * HOLD - len(sure[0] + sure[1])]
        for head in (0, 1):
            assert sets[layer, head] == with_pins(sure[head] + [p for _, h, p in rest if h == head])


def test_defensivekv_over_the_whole_model(llama, ids, seen):
    sets, made = kept(llama, ids, "defensivekv", across="model", threshold=0.0)
    assert int(made.kept[:, 0].sum()) == 4 * KEEP
    scores = {(layer, h): defensive(seen, layer, "free", 0.0)[0][h] for layer in (0, 1) for h in (0, 1)}
    rest = sorted(((s[p], site, p) for site, s in scores.items() for p in FREE), reverse=True)[: 4 * HOLD]
    assert sets == {site: with_pins([p for _, own, p in rest if own == site]) for site in sets}


def test_defensivekv_in_rounds_compares_heads_by_position(llama, ids, monkeypatch):
    """After a round a slot is another token in each head: the share of a norm is among the heads that hold the entry."""
    policy, found = make_policy("defensivekv", dict(threshold=0.0), llama[0]), []
    score = type(policy).score
    monkeypatch.setattr(type(policy), "score", lambda self, view: found.append((view, score(self, view))) or found[-1][1])
    kvprobe.force(llama[0], kvprobe.cache(llama[0], policy=policy, keep=10, buffer=4), ids[:1, :40])
    view, got = next((v, s) for v, s in found if not v.positions.equal(v.positions[:, :1].expand_as(v.positions)) and bool(v.real.all()))
    norms, w = projections.value_norms(kvprobe.head_weights(llama[0], "O", view.layer), view.values)[0], 4
    at = [{p: i for i, p in enumerate(view.positions[0, h].tolist())} for h in (0, 1)]
    for h in (0, 1):
        rows = torch.stack([(view.queries[0, 2 * h + g, -w:] @ view.keys[0, h].T * view.scaling).softmax(-1) for g in (0, 1)]).numpy()
        worst = np.max([[(s := pooled(r, 5, "average")) * r.sum() / s.sum() for r in g] for g in rows], axis=(0, 1))
        for p, i in at[h].items():
            share = norms[h, i] / sum(norms[g, at[g][p]] for g in (0, 1) if p in at[g])
            assert float(got[0, h, i]) == pytest.approx(max(worst[i], worst.mean()) * float(share), abs=1e-12)


def test_flattened_example():
    """methods R13: four kept of two heads together."""
    got = allocation.flattened(torch.tensor([[3.0, 4, 5, 9999], [1, 1, 1, 9998]]), 4)
    assert got.tolist() == [3, 1]


# -- andpro ---------------------------------------------------------------------------------------------------------


def anchored(seen, layer, head, form):
    _, _, v, _ = seen[layer]
    score, squares = np.zeros(N), 0.0
    for rows in window(seen, layer, head):
        for t, a in enumerate(rows):
            if form == "released":
                seen_of = a[: N - W + t + 1]
                a = np.concatenate([pooled(np.concatenate([seen_of, np.zeros(N - len(seen_of))]), 7, "max")])
                a = np.where(np.isin(np.arange(N), list(FREE)), a, 0.0)
            y = a @ v[head]
            squares += y @ y
            score += a * (v[head] @ y)
    return score, squares


@pytest.mark.parametrize("form", ["paper", "released"])
@pytest.mark.parametrize("chunk, across", [(4, "layer"), (1, "layer"), (4, "head"), (1, "head")])
def test_andpro(llama, ids, seen, form, chunk, across):
    """Sets, and the identity of methods R7: scores add up to the squares of the anchors."""
    sets, made = kept(llama, ids, "andpro", form=form, chunk=chunk, across=across)
    assert bool((made.kept.sum(-1) == 2 * KEEP).all()) and (across == "layer" or bool((made.kept == KEEP).all()))
    for layer in (0, 1):
        scores = [anchored(seen, layer, h, form) for h in (0, 1)]
        assert all(np.isclose(s.sum(), squares) for s, squares in scores)
        by_chunk = {(h, j): [p for p in FREE if p // chunk == j] for h in (0, 1) for j in {p // chunk for p in FREE}}
        order = sorted(by_chunk, key=lambda hj: (-np.mean([scores[hj[0]][0][p] for p in by_chunk[hj]]), hj[0], -hj[1]))
        for head in (0, 1):
            if across == "layer":
                count = sum(h == head for h, j in [(h, j) for h, j in order for _ in by_chunk[h, j]][: 2 * HOLD])
            else:
                count = HOLD
            own = [p for h, j in order if h == head for p in sorted(by_chunk[h, j], key=lambda p: (-scores[head][0][p], -p))][:count]
            assert sets[layer, head] == with_pins(own)


# -- expected attention ---------------------------------------------------------------------------------------------


def test_expected_attention_toy():
    """methods R14: the logit of a key is k mu / sqrt d + k Sigma k / 2d, and the exponential's mean agrees."""
    k, mu, sigma, d = np.array([1.0, 2.0]), np.array([0.5, -0.25]), np.array([[0.2, 0.05], [0.05, 0.1]]), 2
    assert np.isclose(k @ mu / np.sqrt(d) + k @ sigma @ k / (2 * d), 0.2)
    draws = np.random.default_rng(0).multivariate_normal(mu, sigma, 400_000)
    assert abs(np.log(np.exp(draws @ k / np.sqrt(d)).mean()) - 0.2) < 2e-3


@pytest.mark.parametrize("options", [{}, dict(covariance=False), dict(value_norm=False, eps=0.1), dict(n_sink=2, n_future=7)], ids=str)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_expected_attention(ids, model, options):
    """Against moments of the queries before their rotation, and rotation matrices written out and averaged. E02: with query normalisation, too."""
    import tiny

    lm, stock = tiny.pair(model)
    before = {}
    for i, layer in enumerate(stock.model.layers):
        part = layer.self_attn.q_norm if model == "qwen3" else layer.self_attn.q_proj
        part.register_forward_hook(lambda m, a, out, i=i: before.__setitem__(i, out.detach().reshape(1, N, 4, 8)[0].transpose(0, 1).numpy()))
    with torch.no_grad():
        stock(ids[:1, :N])
    sets, _ = kept((lm,), ids, "expected_attention", **options)
    states = kvprobe.capture(lm, ids[:1, :N])
    sink, future = options.get("n_sink", 4), options.get("n_future", 512)
    omega = 10000.0 ** (-np.arange(4) / 4)
    mean_turn = np.zeros((8, 8))
    for p in range(N, N + future):
        c, s = np.diag(np.cos(omega * p)), np.diag(np.sin(omega * p))
        mean_turn += np.block([[c, -s], [s, c]]) / future
    for layer in (0, 1):
        k, v = states.k[layer][0].numpy(), states.v[layer][0].numpy()
        for head in (0, 1):
            a = np.zeros(N)
            for g in (0, 1):
                q = before[layer][2 * head + g][sink:]
                mu, sigma = mean_turn @ q.mean(0), mean_turn @ np.cov(q.T, bias=True) @ mean_turn.T
                z = k[head] @ mu / np.sqrt(8) + (0.0 if options.get("covariance") is False else np.einsum("nd,de,ne->n", k[head], sigma, k[head]) / 16)
                e = np.where(np.arange(N) < sink, 0.0, np.exp(z))
                a += e / e.sum() / 2
            score = (a + options.get("eps", 0.0)) * (1 if options.get("value_norm") is False else np.linalg.norm(v[head], axis=-1))
            free = [p for p in FREE if p >= sink]
            assert sets[layer, head] == sorted([*range(max(1, sink)), *best(score, KEEP - W - max(1, sink), free), *range(N - W, N)])


def test_moments_in_parts_are_those_of_the_whole(llama, ids):
    """A prompt read in chunks, a padded row among them: the same count, mean and spread."""
    policy = make_policy("expected_attention", {}, llama[0])
    whole, parts = (kvprobe.cache(llama[0], policy=policy, keep=70, buffer=4) for _ in range(2))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    for cache, cuts in ((whole, (0, 30)), (parts, (0, 11, 12, 30))):
        for a, z in zip(cuts, cuts[1:]):
            with torch.no_grad():
                llama[0].model(ids[:2, a:z], attention_mask=mask[:, :z], position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, a:z], cache=cache, use_cache=True)
    for layer in (0, 1):
        a, z = whole.layers[layer].state, parts.layers[layer].state
        assert a["count"].tolist() == [26, 19] and all(torch.allclose(a[name], z[name], atol=1e-10) for name in ("count", "mean", "scatter"))


def test_turns_are_the_models_own(llama):
    """A key turned by 5 here and by the model's code; turned back it is what it was."""
    turn, x = rotary.read(llama[0], 0), torch.randn(1, 2, 9, 8, dtype=torch.float64)
    by = torch.arange(9)[None, None].expand(1, 2, -1)
    there = turn.turned(x, by)
    assert torch.allclose(there, rotate(llama[0], 0, x, by), atol=1e-6) and torch.allclose(turn.turned(there, -by), x, atol=1e-12)


# -- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["criticalkv", "defensivekv", "expected_attention"])
def test_what_is_not_bound_is_refused(llama, ids, policy):
    from kvprobe.eviction_cache import EvictionCache
    from kvprobe.types import Plan

    raw = make_policy(policy, {} if policy == "expected_attention" else dict(window=4))
    with pytest.raises(ValueError, match=f"{policy} needs its model's"):
        kvprobe.force(llama[0], EvictionCache(llama[0].model.config, llama[0].geometry, Plan(10, 4), raw), ids[:1])


@pytest.mark.parametrize("policy, bad, says", [
    ("adakv", dict(alpha=1.5), "alpha=1.5 must be in"), ("pyramidkv", dict(beta=0.5), "beta=0.5"), ("criticalkv", dict(first=2.0), "first=2.0"), ("criticalkv", dict(eps=-1.0), "eps=-1.0"),
    ("andpro", dict(chunk=0), "chunk=0"), ("andpro", dict(kernel=4), "kernel=4 must be odd"), ("defensivekv", dict(threshold=1.2), "threshold=1.2"),
    ("expected_attention", dict(n_future=0), "n_future=0"), ("andpro", dict(form="x"), "'paper' or 'released'")])
def test_refused(policy, bad, says):
    with pytest.raises(ValueError, match=says):
        make_policy(policy, bad)


@pytest.mark.parametrize("policy", ["tova", "pyramidkv", "adakv", "criticalkv", "andpro", "defensivekv", "expected_attention"])
def test_half_precision_is_finite(ids, policy):
    import tiny

    for dtype in (torch.float16, torch.bfloat16):
        made = compress(tiny.pair("llama", dtype)[0], ids[:1, :N], policy=policy, keep=KEEP, protect_window=W)
        assert int(made.kept.sum()) == 4 * KEEP and np.isfinite(made.ask(max_new_tokens=3).logp).all()
