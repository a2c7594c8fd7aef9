"""A run of the oracle suite: its pieces, resumption, tables, and the figures against their tables."""

import io
import re

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe
from kvprobe import runner
from kvprobe.metrics import fidelity
from kvprobe.suite import orders as suite_orders, pieces as suite_pieces, tables as suite_tables
from kvprobe.models import load
from kvprobe.prompting import CHANCE
from kvprobe.probes import oracle_suite as module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # figures are drawn one by one below
        patch.setattr(runner, "save_figures", lambda *a: [])
        return kvprobe.run("oracle_suite", preset="smoke", out=tmp_path_factory.mktemp("suite") / "run", progress=False)


def captured(lm, prompt):
    """q, k, v {layer: [h n d]} of one plain forward over prompt and future, and the future's length."""
    tokens = prompt.truth.ahead.tokens[0][prompt.truth.ahead.valid[0]]
    seen = kvprobe.capture(lm, torch.cat([torch.as_tensor(prompt.ids), tokens])[None], layers=[0, 1])
    return *({i: getattr(seen, x)[i][0].numpy() for i in (0, 1)} for x in "qkv"), len(tokens)


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


def test_predictions_are_ranked_within_prompts(run):
    made, table = suite_tables.deletions(run.rows), suite_tables.predictions(run.rows, 0)
    assert len(made) == 2 * (12 + 4 + 8)
    own = made[made["sample"] == "even"]
    want = np.mean([part.predicted_squared.corr(part.kl_deleted, method="spearman") for _, part in own.groupby("instance")])
    r = table[(table.kind == "all sites at once") & (table.predictor == "predicted_squared") & (table.cost == "kl_deleted")].iloc[0]
    assert r.value == pytest.approx(want) and r.n == 2


def test_the_full_cache_is_a_mark_and_a_gate(run):
    """Known fault H18: what even the full cache cannot answer shows before anything is compared."""
    assert run.table.criterion.iloc[0] == "full cache" and run.checks[0].name == "the full cache answers the prompts"
    assert run.manifest["template_sha256"] is None or len(run.manifest["template_sha256"]) == 64  # H09
    assert run.rows.unit.notna().all()  # H17
