"""The contract of every policy, and each policy against a slow plain version of its formula."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import kvprobe
import stub
import tiny
from kvprobe import attention, metrics
from kvprobe.registry import make_policy
from kvprobe.types import Needs
from oracle import Reference, cache_sets, random_scores
from sidebyside import feed, walk

KEEP, BUFFER = 10, 4
POLICIES = sorted(set(kvprobe.available("policy")) - set(tiny.AHEAD))  # those have their own contract in test_policies_ahead_contract
SCHEDULES = {"rounds": dict(keep=KEEP, buffer=BUFFER), "prompt_end": dict(keep=KEEP, schedule="prompt_end")}
WINDOW = {name: dict(window=4) for name in POLICIES if make_policy(name).needs.window == -1}  # at prompt end there is no buffer whose queries could vote


class Spy:
    """Runs a policy as it is, twice, and notes what it was shown and what it did."""

    def __init__(self, inner):
        self.inner, self.needs, self.scores = inner, inner.needs, []

    def bind(self, model):
        self.inner = make_policy(self.inner, None, model)
        return self

    def __getattr__(self, name):  # what only some policies have, such as `observe`
        return getattr(self.inner, name)

    def score(self, view):
        shown = [view.positions, view.keys, view.values, view.now, view.round, view.queries, view.query_positions, *view.columns.values()]
        before = [None if x is None else x.clone() for x in shown]
        first = self.inner.score(view).clone()
        assert torch.equal(first, self.inner.score(view)), "not repeatable"
        assert all(a is None or torch.equal(a, b) for a, b in zip(before, shown)), "inputs changed"
        assert first.shape == view.positions.shape and torch.isfinite(first).all()
        self.scores.append(first)
        return first


def made(name: str, schedule: str, options: dict):
    """A policy with what it needs to run; options by policy."""
    return make_policy(name, options.get(name, {}) | (WINDOW.get(name, {}) if schedule == "prompt_end" else {}))


def test_the_policies_are_found():
    assert set(POLICIES) >= {"random", "recency", "streaming_llm", "h2o", "snapkv"}
    assert all(kvprobe.available("policy").values()), "each says in one line what it is"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", POLICIES)
def test_contract(llama, ids, calibrated, name, schedule):
    """Shape, finite, repeatable, inputs unchanged; budgets, order and monotony of what it leads to."""
    model, _ = llama
    spy = Spy(made(name, schedule, calibrated))
    cache = kvprobe.cache(model, policy=spy, **SCHEDULES[schedule])
    held = {}
    feed(model, cache, ids[:, :16])
    for t in range(16, 40):
        feed(model, cache, ids[:, t : t + 1])
        for site, now in cache_sets(cache).items():
            assert now == sorted(set(now)) and set(now) <= {*held.get(site, range(17)), t}
            held[site] = now
    assert len(spy.scores) == 2 * (6 if schedule == "rounds" else 1)
    want, count = KEEP + BUFFER + 2 if schedule == "rounds" else KEEP + 24, (cache.positions >= 0).sum(-1).double()
    shared = {"head": (), "layer": (2,), "model": (0, 2)}[spy.level if hasattr(spy, "allocate") else "head"]
    assert bool(((count.mean(shared) if shared else count) == want).all())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_ignores_its_neighbours(llama, ids, calibrated, name, schedule):
    model, _ = llama
    rows = {0: 5, 1: 9, 2: 2}  # row of ids -> instance

    def kept(order):
        cache = kvprobe.cache(model, policy=made(name, schedule, calibrated), instances=[rows[i] for i in order], **SCHEDULES[schedule])
        for part in (ids[order, :18], ids[order, 18:20], ids[order, 20:22], ids[order, 22:26]):
            feed(model, cache, part)
        found = cache_sets(cache)
        return {i: {(layer, head): v for (layer, b, head), v in found.items() if b == at} for at, i in enumerate(order)}

    together = kept([0, 1, 2])
    assert kept([2, 0, 1]) == together
    for i in rows:
        assert kept([i]) == {i: together[i]}


@dataclass(frozen=True)
class Constant:
    """A policy that cannot tell entries apart."""

    needs = Needs()

    def score(self, view):
        return torch.full(view.positions.shape, 0.25)


@pytest.mark.parametrize("pins", [[], [kvprobe.SpanPin(1, 3)]], ids=["free", "pinned"])
def test_equal_scores_keep_the_newest(pins):
    """Also the cut inside a tie, in uniform and in ragged rounds (an unequal batch sorts instead of picking)."""
    stay = 8 - 2 * len(pins)
    want = [1, 2] * len(pins)
    one = stub.walk(stub.cache(8, 3, Constant(), pins=pins), 14)
    assert stub.held(one) == want + list(range(14 - 3 - stay, 14))
    end = stub.cache(8, 0, Constant(), pins=pins, schedule="prompt_end")
    stub.step(end, 20)
    assert stub.held(end) == want + list(range(20 - stay, 20))
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False
    two = stub.cache(8, 3, Constant(), pins=pins)
    stub.step(two, 16, 2, mask=mask)
    assert stub.held(two, row=0) == want + list(range(16 - 3 - stay, 16))
    assert stub.held(two, row=1) == want + list(range(14 - 3 - stay, 14))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_refused(bad):
    class Bad(Constant):
        def score(self, view):
            return super().score(view).index_fill(-1, torch.tensor([2]), bad)

    for pins in ([], [kvprobe.SinkPin(1)]):
        with pytest.raises(ValueError, match=r"not finite.*\[0, 0, 0, 2\].*Bad"):
            stub.walk(stub.cache(8, 3, Bad(), pins=pins), 14)


# -- positions alone ------------------------------------------------------------------------------------------------


def test_recency():
    for head in (0, 1):
        assert stub.held(stub.walk(stub.cache(10, 4, "recency"), 54), head=head) == list(range(40, 54))


def test_streaming_llm():
    """The first four positions and the newest; the sinks count inside the budget."""
    assert stub.held(stub.walk(stub.cache(10, 4, "streaming_llm"), 54)) == [0, 1, 2, 3] + list(range(44, 54))
    assert stub.held(stub.walk(stub.cache(10, 4, "streaming_llm", options=dict(n_sink=1)), 54)) == [0] + list(range(41, 54))
    assert stub.held(stub.walk(stub.cache(2, 1, "streaming_llm"), 30)) == [2, 3, 29], "of more sinks than fit the newest stay"


def test_prefix_sliding():
    """Recency with the prompt protected."""
    cache = stub.cache(10, 4, "recency", pins=[kvprobe.PromptPin()])
    stub.step(cache, 6)
    assert stub.held(stub.walk(cache, 54)) == [0, 1, 2, 3, 4, 5] + list(range(46, 54))


# -- random ---------------------------------------------------------------------------------------------------------

R1 = {  # methods R1: n -> survival at K=1024, r=64 with l_p = 0, 90, 150; K=960 of 1024
    3: (0.833706, 0.819689, 0.808958, 0.823975), 10: (0.545394, 0.515422, 0.493271, 0.524460), 15: (0.402778, 0.370037, 0.346441, 0.379812),
    39: (0.094009, 0.075411, 0.063538, 0.080701), 57: (0.031568, 0.022873, 0.017807, 0.025256), 100: (0.002329, 0.001323, 0.000853, 0.001574)}


def test_the_closed_form_has_the_published_values():
    for n, row in R1.items():
        got = [metrics.survival(1024, 64, n, prompt) for prompt in (0, 90, 150)] + [metrics.survival(960, 64, n)]
        assert got == pytest.approx(row, abs=6e-7)


@pytest.mark.parametrize("prompt", [0, 5])
def test_survival(prompt):
    """An entry outlives n rounds with ((K-l)/(K+r-l))^n: 4 sigma over 6,000 independent instances, both heads, three entries."""
    keep, buffer, trials, rounds = 14, 4, 6000, 5
    pins = [kvprobe.SpanPin(0, prompt)] if prompt else []
    cache = stub.walk(stub.cache(keep, buffer, pins=pins, seed=prompt), keep + (2 + rounds - 1) * buffer, batch=trials)
    died = cache.keep_log.died[0]  # [b hkv p]
    for position, entered in ((prompt, 0), (keep, 0), (keep + buffer + 1, 1)):
        for n in range(1, rounds - entered + 1):
            want = metrics.survival(keep, buffer, n, prompt)
            for head in (0, 1):
                got = float((died[:, head, position] >= n + entered).mean())
                assert abs(got - want) <= 4 * (want * (1 - want) / trials) ** 0.5, (position, n, head, got, want)


def test_heads_are_independent():
    """Both heads hold an entry as often as chance says; under the shared draw they always agree."""
    trials = 4000
    died = stub.walk(stub.cache(8, 4), 16, batch=trials).keep_log.died[0]
    both = float(((died[:, 0, 0] > 0) & (died[:, 1, 0] > 0)).mean())
    want = (8 / 12) ** 2
    assert abs(both - want) <= 4 * (want * (1 - want) / trials) ** 0.5
    shared = stub.walk(stub.cache(8, 4, options=dict(shared=True), layers=2), 40, batch=3).keep_log.died
    assert (shared[:, :, 0] == shared[:, :, 1]).all() and (shared[0] != shared[1]).any() and (shared[0, 0] != shared[0, 1]).any()


# -- h2o ------------------------------------------------------------------------------------------------------------


def hand_made(rng: np.random.Generator) -> np.ndarray:
    """A lower-triangular 8 x 8 attention matrix: row t is a distribution over 0..t."""
    a = np.tril(rng.uniform(0.05, 1.0, (8, 8)))
    return a / a.sum(1, keepdims=True)


def attending(a: np.ndarray) -> torch.Tensor:
    """Queries [8 8] that attend as `a` says over keys that are unit vectors, at scaling 1."""
    return torch.as_tensor(np.log(np.where(a > 0, a, 1.0)))


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 1, 4]], ids=str)
def test_h2o_on_a_hand_made_matrix(chunks):
    """B05: the score is the column sum of the whole triangle, meaned over the two query heads of the KV head."""
    rng = np.random.default_rng(0)
    heads = [hand_made(rng) for _ in range(4)]
    query = torch.stack([attending(a) for a in heads])[None]
    key = torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8)
    cache, at = stub.cache(100, 1, "h2o", group=2, d=8), 0
    for n in chunks:
        stub.step(cache, n, query=query[:, :, at : at + n], key=key[:, :, at : at + n])
        at += n
    want = [(heads[0].sum(0) + heads[1].sum(0)) / 2, (heads[2].sum(0) + heads[3].sum(0)) / 2]
    assert np.allclose(cache.layers[0].columns["attn_mass"][0].numpy(), want, atol=1e-12)
    short = stub.cache(3, 2, "h2o", group=2, d=8)
    stub.step(short, 8, query=query, key=key)
    for head in (0, 1):
        assert stub.held(short, head=head) == sorted(np.argsort(want[head][:6])[-3:].tolist()) + [6, 7]


def test_a_long_prompt_is_summed_in_blocks(monkeypatch):
    """Blocks of two queries give what one block gives."""
    a = hand_made(np.random.default_rng(3))
    query, key = attending(a)[None, None], torch.eye(8, dtype=torch.float64)[None, None]
    visible = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    monkeypatch.setattr(attention, "BLOCK_BYTES", 8 * 8 * 2)
    assert np.allclose(attention.attention_mass(query, key, visible, 1.0)[0, 0].numpy(), a.sum(0), atol=1e-12)


def heavy(reference, layer, row, head, number, candidates):
    """Attention received since each entry came, from everything that was visible, meaned over the group."""
    mass = reference.mass[layer][row]
    group = mass.shape[0] // reference.heads
    return {p: float(np.mean([mass[h, reference.column[row][p]] for h in range(head * group, (head + 1) * group)])) for p in candidates}


def reference_for(llama, scores, **options):
    model, stock = llama
    return Reference(stock, model.geometry.kv_layers, model.geometry.n_kv, KEEP, BUFFER, scores, **options)


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_h2o_through_rounds(llama, ids, longest, padded):
    """The accumulator moves with its entry."""
    model, _ = llama
    mask = torch.ones(3, 46, dtype=torch.bool)
    mask[1, :5] = not padded
    cache = kvprobe.cache(model, policy="h2o", keep=KEEP, buffer=BUFFER)
    reference = reference_for(llama, heavy)
    assert walk(model, cache, reference, ids[:, :46], prefill=20, longest=longest, mask=mask if padded else None) >= 18


def test_h2o_at_prompt_end(llama, ids):
    model, _ = llama
    cache = kvprobe.cache(model, policy="h2o", keep=14, schedule="prompt_end")
    reference = Reference(llama[1], (0, 1), 2, 14, 0, heavy, rounds=False)
    assert walk(model, cache, reference, ids[:, :40], prefill=33, longest=3) == 3


# -- snapkv ---------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def average(x: np.ndarray, kernel: int) -> np.ndarray:
    """The zeros beyond the edges count in the denominator."""
    half = kernel // 2
    return np.array([sum(x[j] for j in range(i - half, i + half + 1) if 0 <= j < len(x)) / kernel for i in range(len(x))])


def largest(x: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    return np.array([max(x[j] for j in range(i - half, i + half + 1) if 0 <= j < len(x)) for i in range(len(x))])


def voted(window: int, kernel: int, pool=average, reduce=np.mean, group=np.mean):
    """SnapKV as written: per query head softmax over the candidates a query sees, over the window's queries, pooled, then over the group."""

    def scores(reference, layer, row, head, number, candidates):
        keys, queries = reference.keys_at(layer, row, head, candidates), reference.newest_queries(layer, row, window)
        first, size = len(reference.column[row]) - len(queries), queries.shape[1] // reference.heads
        votes = []
        for h in range(head * size, (head + 1) * size):
            hidden = np.array([[p > first + w for p in candidates] for w in range(len(queries))])
            attended = np.array([softmax(np.where(hidden[w], -np.inf, keys @ q[h] * reference.scaling)) for w, q in enumerate(queries)])
            votes.append(pool(reduce(attended, axis=0), kernel))
        return dict(zip(candidates, group(votes, axis=0)))

    return scores


VARIANTS = {
    "default": (dict(), voted(BUFFER, 5)),
    "max7": (dict(kernel=7, pooling="max"), voted(BUFFER, 7, largest)),
    "sum, window 2, group max": (dict(window=2, queries="sum", group="max", kernel=3), voted(2, 3, reduce=np.sum, group=np.max)),
    "no pooling, group sum": (dict(kernel=1, group="sum"), voted(BUFFER, 1, group=np.sum)),
    "window beyond the buffer": (dict(window=9), voted(9, 5)),
}


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_snapkv(llama, ids, variant, longest):
    model, _ = llama
    options, scores = VARIANTS[variant]
    cache = kvprobe.cache(model, policy="snapkv", keep=KEEP, buffer=BUFFER, **options)
    assert walk(model, cache, reference_for(llama, scores), ids[:2, :40], prefill=3, longest=longest) == 2 * 6


def test_snapkv_at_prompt_end(llama, ids):
    """The window's own entries are candidates here, and see one another causally."""
    model, stock = llama
    cache = kvprobe.cache(model, policy="snapkv", keep=14, schedule="prompt_end", window=6)
    reference = Reference(stock, (0, 1), 2, 14, 0, voted(6, 5), rounds=False)
    assert walk(model, cache, reference, ids[:, :40], prefill=33, longest=3) == 3


def test_the_sum_over_queries_is_the_mean_times_their_number(llama, ids):
    """The same sets, but the number that is reported."""
    found = {}
    for how in ("mean", "sum"):
        spy = Spy(make_policy("snapkv", dict(queries=how)))
        feed(llama[0], kvprobe.cache(llama[0], policy=spy, keep=KEEP, buffer=BUFFER), ids[:1, :30])
        found[how] = spy.scores[0]
    assert torch.allclose(found["sum"], found["mean"] * BUFFER, atol=1e-14)


def test_snapkv_with_padding(llama, ids):
    """Left padding neither votes nor is pooled."""
    model, _ = llama
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, :3], mask[2, :8] = False, False
    cache = kvprobe.cache(model, policy="snapkv", keep=KEEP, buffer=BUFFER)
    assert walk(model, cache, reference_for(llama, VARIANTS["default"][1]), ids[:, :40], prefill=22, longest=2, mask=mask) > 12


def test_pools_by_hand():
    """Average: zeros at the edges count. Max: they do not exist."""
    x = torch.tensor([[5.0, 0.0, 0.0, 0.0, -10.0]])
    assert attention.pool(x, 5, "average").tolist() == [[1.0, 1.0, -1.0, -2.0, -2.0]]
    assert attention.pool(x, 3, "max").tolist() == [[5.0, 5.0, 0.0, 0.0, 0.0]]
    assert attention.pool(-x.abs() - 1, 3, "max").tolist() == [[-1.0, -1.0, -1.0, -1.0, -1.0]]
    assert torch.equal(attention.pool(x, 1, "max"), x)


def test_snapkv_refuses_what_cannot_vote(llama):
    model, _ = llama
    for options, say in ((dict(kernel=4), "kernel=4"), (dict(window=0), "window=0"), (dict(kernel=0), "kernel=0")):
        with pytest.raises(ValueError, match=say):
            kvprobe.cache(model, policy="snapkv", keep=8, **options)
    with pytest.raises(ValueError, match="window"):
        kvprobe.cache(model, policy="snapkv", keep=8, schedule="prompt_end")


def test_a_text_shorter_than_the_window_passes_through(llama, ids):
    """B04: 17 tokens, a window of 64."""
    model, stock = llama
    cache = kvprobe.cache(model, policy="snapkv", keep=32, buffer=8, window=64)
    with torch.no_grad():
        assert torch.equal(feed(model, cache, ids[:, :17]), stock(ids[:, :17]).logits)
    assert cache.physical == 17 and cache.keep_log.fired == ((), (), ())


def test_random_is_the_hash_of_its_site(llama, ids):
    model, _ = llama
    cache = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[4, 4, 1], seed=6)
    assert walk(model, cache, reference_for(llama, random_scores(6, [4, 4, 1])), ids[:, :30], prefill=30, longest=1) == 3
