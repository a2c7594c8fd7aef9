"""The oracle suite: orders against the policies' own evictions, measures against plain recomputation, no leak from the future, figures against their tables."""

import dataclasses
import io
import re

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe
from kvprobe import oracle, runner
from kvprobe.metrics import fidelity
from kvprobe.suite import answers as suite_answers, deletions as suite_deletions, orders as suite_orders, pieces as suite_pieces, rows as suite_rows, tables as suite_tables
from kvprobe.models import load
from kvprobe.prompting import CHANCE, Prompting
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # figures are drawn one by one below
        patch.setattr(runner, "save_figures", lambda *a: [])
        return kvprobe.run("oracle_suite", preset="smoke", out=tmp_path_factory.mktemp("suite") / "run", progress=False)


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


def test_predictions_are_ranked_within_prompts(run):
    made, table = suite_tables.deletions(run.rows), suite_tables.predictions(run.rows, 0)
    assert len(made) == 2 * (12 + 4 + 8)
    own = made[made["sample"] == "even"]
    want = np.mean([part.predicted_squared.corr(part.kl_deleted, method="spearman") for _, part in own.groupby("instance")])
    r = table[(table.kind == "all sites at once") & (table.predictor == "predicted_squared") & (table.cost == "kl_deleted")].iloc[0]
    assert r.value == pytest.approx(want) and r.n == 2


# -- a run -------------------------------------------------------------------------------------------------------------------


def test_pieces_are_an_independent_decodes_queries_and_the_rows_sources(run):
    """float32: the stored queries against one plain forward; coverage, recall and classes by numpy from pieces alone."""
    piece = suite_pieces.Pieces.load(run.path / "keeplogs" / "batch-0001.npz")
    lm32, a = load("tiny"), piece.arrays
    n, tokens = len(a["ids"]), a["future.tokens"][a["future.valid"]]
    seen = kvprobe.capture(lm32, torch.as_tensor(np.concatenate([a["ids"], tokens]))[None], layers=[0, 1])
    for layer in (0, 1):
        q = seen.q[layer][0].numpy()
        assert np.allclose(a[f"queries.{layer}.future"][:, : len(tokens)], q[:, n:], atol=2e-5) and np.allclose(a[f"queries.{layer}.window"], q[:, n - 8 : n], atol=2e-5)
    rows = run.rows[run.rows.instance == 1]

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    cos = unit(a["queries.1.future"][:, : len(tokens)]) @ unit(a["queries.1.window"]).transpose(0, 2, 1)
    own = rows[(rows.metric == "coverage") & (rows.layer == 1)]
    assert own[own.sets == "window"].value.item() == pytest.approx(cos.max(-1).mean(), abs=1e-5)
    sampled = np.concatenate([unit(a["queries.1.draw.1"][m])[:, a["draw.1.valid"][m]] for m in range(2)], axis=1)
    both = np.concatenate([cos, unit(a["queries.1.future"][:, : len(tokens)]) @ sampled.transpose(0, 2, 1)], axis=-1).max(-1).mean()
    assert own[(own.sets == "both") & (own.form == "union") & (own.m == 2) & (own.draw == 1)].value.item() == pytest.approx(both, abs=1e-5)
    kept, best = piece.kept("LORE /E", 1), piece.kept("oracle")
    told = suite_tables.means_of(rows)
    assert told[(told.metric == "recall") & (told.arm == "LORE /E") & (told.draw == 1) & (told["keep"] == 48)].value.item() == pytest.approx((kept & best).sum() / best.sum())
    sink = rows[(rows.metric == "fraction") & (rows.cls == "sink")]
    assert (sink.value == 1).all() and kept[..., 0].all()


def test_bytes_are_reckoned(run):
    s = module.start(module.PRESETS["smoke"], load("tiny"))
    used = sum(p.stat().st_size for p in [run.path / "rows.jsonl", *(run.path / "keeplogs").iterdir()])
    assert used < s.bytes_needed < 4 * used + 10_000_000


def test_floor_and_ceiling(run):
    means = suite_tables.means_of(run.rows)
    recall = means[means.metric.isin(["recall", "recall_free"])]
    assert (recall[recall.arm == "oracle"].value == 1).all() and run.ok
    for metric, keep in (("recall", 96), ("recall_free", 96), ("recall", 24)):
        part = recall[(recall.metric == metric) & (recall["keep"] == keep)]
        assert part[part.arm == "random"].value.mean() == pytest.approx(part[part.arm == CHANCE].value.mean(), abs=0.03)  # 2 prompts x 2 seeds x 4 sites
    n = run.rows[run.rows.metric == "tokens"].set_index("instance").value
    want = fidelity.random_recall(int(n[0]), 96, 9)
    assert tuple(recall[(recall.arm == CHANCE) & (recall["keep"] == 96) & (recall.instance == 0)].sort_values("metric").value) == want


def test_a_run_goes_on_where_a_prompt_was_lost(run, tmp_path, monkeypatch):
    import shutil

    again = tmp_path / "run"
    shutil.copytree(run.path, again)
    (again / "keeplogs" / "batch-0001.npz").write_bytes(b"torn")
    done, compute = [], module.Session.compute
    monkeypatch.setattr(module.Session, "compute", lambda self, batch, *a: done.append(batch) or compute(self, batch, *a))
    monkeypatch.setattr(runner, "save_figures", lambda *a: [])
    other = kvprobe.run("oracle_suite", preset="smoke", out=again, progress=False)
    assert done == [1] and (again / "rows.jsonl").read_text() == (run.path / "rows.jsonl").read_text() and other.ok
    kept = [suite_pieces.Pieces.load(p / "keeplogs" / "batch-0001.npz").kept("LORE /D", 1) for p in (again, run.path)]
    assert np.array_equal(*kept)


def test_tables_are_means_over_seeds_then_prompts(run):
    part = run.rows[(run.rows.metric == "error") & (run.rows.arm == "random") & (run.rows["keep"] == 48) & run.rows.layer.isna()]
    by_prompt = part.groupby("instance").value.mean()
    row = suite_tables.headline(run.rows, run.manifest).set_index(["metric", "arm"]).loc[("error", "random")]
    assert row.value == pytest.approx(by_prompt.mean()) and row.n == 2 and (row.low, row.high) == pytest.approx((by_prompt.min(), by_prompt.max()))
    assert set(run.table.criterion) == {*suite_orders.CRITERIA, suite_orders.FULL, CHANCE}


def test_curves_take_prompts_of_twice_the_largest_budget(run):
    rows = pd.DataFrame([dict(instance=i, metric="tokens", value=v) for i, v in ((0, 179), (1, 180), (2, 400))] + [dict(instance=i, metric="error", value=0.5) for i in range(3)])
    assert set(suite_tables.long_enough(rows, 90).instance) == {1, 2}
    n = run.rows[run.rows.metric == "tokens"].value.min()
    assert set(suite_tables.long_enough(run.rows, int(n // 2) + 1).instance) == {int(run.rows[(run.rows.metric == "tokens") & (run.rows.value > n)].instance.iloc[0])}


def drawn(figure):
    """Every number that lines, points, bands and maps of a figure show; a line's other axis may be the value's, so that one of both has to be known."""
    out = []
    for ax in figure.axes:
        upright = ax.get_ylabel() == "layer" or ax.yaxis_inverted()  # layers go down
        out += [x for image in ax.get_images() for x in np.ma.compressed(np.ma.masked_invalid(image.get_array()))]
        for line in ax.get_lines():
            if line.get_transform().contains_branch(ax.transData) and line.get_transform() == ax.transData:
                out += list(np.asarray(line.get_xdata() if upright else line.get_ydata(), dtype=float))
        for made in ax.collections:
            if type(made).__name__ == "PathCollection":
                out += list(np.asarray(made.get_offsets(), dtype=float)[:, 1])
            elif "PolyCollection" in type(made).__name__ or "FillBetween" in type(made).__name__:
                out += [v for path in made.get_paths() for v in path.vertices[:, 0 if upright else 1]]
        out += [v for patch in ax.patches if type(patch).__name__ == "Rectangle" and ax.get_legend_handles_labels() for v in (patch.get_y(), patch.get_y() + patch.get_height()) if v not in (0, 1)]
    return np.array([x for x in out if np.isfinite(x)])


def written(figure):
    """Numbers of the texts inside the axes, as strings, e.g. of "0.38\\n[0.37, 0.39]"."""
    return [x for ax in figure.axes for t in ax.texts for x in re.findall(r"-?\d+\.\d+", t.get_text())]


def labelled(ax) -> bool:
    """Both axes say what they show, the quantity with its unit; categories name themselves."""
    def says(text, ticks) -> bool:
        return "[" in text or any(word in text for word in ("rho", "layer", "head", "continuations M", "variance", "class", "closed-form cost")) or any(re.search("[a-z]{4}", t.get_text()) for t in ticks)

    below = [other.get_xlabel() for other in ax.figure.axes if other is ax or ax.get_shared_x_axes().joined(ax, other)]
    return says(ax.get_ylabel(), ax.get_yticklabels()) and says(" ".join(below), ax.get_xticklabels())


@pytest.mark.parametrize("name", runner.figures_of("oracle_suite"))
def test_every_drawn_value_is_in_the_table(run, name):
    from kvprobe import registry

    figure_module = registry.find("figure", name)
    table = figure_module.reduce(run.rows, run.manifest)
    figure = figure_module.draw(table, run.manifest)
    known = table.select_dtypes("number").to_numpy().ravel()
    known = np.sort(known[np.isfinite(known)])
    values = drawn(figure)
    near = np.abs(known[np.clip(np.searchsorted(known, values), 0, len(known) - 1)] - values)
    before = np.abs(known[np.clip(np.searchsorted(known, values) - 1, 0, len(known) - 1)] - values)
    assert len(values) and np.minimum(near, before).max() < 1e-9
    rounded = {f"{v:z.{d}f}" for v in known for d in (2, 3)}
    assert set(written(figure)) <= rounded and (name != "retention_shift" or len(written(figure)) > 100)
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes if ax not in bars and not labelled(ax)] == []
    assert all(bar.get_xlabel() or bar.get_ylabel() for bar in bars) and "n = " in figure.get_suptitle()
    assert "95 %" in "".join(t.get_text() for t in figure.texts)
    figure.savefig(io.BytesIO(), dpi=40)


def layered(rows):
    """Of each prompt: rows whose means by layer rise with mismatch, and with the gain in fidelity of /E over the window only."""
    for _, own in rows.groupby("instance"):
        seen = own[(own.metric == "coverage") & (own.sets == "window")]
        error = own[(own.metric == "error") & (own["keep"] == 48) & own.layer.notna() & own.arm.isin(["LORE /E", "window only"])]
        weight = error.arm.map({"LORE /E": -1.0, "window only": 1.0}) / error.groupby(["arm", "layer"]).value.transform("size")
        yield seen.assign(value=-seen.value), error.assign(value=weight * error.value * 2)


def test_mismatch_is_gain_against_coverage(run):
    from kvprobe.figures import mismatch

    table, rows = mismatch.reduce(run.rows, run.manifest), run.rows
    own = rows[(rows.instance == 1) & (rows.metric == "coverage")]
    p = table[(table.part == "prompt") & (table.instance == 1)].iloc[0]
    assert p.mismatch == pytest.approx(1 - own[own.sets == "window"].value.mean())
    assert p.added == pytest.approx(own[(own.sets == "both") & (own.form == "union") & (own.m == 2)].value.mean() - own[own.sets == "window"].value.mean())
    means = suite_tables.means_of(rows[(rows.instance == 1) & (rows["keep"] == 48)])
    error, recall = ({a: means[(means.metric == m) & (means.arm == a)].value.mean() for a in ("LORE /E", "window only")} for m in ("error", "recall_free"))
    assert p.fidelity == pytest.approx(error["window only"] - error["LORE /E"]) and p.recall_free == pytest.approx(recall["LORE /E"] - recall["window only"])
    each = [np.sign(np.prod([np.diff(own.groupby("layer").value.mean())[0] for own in pair])) for pair in layered(rows)]
    layers = table[(table.part == "layers") & (table.x == "mismatch") & (table.y == "fidelity")].iloc[0]
    assert layers.value == pytest.approx(np.mean(each)) and layers.p == (0.5 if abs(np.sum(each)) == 2 else 1) and layers.n == 2
    rho = table[(table.part == "rho") & (table.x == "mismatch") & (table.y == "fidelity")].iloc[0]
    pair = table[table.part == "prompt"]
    assert rho.value == np.sign(np.diff(pair.mismatch)[0] * np.diff(pair.fidelity)[0]) and rho.n == 2
    assert pair.future.tolist() == [len(suite_pieces.Pieces.load(run.path / "keeplogs" / f"batch-000{i}.npz").arrays["future.tokens"]) for i in (0, 1)]


def test_mismatch_with_the_length_of_the_future_held():
    """Gain and mismatch that share nothing but the length: a rho over prompts, and none when it is held."""
    from kvprobe.figures import mismatch

    rng, rows = np.random.default_rng(0), []
    for i in range(60):
        rows.append(dict(instance=i, metric="future", value=(length := int(rng.integers(2, 33)))))
        window, gain = 0.9 - 0.01 * length + rng.normal() / 40, 0.01 * length + rng.normal() / 40
        at = dict(instance=i, layer=0)
        rows += [at | dict(metric="coverage", sets="window", form="union", m=0, value=window), at | dict(metric="coverage", sets="both", form="union", m=2, value=0.95)]
        for name in ("recall", "recall_free", "error"):
            rows += [at | dict(metric=name, keep=48, arm=arm, value=v) for arm, v in (("LORE /E", 0.5 + (name != "error") * gain), ("window only", 0.5 + (name == "error") * gain))]
    table = mismatch.reduce(pd.DataFrame(rows), dict(settings=dict(seed=0, m=2, budget=48)))
    rho, held = (table[(table.part == part) & (table.x == "mismatch") & (table.y == "recall_free")].iloc[0] for part in ("rho", "held"))
    assert table[table.part == "layers"].n.eq(0).all()  # one layer has no order
    assert rho.value > 0.8 and rho.low > 0.6 and held.low < 0 < held.high and rho.n == held.n == 60


def test_budget_equivalence_is_that_of_means_over_prompts(run):
    from kvprobe.metrics import equivalence
    from kvprobe.figures import budget_equivalence

    table = budget_equivalence.reduce(run.rows, run.manifest)
    means = suite_tables.means_of(run.rows)
    curve = {a: [1 - means[(means.metric == "error") & (means.arm == a) & (means["keep"] == b)].groupby("instance").value.mean().mean() for b in (24, 48, 96)] for a in ("LORE /E", "window only", "random")}
    for name in ("window only", "random"):
        needed, bound = equivalence.needed([24, 48, 96], np.array(curve[name]), np.array(curve["LORE /E"]))
        own = table[(table.part == "match") & (table.arm == name)].sort_values("keep")
        assert own.needed.to_numpy() == pytest.approx(needed) and own.bound.tolist() == bound.tolist() and own.value.to_numpy() == pytest.approx(1 - np.array([24, 48, 96]) / needed)
        assert (own.low <= own.value + 1e-12).all() and (own.value <= own.high + 1e-12).all()


def test_layer_head_map_is_the_paired_gain(run):
    from kvprobe.figures import layer_head_map

    table = layer_head_map.reduce(run.rows, run.manifest)
    site = run.rows[(run.rows.metric == "recall_free") & (run.rows["keep"] == 48) & (run.rows.layer == 1) & (run.rows["head"] == 0)]
    want = site[site.arm == "single continuation"].value.mean() - site[site.arm == "window only"].value.mean()
    cell = table[(table.part == "gain") & (table.arm == "single continuation") & (table.layer == 1) & (table["head"] == 0)].iloc[0]
    assert cell.value == pytest.approx(want) and cell.n == 2
    energy = table[table.part == "energy"]
    assert energy.value.sum() == pytest.approx(1) and table[table.part == "energy, layer"].value.sum() == pytest.approx(1) and len(energy) == 8


@pytest.mark.parametrize("bad, says", [(dict(budget=50), "must be among keeps"), (dict(answers="50"), "must be among keeps"), (dict(keeps="8,48"), "must lie between the 9 protected"), (dict(m=4), "the largest of ms"),
                                       (dict(layers="0,7"), "layers with a growing cache"), (dict(shown="1,4"), "query heads 0..3"), (dict(deletion_layer=9), "deletion_layer=9"), (dict(deletions=-1), "must not be negative"), (dict(shown="1"), "take whole numbers"), (dict(spread=500), "must be in 0..length"),
                                       (dict(keeps="48,300"), "2 x 300 tokens"), (dict(fidelity_over="some"), "prompt or all")])
def test_refuses(bad, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        kvprobe.run("oracle_suite", preset="smoke", out=tmp_path / "never", progress=False, **bad)
    assert not (tmp_path / "never").exists()


def test_the_full_cache_is_a_mark_and_a_gate(run, session, prompt, lm):
    """Known fault H18: what even the full cache cannot answer shows before anything is compared. Against one plain forward."""
    rows = [r for r in suite_answers.uncompressed(session, prompt, [24, 48]) if r["keep"] == 48]
    answer = torch.as_tensor(prompt.task.answer_ids)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.cat([torch.as_tensor(prompt.ids), answer])[None]).logits[0, len(prompt.ids) : -1].double().log_softmax(-1)
    counts = torch.as_tensor(prompt.task.scored[1:])
    assert found(rows, "logp").item() == pytest.approx(float(logits.gather(-1, answer[1:, None])[:, 0][counts].sum()), rel=1e-9)
    assert found(rows, "retrieved").item() == float((logits.argmax(-1) == answer[1:])[counts].all())
    assert run.table.criterion.iloc[0] == "full cache" and run.checks[0].name == "the full cache answers the prompts"
    assert run.manifest["template_sha256"] is None or len(run.manifest["template_sha256"]) == 64  # H09
    assert run.rows.unit.notna().all()  # H17
