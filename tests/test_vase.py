"""VaSE: the large set, the law of the sample, and what a decision depends on."""

import math

import numpy as np
import pytest
import torch

import kvprobe
import oracle
import stub
from kvprobe import evict
from kvprobe.policies.vase import POLICY
from oracle import Reference
from sidebyside import feed, walk
from test_policies import BUFFER, KEEP, reference_for, voted


# -- the plain version ----------------------------------------------------------------------------------------------


def large_set(values: np.ndarray, positions: list[int], n_large: int, n_sink: int = 4) -> set[int]:
    """Positions of the entries of largest value range; sinks first, then by range, the newest first among equals."""
    key = {p: (p < n_sink, 0.0 if p < n_sink else max(v) - min(v), p) for p, v in zip(positions, values.tolist())}
    return set(sorted(positions, key=lambda p: key[p], reverse=True)[:n_large])


def sampled_after_large(seed, instances, keep=KEEP, buffer=BUFFER, n_large=None, window=BUFFER, kernel=5, n_sink=4):
    """log p + Gumbel of a draw per (seed, instance, layer, head, round, position), above all of it the large set."""
    vote = voted(window, kernel)

    def rule(reference, layer, row, head, number, candidates):
        values = reference.cache.layers[layer].values[row, head, [reference.column[row][p] for p in candidates]].numpy()
        large = large_set(values, candidates, (keep + buffer) // 4 if n_large is None else n_large, n_sink)
        p = vote(reference, layer, row, head, number, candidates)
        u = dict(zip(candidates, oracle.raw_draws(seed, instances[row], layer, head, number, candidates)))
        return {c: 1e9 if c in large else math.log(p[c]) - math.log(-math.log(u[c])) for c in candidates}

    return rule


VARIANTS = {
    "default": (dict(), {}),
    "n_large 0": (dict(n_large=0), dict(n_large=0)),
    "n_large 5, one sink, window 2, kernel 1": (dict(n_large=5, n_sink=1, window=2, kernel=1), dict(n_large=5, n_sink=1, window=2, kernel=1)),
    "all large": (dict(n_large=KEEP, n_sink=0), dict(n_large=KEEP, n_sink=0)),
}


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_through_rounds(llama, ids, variant, longest):
    options, plain = VARIANTS[variant]
    cache = kvprobe.cache(llama[0], policy="vase", keep=KEEP, buffer=BUFFER, instances=[4, 1], seed=6, **options)
    rule = sampled_after_large(6, [4, 1], **plain)
    assert walk(llama[0], cache, reference_for(llama, rule), ids[:2, :40], prefill=3, longest=longest) == 2 * 6


def test_padded_rows(llama, ids):
    """Sinks are the first positions of the text, wherever padding puts them."""
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, :3], mask[2, :8] = False, False
    cache = kvprobe.cache(llama[0], policy="vase", keep=KEEP, buffer=BUFFER)
    assert walk(llama[0], cache, reference_for(llama, sampled_after_large(0, [0, 1, 2])), ids[:, :40], prefill=22, longest=2, mask=mask) > 12
    assert all(set(range(1, 4)) <= set(held) for held in oracle.cache_sets(cache).values()), "three of the four sinks fit into the large set"


def test_at_prompt_end(llama, ids):
    """There is no buffer: a quarter of the budget is large."""
    cache = kvprobe.cache(llama[0], policy="vase", keep=14, schedule="prompt_end", window=6)
    reference = Reference(llama[1], (0, 1), 2, 14, 0, sampled_after_large(0, [0, 1, 2], keep=14, buffer=0, window=6), rounds=False)
    assert walk(llama[0], cache, reference, ids[:, :40], prefill=33, longest=3) == 3


# -- the large set --------------------------------------------------------------------------------------------------


def shown(values: torch.Tensor, **rest):
    """Values [b hkv c d] under keys that are all alike."""
    b, h, c, d = values.shape
    return stub.view(torch.zeros_like(values), values, queries=torch.zeros(b, h, 2, d, dtype=values.dtype), **rest)


@pytest.mark.parametrize("keep, buffer, n_large, count", [(20, 8, -1, 7), (20, 7, -1, 6), (6, 64, -1, 6), (20, 8, 3, 3), (20, 8, 0, 0), (20, 0, 20, 20)])
def test_the_large_set(keep, buffer, n_large, count):
    """Among a few different ranges, so that the cut falls among equals; a padded row; a quarter that exceeds the budget is the budget."""
    b, h, c = 3, 2, 40
    values = torch.randint(0, 4, (b, h, c, 3), generator=torch.Generator().manual_seed(1)).double()
    positions = (torch.arange(c) - torch.tensor([0, 3, 9])[:, None, None]).clamp(min=-1).expand(b, h, c)
    score = POLICY(n_large=n_large).score(shown(values, positions=positions, now=torch.tensor([42, 39, 33]), keep=keep, buffer=buffer))
    for row in range(b):
        for head in range(h):
            real = positions[row, head] >= 0
            held = positions[row, head][real].tolist()
            best = score[row, head][real].argsort(descending=True)[:count].tolist()
            assert {held[i] for i in best} == large_set(values[row, head][real].numpy(), held, count)
            assert int((score[row, head][real] > 1e4).sum()) == count, "the large set stands far above the sampled"
            assert best == sorted(best, key=lambda i: -float(score[row, head][real][i]))


def test_sinks_of_small_range_are_kept():
    """Methods 20: that is why the rule names them. Of more sinks than fit the newest stay."""
    values = torch.zeros(1, 1, 12, 2, dtype=torch.float64)
    values[0, 0, 4:, 0] = torch.arange(8.0, dtype=torch.float64) + 1
    for n_large, n_sink, want in ((6, 4, {0, 1, 2, 3, 10, 11}), (2, 4, {2, 3}), (3, 0, {9, 10, 11})):
        score = POLICY(n_large=n_large, n_sink=n_sink).score(shown(values, keep=8))[0, 0]
        assert set(score.topk(n_large).indices.tolist()) == want == large_set(values[0, 0].numpy(), list(range(12)), n_large, n_sink)
    later = shown(values, positions=torch.arange(20, 32).expand(1, 1, 12), keep=8)
    assert set(POLICY(n_large=2).score(later)[0, 0].topk(2).indices.tolist()) == {10, 11}, "the first slots are no sinks"


def test_the_counts_of_the_preset():
    """methods R15: 1,024 candidates, 960 kept, of them 256 for their range and 704 sampled."""
    keep, buffer, seen = 960, 64, {}

    class Noting:
        needs = POLICY().needs

        def score(self, view):
            seen[view.layer] = (view, POLICY().score(view))
            return seen[view.layer][1]

    g = torch.Generator().manual_seed(0)
    cache = stub.cache(keep, buffer, Noting(), group=2, d=3)
    query, key = torch.randn(1, 4, 1088, 3, generator=g, dtype=torch.float64), torch.randn(1, 2, 1088, 3, generator=g, dtype=torch.float64)
    stub.step(cache, 1088, query=query, key=key)
    view, score = seen[0]
    assert view.positions.shape[-1] == 1024 and cache.physical == 1024
    for head in (0, 1):
        large = large_set(key[0, head, :1024].numpy(), list(range(1024)), 256)
        kept = {p for p in stub.held(cache, head=head) if p < 1024}
        assert large <= kept and len(kept) == 960 and len(kept - large) == 704 and int((score[0, head] > 1e4).sum()) == 256
        assert set(range(4)) <= large


# -- the law of the sample ------------------------------------------------------------------------------------------


def attended(logits: list[float], trials: int, keep: int, **rest):
    """One query per row that attends as softmax(logits) over the candidates; a row per trial."""
    c = len(logits)
    keys = torch.eye(c, dtype=torch.float64).expand(trials, 1, c, c)
    queries = torch.tensor(logits, dtype=torch.float64).expand(trials, 1, 1, c)
    return stub.view(keys, rest.pop("values", torch.zeros_like(keys)), queries=queries, keep=keep, **rest)


def frequencies(view, policy, keep: int) -> dict[tuple[int, ...], float]:
    gone = evict.evicted(policy.score(view), view.keys.shape[2] - keep)
    sets, counts = (~gone)[:, 0].unique(dim=0, return_counts=True)
    return {tuple(s.nonzero().flatten().tolist()): float(n) / len(gone) for s, n in zip(sets, counts)}


def agrees(got: float, want: float, trials: int) -> bool:
    return abs(got - want) <= 4 * (want * (1 - want) / trials) ** 0.5


P = [math.log(0.5), math.log(0.3), math.log(0.2)]
R16 = {(0, 1): 0.514286, (0, 2): 0.325, (1, 2): 0.160714}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_law_of_sequential_sampling(seed):
    """methods R16, to 4 sigma over 20,000 independent instances."""
    trials = 20000
    policy = POLICY(n_large=0, n_sink=0, window=1, kernel=1)
    found = frequencies(attended(P, trials, 2, seed=seed), policy, 2)
    assert set(found) == set(R16) and all(agrees(found[s], want, trials) for s, want in R16.items()), found
    for i, want in enumerate((0.839286, 0.675, 0.485714)):
        assert agrees(sum(f for s, f in found.items() if i in s), want, trials)


def test_the_law_beside_a_large_entry():
    """p = 0 on the large set: what is left is sampled as if it were alone."""
    trials = 20000
    values = torch.zeros(trials, 1, 4, 4, dtype=torch.float64)
    values[:, :, 2, 0] = 1.0
    logits = [P[0], P[1], math.log(3.0), P[2]]  # the large entry has three quarters of the attention
    found = frequencies(attended(logits, trials, 3, values=values), POLICY(n_large=1, n_sink=0, window=1, kernel=1), 3)
    want = {(0, 1, 2): R16[0, 1], (0, 2, 3): R16[0, 2], (1, 2, 3): R16[1, 2]}
    assert set(found) == set(want) and all(agrees(found[s], f, trials) for s, f in want.items()), found


def test_entries_without_attention_come_last_and_uniformly():
    """Two have all of it, four none: exp underflows."""
    trials = 12000
    found = frequencies(attended([0.0, -2000.0, -2000.0, -1.0, -3000.0, -2000.0], trials, 4), POLICY(n_large=0, n_sink=0, window=1, kernel=1), 4)
    assert len(found) == 6 and all({0, 3} <= set(s) and agrees(f, 1 / 6, trials) for s, f in found.items()), found


def test_the_least_attention_comes_before_none():
    found = frequencies(attended([0.0, -707.0, -2000.0], 500, 2), POLICY(n_large=0, n_sink=0, window=1, kernel=1), 2)
    assert found == {(0, 1): 1.0}


def test_no_draw_lifts_a_sampled_entry_among_the_large():
    """The extremes of a draw, and of p."""
    view = attended([0.0, -700.0, -2000.0], 1, 2)
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        extreme = type(view)(**{**vars(view), "rand": lambda _u=u: torch.full((1, 1, 3), _u, dtype=torch.float64)})
        score = POLICY(n_large=0, n_sink=0, window=1, kernel=1).score(extreme)[0, 0]
        assert torch.isfinite(score).all() and score[0] > score[1] > score[2] and float(score.max()) < 1e4


# -- what a decision depends on -------------------------------------------------------------------------------------


def test_a_decision_is_a_function_of_its_site():
    """(seed, instance, layer, KV head, round, position) and what attention says: not the batch, nor a generator, nor the call."""
    logits, policy = [0.1 * i for i in range(9)], POLICY(n_large=1, window=1)
    score = policy.score(attended(logits, 3, 4, instances=[5, 6, 7]))
    torch.manual_seed(1)
    assert torch.equal(score, policy.score(attended(logits, 3, 4, instances=[5, 6, 7])))
    assert torch.equal(score.flip(0), policy.score(attended(logits, 3, 4, instances=[7, 6, 5])))
    assert torch.equal(score[1:2], policy.score(attended(logits, 1, 4, instances=[6])))
    for other in (dict(seed=1), dict(layer=1), dict(number=1), dict(instances=[15, 16, 17])):
        assert not torch.equal(score, policy.score(attended(logits, 3, 4, **{"instances": [5, 6, 7], **other})))
    shifted = policy.score(attended(logits, 3, 4, instances=[5, 6, 7], positions=torch.arange(4, 13).expand(3, 1, 9)))
    again = policy.score(attended(logits, 3, 4, instances=[5, 6, 7], positions=torch.arange(5, 14).expand(3, 1, 9)))
    assert not torch.equal(shifted[..., 1:6], again[..., 1:6])


def test_heads_draw_for_themselves():
    keys, values = torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6), torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    score = POLICY(n_large=0, n_sink=0, window=1).score(stub.view(keys, values, queries=torch.zeros(1, 2, 1, 6, dtype=torch.float64), keep=3))
    assert not torch.equal(score[0, 0], score[0, 1])


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, says", [(dict(n_large=-2), "n_large=-2"), (dict(n_sink=-1), "n_sink=-1"), (dict(kernel=2), "kernel=2"), (dict(window=0), "window=0")])
def test_options_that_cannot_be_are_refused(llama, options, says):
    with pytest.raises(ValueError, match=says):
        kvprobe.cache(llama[0], policy="vase", keep=8, **options)


def test_a_large_set_beyond_the_budget_is_refused(llama, ids):
    with pytest.raises(ValueError, match=f"n_large={KEEP + 1} is larger than keep={KEEP}"):
        kvprobe.cache(llama[0], policy="vase", keep=KEEP, buffer=BUFFER, n_large=KEEP + 1)


def test_with_nothing_but_a_budget_and_with_nothing(llama, ids):
    """B13, and B04: a text shorter than the window passes through."""
    with pytest.raises(ValueError, match="give keep"):
        kvprobe.cache(llama[0], policy="vase")
    cache = kvprobe.cache(llama[0], policy="vase", keep=32)
    with torch.no_grad():
        assert torch.equal(feed(llama[0], cache, ids[:, :17]), llama[1](ids[:, :17]).logits)
