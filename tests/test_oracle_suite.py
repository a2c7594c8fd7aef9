"""The oracle suite: orders against the policies' own evictions, measures against plain recomputation, no leak from the future, figures against their tables."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe
from kvprobe import oracle
from kvprobe.suite import answers as suite_answers, deletions as suite_deletions, orders as suite_orders, rows as suite_rows
from kvprobe.models import load
from kvprobe.prompting import Prompting
from kvprobe.probes import oracle_suite as module

SMALL = dataclasses.replace(module.PRESETS["smoke"], dtype="float64", instances=1, sampling_seeds=2)


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def session(lm):
    return module.start(SMALL, lm)


@pytest.fixture(scope="module")
def prompt(session):
    return session.read(0)


@pytest.fixture(scope="module")
def ranked(session, prompt):
    return suite_orders.ranked(session, prompt)


def found(rows, metric, **where):
    rows = [r for r in rows if r["metric"] == metric and all(r.get(k) == v for k, v in where.items())]
    assert rows, (metric, where)
    return np.array([r["value"] for r in rows])


def captured(lm, prompt):
    """q, k, v {layer: [h n d]} of one plain forward over prompt and future, and the future's length."""
    tokens = prompt.truth.ahead.tokens[0][prompt.truth.ahead.valid[0]]
    seen = kvprobe.capture(lm, torch.cat([torch.as_tensor(prompt.ids), tokens])[None], layers=[0, 1])
    return *({i: getattr(seen, x)[i][0].numpy() for i in (0, 1)} for x in "qkv"), len(tokens)


# -- orders ------------------------------------------------------------------------------------------------------------------


def test_every_arm_keeps_what_its_policy_keeps(session, prompt, ranked):
    """One scoring and a cut at any budget, against the policy doing everything itself at that budget."""
    assert len(ranked.orders) == 9 + 4 and {o.arm.name for o in ranked.orders} == set(suite_orders.CRITERIA)
    for keep in SMALL.budgets:
        kept = ranked.kept(keep)
        assert bool((kept.sum(-1) == keep).all())
        for i, a in enumerate(ranked.arms):
            own = Prompting.evicted(session, dataclasses.replace(a, keep=keep), prompt)
            assert torch.equal(kept[:, i : i + 1], prompt.truth.kept(own)), (a.name, keep)
    assert len({tuple(o.score.flatten().tolist()) for o in ranked.orders}) >= 12  # /E and /D may agree, no others


def test_a_poisoned_future_changes_no_policys_kept_set(session, prompt, ranked):
    ahead = prompt.truth.ahead
    other = oracle.Future(ahead.tokens.flip(-1), ahead.valid, {i: -q.flip(2) for i, q in ahead.queries.items()})
    truth = oracle.of(session.model, prompt.cache, other)
    poisoned = suite_orders.ranked(session, dataclasses.replace(prompt, truth=truth))
    for keep in SMALL.budgets:
        for i, a in enumerate(ranked.arms):
            assert torch.equal(ranked.kept(keep)[:, i], poisoned.kept(keep)[:, i]) == (a.name != "oracle"), a.name


# -- measures ----------------------------------------------------------------------------------------------------------------


def test_agreement_is_each_arm_measured_alone(session, prompt, ranked):
    """Masks over the full cache against caches that were evicted, site by site."""
    rows = list(suite_rows.agreement(prompt, ranked, 48, True))
    for i, a in enumerate(ranked.arms):
        own = Prompting.evicted(session, a, prompt)
        error, (every, free) = prompt.truth.error(own), prompt.truth.recall(prompt.truth.kept(own), 48)
        at = dict(arm=a.name, draw=a.draw, keep=48)
        assert found(rows, "error", layer=1, **at) == pytest.approx(float(error[1].mean()), rel=1e-6)
        assert found([r for r in rows if "layer" not in r], "error", **at) == pytest.approx(float(error.mean()), rel=1e-6)
        assert found(rows, "recall", layer=1, head=0, **at) == pytest.approx(float(every[1, 0, 0]))
        assert found([r for r in rows if "layer" not in r], "recall_free", **at) == pytest.approx(float(free.mean()))


def test_errors_by_numpy_with_and_without_the_generated_keys(lm, session, prompt, ranked):
    q, k, v, t = captured(lm, prompt)
    n, kept = len(prompt.ids), ranked.kept(24)
    said = suite_answers.full(lm, prompt)
    for generated in (None, said.cache):
        mine = suite_rows.errors(prompt, kept, generated)
        for layer, arm, head in ((0, 0, 1), (1, 5, 2)):
            cos = []
            for u in range(t):
                last = n + u + 1 if generated else n
                z = k[layer][head // 2, :last] @ q[layer][head, n + u] * q[layer].shape[-1] ** -0.5
                stays = np.concatenate([kept[layer, arm, head // 2].numpy(), np.ones(last - n, dtype=bool)])
                full, part = (np.exp(z - z.max()) * m @ v[layer][head // 2, :last] for m in (np.ones(last), stays))
                cos.append(full @ part / np.linalg.norm(full) / np.linalg.norm(part))
            assert float(mine[layer, arm, head]) == pytest.approx(1 - np.mean(cos), abs=1e-9)
    assert not torch.allclose(suite_rows.errors(prompt, kept), suite_rows.errors(prompt, kept, said.cache))


def test_everything_kept_is_no_error(prompt):
    assert float(suite_rows.errors(prompt, torch.ones_like(prompt.truth.protected)).abs().max()) < 1e-12


def test_answers_are_those_of_an_evicted_cache(lm, session, prompt, ranked):
    rows = list(suite_answers.answers(session, prompt, ranked, 48, suite_answers.full(lm, prompt)))
    tokens = prompt.truth.ahead.tokens[0][prompt.truth.ahead.valid[0]]
    text, n = torch.cat([torch.as_tensor(prompt.ids), tokens])[None], len(prompt.ids)
    with torch.no_grad():
        p = lm.model(input_ids=text).logits[0, n:-1].log_softmax(-1)
        for name in ("CriticalKV", "LORE /D"):
            a = next(x for x in ranked.arms if x.name == name and x.draw == max(y.draw for y in ranked.arms if y.name == name))
            own = Prompting.evicted(session, a, prompt)
            assert found(rows, "logp", arm=name, draw=a.draw) == pytest.approx(session.answered(own.branch(1), prompt)[0]["logp"], rel=1e-9)
            logq = lm.model(input_ids=tokens[None, :-1], position_ids=torch.arange(n, n + len(tokens) - 1)[None], cache=own, use_cache=True).logits[0].log_softmax(-1)
            assert found(rows, "kl", arm=name, draw=a.draw) == pytest.approx(float((p.exp() * (p - logq)).sum(-1).mean()), rel=1e-6)


def test_likeness_by_sets(prompt, ranked):
    rows, kept = list(suite_rows.likeness(prompt, ranked, 48)), ranked.kept(48)
    at = {(a.name, a.draw): i for i, a in enumerate(ranked.arms)}
    i, j = at["window attention", 0], at["LORE /E", 1]
    want = np.mean([len(set(np.flatnonzero(kept[x, i, h])) & set(np.flatnonzero(kept[x, j, h]))) / 48 for x in (0, 1) for h in (0, 1)])
    assert found(rows, "overlap", arm="window attention", other="LORE /E", draw=1) == pytest.approx(want)
    same = [float((kept[:, at["single continuation", d]] & kept[:, at["LORE /E", d]]).sum()) / (48 * 4) for d in (0, 1)]
    assert found(rows, "overlap", arm="single continuation", other="LORE /E").tolist() == pytest.approx(same)  # each under its own sampling seed
    free = ~prompt.truth.protected[1, 0, 0]
    a, b = (pd.Series(ranked.orders[x].score[1, 0, 0][free].numpy()) for x in (j, at["oracle", 0]))
    mine = found([r for r in rows if r["arm"] == "LORE /E"], "spearman", other="oracle", layer=1, draw=1)
    other = pd.Series(ranked.orders[j].score[1, 0, 1][free].numpy()).corr(pd.Series(ranked.orders[at["oracle", 0]].score[1, 0, 1][free].numpy()), method="spearman")
    assert mine == pytest.approx((a.corr(b, method="spearman") + other) / 2)


def test_profiles_and_energy(lm, prompt, ranked):
    rows = list(suite_rows.profiles(prompt, ranked))
    one = next(o for o in ranked.orders if o.arm.name == "LORE /E")
    free = ~prompt.truth.protected[0, 0, 0]
    s = np.sort(one.score[:, 0][:, :, free].numpy(), axis=-1)[..., ::-1]
    assert found(rows, "share", arm="LORE /E", draw=0, top=0.1) == pytest.approx((s[..., : round(0.1 * free.sum().item())].sum(-1) / s.sum(-1)).mean())
    energy = list(suite_rows.energies(lm, prompt, oracle.ANALYSIS))
    pair = [found(energy, "energy", layer=1, head=h)[0] for h in (2, 3)]
    assert np.mean(pair) == pytest.approx(float(prompt.truth.score[1, 0, 1].sum()), rel=1e-9)  # S* is the mean over the group
    assert found(energy, "energy_free", layer=1, head=1) == pytest.approx(float(prompt.truth.score[1, 0, 1][free].sum()), rel=1e-9)


# -- deletions ---------------------------------------------------------------------------------------------------------------


def hidden(lm, prompt, target):
    """Logits of the future's tokens but the first by one plain forward, in which they do not see a position in the layers and heads of a deletion."""
    tokens = prompt.truth.ahead.tokens[0][prompt.truth.ahead.valid[0]]
    text, n = torch.cat([torch.as_tensor(prompt.ids), torch.as_tensor(prompt.tail, dtype=tokens.dtype), tokens])[None], len(prompt.ids)
    hooks = []
    for i, layer in enumerate(lm.model.model.layers):
        mask = torch.ones(len(text[0]), len(text[0]), dtype=torch.bool).tril()[None].repeat(4, 1, 1)
        if target.site is None or target.site[0] == i:
            heads = slice(None) if target.site is None else slice(2 * target.site[1], 2 * target.site[1] + 2)
            mask[heads, n:, target.position] = False
        hooks.append(layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs, mask=mask: (args, kwargs | dict(attention_mask=mask[None])), with_kwargs=True))
    try:
        with torch.no_grad():
            return lm.model(input_ids=text).logits[0, n + len(prompt.tail) : -1]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("question", ["seen", "unseen"])
def test_a_deletion_costs_what_hiding_the_token_costs(lm, session, question):
    """Against masks on the full text; all sites at once and a single site; predictions are sums of S* over the queries that the costs come from."""
    session = module.start(dataclasses.replace(session.config, question=question), lm)
    prompt = session.read(0)
    rows = list(suite_deletions.rows(session, prompt, suite_answers.full(lm, prompt)))
    prompt = suite_deletions.shortened(prompt, 4)
    assert prompt.truth.ahead.valid.sum() == 4
    full = hidden(lm, prompt, suite_deletions.Target(0, "none", (5, 0))).log_softmax(-1)  # no such layer: nothing is hidden
    tokens = prompt.truth.ahead.tokens[0][prompt.truth.ahead.valid[0]][1:, None]
    assert 0 <= found(rows, "kl_noise").item() < 1e-12
    true = [r for r in rows if r["metric"] == "kl_deleted"]
    assert len(true) == 12 + 4 + 2 * 4 and max(r["value"] for r in true) > 1e-8
    for r in (true[3], true[13], true[16], true[-1]):
        site = (r["layer"], r["head"]) if "layer" in r else None
        q = hidden(lm, prompt, suite_deletions.Target(r["position"], "", site)).log_softmax(-1)
        at = {k: r[k] for k in ("position", "sample", "layer", "head") if k in r}
        assert r["value"] == pytest.approx(float((full.exp() * (full - q)).sum(-1).mean()), rel=1e-4, abs=1e-13)
        assert found(rows, "logp_lost", **at) == pytest.approx(float((full - q).gather(-1, tokens).mean()), rel=1e-6, abs=1e-13)
        ahead = dataclasses.replace(prompt.truth.ahead, valid=prompt.truth.ahead.valid & (torch.arange(len(prompt.truth.ahead.valid[0])) < 3))
        score = oracle.score(lm, prompt.cache, ahead)[:, 0, :, r["position"]]
        assert found(rows, "predicted_magnitude", **at) == pytest.approx(2 * float(score.sum() if site is None else score[site]), rel=1e-9)  # S* is a mean over two query heads


def test_which_tokens_are_deleted(prompt):
    score, protected = prompt.truth.score[:, 0], prompt.truth.protected[:, 0]
    made = suite_deletions.chosen(score, protected, 10, 5, 1, 6)
    even, top = ([t.position for t in made if t.sample == s] for s in ("even", "top"))
    free = np.flatnonzero(~protected[0, 0])
    assert len(even) == 10 and set(even) <= set(free) and np.ptp(np.diff(even)) <= 2 and even[0] - free[0] <= len(free) / 10
    total = score.sum((0, 1)).numpy()
    assert len(top) == 5 and min(total[top]) >= max(total[p] for p in free if p not in {*even, *top})
    for head in (0, 1):
        high = [t.position for t in made if t.sample == "site, top" and t.site == (1, head)]
        assert len(high) == 3 and min(score[1, head, high]) >= score[1, head, free].sort(descending=True).values[2]
        assert sum(t.site == (1, head) for t in made) == 6
    few = suite_deletions.chosen(score, protected, 10_000, 5, 1, 0)
    assert [t.position for t in few] == free.tolist()


def test_a_protected_token_is_not_deleted(prompt):
    with pytest.raises((RuntimeError, ValueError)):
        suite_deletions.deleted(prompt, [suite_deletions.Target(0, "even")])


def test_the_full_cache_is_measured_too(session, prompt, lm):
    """Known fault H18: what even the full cache cannot answer shows before anything is compared. Against one plain forward."""
    rows = [r for r in suite_answers.uncompressed(session, prompt, [24, 48]) if r["keep"] == 48]
    answer = torch.as_tensor(prompt.task.answer_ids)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.cat([torch.as_tensor(prompt.ids), answer])[None]).logits[0, len(prompt.ids) : -1].double().log_softmax(-1)
    counts = torch.as_tensor(prompt.task.scored[1:])
    assert found(rows, "logp").item() == pytest.approx(float(logits.gather(-1, answer[1:, None])[:, 0][counts].sum()), rel=1e-9)
    assert found(rows, "retrieved").item() == float((logits.argmax(-1) == answer[1:])[counts].all())


def test_copies_of_a_prompts_cache_are_bounded_in_bytes(lm, session, prompt, ranked, monkeypatch):
    """A long prompt is answered by few rows at a time, and says the same."""
    each = sum(prompt.cache.layers[i].keys.nbytes + prompt.cache.layers[i].values.nbytes for i in (0, 1))
    said, batches = suite_answers.full(lm, prompt), []
    whole = list(suite_answers.answers(session, prompt, ranked, 48, said))
    branch = type(prompt.cache).branch
    monkeypatch.setattr(type(prompt.cache), "branch", lambda self, repeats=1, **more: batches.append(repeats) or branch(self, repeats, **more))
    monkeypatch.setattr(suite_answers, "COPIED_BYTES", 3 * each + 1)
    few = list(suite_answers.answers(session, prompt, ranked, 48, said))
    assert suite_answers.rows_at_once(prompt.cache, 16) == 3 and suite_answers.rows_at_once(prompt.cache, 2) == 2 and max(batches) == 3
    assert [{**r, "value": 0} for r in few] == [{**r, "value": 0} for r in whole] and np.allclose([r["value"] for r in few], [r["value"] for r in whole], atol=1e-9)
    monkeypatch.setattr(suite_answers, "COPIED_BYTES", 0)
    assert suite_answers.rows_at_once(prompt.cache, 16) == 1
