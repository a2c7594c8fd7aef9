"""Site map, transplant, coalitions and linear readout: rows against independent paths, summaries against numbers worked by hand, figures."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe
from kvprobe import audit, coalitions, engine, keeplog, needles, places, readout, registry, runner
from kvprobe.models import load
from kvprobe.probes import coalitions as coalitions_probe
from kvprobe.probes import linear_readout, site_map, transplant
from kvprobe.types import Geometry

GEOMETRY = Geometry(7, 9, 3, 8, 72, (0, 1, 2, 4, 5, 6), {3: "sliding window, bounded by itself"})


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """Filler is encoded once; figures are drawn where they are tested."""
    real, made = needles.Filler, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        patch.setattr(linear_readout, "NEAR", 3)
        patch.setattr(needles, "Filler", lambda source, tokenizer: made.get(source) or made.setdefault(source, real(source, tokenizer)))
        yield


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """probe -> its finished smoke run in float64, made once."""
    made = {}
    few = {"linear_readout": dict(readings=20, read_pre=0, box=18)}
    return lambda probe: made.get(probe) or made.setdefault(probe, kvprobe.run(
        probe, preset="smoke", out=tmp_path_factory.mktemp("runs") / probe, progress=False, dtype="float64", **few.get(probe, {})))


@pytest.mark.parametrize("probe", ["site_map", "transplant", "coalitions", "linear_readout"])
def test_the_smoke_run_reports_and_draws(probe, done):
    run = done(probe)
    assert run.manifest["status"] == "finished" and run.ok and len(run.table)
    figure = run.figure()
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    shown = [ax for ax in figure.axes if ax.axison and ax.get_label() != "<colorbar>"]
    assert shown and all(ax.get_xlabel() for ax in shown)
    assert "tiny" in " ".join(t.get_text() for t in figure.texts) and "n = " in figure.get_suptitle()


# -- places ---------------------------------------------------------------------------------------------------------------


def test_bands_cut_the_evicted_layers():
    assert places.bands(GEOMETRY, 4) == [(0, 1), (2, 4), (5,), (6,)] and places.bands(GEOMETRY, 1) == [(0, 1, 2, 4, 5, 6)]
    for count in (0, 7):
        with pytest.raises(ValueError, match=r"1\.\.6"):
            places.bands(GEOMETRY, count)


def test_places_of_each_kind():
    grid = places.expand("grid", GEOMETRY, 2)
    assert [p.name for p in grid][:2] == ["layers 0-2, head 0", "layers 0-2, head 1"] and len(grid) == 6
    assert frozenset().union(*(p.sites for p in grid)) == places.of(GEOMETRY).sites and sum(len(p.sites) for p in grid) == 18
    assert places.expand("heads", GEOMETRY, 2)[2].sites == {(layer, 2) for layer in GEOMETRY.kv_layers}
    assert len(places.expand("sites", GEOMETRY, 2)) == 18 and places.expand("all", GEOMETRY, 9)[0].name == "all"
    with pytest.raises(ValueError, match="sliding"):
        places.of(GEOMETRY, [3], 0)
    with pytest.raises(ValueError, match="known: all"):
        places.expand("columns", GEOMETRY, 2)


# -- transplant -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grafting(lm):
    config = transplant.CONFIG(model="tiny", dtype="float64", instances=2, batch_size=2, pre=8, age=96, query=60, bands=2)
    session = transplant.start(config, lm)
    rows = pd.DataFrame(session.compute(0, None, lambda tokens: None)[0])
    return SimpleNamespace(session=session, rows=rows, odds=transplant.wide(rows))


def test_donors_differ_in_every_digit_of_the_value_and_nowhere_else(grafting, lm):
    for pair in grafting.session.pairs:
        host, other = pair.host.ids, pair.donor_ids
        spans = [range(*pair.host.value_in_box), range(*pair.host.answer)]
        assert sorted(np.flatnonzero(host != other)) == sorted(p for span in spans for p in span)
        assert all(lm.tokenizer.decode(other[list(span)].tolist()) == pair.donor_value for span in spans)
        assert all(a != b for a, b in zip(pair.host.value, pair.donor_value)) and 5000 <= int(pair.donor_value) <= 9999
        assert lm.tokenizer.decode(other.tolist()).count(pair.donor_value) == 2


def close(a, b, atol=1e-11):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def test_everything_is_the_donor_nothing_and_itself_the_host(grafting):
    odds = grafting.odds
    host, donor = odds["", "host", "", ""], odds["", "donor", "", ""]
    assert (host - donor).abs().min() > 1e-4  # a random model, but not a deaf one
    close(odds["from_box", "both", "all", "box"], donor)
    close(odds["at_query", "both", "all", "text"], donor)
    assert (odds["at_query", "both", "all", "box"] - donor).abs().max() > 1e-5  # what came after the box still knows the host's
    for mode in transplant.MODES:
        close(odds[mode, "both", "all", "own box"], host)


def test_an_empty_place_changes_nothing(grafting):
    s, nowhere = grafting.session, places.Place("nowhere", frozenset(), ())
    texts = {"host": s._ids([p.host.ids for p in s.pairs]), "donor": s._ids([p.donor_ids for p in s.pairs])}
    caches = {name: s._empty(s.pairs) for name in texts}
    for name, cache in caches.items():
        engine.force(s.model, cache, texts[name][:, : s.before - 1])
    new = s.grafted(caches["host"], caches["donor"], [transplant.Graft("at_query", "both", nowhere)])
    for layer in s.model.geometry.kv_layers:
        assert torch.equal(new.layers[layer].keys, caches["host"].layers[layer].keys) and torch.equal(new.layers[layer].values, caches["host"].layers[layer].values)


@pytest.mark.parametrize("mode, what, place", [("from_box", "values", "head 1"), ("from_box", "keys", "layer 0"), ("at_query", "both", "head 0"), ("at_query", "keys", "layer 1")])
def test_log_p_is_that_of_an_interchange_intervention(mode, what, place, grafting, lm):
    """The other path: nnsight replaces what the attention call sees, on a cache that keeps the host's states."""
    s = grafting.session
    pair, stop = s.pairs[1], s.box[1] if mode == "from_box" else s.query
    donor = kvprobe.capture(lm, torch.from_numpy(pair.donor_ids[None, :stop]), what=("k", "v"))
    known = {p.name: p.sites for kind in ("heads", "bands") for p in places.expand(kind, lm.geometry, 2)}
    edit = kvprobe.transplant(donor, s.box, known[place], what={"keys": "k", "values": "v", "both": ("k", "v")}[what])
    want = {}
    for name, ids in (("host", pair.host.ids), ("donor", pair.donor_ids)):
        cache = kvprobe.cache(lm, keep=4096)
        kvprobe.prefill(lm, cache, torch.from_numpy(pair.host.ids[None, :stop]))
        outcome = kvprobe.intervene(lm, torch.from_numpy(ids[None, stop:]), edit, cache=cache, all_logits=True)
        want[name] = float(outcome.logp(s.before - stop).sum())
    rows = grafting.rows[(grafting.rows.instance == 1) & (grafting.rows["mode"] == mode) & (grafting.rows.what == what) & (grafting.rows.place == place)]
    got = rows.set_index("metric").value
    assert got["logp_host"] == pytest.approx(want["host"], abs=1e-10) and got["logp_donor"] == pytest.approx(want["donor"], abs=1e-10)
    assert got["odds"] == pytest.approx(want["donor"] - want["host"], abs=1e-10)  # every token differs


def test_share_moved_as_in_its_docstring():
    got = transplant.share_moved([0, 5], [-8, -10], [8, 10])
    assert got.value == pytest.approx(23 / 36) and got.n == 2
    assert transplant.share_moved([-8, -10], [-8, -10], [8, 10]).value == 0 and transplant.share_moved([8, 10], [-8, -10], [8, 10]).value == 1


@pytest.mark.parametrize("fields, message", [(dict(modes="later"), "known: from_box"), (dict(what="queries"), "known: keys"), (dict(places=""), "nothing is named"),
                                             (dict(age=40), "no token between"), (dict(instances=0), "at least 1")])
def test_transplant_refuses_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        transplant.CONFIG(**fields)


# -- site map -------------------------------------------------------------------------------------------------------------


def logged(run, case):
    """(log, row, instance) of a case in a run."""
    from kvprobe.results import RunFolder

    folder = RunFolder(run.path, run.manifest["settings"])
    folder.read()
    return [(log, k, member[0]) for _, log, members in folder.logs() for k, member in enumerate(members) if member[1] == case]


@pytest.mark.parametrize("probe, case", [("site_map", "everywhere but layer 1, head 0"), ("site_map", "alone in layers 0-1, head 1"), ("coalitions", "grid 0+3"), ("coalitions", "bands 1")])
def test_log_p_equals_the_full_cache_under_per_head_masks(probe, case, done, lm):
    run = done(probe)
    module = registry.find("probe", probe)
    session = module.start(runner.config_of(module, {k: v for k, v in run.manifest["settings"].items() if k not in ("probe", "preset")}), lm)
    log, row, instance = logged(run, case)[1]
    story = session.stories[instance]
    ask = story.asks[0]
    ids = torch.from_numpy(np.concatenate([story.ids[: ask.at], ask.query, ask.value]))
    want = audit.replay(lm, ids, log, row, ask.at + len(ask.query)).sum()
    got = run.rows[(run.rows["case"] == case) & (run.rows.instance == instance) & (run.rows.metric == "logp")].value
    assert got.tolist() == [pytest.approx(float(want), abs=1e-9)]
    held = {"everywhere but layer 1, head 0": {(0, 0), (0, 1), (1, 1)}, "alone in layers 0-1, head 1": {(0, 1), (1, 1)}, "grid 0+3": {(0, 0), (1, 1)}, "bands 1": {(1, 0), (1, 1)}}[case]
    a, z = story.spans["x"]
    alive = (log.died[:, row, :, a:z] == keeplog.ALIVE).all(-1)
    assert {(layer, h) for layer in (0, 1) for h in (0, 1) if alive[layer, h]} == held


def planted(logp, metric="logp"):
    """Rows of cases: {case: log p per instance}."""
    return pd.DataFrame([dict(case=c, instance=i, draw=0, ask="3 rounds", metric=metric, value=v) for c, values in logp.items() for i, v in enumerate(values)])


def test_site_summary_and_strongest_band_by_hand():
    g = Geometry(4, 2, 2, 8, 16, (0, 1, 2, 3))
    bands, grid = places.bands(g, 2), places.expand("grid", g, 2)
    logp = {"deleted": (-10, -8), "kept": (0, 0)} | {site_map.ALONE + p.name: (-10, -8) for p in grid} | {site_map.WITHOUT + p.name: (0, 0) for p in grid}
    logp |= {site_map.ALONE + "layers 0-1, head 1": (-8, -8), site_map.WITHOUT + "layers 2-3, head 0": (-6, -2)}
    rows = planted(logp)
    assert site_map.strongest(rows, grid, bands, 1) == [(2, 3)] and site_map.strongest(rows, grid, bands, 9) == bands  # 8 / 2 lost against 2 / 2 gained
    s = site_map.summary(rows, {"settings": {"seed": 0}, "bands": [[0, 1], [2, 3]], "model": {"kv_heads": 2}}).set_index("place")
    assert s.loc["layers 0-1, head 1", "gained"] == pytest.approx(2 / 18) and s.loc["layers 0-1, head 1", "gained_sd"] == pytest.approx(2**0.5 / 9)
    assert s.loc["layers 2-3, head 0", "lost"] == pytest.approx(8 / 18) and s.loc["layers 2-3, head 0", "gained"] == 0 and len(s) == 4


def test_the_map_resumes_in_the_middle_of_its_sites(done, tmp_path):
    """With bands of one layer each, no site is left to search: the batches kept for them say so and are not computed again."""
    run = done("site_map")
    again = kvprobe.run("site_map", preset="smoke", out=tmp_path / "a", progress=False, dtype="float64")
    ledger = (tmp_path / "a/batches.jsonl").read_text().splitlines()
    last = json.loads(ledger[-1])["batch"]
    (tmp_path / "a/batches.jsonl").write_text("\n".join(ledger[:-1]) + "\n")
    (tmp_path / "a/rows.jsonl").write_text("".join(line for line in (run.path / "rows.jsonl").read_text().splitlines(True) if json.loads(line)["batch"] != last))
    manifest = json.loads((tmp_path / "a/manifest.json").read_text()) | {"status": "running"}
    (tmp_path / "a/manifest.json").write_text(json.dumps(manifest))
    again = kvprobe.run("site_map", preset="smoke", out=tmp_path / "a", progress=False, dtype="float64")
    assert again.manifest["rows_sha256"] == run.manifest["rows_sha256"]
    single = kvprobe.run("site_map", preset="smoke", out=tmp_path / "b", progress=False, dtype="float64", bands=2, instances=1, batch_size=1)
    assert single.manifest["status"] == "finished" and (single.rows.metric == "unused").sum() >= 1 and len(single.table) == 4


# -- coalitions -----------------------------------------------------------------------------------------------------------


def told(rows, game, names, orders=None):
    manifest = {"settings": {"seed": 0, "enough": 0.9}, "games": {game: {"players": names, "orders": orders}}}
    return coalitions_probe.summary(rows, manifest)


def as_rows(worth, gains, name="heads", order=None):
    """Rows of a game worth `worth` [2^p] (1: all players) for facts with `gains` nats to be had."""
    p = len(worth).bit_length() - 1
    game = coalitions_probe.Game(name, tuple(places.Place(f"head {i}", frozenset(), ()) for i in range(p)), order)
    return planted({game.case(s): [-20 + worth[s] * g for g in gains] for s in game.coalitions})


def test_a_majority_of_heads_by_hand():
    worth = np.array([0, 0, 0, 1, 0, 1, 1, 1.0])
    s = told(as_rows(worth, (10, 14, 12)), "heads", ["a", "b", "c"])
    by = s.set_index(["quantity", "players"]).value
    assert by["Shapley value"].tolist() == pytest.approx([1 / 3] * 3) and by["alone"].tolist() == [0, 0, 0] and by["last"].tolist() == pytest.approx([0, 0, 0])
    assert by["interaction", "0+1"] == pytest.approx(0) and by["pooling", ""] == pytest.approx(1) and by["superadditivity", ""] == pytest.approx(0.5)
    assert s[s.quantity == "sufficient"].players.tolist() == ["0+1", "0+2", "1+2"] and s[s.quantity == "sufficient"].names.iloc[0] == "a + b"
    assert by["worth"].loc["0+1"] == pytest.approx(1) and (s.n == 3).all()


def test_values_weigh_facts_as_recall_does():
    """A ratio of sums: the fact with more to be had counts more."""
    rows = planted({"deleted": (-20, -20), "kept": (-10, -18), "heads 0": (-10, -20), "heads 1": (-20, -18)})  # one head has all of each fact
    by = told(rows, "heads", ["a", "b"]).set_index(["quantity", "players"]).value
    assert by["Shapley value", "0"] == pytest.approx(10 / 12) and by["Shapley value", "1"] == pytest.approx(2 / 12) and by["interaction", "0+1"] == pytest.approx(0)


def test_a_sampled_game_tells_both_intervals():
    order = coalitions.orders(9, 40, 3)
    worth = np.array([min(1.0, bin(s).count("1") / 9 + 0.2 * (s & 1)) for s in range(512)])
    s = told(as_rows(worth, np.linspace(8, 16, 6), "grid", order), "grid", [f"p{i}" for i in range(9)], order.tolist())
    got = s[s.quantity == "Shapley value"]
    exact = coalitions.shapley(worth)
    assert got.value.sum() == pytest.approx(1) and (got.draw_low - 1e-9 <= got.value).all() and (got.value <= got.draw_high + 1e-9).all()
    assert np.abs(got.value.to_numpy() - exact).max() < 0.05 and "superadditivity" not in set(s.quantity)
    assert len(coalitions_probe.Game("grid", (None,) * 9, order).coalitions) < 512


def test_values_are_not_told_where_nothing_was_there_to_be_recalled():
    rows = planted({"deleted": (-10, -10), "kept": (-9, -11), "heads 0": (-9, -9), "heads 1": (-10, -9)})
    s = told(rows, "heads", ["a", "b"])
    assert s.value.isna().all() and "sufficient" not in set(s.quantity)


@pytest.mark.parametrize("fields, message", [(dict(games="layers"), "known: heads"), (dict(rounds="3,15"), "one distance"), (dict(enough=0.0), "above 0"), (dict(orders=5), "even number")])
def test_coalitions_refuses_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        coalitions_probe.CONFIG(**fields)


# -- linear readout -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples():
    """States [200, 12] that hold a digit of 10 in a linear code, and its labels with a second, unrelated one [200, 2]."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, (200, 2))
    code = rng.normal(size=(10, 12)) * 3
    return code[labels[:, 0]] + 0.1 * rng.normal(size=(200, 12)), labels


def test_the_ridge_classifier_is_scikit_learns(samples):
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    states, labels = samples
    states = states + np.random.default_rng(1).normal(size=states.shape) * 4  # so that answers differ
    folds = readout.folds_of(200, 5, 0)
    got = readout.ridge_hits(states, labels, folds, 7.0)
    for k in range(2):
        for fold in range(5):
            fitted = make_pipeline(StandardScaler(), RidgeClassifier(alpha=7.0)).fit(states[folds != fold], labels[folds != fold, k])
            assert (got[folds == fold, k] == (fitted.predict(states[folds == fold]) == labels[folds == fold, k])).all()
    assert 0.2 < got[:, 0].mean() < 0.95


@pytest.mark.parametrize("method", ["ridge", "logistic"])
def test_a_planted_digit_is_read_and_a_shuffled_one_is_not(method, samples):
    states, labels = samples
    folds = readout.folds_of(200, 4, 0)
    mixed = labels[np.random.default_rng(3).permutation(200)]
    both = np.concatenate([labels[:, :1], mixed[:, :1]], axis=1)
    hits = readout.ridge_hits(states, both, folds, 1.0) if method == "ridge" else readout.logistic_hits(states, both, folds)
    assert hits[:, 0].all()
    assert hits[:, 1].mean() == pytest.approx(0.1, abs=0.065)  # three standard errors
    assert readout.chance(both)[0] == np.bincount(labels[:, 0]).max() / 200


def test_shuffled_labels_are_judged_on_both_sides_of_what_unrelated_answers_get():
    right, error = readout.unrelated(np.array([[0], [0], [1], [2]]))
    assert right == 3 / 8 and error == pytest.approx((3 / 8 * 5 / 8 / 4) ** 0.5)
    labels = np.repeat(np.arange(10), 40)[:, None].repeat(4, 1)  # .1, standard error .0075
    for found, passed in ((0.1, True), (0.12, True), (0.08, True), (0.125, False), (0.075, False)):
        assert linear_readout.shuffled_check(pd.Series({("keys", "digit"): 0.1, ("values", "last"): found}), labels).passed is passed
    rng = np.random.default_rng(0)
    skew = rng.choice(4, size=(4000, 1), p=[0.7, 0.1, 0.1, 0.1])
    hits = skew == rng.permutation(skew)
    assert hits.mean() == pytest.approx(readout.unrelated(skew)[0], abs=0.03)


def test_folds_are_a_balanced_cut():
    folds = readout.folds_of(23, 4, 1)
    assert sorted(np.bincount(folds)) == [5, 6, 6, 6] and (folds != readout.folds_of(23, 4, 2)).any()


def test_states_are_those_of_the_texts_own_tokens(lm):
    config = linear_readout.CONFIG(model="tiny", dtype="float64", keep=64, buffer=16, instances=2, pre=8, query=60, box=24, rounds="4", bands=1, readings=20, folds=2, read_batch=3)
    session = linear_readout.start(config, lm)
    session.texts, session.labels = session.texts[:4], session.labels[:4]
    states = session.read(lambda tokens: None)
    text, first = session.texts[3], session.columns["digit"][0]
    assert lm.tokenizer.decode(text.ids[list(session.columns["digit"])].tolist()) == text.value
    assert [len(c) for c in session.columns.values()] == [4, 4, session.texts[0].box[1] - session.texts[0].value_in_box[1], 3, 3, 1] and session.columns["next"][0] == first + 1
    assert session.columns["query"][-1] == text.answer[0] - 1  # the token that predicts the first digit
    capture = kvprobe.capture(lm, torch.from_numpy(text.ids[None, : text.answer[0]]), what=("k", "v"))
    for name, kind in (("keys", "k"), ("values", "v")):
        for row, layer in enumerate(lm.geometry.kv_layers):
            want = getattr(capture, kind)[layer][0, :, first:].numpy()
            np.testing.assert_allclose(states[name][row, :, :, 3], want, atol=1e-6)


def test_texts_whose_values_stand_elsewhere_are_refused(lm, monkeypatch):
    monkeypatch.setattr(needles, "VARIABLES", ("ab", "abc"))  # a token is a byte here: the second variable is a token longer
    config = linear_readout.CONFIG(model="tiny", dtype="float64", keep=64, buffer=16, instances=1, batch_size=1, pre=8, query=60, box=24, rounds="4", bands=1, readings=20, folds=2)
    with pytest.raises(ValueError, match=r"value of short text 1 \(variable 'abc'\) stands at tokens \d+\.\.\d+, that of text 0 \(variable 'ab'\) at \d+\.\.\d+"):
        linear_readout.start(config, lm)


def test_readout_rows_are_complete(done):
    run = done("linear_readout")
    rows = run.rows[run.rows.metric == "accuracy"]
    ridge = rows[rows.method == "ridge"]
    assert len(ridge) == 2 * 2 * 2 * 6 * 2 * 5  # states, layers, heads, groups, labels, digits and their mean
    mean = ridge[ridge.digit == linear_readout.ALL].set_index(["state", "layer", "head", "group", "labels"]).value
    each = ridge[ridge.digit >= 0].groupby(["state", "layer", "head", "group", "labels"]).value.mean()
    assert (mean.sort_index() - each.sort_index()).abs().max() < 1e-12
    at_digit = ridge[(ridge.group == "digit") & (ridge.labels == "true") & (ridge.digit == linear_readout.ALL)].value
    assert at_digit.min() > 0.4  # an embedded digit is all that its value vector holds


@pytest.mark.parametrize("fields, message", [(dict(folds=1), "at least 2"), (dict(readings=8), "4 per fold"), (dict(rounds="3,15"), "one distance"), (dict(ridge=0.0), "above 0"), (dict(ridge=float("nan")), "above 0"), (dict(ridge=float("inf")), "finite")])
def test_readout_refuses_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        linear_readout.CONFIG(**fields)
