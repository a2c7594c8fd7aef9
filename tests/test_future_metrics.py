"""Metrics against the future: worked examples, brute force in plain python and scipy, and the identities that each must meet."""

import doctest
import importlib
import itertools
import math
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from kvprobe import deletion
from kvprobe.metrics import composition, coverage, divergence, equivalence, layer_maps, ranking

L, B, HQ, HKV, T, D, W, M, N = 2, 2, 4, 2, 3, 5, 4, 3, 12
WORKED = {"coverage": 5, "fidelity": 3, "ranking": 6, "composition": 3, "layer_maps": 3, "perturbation": 1, "equivalence": 2, "divergence": 2}
"""Docstrings with a worked example."""


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name):
    module = importlib.import_module(f"kvprobe.metrics.{name}")
    tests = [t for t in doctest.DocTestFinder().find(module) if t.examples]
    assert len(tests) >= WORKED[name]
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


# -- coverage --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def queries():
    """(future {layer: [b hq t d]}, valid, window, window_valid, continuations {layer: [b m hq t d]}, written); what does not count is nan."""
    future, window, more = ({layer: drawn(*shape, seed=10 * layer + k) for layer in (1, 4)}
                            for k, shape in enumerate([(B, HQ, T, D), (B, HQ, W, D), (B, M, HQ, 2, D)]))
    valid, seen, written = torch.ones(B, T, dtype=torch.bool), torch.ones(B, W, dtype=torch.bool), torch.ones(B, M, 2, dtype=torch.bool)
    valid[0, 2], seen[1, 0], written[1, 2, 1] = False, False, False
    for layer in (1, 4):
        future[layer][0, :, 2], window[layer][1, :, 0], more[layer][1, 2, :, 1] = torch.nan, torch.nan, torch.nan
    return future, valid, window, seen, more, written


def cosine(a, b):
    return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))


def by_hand(queries, layer, b, h, sets, form, weights):
    """Coverage of one layer, row and head: lists and loops; weights by set."""
    future, valid, window, seen, more, written = (x[layer] if isinstance(x, dict) else x for x in queries)
    members = {"w": [window[b, h, i] for i in range(W) if seen[b, i]]} | {m: [more[b, m, h, t] for t in range(2) if written[b, m, t]] for m in range(M)}
    out = []
    for t in [t for t in range(T) if valid[b, t]]:
        best = {s: max(cosine(future[b, h, t], q) for q in members[s]) for s in sets}
        out.append(max(best.values()) if form == "union" else sum(weights[s] * best[s] for s in sets))
    return sum(out) / len(out)


@pytest.mark.parametrize("form", ["mixture", "union"])
@pytest.mark.parametrize("name", coverage.SETS)
def test_coverage_by_brute_force(queries, name, form):
    found = coverage.measure(*queries)
    for m in (1, M):
        got = found.coverage(name, form, m=m)
        sets = {"window": ["w"], "continuations": list(range(m)), "both": ["w", *range(m)]}[name]
        share = 0.5 if name == "both" else 0.0
        weights = {"w": share or 1.0} | {k: (1 - share) / m for k in range(m)}
        for (i, layer), b, h in itertools.product(enumerate((1, 4)), range(B), range(HQ)):
            assert float(got[i, b, h]) == pytest.approx(by_hand(queries, layer, b, h, sets, form, weights), abs=1e-12)


def test_mixture_weights_by_brute_force(queries):
    """One set of weights for all rows, and one per row; the window's share."""
    found, rows = coverage.measure(*queries), torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    for weights, b in ((rows[0], 1), (rows, 0), (rows, 1)):
        own = weights[b] if weights.ndim == 2 else weights
        got = found.coverage("both", "mixture", weights=weights, window_share=0.25)[1, b, 2]
        assert float(got) == pytest.approx(by_hand(queries, 4, b, 2, ["w", 0, 1, 2], "mixture", {"w": 0.25} | {k: 0.75 * float(own[k]) for k in range(3)}), abs=1e-7)


def test_coverage_identities(queries):
    future, valid, window, seen, more, written = queries
    found = coverage.measure(*queries)
    itself = coverage.measure(future, valid, future, valid, {layer: q[:, None].expand(-1, M, -1, -1, -1) for layer, q in future.items()}, valid[:, None].expand(-1, M, -1))
    for name, form in itertools.product(coverage.SETS, ("mixture", "union")):
        assert torch.allclose(itself.coverage(name, form), torch.ones((), dtype=torch.float64)) and itself.mismatch().abs().max() < 1e-12
    singles = torch.stack([found.coverage("window"), *(coverage.Nearest(found.window, e[None], valid).coverage("continuations") for e in found.each)])
    union, mixture = found.coverage("both", "union"), found.coverage("both", "mixture")
    assert bool((union >= singles.amax(0) - 1e-12).all()) and bool((mixture <= singles.amax(0) + 1e-12).all()) and bool((mixture >= singles.amin(0) - 1e-12).all())
    assert bool((union > mixture + 1e-6).any())
    grown = torch.stack([found.coverage("continuations", "union", m=m) for m in (1, 2, 3)])
    assert bool((grown.diff(dim=0) >= 0).all()) and torch.equal(found.mismatch(), 1 - found.coverage("window"))
    scaled = coverage.measure({k: 3 * q for k, q in future.items()}, valid, {k: q / 7 for k, q in window.items()}, seen, more, written)
    assert torch.allclose(scaled.coverage(), union, atol=1e-12)  # unit-normalised
    assert torch.allclose(found.coverage("window", m=1), found.coverage("window")) and found.coverage().shape == (L, B, HQ)


def test_coverage_holds_one_layer_at_a_time():
    """Queries that are read when asked for are let go: never two layers of the same set beside the one just made."""

    class Read(Mapping):
        def __init__(self, *shape):
            self.shape, self.made, self.most = shape, [], 0

        def __getitem__(self, layer):
            out = drawn(*self.shape, seed=layer)
            self.made.append(weakref.ref(out))
            self.most = max(self.most, sum(r() is not None for r in self.made))
            return out

        def __iter__(self):
            return iter(range(6))

        def __len__(self):
            return 6

    read = Read(1, HQ, T, D), Read(1, HQ, W, D), Read(1, M, HQ, 2, D)
    found = coverage.measure(read[0], torch.ones(1, T, dtype=torch.bool), read[1], None, read[2])
    assert found.each.shape == (M, 6, 1, HQ, T) and max(r.most for r in read) <= 2


def test_coverage_refusals(queries):
    found = coverage.measure(*queries)
    none = coverage.measure(*queries[:4])
    bad = [(dict(sets="all"), "known: window"), (dict(form="sum"), "known: mixture"), (dict(m=4), "there are 3"), (dict(m=0), "there are 3"),
           (dict(weights=torch.ones(3) / 3), "have none"), (dict(form="mixture", weights=torch.ones(3)), "sum to 1"),
           (dict(form="mixture", weights=torch.tensor([1.5, -0.5, 0])), "not be negative"), (dict(form="mixture", weights=torch.ones(2) / 2), "one each"),
           (dict(form="mixture", window_share=1.5), "not be negative")]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            found.coverage(**options)
    with pytest.raises(ValueError, match="there are 0"):
        none.coverage("both")
    assert torch.equal(none.coverage("window"), found.coverage("window"))
    with pytest.raises(ValueError, match="is empty"):
        coverage.measure(*queries[:3], torch.zeros(B, W, dtype=torch.bool))


# -- overlap and ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores():
    """(a, b, protected) [l b hkv n], with ties."""
    a, b = ((3 * drawn(L, B, HKV, N, seed=s)).round() for s in (1, 2))
    protected = torch.zeros(L, B, HKV, N, dtype=torch.bool)
    protected[..., [0, 10, 11]] = True
    return a, a + b, protected


def test_overlap_in_python(scores):
    a, b, protected = scores
    keep = 7
    every, free = ranking.overlap(a, b, keep, protected)
    for site in np.ndindex(L, B, HKV):
        held = {p for p in range(N) if protected[site][p]}
        mine, other = (held | set(sorted(set(range(N)) - held, key=lambda p: (-float(s[site][p]), -p))[: keep - len(held)]) for s in (a, b))
        assert float(every[site]) == pytest.approx(len(mine & other) / keep) and float(free[site]) == pytest.approx(len((mine & other) - held) / (keep - len(held)))
    assert 0 < free.mean() < every.mean() < 1
    assert all(torch.equal(x, y) for x, y in zip(ranking.overlap(b, a, keep, protected), (every, free)))
    assert all(bool((x == 1).all()) for x in ranking.overlap(a, a, keep, protected) + ranking.overlap(a, b, N, protected))


def test_overlap_behind_padding_is_that_of_the_row_alone(scores):
    a, b, _ = scores
    real, held = torch.arange(N) >= 3, torch.arange(N) == N - 1
    for padded, alone in zip(ranking.overlap(a.masked_fill(~real, 1e9), b.masked_fill(~real, torch.nan), 5, held, real), ranking.overlap(a[..., 3:], b[..., 3:], 5, held[3:])):
        assert torch.equal(padded, alone)


def test_spearman_is_scipys_over_the_candidates(scores):
    a, b, protected = scores
    real = (torch.arange(N) >= torch.tensor([[0], [2]]))[None, :, None]  # [1 b 1 n]: the second row begins with padding
    hidden = torch.where(protected, 1e9 * drawn(L, B, HKV, N, seed=9), a).masked_fill(~real, torch.nan)  # of what is no candidate nothing is read
    rho = ranking.spearman(hidden, b, protected, real)
    for site in np.ndindex(L, B, HKV):
        own = [p for p in range(2 * site[1], N) if not protected[site][p]]
        assert float(rho[site]) == pytest.approx(scipy.stats.spearmanr(a[site][own], b[site][own]).statistic, abs=1e-12)
        ranks = ranking.average_ranks(a[site], ~protected[site])
        assert ranks[~protected[site]].tolist() == (scipy.stats.rankdata(a[site][~protected[site]]) - 1).tolist() and bool(ranks[protected[site]].isnan().all())
    assert len({round(float(x), 6) for x in rho.flatten()}) > 4
    assert ranking.layerwise(rho).tolist() == [pytest.approx([np.mean(rho[i, b].numpy()) for b in range(B)]) for i in range(L)]
    assert ranking.overall(rho).tolist() == pytest.approx([np.mean(rho[:, b].numpy()) for b in range(B)])


def test_spearman_identities(scores):
    a, b, protected = scores
    one = torch.ones(L, B, HKV, dtype=torch.float64)
    assert torch.allclose(ranking.spearman(a, a, protected), one, atol=1e-14) and torch.allclose(ranking.spearman(a, -a, protected), -one, atol=1e-14)
    assert torch.allclose(ranking.spearman(a, b), ranking.spearman(b, a)) and torch.allclose(ranking.spearman(a.exp(), b), ranking.spearman(a, b))
    assert torch.allclose(ranking.spearman(a.float(), b.float(), protected), ranking.spearman(a, b, protected))
    constant = torch.where(torch.arange(B)[:, None, None] == 0, 2.5, a)
    rho = ranking.spearman(constant, b)
    assert bool(rho[:, 0].isnan().all()) and not bool(rho[:, 1].isnan().any()) and torch.isnan(ranking.overall(rho)[0])
    assert torch.isnan(ranking.spearman(a[..., :1], b[..., :1])).all()


def test_one_ranking_over_sites(scores):
    a, b, protected = scores
    for over, where in (("layer", lambda x, b: x[1, b]), ("model", lambda x, b: x[:, b])):
        rho = ranking.spearman(*(ranking.pooled(x, over) for x in (a, b, protected)))
        for row in range(B):
            own = ~where(protected, row).flatten()
            want = scipy.stats.spearmanr(where(a, row).flatten()[own], where(b, row).flatten()[own]).statistic
            assert float(rho[1, row] if over == "layer" else rho[row]) == pytest.approx(want, abs=1e-12)


def test_ranking_refusals(scores):
    a, b, protected = scores
    nan = a.clone()
    nan[0, 0, 0, 5] = torch.nan
    for call, message in ((lambda: ranking.overlap(a, b, 2, protected), "cannot hold 3"), (lambda: ranking.spearman(nan, b), "not finite"), (lambda: ranking.overlap(nan, b, 7), "not finite"),
                          (lambda: ranking.spearman(a, b[..., 1:]), "different entries"), (lambda: ranking.pooled(a, "head"), "known: site")):
        with pytest.raises(ValueError, match=message):
            call()


# -- classes of tokens -----------------------------------------------------------------------------------------------------

TASK = SimpleNamespace(ids=np.array([1, 50, 9, 7, 30, 8, 7, 40, 41, 1, 7, 3, 60, 61]), answer_ids=np.array([7, 60, 41]), scored=np.array([True, True, False]),
                       spans={"evidence": ((5, 8),), "answer": ((6, 7),)})


def test_classes_by_hand():
    made = composition.classes(TASK, structural=[(0, 2), (9, 10)], window=3)
    at = {name: mask.nonzero().flatten().tolist() for name, mask in made.items()}
    assert at == {"sink": [0], "recent": [11, 12, 13], "structural": [1, 9], "evidence": [5, 6, 7], "answer": [3, 10], "other": [2, 4, 8]}  # 41 is no token that counts
    assert list(made) == list(composition.CLASSES)
    short = composition.classes(TASK, n=6, window=2, sink=0)
    assert {name: mask.nonzero().flatten().tolist() for name, mask in short.items()} == {"sink": [], "recent": [4, 5], "structural": [], "evidence": [], "answer": [3], "other": [0, 1, 2]}
    assert composition.matches(TASK).nonzero().flatten().tolist() == [3, 6, 10, 12] and composition.matches(TASK, 6).nonzero().flatten().tolist() == [3]
    for n in (0, 15):
        with pytest.raises(ValueError, match="1..14"):
            composition.classes(TASK, n=n)


@pytest.mark.parametrize("kind", ["needles", "variables", "passages"])
def test_classes_of_real_prompts_fill_them(kind):
    """Whole prompts and those that end before the question: each token in one class, the evidence its own unless it is recent."""
    from kvprobe import models, tasks

    task = tasks.build(models.load("tiny").tokenizer, kind, [3], length=900)[0]
    for n in (len(task.ids), task.cut):
        made = composition.classes(task, n, window=8)
        assert bool((torch.stack(list(made.values())).sum(0) == 1).all()) and made["recent"].sum() == 8
        said = {p for a, z in task.spans["evidence"] for p in range(a, z)} - set(range(n - 8, n))
        assert set(made["evidence"].nonzero().flatten().tolist()) == said and said
        ids = set(task.answer_ids[task.scored].tolist())
        assert {int(task.ids[p]) for p in made["answer"].nonzero().flatten()} <= ids and not ids & {int(task.ids[p]) for p in made["other"].nonzero().flatten()}


def test_composition_in_python_and_its_identity():
    made = composition.classes(TASK, structural=[(9, 10)], window=3) | {"none": torch.zeros(14, dtype=torch.bool)}
    kept = drawn(L, HKV, 14, seed=4) > 0.3
    kept[0, 0] = True
    kept[1, 1] = False
    found = composition.composition(kept, made)
    for site in np.ndindex(L, HKV):
        mine = {p for p in range(14) if kept[site][p]}
        for name in composition.CLASSES:
            own = {p for p in range(14) if made[name][p]}
            assert float(found[name].fraction[site]) == pytest.approx(len(mine & own) / len(own))
            if mine:
                assert float(found[name].enrichment[site]) == pytest.approx((len(mine & own) / len(mine)) / (len(own) / 14))
        average = sum(float(made[name].sum()) / 14 * found[name].enrichment[site] for name in composition.CLASSES)
        assert math.isnan(average) if not mine else float(average) == pytest.approx(1)
    assert all(float(found[name].fraction[0, 0]) == float(found[name].enrichment[0, 0]) == 1 for name in composition.CLASSES)
    assert bool(found["none"].fraction.isnan().all()) and bool(found["none"].enrichment.isnan().all())
    with pytest.raises(ValueError, match="the kept sets are of 13"):
        composition.composition(kept[..., 1:], made)


# -- layers and heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["magnitude", "squared"])
def test_energy_is_the_sum_of_leaving_each_entry_out(form):
    """Each entry left out by a new softmax over the others, and the change put through W_O; per query head."""
    q, k, v, w_o = drawn(B, HQ, T, D), drawn(B, HKV, N, D, seed=1), drawn(B, HKV, N, D, seed=2), drawn(HQ, D, 7, seed=3)
    visible, weight = torch.ones(1, 1, T, N, dtype=torch.bool), torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    visible[..., 0, 9:] = False
    got = layer_maps.energy(q, k, v, 0.4, deletion.gram(w_o), visible, weight, deletion.Cost(form=form, eps=0.0))

    def out(b, h, t, seen):
        z = k[b, h // 2][seen] @ q[b, h, t] * 0.4
        return z.softmax(0) @ v[b, h // 2][seen] @ w_o[h]

    for b, h in itertools.product(range(B), range(HQ)):
        want = 0.0
        for t in range(T):
            seen = visible[0, 0, t].nonzero().flatten().tolist()
            moved = [float((out(b, h, t, [j for j in seen if j != i]) - out(b, h, t, seen)).norm()) for i in seen]
            want += float(weight[b, t]) * sum(x if form == "magnitude" else x**2 for x in moved)
        assert float(got[b, h]) == pytest.approx(want, rel=1e-9)
    folded = deletion.weighted(q, k, v, 0.4, deletion.gram(w_o), visible, weight, deletion.Cost(form=form, eps=0.0)).sum(-1)
    assert torch.allclose(got.unflatten(1, (HKV, -1)).mean(-1), folded)  # the group's mean is what policies score by


def test_shares_sum_to_one():
    energy = drawn(L, B, HQ).abs()
    found = layer_maps.shares(energy)
    assert torch.allclose(found.sum((0, 2)), torch.ones(B, dtype=torch.float64)) and float(found[1, 0, 2]) == pytest.approx(float(energy[1, 0, 2] / energy[:, 0].sum()))


def test_recall_difference_in_python():
    sets = [(drawn(L, B, HKV, N, seed=s) + 9 * (torch.arange(N) == 0)).topk(5, -1).indices for s in (1, 2, 3)]
    kept, control, best = (torch.zeros(L, B, HKV, N, dtype=torch.bool).scatter_(-1, s, True) for s in sets)
    held = (torch.arange(N) == 0).expand(L, B, HKV, N)
    every, free = layer_maps.recall_difference(kept, control, best, held)
    for site in np.ndindex(L, B, HKV):
        mine, other, want = (set(s[site].tolist()) for s in sets)
        assert float(every[site]) == pytest.approx((len(mine & want) - len(other & want)) / 5) and float(free[site]) == pytest.approx((len(mine & want) - len(other & want)) / 4)
    assert bool((layer_maps.recall_difference(kept, kept, best)[0] == 0).all()) and bool(layer_maps.recall_difference(kept, control, held, held)[1].isnan().all())
    assert every.abs().max() > 0


# -- budgets ---------------------------------------------------------------------------------------------------------------

BUDGETS = np.geomspace(32, 512, 12)


def test_a_power_law_is_met_exactly():
    """Curves linear in log B are what the interpolation draws: the factor between two of them is known."""
    method, baseline = (0.5 + 0.1 * np.log(BUDGETS / c) for c in (32, 40))
    match = equivalence.equivalence(BUDGETS, method, baseline)
    want = BUDGETS * 40 / 32
    inside = want <= BUDGETS[-1]
    assert match.needed[inside] == pytest.approx(want[inside]) and match.saving[inside] == pytest.approx(0.2) and not match.bound[inside].any()
    assert (match.bound[~inside] == 1).all() and (match.needed[~inside] == 512).all() and match.saving[~inside] == pytest.approx(1 - BUDGETS[~inside] / 512) and (~inside).any()
    back = equivalence.equivalence(BUDGETS, baseline, method)
    assert back.bound[0] == -1 and back.needed[0] == 32 and back.saving[0] == 0 and back.saving[2:] == pytest.approx(-0.25) and not back.bound[2:].any()


def test_the_papers_saving():
    """Table 16: a baseline that needs 208 entries for 128 saves 38.5 %."""
    budgets = np.array([64.0, 128, 208, 512])
    match = equivalence.equivalence(budgets, np.array([0.5, 0.7, 0.8, 0.9]), np.array([0.4, 0.5, 0.7, 0.8]))
    assert match.needed[1] == pytest.approx(208) and match.saving[1] == pytest.approx(0.3846, abs=5e-5)


def test_needed_by_a_fine_search():
    """The first budget of a fine grid at which numpy's own interpolation over log B is there, on curves that rise and fall."""
    curves, targets = np.random.default_rng(0).normal(size=(20, 12)), 2 * np.random.default_rng(1).normal(size=20)
    fine = np.geomspace(32, 512, 40001)
    found, bound = equivalence.needed(BUDGETS, curves, targets)
    for curve, target, got, side in zip(curves, targets, found, bound):
        there = np.flatnonzero(np.interp(np.log(fine), np.log(BUDGETS), curve) >= target)
        assert side == (1 if not len(there) else -1 if there[0] == 0 else 0)
        assert got == (pytest.approx(fine[there[0]], rel=2e-4) if len(there) else 512)
    assert set(bound) == {-1, 0, 1}
    falls = equivalence.needed(BUDGETS, -curves, -targets, higher=False)
    assert np.array_equal(falls[0], found) and np.array_equal(falls[1], bound)


def test_a_method_matches_itself_and_curves_stand_apart():
    rising = np.sort(np.random.default_rng(2).normal(size=(5, 12)), axis=-1)
    match = equivalence.equivalence(BUDGETS, rising, rising)
    assert match.needed == pytest.approx(np.broadcast_to(BUDGETS, (5, 12))) and np.abs(match.saving).max() < 1e-12 and not match.bound.any()
    two = equivalence.equivalence(BUDGETS, rising[:2], rising[2:4])
    for i in range(2):
        one = equivalence.equivalence(BUDGETS, rising[i], rising[2 + i])
        assert np.array_equal(two.needed[i], one.needed) and np.array_equal(two.bound[i], one.bound)


def test_equivalence_refusals():
    for budgets, curve, message in (([128, 64], [1, 2], "must rise"), ([0, 64], [1, 2], "must rise"), ([64, 128], [1, 2, 3], "one value per budget"), ([64, 128], [1, np.nan], "finite")):
        with pytest.raises(ValueError, match=message):
            equivalence.equivalence(budgets, np.array(curve, dtype=float), np.array(curve, dtype=float))


# -- next-token distributions ----------------------------------------------------------------------------------------------


def test_kl_is_scipys():
    full, other = 3 * drawn(B, T, 40), 3 * drawn(B, T, 40, seed=1)
    got = divergence.kl_by_token(full, other)
    want = scipy.special.rel_entr(*(scipy.special.softmax(x.numpy(), -1) for x in (full, other))).sum(-1)
    assert np.allclose(got.numpy(), want, rtol=1e-12)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    assert divergence.mean_kl(full, other, valid).tolist() == pytest.approx([want[0].mean(), want[1, 0]])
    assert torch.allclose(divergence.kl_by_token(full + 100, other - 50), got) and torch.allclose(divergence.kl_by_token(full.float(), other.float()), got, rtol=1e-5)
    assert bool((got > 0).all()) and not torch.allclose(got, divergence.kl_by_token(other, full))


def test_kl_of_equal_and_of_nearly_equal_distributions():
    """0 exactly, and where the plain sum is rounding only, the second-order form sum p dx^2 / 2 of logits that moved by dx (centred)."""
    full, move = 5 * drawn(4, 1, 50), 1e-8 * drawn(4, 1, 50, seed=1)
    assert bool((divergence.kl_by_token(full, full) == 0).all())
    p = full.softmax(-1)
    moved = (full + move) - full  # what float64 holds of it
    want = (p * (moved - (p * moved).sum(-1, keepdim=True)).square()).sum(-1) / 2
    assert torch.allclose(divergence.kl_by_token(full, full + move), want, rtol=1e-4, atol=0)


def test_kl_of_extreme_logits():
    full = torch.tensor([[0.0, -1000.0, 800.0, -torch.inf]])
    other = torch.tensor([[800.0, 0.0, -800.0, -torch.inf]])
    assert float(divergence.kl_by_token(full, other)) == pytest.approx(1600.0) and float(divergence.kl_by_token(full, full)) == 0
    barely = torch.tensor([[0.0, -720.0]])  # e^-720 is above 0, e^720 is no number
    assert float(divergence.kl_by_token(barely, barely.flip(-1))) == pytest.approx(720.0)
    masked = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]])
    plain = torch.tensor([[0.0, 0.0, 1.0, 2.0]])
    assert float(divergence.kl_by_token(masked, plain)) == pytest.approx(math.log(plain.exp().sum() / masked.exp().sum())) and float(divergence.kl_by_token(plain, masked)) == math.inf
    for bad in (torch.tensor([[torch.nan, 0.0, 0, 0]]), torch.full((1, 4), -torch.inf), torch.tensor([[torch.inf, 0.0, 0, 0]])):
        with pytest.raises(ValueError, match="no distribution"):
            divergence.kl_by_token(plain, bad)
    with pytest.raises(ValueError, match="different tokens"):
        divergence.kl_by_token(plain, plain[:, 1:])
