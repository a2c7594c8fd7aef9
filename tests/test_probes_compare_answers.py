"""The probes that compare policies: answers against a stock model on the full cache, hidden by masks per KV head."""

import numpy as np
import pytest
import torch

import compared
import kvprobe
from compared import SEEDS, pick, value
from kvprobe import audit, engine
from oracle import Reference, random_scores

cheap, lm, stock, done = compared.cheap, compared.lm, compared.stock, compared.done


def seen(stock, plan, ids, first: int, scores, span=None, hold: bool = False, prompt: int = 0) -> Reference:
    """The reference after `ids` [n], fed as rounds allow; `first` is the prompt's forward. span is held or banned everywhere, the first `prompt` positions are held."""
    inside = set(range(*span)) if span else set()
    ref = Reference(stock, range(2), 2, plan.keep, plan.buffer, scores, held=lambda *_: (inside if hold else set()) | set(range(prompt)), banned=lambda *_: set() if hold else inside)
    ref.last, at = None, 0
    while at < len(ids):
        n = first if at == 0 else min(len(ids) - at, plan.fires_at - max(map(len, ref.kept.values())))
        ref.last = ref.feed(torch.as_tensor(ids[at : at + n])[None])[0]
        at += n
    return ref


def mass(ref, layer, row, head, number, candidates):
    """H2O: attention received so far, mean over the group of two query heads."""
    got = ref.mass[layer][row, 2 * head : 2 * head + 2].mean(0)
    return {p: got[ref.column[row][p]] for p in candidates}


def answered(stock, plan, story, ask, scores, **pins):
    """(log p of the value, retrieved, reference right before the value's first token is predicted)."""
    text = np.concatenate([story.ids[: ask.at], ask.query])
    ref = seen(stock, plan, text, story.prompt, scores, **pins)
    before, logp, top = {s: list(v) for s, v in ref.kept.items()}, 0.0, True
    felt = [h for h in ref.history if h[1] < len(text)]  # the last forward's own round comes after its logits
    if len(felt) < len(ref.history):
        before = None
    for token in ask.value:
        row = torch.log_softmax(ref.last[-1], -1)
        logp, top = logp + float(row[token]), top and int(row.argmax()) == token
        ref.last = ref.feed(torch.tensor([[int(token)]]))[0]
    return logp, top, len(felt), before, ref


def same_sets(log, k: int, ref, upto: int) -> int:
    """Asserts that a stored log is the reference's history; returns the rounds compared."""
    history = [h for h in ref.history if h[1] <= upto]
    assert [h[1] for h in history] == list(log.fired[k][: len(history)])
    for n, (_, _, sets) in enumerate(history):
        held = log.held(k, n)
        for (layer, _, head), kept in sets.items():
            assert np.flatnonzero(held[layer, head]).tolist() == kept
    return len(history)


@pytest.mark.parametrize("policy, draw", [("random", 1), ("h2o", 0)])
def test_passcode_answers_and_copies(done, stock, policy, draw):
    d, i = done("passcode"), 1
    story, (log, k) = d.session.stories[i], d.logs[i, policy, draw]
    a, z = story.spans["value"]
    for n, ask in enumerate(story.asks[:2], 1):
        scores = random_scores(SEEDS[draw], [i]) if policy == "random" else mass
        logp, top, felt, before, ref = answered(stock, d.config.plan, story, ask, scores)
        mine = pick(d.rows, policy=policy, draw=draw, instance=i, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="retrieved") == top
        assert value(mine, metric="rounds") == n == felt
        for (layer, _, head), kept in before.items():
            assert value(mine, metric="value_held", layer=layer, head=head) == pytest.approx(sum(a <= p < z for p in kept) / (z - a))
        assert same_sets(log, k, ref, ask.at) == len([f for f in log.fired[k] if f <= ask.at])


@pytest.mark.parametrize("keep, block, end, draw", [(32, 1, "", 1), (64, 1, "kept", 0), (32, 1, "deleted", 0)])
def test_blocks_answers(done, stock, keep, block, end, draw):
    d, i = done("blocks"), 0
    story, plan, ask = d.session.stories[i], kvprobe.Plan(keep, 8), d.session.stories[i].asks[0]
    pins = dict(span=story.spans["box"], hold=end == "kept") if end else {}
    logp, _, felt, _, ref = answered(stock, plan, story, ask, random_scores(SEEDS[draw], [i]), **pins)
    mine = pick(d.rows, keep=keep, block=block, end=end, draw=draw, instance=i)
    assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds") == felt
    log, k = d.logs[i, f"K={keep}, {end or f'block {block}'}", draw]
    assert same_sets(log, k, ref, ask.at) == log.rounds(k) > 5


@pytest.mark.parametrize("factor, policy, end, draw", [("once", "random", "kept", 0), ("once", "random", "deleted", 0), ("derived", "h2o", "", 0)])
def test_distance_answers(done, stock, factor, policy, end, draw):
    d, i = done("distance"), 1
    story = d.session.by_factor[factor][i]
    pins = dict(span=story.spans["box0"], hold=end == "kept") if end else {}
    for n, ask in enumerate(story.asks, 1):
        logp, _, felt, _, _ = answered(stock, d.config.plan, story, ask, random_scores(SEEDS[draw], [i]) if policy == "random" else mass, **pins)
        mine = pick(d.rows, factor=factor, policy=policy, end=end, draw=draw, instance=i, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds") == n == felt


@pytest.mark.parametrize("policy, protect, draw", [("random", True, 1), ("h2o", False, 0)])
def test_protection_answers_and_survival(done, stock, policy, protect, draw):
    d, i = done("protection"), 1
    story = d.session.stories[i]
    mine = pick(d.rows, policy=policy, protect=protect, draw=draw, instance=i)
    for ask in story.asks[:2]:
        scores = random_scores(SEEDS[draw], [i]) if policy == "random" else mass
        logp, _, felt, before, _ = answered(stock, d.config.plan, story, ask, scores, prompt=story.prompt if protect else 0)
        assert value(mine, metric="logp", ask=ask.name) == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds", ask=ask.name) == 2 == felt
    kept = {(layer, head): {p for p in v if p < story.prompt} for (layer, _, head), v in before.items()}
    assert value(mine, metric="prompt_head") == pytest.approx(np.mean([len(v) for v in kept.values()]) / story.prompt)
    assert value(mine, metric="prompt_union") == pytest.approx(np.mean([len(kept[layer, 0] | kept[layer, 1]) for layer in (0, 1)]) / story.prompt)


@pytest.mark.parametrize("probe", ["passcode", "protection"])
def test_the_full_cache_is_stock_transformers(done, stock, probe):
    d = done(probe)
    for i, story in enumerate(d.session.stories):
        ask = story.asks[1]
        text = torch.as_tensor(np.concatenate([story.ids[: ask.at], ask.query, ask.value]))[None]
        with torch.no_grad():
            rows = torch.log_softmax(stock(text[:, :-1]).logits[0, -len(ask.value) :], -1)
        assert value(d.rows, policy="full", metric="logp", instance=i, ask=ask.name) == pytest.approx(float(rows.gather(-1, text[0, -len(ask.value) :, None]).sum()), abs=1e-8)
        assert value(d.rows, policy="full", metric="rounds", instance=i, ask=ask.name) == 0


@pytest.mark.parametrize("probe, label, draw", [("passcode", "vase", 1), ("passcode", "triattention", 0), ("passcode", "rkv", 0), ("protection", "h2o + prompt", 0), ("blocks", "K=32, block 8", 1)])
def test_answers_replayed_from_the_keep_log(done, lm, probe, label, draw):
    """Policies without a reference here: the full cache under the masks of their own log, and the stored log is that of the answer's run."""
    d = done(probe)
    batch, (arm, cut) = next((b, x) for b, x in enumerate(d.session.batches) if (x[0].label, x[0].draw) == (label, draw) and 1 in x[1])
    stories = [d.session.stories[i] for i in cut]
    if probe == "blocks":
        d.session._at(arm.keep)
    _, answers = d.session.run(arm, cut, stories, lambda n: None)
    for answer in [a for a in answers if not a.ask.name.endswith("control")]:
        k, story = list(cut).index(1), d.session.stories[1]
        ask = next(a for a in story.asks if a.name == answer.ask.name)
        ids = torch.as_tensor(np.concatenate([story.ids[: ask.at], ask.query, ask.value]))
        want = audit.replay(lm, ids, answer.log, k, ask.at + len(ask.query))
        mine = pick(d.rows[d.rows.batch == batch], instance=1, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(float(want.sum()), abs=1e-8)
        stored, row = d.logs[1, label, draw]
        n = sum(f <= ask.at for f in stored.fired[row])
        assert n == sum(f <= ask.at for f in answer.log.fired[k])
        upto = np.minimum(stored.died[:, row, :, : ask.at], n), np.minimum(answer.log.died[:, k, :, : ask.at], n)
        assert (upto[0] == upto[1]).all()


def test_a_row_alone_token_by_token_without_a_shared_prefix(done, lm):
    d, i, draw = done("passcode"), 0, 1
    story = d.session.stories[i]
    cache = kvprobe.cache(lm, policy="vase", keep=96, buffer=48, instances=[i], seed=SEEDS[draw])
    engine.prefill(lm, cache, torch.as_tensor(story.ids[: story.prompt])[None])
    ask, q = story.asks[0], len(story.asks[0].query)
    text = torch.as_tensor(np.concatenate([story.ids[story.prompt : ask.at], ask.query, ask.value]))[None]
    first = ask.at - story.prompt + q
    got = engine.force(lm, cache, text[:, :-1], targets=text[:, first:], first=first, longest=1)
    assert value(d.rows, policy="vase", draw=draw, instance=i, ask=ask.name, metric="logp") == pytest.approx(float(got.logp.sum()), abs=1e-8)


def test_the_control_is_asked_of_a_branch_of_its_own(done, lm):
    """Its fact stands in its own question: the passcode's answer, at the same place, is that of a run without it."""
    d, i = done("passcode"), 0
    story = d.session.stories[i]
    plain, controls = story.asks[:2], story.asks[2:]
    for ask, control in zip(plain, controls, strict=True):
        assert (control.name, control.at) == (ask.name + ", control", ask.at)
        text, number = lm.tokenizer.decode(control.query.tolist()), lm.tokenizer.decode(control.value.tolist())
        assert f"Let zq = {number}.\n" in text and text.endswith("zq = ") and number not in lm.tokenizer.decode(story.ids.tolist())
        ids = torch.as_tensor(np.concatenate([story.ids[: ask.at], control.query, control.value]))[None]
        cache = kvprobe.cache(lm, policy="recency", keep=96, buffer=48, instances=[i])
        got = engine.force(lm, cache, ids[:, :-1], targets=ids[:, -len(control.value) :], first=ids.shape[1] - len(control.value))
        assert value(d.rows, policy="recency", instance=i, ask=ask.name, metric="control_retrieved") == float(got.top.all())
