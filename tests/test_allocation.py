"""Budgets and picks against plain loops over Python numbers, and against the numbers of the releases."""

import itertools
import math

import pytest
import torch

from kvprobe import allocation

ROWS, HEADS, N = 2, 3, 17


def scores(seed=0, ties=False, rows=ROWS, heads=HEADS, n=N):
    """Scores [rows heads n], half of them equal if ties; which are candidates."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, heads, n, generator=generator, dtype=torch.float64)
    score = (score * 4).floor() / 4 if ties else score
    candidate = torch.rand(rows, heads, n, generator=generator) < 0.7
    return score, candidate


def best(values, count):
    """Indices of the best, the newest of equals first."""
    return set(sorted(values, key=lambda i: (-values[i], -i))[:count])


def sites(score, candidate):
    """(row, head, {index: score} of the candidates)"""
    for b, h in itertools.product(range(score.shape[0]), range(score.shape[1])):
        yield b, h, {i: score[b, h, i].item() for i in range(score.shape[2]) if candidate[b, h, i]}


def picked(keep):
    return set(keep.nonzero().flatten().tolist())


@pytest.mark.parametrize("ties", [False, True])
def test_top(ties):
    score, candidate = scores(1, ties)
    counts = torch.tensor([[0, 1, 5], [4, 17, 40]])
    every = torch.ones_like(candidate)
    for count, given in itertools.product((6, counts), (None, candidate)):
        keep = allocation.top(score, count, given)
        for b, h, values in sites(score, every if given is None else given):
            assert picked(keep[b, h]) == best(values, int(torch.as_tensor(count).expand(ROWS, HEADS)[b, h]))
    assert allocation.top(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), 2).tolist() == [False, False, True, True, False]
    low = torch.tensor([-torch.inf, -5.0, 3.0])
    assert allocation.top(low, 2, torch.tensor([True, True, False])).tolist() == [True, True, False], "what is no candidate comes behind -inf"


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_chunks(size, ties):
    """Whole chunks by their mean until the count, the last one cut; left padding moves no border."""
    score, candidate = scores(2, ties)
    pad = torch.tensor([0, 2])
    positions = torch.arange(N) - pad[:, None, None]
    candidate &= positions >= 0
    for count in (0, 1, 5, 9, 40):
        keep = allocation.chunks(score, count, size, candidate, positions)
        for b, h, values in sites(score, candidate):
            groups = {}
            for i in values:
                groups.setdefault((i - int(pad[b])) // size, []).append(i)
            order = sorted(groups, key=lambda c: (-sum(values[i] for i in groups[c]) / len(groups[c]), -c))
            want = []
            for c in order:
                want += sorted(groups[c], key=lambda i: (-values[i], -i))
            assert picked(keep[b, h]) == set(want[:count]), (count, b, h)
    if size == 1:
        assert torch.equal(allocation.chunks(score, 5, 1), allocation.top(score, 5))


def test_a_chunk_by_hand():
    """Means 4, 5 and 3 of chunks of three; one protected entry counts in none."""
    score, free = torch.tensor([4.0, 4.0, 4.0, 9.0, 1.0, 100.0, 0.0, 3.0, 6.0]), torch.ones(9, dtype=torch.bool)
    free[5] = False
    assert picked(allocation.chunks(score, 2, 3, free)) == {3, 4}
    assert picked(allocation.chunks(score, 3, 3, free)) == {2, 3, 4}
    assert picked(allocation.chunks(score, 6, 3, free)) == {0, 1, 2, 3, 4, 8}
    with pytest.raises(ValueError, match="size=0"):
        allocation.chunks(score, 3, 0)


@pytest.mark.parametrize("by_key, by_value", [(0.0, 0.0), (0.1, 0.1), (0.9, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("protected", [True, False])
def test_diverse(by_key, by_value, protected):
    """The greedy rule, one entry at a time."""
    score, candidate = scores(3, ties=True)
    generator = torch.Generator().manual_seed(4)
    keys, values = (torch.randn(ROWS, HEADS, N, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    start = ~candidate if protected else torch.zeros_like(candidate)
    counts = torch.tensor([[0, 1, 5], [4, 17, 3]])
    keep = allocation.diverse(7 * score, counts, keys, values, by_key, by_value, candidate, start)
    for b, h, own in sites(score, candidate):
        chosen, largest = picked(start[b, h]), max(own.values())

        def near(x, i):
            return max((float(torch.cosine_similarity(x[b, h, i], x[b, h, j], dim=0)) for j in chosen), default=0.0)

        want = set()
        while len(want) < min(int(counts[b, h]), len(own)):
            worth = {i: own[i] / largest - by_key * near(keys, i) - by_value * near(values, i) for i in own if i not in want}
            want.add(max(worth, key=lambda i: (round(worth[i], 12), i)))
            chosen = chosen | want
        assert picked(keep[b, h]) == want
    if not by_key and not by_value:
        assert torch.equal(keep, allocation.top(score, counts, candidate))


def joint(values, counts, more):
    """One by one, the highest score that no head keeps yet: its head gets a slot more."""
    counts = list(counts)
    for _ in range(more):
        nexts = []
        for h, own in enumerate(values):
            order = sorted(own, key=lambda i: (-own[i], -i))
            nexts += [(-own[order[counts[h]]], -order[counts[h]], h)] if counts[h] < len(order) else []
        if nexts:
            counts[min(nexts)[2]] += 1
    return counts


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("ties", [False, True])
def test_budgets_of_heads(tau, ties):
    """Eq. 11's floors, no head above what it has, and the missing slots to the highest unkept scores."""
    score, candidate = scores(5, ties)
    score[0, 1] *= 5
    for total in (0, 1, 7, 12, 25, 100):
        got = allocation.head_budgets(score, total, tau, candidate)
        for b in range(ROWS):
            own = [v for x, _, v in sites(score, candidate) if x == b]
            energy = [(sum(v.values()) + 1e-6) ** tau for v in own]
            counts = [min(len(v), math.floor(total * e / sum(energy) + 1e-9)) for e, v in zip(energy, own)]
            want = joint(own, counts, total - sum(counts))
            assert got[b].tolist() == want and sum(want) == min(total, sum(map(len, own)))


def test_budgets_of_heads_by_hand():
    score = torch.tensor([[9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert allocation.head_budgets(score, 4, 0.0).tolist() == [2, 2]
    assert allocation.head_budgets(score, 4, 1.0).tolist() == [3, 1]
    assert allocation.head_budgets(score, 8, 50.0).tolist() == [4, 4], "never above what a head has"
    assert allocation.head_budgets(score, 3, 0.0).tolist() == [2, 1], "the missing slot goes to the highest score left, of equals to the first head"
    assert allocation.head_budgets(-score, 4, 1.0).tolist() == [2, 2], "no mass at all"
    assert allocation.head_budgets(score * 1e30, 4, 40.0).tolist() == [4, 0]
    with pytest.raises(ValueError, match="tau=-1"):
        allocation.head_budgets(score, 3, -1)
    with pytest.raises(ValueError, match="total=3"):
        allocation.filled(torch.tensor([2, 2]), score, 3)


def with_counts(f, n=12):
    """Scores whose joint top has f_h entries in head h."""
    return torch.stack([torch.cat([torch.full((count,), 2.0), torch.zeros(n - count)]) + torch.rand(n, generator=torch.Generator().manual_seed(h)) / 2 for h, count in enumerate(f)])


R12 = [([6, 2], [5, 3], [6, 2]), ([8, 0], [6, 2], [6, 2]), ([7, 1], [6, 2], None), ([5, 5, 2], [4, 4, 3], None)]


@pytest.mark.parametrize("f, released, floor", R12, ids=str)
def test_adakv_reference_numbers(f, released, floor):
    """methods R12: base 4, alpha .5; the released total of the last is 11, not 12."""
    score = with_counts(f)
    assert allocation.flattened(score, sum(f)).tolist() == f
    assert allocation.adakv(score, 4, 0.5, "released").tolist() == released
    if floor:
        assert allocation.adakv(score, 4, 0.5, "floor").tolist() == floor
    exact = allocation.adakv(score, 4, 0.5)
    assert int(exact.sum()) == 4 * len(f) and int((exact - torch.tensor(released)).abs().max()) <= 1
    for form in ("interpolated", "floor", "released"):
        assert allocation.adakv(score, 4, 1.0, form).tolist() == [4] * len(f) and allocation.adakv(score, 4, 0.0, form).tolist() == f


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_adakv_by_loops(alpha, ties):
    score, candidate = scores(6, ties)
    for base in (1, 3, 5):
        for b in range(ROWS):
            own, total = [v for x, _, v in sites(score, candidate) if x == b], 3 * base
            f = joint(own, [0] * 3, total)
            assert allocation.flattened(score, total, candidate)[b].tolist() == f
            counts = [min(len(v), math.floor(x * (1 - alpha) + base * alpha + 1e-9)) for x, v in zip(f, own)]
            assert allocation.adakv(score, base, alpha, candidate=candidate)[b].tolist() == joint(own, counts, total - sum(counts))
            sure = [int(base * alpha)] * 3
            assert allocation.adakv(score, base, alpha, "floor", candidate)[b].tolist() == joint(own, sure, total - sum(sure))
            assert allocation.adakv(score, base, alpha, "released", candidate)[b].tolist() == [round(x * (1 - alpha) + int(base * alpha)) for x in f]


def test_flattened_as_defensivekv_shows_it():
    """methods R13."""
    assert allocation.flattened(torch.tensor([[3.0, 4.0, 5.0, 9999.0], [1.0, 1.0, 1.0, 9998.0]]), 4).tolist() == [3, 1]


R11 = [(128, 8, 4096, (234, 129, 17), 4016, True), (1024, 32, 8192, (1935, 1035, 75), 32160, True), (2048, 32, 3000, (2968, 2053, 1077), 64720, False)]


@pytest.mark.parametrize("budget, window, length, some, total, cases", R11, ids=str)
def test_pyramid_reference_numbers(budget, window, length, some, total, cases):
    """methods R11, 32 layers: the released steps drift, ours add up."""
    given = dict(layers=32, base=budget - window, candidates=length - window, window=window, cases=cases)
    got = allocation.pyramid(**given, released=True)
    assert (got[0], got[15], got[31]) == some and sum(got) == total
    exact = allocation.pyramid(**given)
    assert sum(exact) == 32 * (budget - window) and exact[0] == got[0]
    assert all(a >= b for a, b in itertools.pairwise(exact)) and len({a - b for a, b in itertools.pairwise(exact)}) <= 2


def test_pyramid_always_adds_up():
    for layers, base, extra, beta in itertools.product((1, 2, 7, 30), (0, 1, 19, 64), (1, 5, 63, 400), (1, 2, 20)):
        got = allocation.pyramid(layers, base, base + extra, beta, cases=False)
        assert sum(got) == layers * base and all(0 <= x <= base + extra for x in got) and got == sorted(got, reverse=True), (layers, base, extra, beta)
    assert allocation.pyramid(4, 100, 60) == [60] * 4, "everything stays"
    assert allocation.pyramid(4, 100, 180, window=8) == [100] * 4, "a prompt shorter than 2 base"
    assert len(set(allocation.pyramid(4, 100, 192, window=8))) == 4
    with pytest.raises(ValueError, match="layers=0"):
        allocation.pyramid(0, 1, 2)
    with pytest.raises(ValueError, match="alpha=2"):
        allocation.adakv(torch.rand(2, 5), 1, 2)
    with pytest.raises(ValueError, match="form='ceil'"):
        allocation.adakv(torch.rand(2, 5), 1, 0.5, "ceil")
