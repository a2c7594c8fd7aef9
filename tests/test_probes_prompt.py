"""reliability_plane and latency at smoke scale in float64: mixtures against the policy itself, rows against numbers made in other ways."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import kvprobe
from kvprobe import compression, lookahead, oracle, reliability, runner, weighing, weighing_tables
from kvprobe.figures import latency as latency_figure
from kvprobe.figures import reliability_plane as plane_figure
from kvprobe.models import load
from kvprobe.prompting import CHANCE, Prompting
from kvprobe.probes import latency, reliability_plane
from kvprobe.weighing_tables import PARTICLE, PLANE

FAR = 1_000_003  # between sampling seeds
SMALL = dict(dtype="float64", progress=False)


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    """The finished smoke run, its figure drawn by a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        return kvprobe.run("reliability_plane", preset="smoke", out=tmp_path_factory.mktemp("runs") / "plane", **SMALL)


@pytest.fixture(scope="module")
def session(lm):
    config = dataclasses.replace(reliability_plane.PRESETS["smoke"], dtype="float64")
    return reliability_plane.start(config, lm)


@pytest.fixture(scope="module")
def prompt(session):
    return session.read(1)


def of(rows, **where):
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


# -- reliability_plane: weights change only the mixture --------------------------------------------------------------------


def recorded(policy):
    """The policy, noting every layer's score."""
    seen = {}

    class Noting:
        needs, level = policy.needs, policy.level

        def score(self, view):
            seen[view.layer] = policy.score(view)
            return seen[view.layer]

    return Noting(), seen


def test_mixtures_are_the_policys_own_scores(session, prompt):
    """Every arm and seed: scores and kept entries of `lore` itself, which walks over the keys with all its queries and mixes inside."""
    mine = [a for a in session.arms if a.ahead]
    assert len(mine) == 2 * 13
    for a in mine:
        future = a.policy.weigh(prompt.draws[a.draw])
        noting, seen = recorded(a.policy)
        own = session.evict(prompt.cache, a, noting, future)
        mixed = session._walks[a.draw].mixed(future.weights[0], a.policy.lam_l)
        assert torch.allclose(mixed, torch.stack([seen[i] for i in sorted(seen)]), rtol=1e-10, atol=0), a.name
        assert torch.equal(session.evicted(a, prompt).positions, own.positions), a.name
    kept = {a.name: tuple(session.evicted(a, prompt).positions.flatten().tolist()) for a in mine if not a.draw}
    assert len(set(kept.values())) >= 6


def test_an_arm_is_what_compress_makes(lm, session, prompt):
    for name, options in (("/D", dict(m=3, beta=1.0, gamma=1.0, lam_d=0.3)), ("/E, worst left out", dict(m=3, drop_worst=1)), ("a single one", dict(m=1))):
        for draw in (0, 1):
            a = next(a for a in session.arms if (a.name, a.draw) == (name, draw))
            own = compression.compress(lm, [prompt.ids.tolist()], policy="lore", keep=96, protect_window=8, window=8, t=2, chunk=1, form="magnitude", seed=draw * FAR, instances=[1], **options)
            assert torch.equal(session.evicted(a, prompt).positions, own.cache.positions)


def test_hard_filtering(prompt):
    """The worst by its own reliability has no weight, the others weigh alike; drawn again the worst may be another."""
    for draw, found in prompt.draws.items():
        policy = weighing.Hard(window=8, m=3, t=2)
        future = policy.weigh(found)
        c, h = (x[0, :3, :2].mean(-1) for x in (found.logq + found.entropy, found.entropy))
        assert future.weights[0].tolist() == [0.0 if m == int((c - 1.3 * h).argmin()) else 0.5 for m in range(3)]


def test_spread_of_weights():
    assert weighing.spread(torch.tensor([0.5, 0.25, 0.25, 0.0])) == {"max_weight": 0.5, "effective": pytest.approx(1 / 0.375)}


def test_the_plane_by_hand(session, prompt, plane):
    """One point: weights from the sampled tokens' own numbers, the entries it keeps by sorting."""
    b, g, d = 1.0, 1.3, 0.3
    for draw in (0, 1):
        found, truth, walk = prompt.draws[draw], prompt.truth, session._walks[draw]
        c, h = ((x[0, :3] * found.valid[0, :3]).sum(-1) / found.valid[0, :3].sum(-1) for x in (found.logq + found.entropy, found.entropy))
        unit = torch.stack([torch.nn.functional.normalize(q[0, :3].double(), dim=-1) for q in found.queries.values()])  # [l m h t d]
        away = 1 - torch.einsum("lmhtd,lrhtd->lmrht", unit, unit).mean((0, 3, 4))
        away = away.sum(-1) / 2
        r = b * c - g * h - d * (away - away.mean()) / away.std(correction=0)
        w = r.exp() / r.exp().sum()
        scores = (walk.window + sum(x * psi for x, psi in zip(w, walk.each))).numpy()
        held, best = truth.protected.numpy(), truth.best(96).numpy()
        shares = []
        for site in np.ndindex(scores.shape[:3]):
            order = sorted(range(scores.shape[-1]), key=lambda p: (not held[site][p], -scores[site][p], -p))
            shares.append(len(set(order[:96]) & set(np.flatnonzero(best[site] & ~held[site]))) / (best[site] & ~held[site]).sum())
        point = of(plane.rows, arm=PLANE, instance=1, draw=draw, beta=b, gamma=g, lam_d=d).set_index("metric").value
        assert point["recall_free"] == pytest.approx(np.mean(shares), abs=1e-12)
        assert point["effective"] == pytest.approx(1 / float((w**2).sum()), rel=1e-9) and point["max_weight"] == pytest.approx(float(w.max()), rel=1e-9)


def test_particles(lm, session, prompt, plane):
    """Signals from the draw itself and utility from the oracle's own function, for each continuation of the whole draw."""
    for draw in (0, 1):
        found = lookahead.sample(lm, prompt.cache, prompt.logits, 4, 2, seed=draw * FAR, eos=(lm.tokenizer.eos_token_id,))
        assert torch.equal(found.tokens, prompt.draws[draw].tokens)
        every, free = oracle.utility(lm, prompt.cache, found, prompt.truth, 96)
        rows = of(plane.rows, arm=PARTICLE, instance=1, draw=draw).pivot(index="particle", columns="metric", values="value")
        assert rows.recall.tolist() == pytest.approx(every[0].tolist()) and rows.recall_free.tolist() == pytest.approx(free[0].tolist())
        steps = [int(n) for n in found.valid[0].sum(-1)]
        for name, x in (("entropy", found.entropy), ("varentropy", found.variance), ("typicality", found.logq + found.entropy)):
            assert rows[name].tolist() == pytest.approx([float(own[:n].mean()) for own, n in zip(x[0], steps)])
        assert rows["/E"].tolist() == pytest.approx((rows.typicality - 1.3 * rows.entropy).tolist())
        assert rows.normalised.tolist() == pytest.approx((rows.typicality / (rows.varentropy / steps) ** 0.5).tolist())
        assert rows["/D"].tolist() == pytest.approx((rows.typicality - rows.entropy - 0.3 * (rows.disagreement - rows.disagreement.mean()) / rows.disagreement.std(ddof=0)).tolist())


def test_coverage_by_hand(session, prompt, plane):
    """Best cosines one future query at a time; the mixture by weights, the union over what has any."""
    found, future = prompt.draws[0], prompt.truth.ahead
    best = [[max(float(torch.nn.functional.cosine_similarity(future.queries[layer][0, h, f], found.queries[layer][0, m, h, t], dim=0)) for t in range(2) if found.valid[0, m, t])
             for layer in sorted(found.queries) for h in range(4) for f in range(future.tokens.shape[1]) if future.valid[0, f]] for m in range(3)]
    best = np.array(best)
    for name, weights in (("uniform", [1 / 3] * 3), ("uniform, one left out at random", [0.5, 0.5, 0]), ("a single one", [1, 0, 0])):
        own = of(plane.rows, arm=name, instance=1, draw=0).set_index("metric").value
        assert own["coverage_mixture"] == pytest.approx((np.array(weights) @ best).mean()) and own["coverage_union"] == pytest.approx(best[np.array(weights) > 0].max(0).mean())


@pytest.fixture(scope="module")
def tables(plane):
    """Made once: each table is some thousand draws."""
    return {name: getattr(weighing_tables, name)(plane.rows, plane.manifest) for name in ("summary", "plane", "correlations")}


def test_tables_of_the_plane(plane, tables):
    rows, manifest = plane.rows, plane.manifest
    s = tables["summary"].set_index(["arm", "metric"])
    by = rows[(rows.metric == "error")].groupby(["arm", "instance"]).value.mean().unstack()
    assert s.loc[("/D", "error"), "gap"] == pytest.approx((by.loc["/D"] - by.loc["uniform"]).mean()) and s.loc[("/D", "error"), "n"] == 2
    assert (s.loc["uniform"].gap == 0).all() and s.loc[("uniform", "effective"), "value"] == pytest.approx(3)
    points = tables["plane"]
    assert len(points) == 12 and of(points, beta=0, gamma=0, lam_d=0).gap.item() == pytest.approx(0, abs=1e-12)
    rhos = tables["correlations"].set_index(["utility", "signal"])
    wide = rows[rows.arm == PARTICLE].pivot_table(index=["instance", "draw", "particle"], columns="metric", values="value")
    for signal in ("entropy", "/D"):
        want = [scipy.stats.spearmanr(own[signal], own.recall_free).statistic for _, own in wide.groupby(level=0)]
        assert all(len(own) == 8 for _, own in wide.groupby(level=0)) and rhos.loc[("recall_free", signal), "rho"] == pytest.approx(np.mean(want))
    assert plane.ok and len(s) == 2 + 3 * 5 + 13 * 9


def test_a_signal_that_never_varies_has_no_rho(plane):
    rows = plane.rows.copy()
    rows.loc[(rows.arm == PARTICLE) & (rows.metric == "entropy") & (rows.instance == 0), "value"] = 1.0
    found = weighing_tables.correlations(rows, plane.manifest).set_index(["utility", "signal"])
    assert found.loc[("recall_free", "entropy"), "n"] == 1 and found.loc[("recall_free", "varentropy"), "n"] == 2


def numbers_on(figure) -> set[float]:
    """Every number that a figure's marks stand at."""
    out = set()
    for ax in figure.axes:
        for line in ax.lines:
            out |= set(np.round(np.concatenate([line.get_xdata(), line.get_ydata()]).astype(float), 9))
        out |= {round(float(p.get_width()), 9) for p in ax.patches}
        for image in ax.images:
            out |= set(np.round(np.asarray(image.get_array(), dtype=float).ravel(), 9))
    return out


def test_figure_of_the_plane(plane, tables, monkeypatch):
    for name, made in tables.items():
        monkeypatch.setattr(plane_figure, name, lambda rows, manifest, made=made: made)
    table = plane_figure.reduce(plane.rows, plane.manifest)
    figure = plane_figure.draw(table, plane.manifest)
    drawn = numbers_on(figure)
    arms, signals, points = (table[table.part == p] for p in ("arms", "signals", "plane"))
    gaps = arms[(arms.metric != "effective") & (arms.arm != "uniform")].gap
    assert set(gaps.round(9)) <= drawn and set(points.gap.round(9)) <= drawn and set(signals.value.dropna().round(9)) <= drawn
    assert {"nats" in ax.get_xlabel() for ax in figure.axes} == {True, False}


def test_plane_settings():
    assert reliability_plane.decimals("betas", "0, 1.3") == [0.0, 1.3]
    smoke = reliability_plane.PRESETS["smoke"]
    for bad, says in ((dict(betas="x"), "betas='x'"), (dict(gammas="1,1"), "different numbers"), (dict(disagreements="-1"), "at least 0"), (dict(m=5), "m=5"), (dict(m=1), "m=1"), (dict(keeps="64,96"), "at one budget")):
        with pytest.raises(ValueError, match=says):
            dataclasses.replace(smoke, **bad)
    assert reliability.Weighting(1.0, 1.3, 0.3) in smoke.plane and len(smoke.plane) == 12


# -- latency ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        return kvprobe.run("latency", preset="smoke", out=tmp_path_factory.mktemp("runs") / "latency", **SMALL)


def test_every_stage_is_timed(timed):
    ahead = {"laq(t=2)", "lore(chunk=1,m=2,t=2)"}
    for name in ("full", "random", "snapkv", "andpro(chunk=1)", *ahead):
        rows = of(timed.rows, arm=name)
        rows = rows[rows.metric.isin(latency.STAGES)]
        want = {"prefill", "decode"} | ({"scoring", "gather"} if name != "full" else set()) | ({"lookahead"} if name in ahead else set())
        assert set(rows.metric) == want and (rows.value > 0).all() and (rows.unit == "s").all()
        assert (rows.groupby(["instance", "repeat", "metric"]).size() == 1).all() and len(rows) == 2 * 2 * len(want)


def test_what_is_timed_is_what_is_measured(timed):
    """Also for LAQ, whose first stage evicts by the arm's own plan."""
    same = of(timed.rows, metric="same")
    assert len(same) == 5 * 2 * 2 and (same.value == 1).all() and timed.ok
    assert "laq(t=2)" in set(same.arm)


def test_laqs_first_stage_evicts(lm):
    config = dataclasses.replace(latency.PRESETS["smoke"], dtype="float64", policies="andpro(chunk=1),laq(t=4)", instances=1)
    session = latency.start(config, lm)
    prompt, a = session.read(0), session.arms[-1]
    found = session.ahead_of(a, prompt)
    first = compression.compress(lm, [prompt.ids.tolist()], policy="snapkv", keep=96, protect_window=8, window=8, kernel=7, pooling="max")
    want = first.ask("", max_new_tokens=4, ignore_eos=True)
    assert found.tokens[0, 0].tolist() == want.tokens[0].tolist()
    full = kvprobe.capture(lm, torch.cat([torch.as_tensor(prompt.ids)[None], found.tokens[0]], dim=1), what="q")
    assert any(not torch.allclose(q[0, 0], full.q[i][0, :, -4:]) for i, q in found.queries.items())  # as no full cache would ask


def test_arms_take_turns(lm):
    session = latency.start(dataclasses.replace(latency.PRESETS["smoke"], dtype="float64", repeats=3), lm)
    turns = [[a.name for a in session._turn(batch, repeat)] for batch in range(2) for repeat in range(3)]
    assert all(sorted(t) == sorted(turns[0]) and len(t) == 6 for t in turns) and len({tuple(t) for t in turns}) == 6 and len({t[0] for t in turns}) >= 4


def fake():
    """Times of two prompts in three repeats, one of them disturbed."""
    rows = []
    for i, scale in ((0, 1.0), (1, 3.0)):
        for arm, stages in (("full", dict(prefill=1.0, decode=2.0)), ("andpro", dict(prefill=0.8, scoring=0.5, gather=0.1, decode=1.6)), ("lore", dict(prefill=1.0, lookahead=2.0, scoring=0.4, gather=0.2, decode=2.4))):
            for repeat, slow in enumerate((1.0, 40.0, 1.0)):
                rows += [dict(arm=arm, instance=i, repeat=repeat, draw=0, metric=m, value=v * scale * slow, unit="s") for m, v in stages.items()]
            rows += [dict(arm=arm, instance=i, repeat=np.nan, draw=0, metric=m, value=-scale, unit="") for m in ("logp", "recall", "recall_free")]
    rows.append(dict(arm=CHANCE, instance=0, repeat=np.nan, draw=0, metric="recall", value=0.1, unit="fraction"))
    return pd.DataFrame(rows), {"settings": dict(seed=0, reference="andpro", instances=2, repeats=3, decode=4, keeps="96")}


def test_ratios_by_hand():
    """Medians over repeats, zeros for stages that an arm has not, ratios of sums over prompts."""
    rows, manifest = fake()
    s = latency.summary(rows, manifest).set_index("arm")
    assert list(s.index) == ["full", "andpro", "lore"]
    assert s.loc["lore", "of_reference"] == pytest.approx(6.0 / 3.0) and s.loc["full", "of_reference"] == pytest.approx(1.0) and s.loc["andpro", "of_reference"] == 1
    assert s.loc["lore", "of_plain"] == pytest.approx(3.6) and s.loc["andpro", "of_plain"] == pytest.approx(1.6) and s.loc["full", "of_plain"] == 1
    assert s.loc["lore", "lookahead"] == pytest.approx(4.0) and s.loc["full", "lookahead"] == 0 and s.loc["lore", "logp"] == -2
    assert latency.plain_spread(rows) == pytest.approx(40.0)
    table = latency.report_table(rows, manifest).set_index("arm")
    assert table.loc["lore", "lookahead [ms]"] == "4000.0" and table.loc["lore", "total / andpro"].startswith("2.000 [2.000, 2.000]")


def test_figure_of_latency(timed):
    table = latency_figure.reduce(timed.rows, timed.manifest)
    figure = latency_figure.draw(table, timed.manifest)
    drawn = numbers_on(figure)
    shown = table[table.total.notna()]
    assert set(shown[list(latency.STAGES)].to_numpy().ravel().round(9)) <= drawn
    assert set(shown.of_reference.round(9)) <= drawn and set(shown.logp.round(9)) <= drawn
    assert any("[s]" in ax.get_xlabel() for ax in figure.axes)


@pytest.mark.parametrize("bad, says", [(dict(reference="rkv"), "one of the policies"), (dict(policies="full,random", reference="random"), "without being named"), (dict(repeats=0), "repeats=0"),
                                       (dict(decode=0), "decode=0"), (dict(keeps="64,96"), "one budget")])
def test_latency_refuses(bad, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(latency.PRESETS["smoke"], **bad)


def test_greedy_look_ahead_is_timed_and_measured_once(lm):
    session = latency.start(latency.PRESETS["smoke"], lm)
    counts = {a.name: sum(b.name == a.name for b in session.arms) for a in session.arms}
    assert counts == {"full": 1, "oracle": 1, "random": 2, "snapkv": 1, "andpro(chunk=1)": 1, "laq(t=2)": 1, "lore(chunk=1,m=2,t=2)": 2} and len(session.timed) == 6
    assert isinstance(session, Prompting)
