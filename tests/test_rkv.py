"""R-KV in four forms, each against a slow plain version with the whole candidates x candidates similarity."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import kvprobe
import stub
from kvprobe import scores
from kvprobe.registry import make_policy
from oracle import Reference
from sidebyside import feed, walk
from test_policies import BUFFER, KEEP, average, heavy, largest, reference_for, softmax, voted

FORMS = ["rkv", "rkv_accumulated", "rkv_released", "rkv_engine"]


# -- the plain versions ---------------------------------------------------------------------------------------------


def similarity(keys: np.ndarray) -> np.ndarray:
    """Every cosine [c c], the whole matrix."""
    unit = [k / (np.sqrt(sum(x * x for x in k)) + 1e-8) for k in np.asarray(keys, np.float64)]
    return np.array([[float(np.dot(a, b)) for b in unit] for a in unit])


def spared(keys: np.ndarray, threshold: float) -> tuple[np.ndarray, list[int]]:
    """Column means after each row has zeroed its last similar column (or column 0), and which column that was (-1: none)."""
    c = similarity(keys)
    np.fill_diagonal(c, 0.0)
    last = [max((j for j in range(len(c)) if j != i and c[i, j] > threshold), default=-1) for i in range(len(c))]
    for i, j in enumerate(last):
        c[i, max(j, 0)] = 0.0
    return np.array([sum(c[i, j] for i in range(len(c))) / len(c) for j in range(len(c))]), last


def others(keys: np.ndarray) -> np.ndarray:
    c = similarity(keys)
    return np.array([sum(c[i, j] for i in range(len(c)) if i != j) / len(c) for j in range(len(c))])


def logits_of_the_group(reference, layer, row, head, candidates, window):
    """[w c]: the largest raw logit of the group's query heads, -inf where a query comes before the candidate."""
    keys, queries = reference.keys_at(layer, row, head, candidates), reference.newest_queries(layer, row, window)
    first, size = len(reference.column[row]) - len(queries), queries.shape[1] // reference.heads
    raw = [[max(float(k @ q[h]) * reference.scaling for h in range(head * size, (head + 1) * size)) for k in keys] for q in queries]
    return np.array([[-np.inf if p > first + w else x for p, x in zip(candidates, line)] for w, line in enumerate(raw)])


def paper(lam=0.5, s=voted(BUFFER, 5)):
    def rule(reference, layer, row, head, number, candidates):
        attention = s(reference, layer, row, head, number, candidates)
        mean = similarity(reference.keys_at(layer, row, head, candidates)).mean(0)
        return {p: lam * attention[p] + (1 - lam) * (1 - mean[i]) for i, p in enumerate(candidates)}

    return rule


def engine(lam=0.5, s=voted(BUFFER, 5)):
    def rule(reference, layer, row, head, number, candidates):
        attention = s(reference, layer, row, head, number, candidates)
        redundancy = softmax(others(reference.keys_at(layer, row, head, candidates)))
        return {p: lam * attention[p] - (1 - lam) * redundancy[i] for i, p in enumerate(candidates)}

    return rule


def released(lam=0.1, window=8, kernel=7, threshold=0.5, seen=None):
    def rule(reference, layer, row, head, number, candidates):
        votes = [softmax(line) for line in logits_of_the_group(reference, layer, row, head, candidates, window)]
        importance = largest(np.mean(votes, axis=0), kernel)
        mean, last = spared(reference.keys_at(layer, row, head, candidates), threshold)
        if seen is not None:
            seen.extend(last)
        return dict(zip(candidates, lam * importance - (1 - lam) * softmax(mean)))

    return rule


VARIANTS = {
    "paper": ("rkv", dict(), paper()),
    "paper, lam .1, sum, window 2, kernel 3": ("rkv", dict(lam=0.1, importance="sum", window=2, kernel=3), paper(0.1, voted(2, 3, reduce=np.sum))),
    "accumulated": ("rkv_accumulated", dict(), paper(s=heavy)),
    "accumulated, lam .9": ("rkv_accumulated", dict(lam=0.9), paper(0.9, heavy)),
    "released": ("rkv_released", dict(), released()),
    "released, window 3, kernel 1, threshold .9": ("rkv_released", dict(lam=0.5, window=3, kernel=1, threshold=0.9), released(0.5, 3, 1, 0.9)),
    "engine": ("rkv_engine", dict(), engine()),
    "engine, lam .02, window 3, kernel 1": ("rkv_engine", dict(lam=0.02, window=3, kernel=1), engine(0.02, voted(3, 1))),
}


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_through_rounds(llama, ids, variant, longest):
    """Two query heads per KV head: the largest logit of a group and the mean over it are different things."""
    name, options, rule = VARIANTS[variant]
    cache = kvprobe.cache(llama[0], policy=name, keep=KEEP, buffer=BUFFER, **options)
    assert walk(llama[0], cache, reference_for(llama, rule), ids[:2, :40], prefill=3, longest=longest) == 2 * 6


@pytest.mark.parametrize("variant", ["paper", "accumulated", "released", "engine"])
def test_padded_rows(llama, ids, variant):
    """D02: redundancy is each row's own, and padding is nobody's neighbour."""
    name, options, rule = VARIANTS[variant]
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, :3], mask[2, :8] = False, False
    cache = kvprobe.cache(llama[0], policy=name, keep=KEEP, buffer=BUFFER, **options)
    assert walk(llama[0], cache, reference_for(llama, rule), ids[:, :40], prefill=22, longest=2, mask=mask) > 12


@pytest.mark.parametrize("name, rule", [("rkv", paper(s=voted(6, 5))), ("rkv_released", released(window=6)), ("rkv_engine", engine(s=voted(6, 5)))])
def test_at_prompt_end(llama, ids, name, rule):
    cache = kvprobe.cache(llama[0], policy=name, keep=14, schedule="prompt_end", window=6)
    reference = Reference(llama[1], (0, 1), 2, 14, 0, rule, rounds=False)
    assert walk(llama[0], cache, reference, ids[:, :40], prefill=33, longest=3) == 3


def test_the_text_has_entries_with_and_without_a_like(llama, ids):
    """Both branches of the released form decide something above."""
    seen = []
    cache = kvprobe.cache(llama[0], policy="rkv_released", keep=KEEP, buffer=BUFFER)
    walk(llama[0], cache, reference_for(llama, released(seen=seen)), ids[:1, :26], prefill=18, longest=64)
    assert 0 < sum(j < 0 for j in seen) < len(seen) and len(set(seen)) > 5


# -- reference numbers ----------------------------------------------------------------------------------------------

TOY = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)


def shown(keys: torch.Tensor, **rest):
    """One row and head with these keys [c d], and one query that attends to all alike."""
    return stub.view(keys[None, None], queries=torch.zeros(1, 1, 1, keys.shape[1], dtype=keys.dtype), **rest)


def test_the_released_reference_numbers():
    """methods R8: the newest restatement is spared."""
    mean, last = spared(TOY.numpy(), 0.5)
    assert last == [3, 3, 3, 2] and mean == pytest.approx([0.426777, 0.426777, 0, 0], abs=6e-7)
    assert scores.spared_cosine(shown(TOY), 0.5).flatten().tolist() == pytest.approx([0.426777, 0.426777, 0, 0], abs=6e-7)
    score = make_policy("rkv_released", dict(lam=0.0)).score(shown(TOY)).flatten()
    assert (-score).tolist() == pytest.approx([0.302552, 0.302552, 0.197448, 0.197448], abs=6e-7)


def test_the_engine_reference_numbers():
    """methods R8: nothing is spared, and the newest restatement is penalised most."""
    want = [0.426777, 0.426777, 0.176777, 0.530330]
    assert others(TOY.numpy()) == pytest.approx(want, abs=6e-7)
    assert scores.mean_cosine(shown(TOY), itself=False).flatten().tolist() == pytest.approx(want, abs=6e-7)
    score = make_policy("rkv_engine", dict(lam=0.0)).score(shown(TOY)).flatten()
    assert (-score).tolist() == pytest.approx([0.257208, 0.257208, 0.200314, 0.285271], abs=6e-7)


def test_an_asymmetric_similarity_by_hand():
    """B14: cosines .8, 0, .6; the rows spare columns 1, 2 and 1, and what is left stands at (1, 0) alone: the mean over
    columns would blame entry 1, the mean over rows blames entry 0."""
    keys = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float64)
    assert scores.spared_cosine(shown(keys), 0.5).flatten().tolist() == pytest.approx([0.8 / 3, 0, 0], abs=1e-7)
    score = make_policy("rkv_released", dict(lam=0.0)).score(shown(keys)).flatten()
    assert (-score).tolist() == pytest.approx(softmax(np.array([0.8 / 3, 0, 0])), abs=1e-7)


def random_view(b=2, h=3, c=50, d=4, seed=0, dtype=torch.float64, **rest):
    """Keys in clusters, rows padded on the left by 0, 7, 14, ..."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(b, h, c, d, generator=g, dtype=torch.float64)
    keys[:, :, ::3] = keys[:, :, :1] + 0.3 * torch.randn(b, h, len(range(0, c, 3)), d, generator=g, dtype=torch.float64)
    positions = torch.arange(c) - 7 * torch.arange(b)[:, None, None].expand(b, h, 1)
    queries = torch.randn(b, 2 * h, 4, d, generator=g, dtype=torch.float64)
    now = c - 7 * torch.arange(b) + 4
    return stub.view(keys.to(dtype), positions=positions.clamp(min=-1), queries=queries.to(dtype), now=now, **rest)


def test_redundancy_of_the_paper_ranks_as_keydiff():
    """Up to a scale per head: -c / |mean unit key| against 1 - c."""
    view = random_view()
    mine, theirs = make_policy("rkv", dict(lam=0.0)).score(view), make_policy("keydiff").score(view)
    for b in range(2):
        for h in range(3):
            real = view.real[b, h]
            a, k = (mine[b, h][real] - 1), theirs[b, h][real]
            assert a.argsort().tolist() == k.argsort().tolist()
            ratio = a / k
            assert float(ratio.std() / ratio.mean().abs()) < 1e-6 and float(ratio.mean()) > 0


def test_importance_and_redundancy_sum_to_one():
    """methods R15: per head the importance before pooling, and the redundancy over all; less without the newest w."""
    view = random_view()
    importance = make_policy("rkv_released", dict(lam=1.0, kernel=1, window=4)).score(view)
    pooled = make_policy("rkv_released", dict(lam=1.0, window=4)).score(view)
    assert torch.allclose(importance.sum(-1), torch.ones(2, 3, dtype=torch.float64)) and bool((pooled[:, :, 20:].sum(-1) > 1).all())
    for name in ("rkv_released", "rkv_engine"):
        redundancy = -make_policy(name, dict(lam=0.0, window=4)).score(view)
        assert torch.allclose(redundancy.sum(-1), torch.ones(2, 3, dtype=torch.float64)) and bool((redundancy[..., :-4].sum(-1) < 1).all())
        assert (redundancy[~view.real] == 0).all()


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", [*((name, {}) for name in FORMS), ("rkv_released", dict(threshold=-0.4))])
def test_rows_score_as_single_runs(llama, ids, name, options):
    """D02: two prompts in a batch, then padded; whatever stands in the padding."""
    model, pads, noted = llama[0], [0, 3, 9], {}
    policy = make_policy(name, options)

    class Noting:
        needs = policy.needs

        def score(self, view):
            noted[view.layer] = (policy.score(view), view.real)
            return noted[view.layer][0]

    def scored(text, mask=None):
        noted.clear()
        feed(model, kvprobe.cache(model, policy=Noting(), keep=KEEP, buffer=BUFFER), text, mask)
        return dict(noted)

    mask = torch.ones(3, 30, dtype=torch.long)
    for b, n in enumerate(pads):
        mask[b, :n] = 0
    plain, padded, filled = scored(ids[:, :30]), scored(ids[:, :30], mask), scored(torch.where(mask.bool(), ids[:, :30], 55), mask)
    for b, pad in enumerate(pads):
        alone, short = scored(ids[b : b + 1, :30]), scored(ids[b : b + 1, pad:30])
        for layer in (0, 1):
            assert torch.allclose(plain[layer][0][b], alone[layer][0][0], atol=1e-12)
            score, real = padded[layer]
            assert torch.allclose(score[b][real[b]], short[layer][0].flatten(), atol=1e-12)
            assert torch.equal(score[real], filled[layer][0][real])


# -- tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 2, 7, 50, 4096])
@pytest.mark.parametrize("threshold", [-0.5, 0.5, 0.95, 1.0])
def test_tiles_are_the_whole_matrix(monkeypatch, tile, threshold):
    """G05, and padded heads; at threshold 1 nothing is alike, and the first entry is spared."""
    monkeypatch.setattr(scores, "TILE", tile)
    view = random_view()
    got = scores.spared_cosine(view, threshold)
    for b in range(2):
        for h in range(3):
            real = view.real[b, h]
            want, _ = spared(view.keys[b, h][real].numpy(), threshold)
            assert got[b, h][real].tolist() == pytest.approx(want, abs=1e-12)


def test_many_tiles_are_the_whole_matrix():
    """G05: 4,096 entries in tiles as they are, in float32, against the matrix a block of rows at a time; most have a like, some, none."""
    n = 4096
    keys = torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(0))
    unit = (keys[0, 0] / keys[0, 0].norm(dim=-1, keepdim=True)).double()
    for threshold in (0.5, 0.8, 0.999):
        want, alone = torch.zeros(n, dtype=torch.float64), 0
        for i in range(0, n, 512):
            c, rows = unit[i : i + 512] @ unit.T, torch.arange(512)
            c[rows, i + rows] = 0
            alike = c > threshold
            alone += int((~alike.any(1)).sum())
            last = torch.where(alike.any(1), n - 1 - alike.flip(1).to(torch.uint8).argmax(1), 0)
            c[rows, last] = 0
            want += c.sum(0) / n
        assert float((scores.spared_cosine(stub.view(keys), threshold)[0, 0] - want).abs().max()) < 1e-6
        assert alone == 0 if threshold == 0.5 else alone > n // 2


LONG = """
import torch
from kvprobe.policies import rkv, rkv_engine, rkv_released
from kvprobe.types import CacheView

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

def view(n):
    p, now = torch.arange(n).expand(1, 1, n), torch.tensor([n])
    keys = torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(0))
    return CacheView(0, p, keys, keys, now, now * 0, 1, 0, 1.0, torch.randn(1, 1, 8, 16), torch.arange(n - 8, n)[None], {}, None, None)

torch.set_num_threads(1)
every = [rkv.POLICY(), rkv_engine.POLICY(), rkv_released.POLICY(), rkv_released.POLICY(threshold=0.999)]
small, large = view(64), view(16384)
[policy.score(small) for policy in every]
before = peak()
[policy.score(large) for policy in every]
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_at_16k():
    """G05: n x n would be 1.07 GB. A process of its own: what ru_maxrss says of a child includes its parent's peak."""
    run = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 250e6


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options, says", [
    ("rkv", dict(lam=1.5), "lam=1.5"), ("rkv_accumulated", dict(lam=-0.1), "lam=-0.1"), ("rkv_engine", dict(kernel=4), "kernel=4"),
    ("rkv_released", dict(window=0), "window=0"), ("rkv_released", dict(threshold=1.5), "threshold=1.5"), ("rkv", dict(importance="max"), "'mean' or 'sum'")])
def test_options_that_cannot_be_are_refused(llama, name, options, says):
    with pytest.raises(ValueError, match=says):
        kvprobe.cache(llama[0], policy=name, keep=8, **options)


@pytest.mark.parametrize("name", FORMS)
def test_with_nothing_but_a_budget_and_with_nothing(llama, ids, name):
    """B13, and B04: a text shorter than the window passes through."""
    with pytest.raises(ValueError, match="give keep"):
        kvprobe.cache(llama[0], policy=name)
    cache = kvprobe.cache(llama[0], policy=name, keep=32)
    with torch.no_grad():
        assert torch.equal(feed(llama[0], cache, ids[:, :17]), llama[1](ids[:, :17]).logits)
    assert cache.physical == 17


def test_the_parts_by_hand():
    """Averaging over neighbours counts the zeros beyond the edges, and the largest of seven needs none."""
    assert average(np.array([5.0, 0, 0]), 3).tolist() == pytest.approx([5 / 3, 5 / 3, 0]) and largest(np.array([1.0, 3, 2]), 3).tolist() == [3, 3, 3]
