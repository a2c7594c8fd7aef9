"""Signals of sampled continuations against sums over everything that could have been sampled, on a vocabulary of four."""

import itertools
import math

import pytest
import torch

from kvprobe import reliability
from kvprobe.reliability import PRESETS, Reliability, Weighting

VOCABULARY, T = 4, 3


def model(prefix):
    """Logits after a prefix: a table made of it, with one banned token now and then."""
    generator = torch.Generator().manual_seed(sum((y + 1) * 5**u for u, y in enumerate(prefix)))
    z = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    return z.index_fill(0, torch.tensor([len(prefix)]), -torch.inf) if sum(prefix) % 3 == 2 else z


@pytest.fixture(scope="module")
def everything():
    """Every continuation of T tokens that can be sampled: probability, tokens [T], logits [T vocabulary]."""
    made = []
    for y in itertools.product(range(VOCABULARY), repeat=T):
        logits = torch.stack([model(y[:u]) for u in range(T)])
        p = math.prod(float(z.softmax(-1)[t]) for z, t in zip(logits, y))
        if p > 0:
            made.append((p, torch.tensor(y), logits))
    return made


def test_signals_by_hand():
    """q = (1/2, 1/4, 1/4) and one token banned."""
    logits = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64).log()[None, None].expand(1, 2, -1)
    c, h, v = reliability.steps(logits, torch.tensor([[0, 1]]))
    bit = math.log(2)
    assert h[0].tolist() == pytest.approx([1.5 * bit] * 2) and v[0].tolist() == pytest.approx([0.25 * bit**2] * 2)
    assert c[0].tolist() == pytest.approx([0.5 * bit, -0.5 * bit])
    sure = torch.tensor([0.0, -torch.inf, -torch.inf])
    assert [x.item() for x in reliability.steps(sure, torch.tensor(0))] == [0.0, 0.0, 0.0]
    assert reliability.steps(logits.bfloat16(), torch.tensor([[0, 1]]))[0].dtype == torch.float32


def test_centred_uncorrelated_and_of_known_variance(everything):
    """E c = 0, E c_u c_v = 0, and eq. 9: Var c-bar = sum of E V_u / T^2; by enumeration."""
    p = torch.tensor([x[0] for x in everything], dtype=torch.float64)
    assert float(p.sum()) == pytest.approx(1)
    tokens, logits = torch.stack([x[1] for x in everything]), torch.stack([x[2] for x in everything])
    c, h, v = reliability.steps(logits, tokens)
    assert float((p @ c).abs().max()) < 1e-14
    for a, b in itertools.combinations(range(T), 2):
        assert abs(float(p @ (c[:, a] * c[:, b]))) < 1e-14
    mean = reliability.mean_over_steps(c, torch.full((len(p),), T))
    assert float(p @ mean.square()) == pytest.approx(float((p @ v).sum()) / T**2) and float(p @ mean.square()) > 0.01
    plain = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).mean(-1)
    torch.testing.assert_close(mean - h.mean(-1), plain)  # methods R17


def drawn(m=4, t=5, layers=2, hq=3, d=4, seed=0, lead=()):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([t, 2, t, 1, 3, t, 4, t][:m]).expand(*lead, m)
    return random(m, t, 11), torch.randint(11, (*lead, m, t), generator=generator), lengths, [random(m, hq, t, d) for _ in range(layers)]


def test_a_continuation_that_ended_early():
    """Averaged over its own steps; whatever stands beyond them is not read."""
    logits, tokens, lengths, queries = drawn()
    got = Reliability.of(logits, tokens, lengths, queries)
    for i, n in enumerate(lengths.tolist()):
        q = logits[i, :n].softmax(-1)
        entropy = -(q * q.log()).sum(-1)
        c = q.gather(-1, tokens[i, :n, None]).log().squeeze(-1) + entropy
        v = torch.stack([(row * (row.log() - (row * row.log()).sum()).square()).sum() for row in q])
        assert (got.typicality[i].item(), got.entropy[i].item(), got.varentropy[i].item()) == pytest.approx((c.mean().item(), entropy.mean().item(), v.mean().item()))
        logits[i, n:], tokens[i, n:] = torch.nan, 0
        for layer in queries:
            layer[i, :, n:] = torch.nan
    again = Reliability.of(logits, tokens, lengths, queries)
    for a, b in zip(vars(got).values(), vars(again).values()):
        assert torch.equal(a, b)


def test_disagreement_by_loops():
    """Eq. 10: over the steps both have, each pair by itself."""
    _, _, lengths, queries = drawn(m=5)
    distance = reliability.distances(queries, lengths)
    for m in range(5):
        total = 0.0
        for r in range(5):
            common = min(int(lengths[m]), int(lengths[r]))
            terms = [1 - float(torch.cosine_similarity(x[m, g, u], x[r, g, u], dim=0)) for x in queries for g in range(3) for u in range(common)]
            if r != m:
                total += sum(terms) / len(terms)
                assert distance[m, r].item() == pytest.approx(sum(terms) / len(terms))
        d = Reliability(lengths, lengths, lengths, lengths, distance).disagreement[m]
        assert d.item() == pytest.approx(total / 4)
    assert not distance.diagonal().any() and torch.equal(distance, distance.mT)


def test_rows_of_a_batch_are_their_own():
    logits, tokens, lengths, queries = drawn(lead=(2,))
    both = Reliability.of(logits, tokens, lengths, queries)
    for row in range(2):
        own = Reliability.of(logits[row], tokens[row], lengths[row], [x[row] for x in queries])
        for a, b in zip(vars(both).values(), vars(own).values()):
            torch.testing.assert_close(a[row], b)
        torch.testing.assert_close(both.weights(PRESETS["both"])[row], own.weights(PRESETS["both"]))


def test_standardised_disagreement():
    d = torch.tensor([0.1, 0.4, 0.1, 0.2], dtype=torch.float64)
    got = reliability.standardised(d)
    assert got.mean().item() == pytest.approx(0) and got.square().mean().item() == pytest.approx(1)
    assert got[1].item() == pytest.approx((0.4 - 0.2) / math.sqrt((0.01 + 0.04 + 0.01 + 0) / 4))
    for nothing in (d[:1], d[:2], torch.full((4,), 0.3), torch.tensor([0.3, 0.3 + 1e-8, 0.3, 0.3], dtype=torch.float64)):
        assert not reliability.standardised(nothing).any(), "two or fewer, or no spread but rounding"


def test_equal_continuations_disagree_nowhere():
    """Cosines of equal float32 queries are not exactly 1: that must not be blown up to a standard deviation of 1."""
    logits, tokens, lengths, queries = drawn(d=64)
    same = [x[:1].float().expand(4, -1, -1, -1) * torch.tensor([1.0, 3.0, 0.7, 1e-3])[:, None, None, None] for x in queries]
    got = Reliability.of(logits, tokens, torch.full_like(lengths, 5), same)
    assert float(got.disagreement.abs().max()) < 1e-6 and not reliability.standardised(got.disagreement).any()
    zero = [x * 0 for x in queries]
    assert reliability.distances(zero, lengths)[0, 1].item() == 1.0, "no direction: cosine 0"


WEIGHTINGS = {"/E": (1, 1.3, 0), "/D": (1, 1, 0.3), "log-probability": (1, 1, 0), "both": (1, 1.3, 0.3), "uniform": (0, 0, 0), "typicality": (1, 0, 0)}


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("normalised", [False, True])
def test_weights(name, normalised):
    """Eq. 3 and 4 by hand."""
    got = Reliability.of(*drawn())
    beta, gamma, lam = WEIGHTINGS[name]
    assert (PRESETS[name].beta, PRESETS[name].gamma, PRESETS[name].disagreement) == (beta, gamma, lam)
    by = Weighting(beta, gamma, lam, normalised)
    d = got.disagreement.tolist()
    mean = sum(d) / 4
    sd = math.sqrt(sum((x - mean) ** 2 for x in d) / 4)
    c = [x / math.sqrt(v / n) if normalised else x for x, v, n in zip(got.typicality.tolist(), got.varentropy.tolist(), got.lengths.tolist())]
    r = [math.exp(beta * c[m] - gamma * got.entropy[m].item() - lam * (d[m] - mean) / sd) for m in range(4)]
    assert got.weights(by).tolist() == pytest.approx([x / sum(r) for x in r])
    if name == "uniform":
        assert got.weights(by).tolist() == [0.25] * 4


def test_normalised_where_nothing_was_uncertain():
    zero = torch.zeros(2)
    assert Reliability(zero, zero, zero, torch.tensor([3, 3]), torch.zeros(2, 2)).normalised.tolist() == [0.0, 0.0]


def test_nested_prefixes():
    """The first m of a larger draw are as if only they had been drawn."""
    logits, tokens, lengths, queries = drawn(m=8)
    whole = Reliability.of(logits, tokens, lengths, queries)
    for m in (1, 2, 3, 8):
        own = Reliability.of(logits[:m], tokens[:m], lengths[:m], [x[:m] for x in queries])
        torch.testing.assert_close(whole.first(m).weights(PRESETS["/D"]), own.weights(PRESETS["/D"]))
        assert own.weights(PRESETS["/D"]).sum().item() == pytest.approx(1)
    for m in (0, 9):
        with pytest.raises(ValueError, match=f"m={m}"):
            whole.first(m)


def test_hard_filtering():
    weights, score = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, -1.0, 0.5, 2.0])
    assert reliability.filtered(weights, score, 0).tolist() == pytest.approx(weights.tolist())
    assert reliability.filtered(weights, score, 1).tolist() == pytest.approx([0.125, 0.0, 0.375, 0.5])
    assert reliability.filtered(weights, score, 2).tolist() == pytest.approx([0.2, 0.0, 0.0, 0.8]), "of equal scores the later one goes"
    assert reliability.filtered(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 1).tolist() == [0.0, 1.0], "an underflown weight that is left alone"
    with pytest.raises(ValueError, match="worst=4"):
        reliability.filtered(weights, score, 4)
