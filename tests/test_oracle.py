"""The oracle of a prompt's future against slow plain versions: entries left out one by one, sets in python, outputs from captured states."""

import copy
import itertools

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import deletion, engine, lookahead, oracle
from kvprobe.metrics import fidelity
from kvprobe.eviction_cache import EvictionCache
from kvprobe.pins import SinkPin, SpanPin, WindowPin
from kvprobe.policies import keydiff, random
from kvprobe.types import Plan

N, W, KEEP, T = 40, 5, 16, 6
HELD = {0, 7, 8, *range(N - W, N)}


def prompt_end(keep):
    return Plan(keep, 0, schedule="prompt_end")


def hold(model, ids, mask=None):
    """(held full cache, last logits)"""
    cache = EvictionCache(model.model.config, model.geometry, prompt_end(10**9), random.POLICY(), pins=(SinkPin(1), WindowPin(W), SpanPin(7, 9, elsewhere="free")))
    cache.hold()
    padded = {} if mask is None else dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    with torch.no_grad():
        return cache, model.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **padded).logits[:, -1]


def truth_of(model, cache, logits, t=T):
    return oracle.of(model, cache, oracle.future(model, cache, logits, t))


def evicted(cache, policy, keep, future=None, seed=0):
    branch = cache.branch(1, plan=prompt_end(keep), policy=policy, seed=seed)
    branch.evict_now(future)
    return branch


@pytest.fixture(scope="module")
def made(llama, ids):
    """(held cache, logits, oracle) of two prompts."""
    cache, logits = hold(llama[0], ids[:2, :N])
    return cache, logits, truth_of(llama[0], cache, logits)


def states(llama, ids, tokens, b, layer):
    """Queries of the future and the prompt's keys and values, captured from one plain forward over prompt and future."""
    text = torch.cat([ids[b : b + 1, :N], tokens[b : b + 1]], dim=1)
    seen = kvprobe.capture(llama[0], text, layers=[layer])
    q, k, v = (getattr(seen, x)[layer][0].numpy() for x in "qkv")
    return q[:, N:], k[:, :N], v[:, :N], kvprobe.head_weights(llama[0], "O", layer).numpy()


def attention(q, keys, values):
    """(weights, output) of one query."""
    z = keys @ q * q.shape[-1] ** -0.5
    a = np.exp(z - z.max())
    a /= a.sum()
    return a, a @ values


def test_the_future_is_the_models_own_greedy_text(llama, ids, made):
    with torch.no_grad():
        want = llama[1].generate(ids[:2, :N], max_new_tokens=T, do_sample=False, pad_token_id=0)[:, N:]
    assert torch.equal(made[2].ahead.tokens, want) and bool(made[2].ahead.valid.all())


@pytest.mark.parametrize("form", ["magnitude", "squared"])
def test_score_is_leaving_each_entry_out(llama, ids, made, form):
    cost = deletion.Cost(form=form)
    score = oracle.score(llama[0], made[0], made[2].ahead, cost)
    for b, layer in itertools.product(range(2), range(2)):
        q, k, v, w_o = states(llama, ids, made[2].ahead.tokens, b, layer)
        group, want = q.shape[0] // k.shape[0], np.zeros((k.shape[0], N))
        for h, t in itertools.product(range(q.shape[0]), range(T)):
            a, o = attention(q[h, t], k[h // group], v[h // group])
            delta = (a / (1 - a + cost.eps))[:, None] * (v[h // group] - o)
            norm = np.linalg.norm(delta @ w_o[h], axis=1)
            want[h // group] += (norm if form == "magnitude" else norm**2) / (T * group)
        assert np.allclose(score[layer, b].numpy(), want, rtol=1e-9)


def sets(bools):
    return set(torch.nonzero(bools).flatten().tolist())


def best(score, keep):
    """The protected entries and the highest of the others, in python."""
    free = sorted((p for p in range(N) if p not in HELD), key=lambda p: (-float(score[p]), -p))
    return HELD | set(free[: keep - len(HELD)])


def test_recall_of_kept_sets(made):
    cache, _, truth = made
    arm = evicted(cache, keydiff.POLICY(), KEEP)
    kept = truth.kept(arm)
    every, free = truth.recall(kept, KEEP)
    for layer, b, h in itertools.product(range(2), range(2), range(2)):
        want, mine = best(truth.score[layer, b, h], KEEP), set(arm.positions[layer, b, h].tolist())
        assert sets(truth.best(KEEP)[layer, b, h]) == want and sets(kept[layer, b, h]) == mine and sets(truth.protected[layer, b, h]) == HELD
        assert float(every[layer, b, h]) == pytest.approx(len(mine & want) / KEEP)
        assert float(free[layer, b, h]) == pytest.approx(len((mine & want) - HELD) / (KEEP - len(HELD)))
    assert every.mean() < 0.95 and free.mean() < every.mean()


def test_the_oracle_as_an_arm_is_the_ceiling(made):
    cache, _, truth = made
    arm = evicted(cache, oracle.Given(), KEEP, dict(enumerate(truth.score)))
    every, free = truth.recall(truth.kept(arm), KEEP)
    assert bool((every == 1).all()) and bool((free == 1).all())
    assert truth.error(arm).mean() < truth.error(evicted(cache, random.POLICY(), KEEP)).mean()


def test_output_error_from_captured_states(llama, ids, made):
    cache, _, truth = made
    arm = evicted(cache, random.POLICY(), KEEP, seed=3)
    error = truth.error(arm)
    for b, layer in itertools.product(range(2), range(2)):
        q, k, v, _ = states(llama, ids, truth.ahead.tokens, b, layer)
        group = q.shape[0] // k.shape[0]
        for h in range(q.shape[0]):
            kept = arm.positions[layer, b, h // group].tolist()
            cosines = []
            for t in range(T):
                full, less = attention(q[h, t], k[h // group], v[h // group])[1], attention(q[h, t], k[h // group][kept], v[h // group][kept])[1]
                cosines.append(full @ less / np.linalg.norm(full) / np.linalg.norm(less))
            assert float(error[layer, b, h]) == pytest.approx(1 - np.mean(cosines), rel=1e-9)
    assert truth.error(evicted(cache, random.POLICY(), N)).abs().max() < 1e-12  # everything kept


def test_output_error_under_ragged_budgets(llama, ids, made):
    """Heads of one layer hold different counts: the empty slots of the shorter ones must not be attended."""

    class Uneven(random.POLICY):
        level = "layer"

        def allocate(self, score, keep, held, real, positions):
            return keep + torch.tensor([3, -3])

    cache, _, truth = made
    arm = evicted(cache, Uneven(), KEEP)
    kept = truth.kept(arm)
    assert kept.sum(-1)[0, 0].tolist() == [KEEP + 3, KEEP - 3]
    q, k, v, _ = states(llama, ids, truth.ahead.tokens, 1, 1)
    for h in range(4):
        mine = np.flatnonzero(kept[1, 1, h // 2].numpy())
        pairs = [(attention(q[h, t], k[h // 2], v[h // 2])[1], attention(q[h, t], k[h // 2][mine], v[h // 2][mine])[1]) for t in range(T)]
        want = 1 - np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
        assert float(truth.error(arm)[1, 1, h]) == pytest.approx(want, rel=1e-9)


def test_a_row_behind_padding_is_the_row_alone(llama, ids):
    model = llama[0]
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, :9] = 0
    cache, logits = hold(model, ids[:2, :N] * mask, mask)
    alone, own = hold(model, ids[1:2, 9:N])
    two, one = truth_of(model, cache, logits), truth_of(model, alone, own)
    assert torch.equal(two.ahead.tokens[1], one.ahead.tokens[0]) and torch.allclose(two.score[:, 1, :, 9:], one.score[:, 0], atol=1e-10) and not two.score[:, 1, :, :9].any()
    arms = [evicted(c, keydiff.POLICY(), KEEP) for c in (cache, alone)]
    assert torch.equal(two.kept(arms[0])[:, 1, :, 9:], one.kept(arms[1])[:, 0]) and torch.equal(two.best(KEEP)[:, 1, :, 9:], one.best(KEEP)[:, 0])
    assert torch.allclose(two.error(arms[0])[:, 1], one.error(arms[1])[:, 0], atol=1e-10)


def test_the_token_that_ends_a_text_is_left_out(llama, ids):
    """A future that ends at its third token has two queries; one that ends at once keeps its only one."""
    model = llama[0]
    cache, logits = hold(model, ids[:1, :N])
    plain = truth_of(model, cache, logits)
    config = model.model.generation_config
    for at in (2, 0):
        token = int(plain.ahead.tokens[0, at])
        first = plain.ahead.tokens[0].tolist().index(token)
        try:
            config.eos_token_id = token
            truth = truth_of(model, cache, logits)
        finally:
            config.eos_token_id = None
        count = max(1, first)
        assert truth.ahead.valid[0].tolist() == [True] * count + [False] * (T - count)
        short = truth_of(model, cache, logits, count)
        assert torch.allclose(truth.score, short.score, atol=1e-12)
        arm = evicted(cache, random.POLICY(), KEEP)
        assert torch.allclose(truth.error(arm), short.error(arm), atol=1e-12)


def test_utility_is_the_recall_of_a_trajectory_alone(llama, made):
    """Against an arm whose Q_future is the trajectory: the same score by the one-set walk, then sets in python."""
    cache, logits, truth = made
    found = lookahead.sample(llama[0], cache, logits, 3, 4, seed=2, eos=(11, 30, 60))
    every, free = oracle.utility(llama[0], cache, found, truth, KEEP)
    for m, b in itertools.product(range(3), range(2)):
        alone = oracle.Future(found.tokens[:, m], found.valid[:, m], {layer: q[:, m] for layer, q in found.queries.items()})
        score = oracle.score(llama[0], cache, alone)
        shared = [len(best(score[layer, b, h], KEEP) & best(truth.score[layer, b, h], KEEP)) for layer in range(2) for h in range(2)]
        assert float(every[b, m]) == pytest.approx(np.mean(shared) / KEEP) and float(free[b, m]) == pytest.approx((np.mean(shared) - len(HELD)) / (KEEP - len(HELD)))


def test_a_cache_that_went_on_is_refused(llama, ids, made):
    cache, _, truth = made
    arm = evicted(cache, random.POLICY(), KEEP)
    engine.force(llama[0], arm, ids[:2, :2])
    with pytest.raises(ValueError, match="gone on behind the prompt"):
        truth.error(arm)


# -- the pure parts --------------------------------------------------------------------------------------------------------


def test_recall_by_hand():
    best, kept, held = (torch.tensor([p in s for p in range(8)]) for s in ({0, 2, 3, 7}, {0, 3, 5, 7}, {0, 7}))
    assert [float(x) for x in fidelity.recall(kept, best, held)] == [0.75, 0.5] and float(fidelity.recall(kept, best)[1]) == 0.75
    assert torch.isnan(fidelity.recall(kept, held, held)[1])


@pytest.mark.parametrize("n, keep, held", [(7, 4, 1), (6, 3, 0), (6, 6, 2), (8, 5, 3)])
def test_random_recall_by_enumeration(n, keep, held):
    """Every possible draw of the free slots, each as likely."""
    protected = torch.arange(n) < held
    best = torch.arange(n) < keep
    found = []
    for free in itertools.combinations(range(held, n), keep - held):
        kept = protected.clone()
        kept[list(free)] = True
        found.append([float(x) for x in fidelity.recall(kept, best, protected)])
    assert np.mean(found, 0) == pytest.approx(fidelity.random_recall(n, keep, held))


def test_random_recall_worked_example_and_refusals():
    assert fidelity.random_recall(100, 40, 20) == (0.625, 0.25)
    every, free = fidelity.random_recall(50, 20, 20)
    assert every == 1 and np.isnan(free)
    for bad in ((10, 4, 5), (10, 0, 0), (3, 8, 5)):
        with pytest.raises(ValueError, match="must fit into both"):
            fidelity.random_recall(*bad)


def test_random_eviction_meets_its_closed_form(made):
    """The mean over many draws of the real policy."""
    cache, _, truth = made
    found = [[x.mean() for x in truth.recall(truth.kept(evicted(cache, random.POLICY(), KEEP, seed=s)), KEEP)] for s in range(60)]
    assert np.mean(found, 0) == pytest.approx(fidelity.random_recall(N, KEEP, len(HELD)), abs=0.03)


def test_output_error_by_hand():
    kept, full = torch.tensor([[[[1.0, 0], [0, 2]]]]), torch.tensor([[[[3.0, 0], [1, 0]]]])
    assert float(fidelity.output_error(kept, full)) == 0.5 and float(fidelity.output_error(kept, full, torch.tensor([[True, False]]))) == 0.0


def test_float32_finds_the_sets_of_float64(llama, ids):
    model = kvprobe.prepare(copy.deepcopy(llama[1]).float())
    cache, logits = hold(model, ids[:2, :N])
    truth = truth_of(model, cache, logits)
    wide_cache, wide_logits = hold(llama[0], ids[:2, :N])
    wide = truth_of(llama[0], wide_cache, wide_logits)
    assert torch.allclose(truth.score.double(), wide.score, rtol=1e-3, atol=1e-6) and torch.equal(truth.best(KEEP), wide.best(KEEP))
    arms = [evicted(c, random.POLICY(), KEEP) for c in (cache, wide_cache)]
    assert torch.allclose(truth.error(arms[0]), wide.error(arms[1]), atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5"])
def test_hybrids_are_measured_in_the_layers_that_grow(kind, ids):
    """Layer numbers with gaps; entries and queries of the right layers, by leaving out one entry."""
    import tiny

    model = tiny.pair(kind)[0]
    cache, logits = hold(model, ids[:1, :N])
    truth = truth_of(model, cache, logits)
    layers = cache.geometry.kv_layers
    assert layers == (1, 3) and sorted(truth.outputs) == [1, 3]
    arm = evicted(cache, oracle.Given(), KEEP, dict(zip(layers, truth.score)))
    assert bool((truth.recall(truth.kept(arm), KEEP)[0] == 1).all()) and truth.error(evicted(cache, random.POLICY(), N)).abs().max() < 1e-12
    held = cache.layers[3]
    k, v, w_o = held.keys[0, 0].numpy(), held.values[0, 0].numpy(), kvprobe.head_weights(model, "O", 3).numpy()
    scores = []
    for h in range(cache.geometry.group):
        for one in truth.ahead.queries[3][0, h].numpy():
            z = k @ one * held.scaling
            a = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            scores.append(a / (1 - a + 1e-6) * np.linalg.norm((v - a @ v) @ w_o[h], axis=1))
    assert np.allclose(truth.score[1, 0, 0].numpy(), np.mean(scores, 0), rtol=1e-8)
