"""LORE end to end against a slow plain version: every entry deleted in turn, attention renormalised, the change projected."""

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe.compression import compress
from kvprobe.registry import make_policy

N, W, KEEP = 44, 6, 20
OPTIONS = dict(window=W, m=3, t=4, chunk=1)


def made(llama, ids, future=None, **options):
    return compress(llama[0], ids[:2, :N], policy="lore", keep=KEEP, protect_window=W, seed=5, future=future, **(OPTIONS | options))


def kept(c, b=0):
    positions = c.cache.positions
    return {(layer, h): [p for p in positions[i, b, h].tolist() if p >= 0] for i, layer in enumerate(c.cache.geometry.kv_layers) for h in range(positions.shape[2])}


def deletion(q, keys, values, w_o, scaling, eps):
    """[n]: |W (o_without_i - o)|^2 for one query of one head, by really leaving each entry out."""
    logits = keys @ q * scaling
    a = np.exp(logits - logits.max())
    a /= a.sum()
    o = a @ values
    out = []
    for i in range(len(a)):
        delta = a[i] / (1 - a[i] + eps) * (values[i] - o)
        out.append(float(np.square(delta @ w_o).sum()))
    return np.array(out)


def brute(llama, ids, c, b, layer, lam_l=1.0, eps=1e-6):
    """S [hkv n] of eq. 7 from captured states and the stored look ahead."""
    model = llama[0]
    seen = kvprobe.capture(model, ids[b : b + 1, :N], layers=[layer])
    q, k, v = (getattr(seen, x)[layer][0].numpy() for x in "qkv")
    w_o, scaling = kvprobe.head_weights(model, "O", layer).numpy(), q.shape[-1] ** -0.5
    future, group = c.future, q.shape[0] // k.shape[0]
    score = np.zeros((k.shape[0], N))
    for h in range(q.shape[0]):
        kv = h // group
        for t in range(N - W, N):
            score[kv, : t + 1] += deletion(q[h, t], k[kv, : t + 1], v[kv, : t + 1], w_o[h], scaling, eps) / (W * group)
        if future is not None:
            ahead, valid = future.lookahead.queries[layer][b].numpy(), future.lookahead.valid[b].numpy()
            for m in range(ahead.shape[0]):
                for t in np.flatnonzero(valid[m]):
                    score[kv] += lam_l * float(future.weights[b, m]) * deletion(ahead[m, h, t], k[kv], v[kv], w_o[h], scaling, eps) / (valid[m].sum() * group)
    return score


@pytest.mark.parametrize("options", [{}, dict(m=0), dict(beta=0.0, gamma=0.0), dict(beta=1.0, gamma=1.0, lam_d=0.3), dict(lam_l=2.5)], ids=str)
def test_keeps_what_costs_most_to_delete(llama, ids, options):
    c = made(llama, ids, **options)
    for b in range(2):
        for layer in (0, 1):
            score = brute(llama, ids, c, b, layer, options.get("lam_l", 1.0))
            for kv in range(2):
                free = [p for p in np.argsort(-score[kv], kind="stable").tolist() if p not in (0, *range(N - W, N))]
                want = sorted([0, *range(N - W, N), *free[: KEEP - W - 1]])
                assert kept(c, b)[layer, kv] == want


def test_weights_are_eq_3_and_4(llama, ids):
    """From the stored signals, by hand."""
    c = made(llama, ids, beta=1.0, gamma=1.3)
    found = c.future.lookahead
    typical = (found.logq + found.entropy).mean(-1)
    want = (typical - 1.3 * found.entropy.mean(-1)).softmax(-1)
    assert torch.allclose(c.future.weights, want, atol=1e-12) and torch.allclose(c.future.weights.sum(-1), torch.ones(2, dtype=torch.float64))


def test_without_a_look_ahead(llama, ids):
    """M = 0 == lambda_L = 0 == the window alone; a budget that holds everything is the full cache and looks nowhere."""
    assert kept(made(llama, ids, m=0)) == kept(made(llama, ids, lam_l=0.0))
    whole = compress(llama[0], ids[:1, :N], policy="lore", keep=N, **OPTIONS)
    assert whole.future is None and torch.equal(whole.ask(max_new_tokens=6).tokens[0], llama[1].generate(ids[:1, :N], max_new_tokens=6, do_sample=False)[0, N:])


def test_a_stored_look_ahead(llama, ids):
    """Sampled once, used for /E and /D and for fewer continuations."""
    first = made(llama, ids)
    found = first.future.lookahead
    assert kept(made(llama, ids, future=found)) == kept(first)
    fewer = made(llama, ids, future=found, m=2)
    assert kept(fewer) == kept(made(llama, ids, m=2)) and fewer.cache.keep_log.fired == ((N,), (N,))


@pytest.mark.parametrize("options", [dict(chunk=4), dict(tau=1.0), dict(lam_k=0.1, lam_v=0.1), dict(drop_worst=1), dict(alpha=0.5, kappa=0.2), dict(objective="attention"),
                                     dict(objective="unprojected"), dict(objective="anchor"), dict(form="magnitude"), dict(group="max")], ids=str)
def test_variants_keep_exact_counts(llama, ids, options):
    """B per head, or B x heads per layer where budgets are shared out; the protected ones among them."""
    c = made(llama, ids, **options)
    assert bool((c.kept.sum(-1) == 2 * KEEP).all()) and (options.get("tau") or bool((c.kept == KEEP).all()))
    for b in range(2):
        for held in kept(c, b).values():
            assert {0, *range(N - W, N)} <= set(held)
    c.ask(max_new_tokens=3)


def test_chunks_stay_together(llama, ids):
    """Free entries are whole chunks of four counted from the start, but for the one that was cut."""
    for held in kept(made(llama, ids, chunk=4)).values():
        free = [p for p in held if p and p < N - W]
        sizes = [sum(p // 4 == chunk for p in free) for chunk in sorted({p // 4 for p in free})]
        whole = [min(4, 3 if chunk == 0 else N - W - 4 * chunk) for chunk in sorted({p // 4 for p in free})]
        assert sum(a != b for a, b in zip(sizes, whole)) <= 1


def test_chunks_are_the_best_by_the_mean_of_their_free_entries(llama, ids):
    """Against a plain version: protected entries take no part, the last chunk is cut by the entries' own scores."""
    c = made(llama, ids, chunk=4)
    for i, layer in enumerate(c.cache.geometry.kv_layers):
        score = brute(llama, ids, c, 0, layer)
        for h in range(2):
            free = list(range(1, N - W))
            by_chunk = {j: [p for p in free if p // 4 == j] for j in {p // 4 for p in free}}
            order = sorted(by_chunk, key=lambda j: -np.mean([score[h, p] for p in by_chunk[j]]))
            want = [p for j in order for p in sorted(by_chunk[j], key=lambda p: -score[h, p])][: KEEP - W - 1]
            assert sorted(want) == [p for p in kept(c)[layer, h] if p and p < N - W]


def test_diversity_starts_from_the_protected_entries(llama, ids):
    """Greedy picks against a plain version."""
    c = made(llama, ids, lam_k=0.3, lam_v=0.2)
    seen = kvprobe.capture(llama[0], ids[:1, :N])
    for layer in c.cache.geometry.kv_layers:
        score = brute(llama, ids, c, 0, layer)
        for h in range(2):
            k, v = (x[layer][0, h].numpy() / np.linalg.norm(x[layer][0, h].numpy(), axis=-1, keepdims=True) for x in (seen.k, seen.v))
            free, picked = list(range(1, N - W)), [0, *range(N - W, N)]
            best = max(score[h, p] for p in free)
            for _ in range(KEEP - W - 1):
                worth = {p: score[h, p] / best - 0.3 * max(k[p] @ k[j] for j in picked) - 0.2 * max(v[p] @ v[j] for j in picked) for p in free}
                pick = max(worth, key=worth.get)
                picked, free = [*picked, pick], [p for p in free if p != pick]
            assert sorted(picked) == kept(c)[layer, h]


def test_hard_filtering(llama, ids):
    c = made(llama, ids, drop_worst=1)
    assert bool(((c.future.weights == 0).sum(-1) == 1).all())


def test_half_precision_is_finite(ids):
    import tiny

    for dtype in (torch.float16, torch.bfloat16):
        model, _ = tiny.pair("llama", dtype)
        c = compress(model, ids[:1, :N], policy="lore", keep=KEEP, protect_window=W, **OPTIONS)
        assert bool((c.kept == KEEP).all())


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5", "qwen3"])
def test_models(kind, ids):
    import tiny

    model, _ = tiny.pair(kind)
    c = compress(model, ids[:1, :N], policy="lore", keep=KEEP, protect_window=W, **OPTIONS)
    assert bool((c.kept == KEEP).all()) and c.future.lookahead.m == 3


@pytest.mark.parametrize("bad, say", [(dict(m=-1), "m=-1"), (dict(window=0), "window"), (dict(drop_worst=3), "drop_worst"), (dict(chunk=4, lam_k=0.1), "chunk"), (dict(objective="x"), "objective"),
                                      (dict(alpha=2.0), "alpha"), (dict(tau=-1.0), "tau")])
def test_refused(llama, ids, bad, say):
    with pytest.raises(ValueError, match=say):
        made(llama, ids, **bad)


def test_only_compress_lets_it_look_ahead(llama, ids):
    for policy in ("lore", make_policy("lore"), make_policy("lore", model=llama[0])):
        with pytest.raises(ValueError, match="lore looks ahead.*kvprobe.compress"):
            kvprobe.cache(llama[0], policy=policy, keep=10, buffer=4)
    cache = kvprobe.cache(llama[0], policy="lore", keep=10, schedule="prompt_end")
    with pytest.raises(ValueError, match="lore looks ahead.*kvprobe.compress"):
        kvprobe.force(llama[0], cache, ids[:1, :40])
    from kvprobe import arms

    assert not any(name.startswith("lore") for name in arms.split("all"))
    with pytest.raises(ValueError, match="looks ahead"):
        arms.make(["lore"], "without", 1)
    assert arms.make(["lore(m=0)"], "without", 1)


def test_budgets_follow_the_cost_of_what_is_not_protected(llama, ids):
    """Eq. 11 with E_h over candidates only (protocols 8), the slots that rounding leaves to the best entries left out."""
    c = made(llama, ids, tau=1.0)
    for i, layer in enumerate(c.cache.geometry.kv_layers):
        score = brute(llama, ids, c, 0, layer)[:, 1 : N - W]
        free = 2 * (KEEP - W - 1)
        energy = score.sum(-1) + 1e-6
        budget = np.minimum(np.floor(free * energy / energy.sum()), score.shape[1]).astype(int)
        left = sorted(((s, h) for h in range(2) for s in sorted(score[h])[: score.shape[1] - budget[h]]), reverse=True)[: free - budget.sum()]
        want = [budget[h] + sum(g == h for _, g in left) + W + 1 for h in range(2)]
        assert c.kept[i, 0].tolist() == want
