"""Statistics against hand-computed values, exact enumeration, brute-force loops with the same draws, and scipy."""

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

import kvprobe
from kvprobe import metrics, stats

UNEQUAL = np.repeat(np.arange(6), [1, 4, 2, 3, 1, 5])
EQUAL = np.tile(np.arange(8), 2)


def loop(statistic, clusters, *samples, seed, replicates):
    """Replicates [replicates]: the definition, one draw of clusters after the other."""
    n = len(set(clusters))
    draws = np.random.default_rng(seed).integers(0, n, (replicates, n))
    rows = [np.concatenate([np.flatnonzero(clusters == c) for c in draw]) for draw in draws]
    return np.array([statistic(*(s[r] for s in samples)) for r in rows])


# -- the bootstrap ------------------------------------------------------------------------------------------------------


def test_without_clusters_it_is_scipys():
    x = np.random.default_rng(0).exponential(size=30)
    want = scipy_stats.bootstrap((x,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(3)).confidence_interval
    for got in (stats.mean(x, seed=3), stats.mean(x, seed=3, clusters=range(30)), stats.bootstrap(np.mean, x, seed=3, clusters=range(30))):
        assert [got.value, got.low, got.high] == pytest.approx([x.mean(), want.low, want.high], rel=1e-12) and got.n == 30


@pytest.mark.parametrize("clusters", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_clusters_are_drawn_whole(clusters):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, len(clusters))) + clusters
    for statistic, got in ((np.mean, stats.mean(x, 5, 400, clusters)), (np.mean, stats.bootstrap(np.mean, x, seed=5, replicates=400, clusters=clusters)),
                           (np.median, stats.bootstrap(np.median, x, seed=5, replicates=400, clusters=clusters))):
        want = np.percentile(loop(statistic, clusters, x, seed=5, replicates=400), [2.5, 97.5])
        assert [got.value, got.low, got.high] == pytest.approx([statistic(x), *want], rel=1e-12) and got.n == len(set(clusters))
    want = np.percentile(loop(lambda a, b: a.sum() / b.sum(), clusters, x, y + 9, seed=5, replicates=400), [2.5, 97.5])
    got = stats.ratio(x, y + 9, 5, 400, clusters)
    assert [got.value, got.low, got.high] == pytest.approx([x.sum() / (y + 9).sum(), *want], rel=1e-12)
    gain = metrics.recall_gain(x, 0 * x, y + 9, 5, 400, clusters)
    assert gain == got and gain.n == len(set(clusters))


def test_three_clusters_by_hand():
    # of 27 resamples one is all the lowest cluster and one all the highest: 3.7 % each, so the interval ends there
    x, clusters = np.array([0, 3, 0, 9, 9, 0]), np.array(list("abbccc"))
    e = stats.mean(x, clusters=clusters)
    assert (e.value, e.low, e.high, e.n) == (3.5, 0, 6, 3)


def test_four_clusters_by_enumeration():
    sums, counts = np.array([0, 2, 5, 3]), np.array([1, 2, 2, 1])
    every = np.array(list(itertools.product(range(4), repeat=4)))
    found = np.sort(sums[every].sum(1) / counts[every].sum(1))
    x, clusters = np.concatenate([np.full(c, s / c) for s, c in zip(sums, counts)]), np.repeat(range(4), counts)
    e = stats.mean(x, clusters=clusters)
    for end, share in ((e.low, 0.025), (e.high, 0.975)):
        assert found[int(256 * (share - 0.008))] - 1e-12 <= end <= found[int(256 * (share + 0.008))] + 1e-12
    spread = np.std(loop(np.mean, clusters, x, seed=0, replicates=4000))
    assert found.std() == pytest.approx(spread, rel=0.05)


def test_copies_in_a_cluster_are_no_information():
    x = np.random.default_rng(2).normal(size=40)
    one, copies, fooled = stats.mean(x), stats.mean(np.repeat(x, 4), clusters=np.repeat(range(40), 4)), stats.mean(np.repeat(x, 4))
    assert [copies.value, copies.low, copies.high] == pytest.approx([one.value, one.low, one.high], rel=1e-12)
    assert (fooled.high - fooled.low) / (copies.high - copies.low) == pytest.approx(0.5, abs=0.05)
    y = x + np.random.default_rng(3).normal(size=40)
    rho, rhos = stats.spearman(x, y, clusters=range(40)), stats.spearman(np.repeat(x, 4), np.repeat(y, 4), clusters=np.repeat(range(40), 4))
    assert (rho.low, rho.high) == pytest.approx((rhos.low, rhos.high)) and rho.n == rhos.n == 40


def test_intervals_cover_only_if_clustered():
    rng = np.random.default_rng(4)
    clusters = np.repeat(range(25), 6)
    worlds = [np.repeat(rng.normal(size=25), 6) + rng.normal(size=150) for _ in range(200)]
    covered = [np.mean([e.low <= 0 <= e.high for e in (stats.mean(x, clusters=c) for x in worlds)]) for c in (clusters, range(150))]
    assert 0.88 <= covered[0] <= 0.99 and covered[1] < 0.8


def test_degenerate_samples_are_points():
    e = stats.mean([2.0] * 6, clusters=[0, 0, 1, 1, 2, 2])
    assert (e.value, e.low, e.high, e.n) == (2, 2, 2, 3)
    e = stats.bootstrap(np.median, np.array([1.0, 5.0]), seed=0, clusters=["a", "a"])
    assert (e.value, e.n) == (3, 1) and np.isnan([e.low, e.high]).all()  # one cluster gives no interval


@pytest.mark.parametrize("clusters, message", [([0, 1], "2 labels for 3 values"), (["a", None, "b"], "label is missing"), ([0, np.nan, 1], "label is missing")])
def test_bad_labels_are_refused(clusters, message):
    for call in (stats.mean, stats.spread, lambda x, clusters: stats.bootstrap(np.median, np.array(x), seed=0, clusters=clusters)):
        with pytest.raises(ValueError, match=message):
            call([1.0, 2.0, 3.0], **{"seeds" if call is stats.spread else "clusters": clusters})


# -- tests and spreads --------------------------------------------------------------------------------------------------


def test_sign_test_by_hand_and_by_scipy():
    a = np.array([1, 1, 1, 1, 1, 1, 1, 0, 2, 2.0])
    t = stats.sign_test(a, [0, 0, 0, 0, 0, 0, 0, 1, 2, 2])
    assert (t.wins, t.losses, t.ties) == (7, 1, 2) and t.p == pytest.approx(2 * 9 / 256)
    assert t.p == scipy_stats.binomtest(7, 8).pvalue and t.text() == "7 higher, 1 lower, 2 the same, p = 0.07"
    assert stats.sign_test([1, 2], [1, 2]) == stats.SignTest(0, 0, 2, 1.0)


def test_sign_test_counts_clusters_and_ignores_rounding():
    clusters = ["p", "p", "p", "q", "q"]
    t = stats.sign_test([1, 0, 0, 0.1, 0.2], [0, 1, 1, 0.3, 0.0], clusters)  # p: mean -1/3; q: 0.1 + 0.2 against 0.3
    assert (t.wins, t.losses, t.ties, t.p) == (0, 1, 1, 1.0)
    with pytest.raises(ValueError, match="finite"):
        stats.sign_test([1, np.nan], [0, 0])


def test_spread_is_that_of_the_means_of_runs():
    values, seeds, problems = [0, 1, 1, 1, 0, 0], [7, 7, 8, 8, 9, 9], list("abbaab")
    s = stats.spread(pd.Series(values), pd.Series(seeds), problems)
    assert (s.mean, s.sd, s.n) == (0.5, 0.5, 3) == (0.5, np.std([0.5, 1, 0], ddof=1), 3) and s.text() == "0.50, sd 0.50 over 3 seeds"
    assert stats.run_sd(values, seeds) == 0.5 and stats.run_sd([1, 2], [0, 0]) is None and stats.spread([1, 2], [0, 0]).text() == "1.50, one seed"
    with pytest.raises(ValueError, match="same clusters"):
        stats.run_sd(values, seeds, list("abbbab"))


def test_spearman_equals_scipy():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 6, 40).astype(float)  # with ties
    y = x + rng.normal(size=40) * 3
    want, e = scipy_stats.spearmanr(x, y), stats.spearman(x, y, seed=2, replicates=300)
    assert (e.rho, e.p) == pytest.approx((want.statistic, want.pvalue), rel=1e-12) and (e.n, e.dropped) == (40, 0)
    found = loop(lambda a, b: scipy_stats.spearmanr(a, b).statistic, np.arange(40), x, y, seed=2, replicates=300)
    assert (e.low, e.high) == pytest.approx(np.percentile(found, [2.5, 97.5]), rel=1e-12)


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_spearman_by_clusters_says_what_it_drops():
    x, y, clusters = np.array([1, 1, 2, 3, 2.0, 2]), np.array([1, 2, 2, 5, 3.0, 4]), np.array([0, 0, 1, 1, 2, 2])
    e = stats.spearman(x, y, clusters, seed=1, replicates=500)
    found = loop(lambda a, b: scipy_stats.spearmanr(a, b).statistic, clusters, x, y, seed=1, replicates=500)
    rho = found[~np.isnan(found)]
    assert e.dropped == np.isnan(found).sum() > 0 and (e.low, e.high) == pytest.approx(np.percentile(rho, [2.5, 97.5]), rel=1e-12)
    assert e.p == pytest.approx(2 * ((rho <= 1e-12).sum() + 1) / (len(rho) + 1)) and e.n == 3
    assert e.text().endswith(f"n = 3, {e.dropped} constant replicates dropped")


def test_partial_spearman_is_that_of_residuals():
    rng = np.random.default_rng(5)
    z = rng.integers(0, 6, 40).astype(float)
    x, y = z + rng.normal(size=40), rng.normal(size=40) - 2 * z

    def residual(x, y, z):
        a, b, c = (scipy_stats.rankdata(v) for v in (x, y, z))
        design = np.stack([np.ones(len(c)), c], axis=1)
        a, b = (v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (a, b))
        return a @ b / np.sqrt((a @ a) * (b @ b))

    e = stats.spearman(x, y, seed=3, replicates=200, given=z)
    assert e.rho == pytest.approx(residual(x, y, z), abs=1e-12) and abs(e.rho) < 0.5 * abs(stats.spearman(x, y).rho)
    t = e.rho * np.sqrt(37 / (1 - e.rho**2))
    assert e.p == pytest.approx(2 * scipy_stats.t.sf(abs(t), 37), rel=1e-9)
    drawn = loop(residual, np.arange(40), x, y, z, seed=3, replicates=200)
    assert (e.low, e.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=1e-12)
    assert stats.spearman(x, y, given=np.ones(40)).rho == pytest.approx(stats.spearman(x, y).rho, abs=1e-12)
    assert stats.spearman(x, y, given=x).rho is None


def test_spearman_where_it_does_not_exist():
    e = stats.spearman([1, 1, 1], [1, 2, 3])
    assert (e.rho, e.low, e.p, e.n) == (None, None, None, 3) and e.text() == "n/a, n = 3"
    assert stats.spearman([1, 2, 3], [1, 2, 3]).rho == 1
    with pytest.raises(ValueError, match="finite"):
        stats.spearman([1, 2, np.nan], [1, 2, 3])


# -- the table ----------------------------------------------------------------------------------------------------------

BASE = np.arange(10) / 10
ARMS = {
    "full": BASE + 1,
    "random": BASE,
    "lower": BASE - 0.2,  # worse by both
    "seven": BASE - np.where(np.arange(10) < 7, 0.2, -0.01),  # interval below 0, but 7 of 10 clusters: p = 0.34
    "nine": BASE - np.where(np.arange(10) < 9, 0.01, -0.5),  # p = 0.02, but the mean difference is above 0
    "gone": None,
}


def frame(**more) -> pd.DataFrame:
    """Two samples of every problem, one above and one below the mean; the arm "gone" has values in the second task only."""
    rows = [dict(policy=a, task=task, problem=f"p{k}", ok=x + e) for task in ("one", "two") for a, xs in ARMS.items()
            for k, x in enumerate(BASE if xs is None and task == "two" else [] if xs is None else xs) for e in (0.05, -0.05)]
    return pd.DataFrame(rows).assign(**more)


ROLES = dict(value="ok", arm="policy", cluster="problem", reference="random", column="task")


def flags(c, flag: str, column="one") -> set:
    return {a for a in c.arms if c.cells[a, column] and getattr(c.cells[a, column], flag)}


def test_what_is_worse_and_what_is_best():
    c = stats.compare(frame(), **ROLES, unranked="full")
    assert c.columns == ("one", "two") and c.arms == tuple(ARMS) and c.cells["gone", "one"] is None
    assert flags(c, "worse") == {"lower"} and flags(c, "best") == {"nine"} and flags(c, "best", "two") == {"nine"}
    assert flags(stats.compare(frame(), **ROLES), "best") == {"full"}
    assert flags(stats.compare(frame(), **ROLES, rule="interval"), "worse") == {"lower", "seven"}
    assert flags(stats.compare(frame(), **ROLES, rule="sign"), "worse") == {"lower", "nine"}
    low = stats.compare(frame(), **ROLES, higher=False)
    assert flags(low, "worse") == {"full"} and flags(low, "best") == {"lower"} and "; lower is better; " in low.text()


def test_cells_are_the_estimates_of_this_module():
    f = frame()
    c = stats.compare(f, **ROLES, seed=4)
    one = f[f.task == "one"]
    x, ref = (one[one.policy == a] for a in ("seven", "random"))
    cell = c.cells["seven", "one"]
    mean, apart = stats.mean(x.ok, 4, clusters=x.problem), stats.difference(x.ok.to_numpy(), ref.ok.to_numpy(), 4, clusters=x.problem)
    for got, want in ((cell.estimate, mean), (cell.difference, apart)):
        assert vars(got) == pytest.approx(vars(want))
    assert cell.difference.value == pytest.approx(-0.137) and cell.signs == stats.SignTest(3, 7, 0, pytest.approx(0.34375))
    tidy = c.frame.set_index(["arm", "column"])
    assert len(tidy) == 12 and tidy.loc[("seven", "one"), "difference_low"] == cell.difference.low and pd.isna(tidy.loc[("gone", "one"), "value"])


def test_equal_arms_are_both_best_and_never_worse():
    f = pd.concat([frame(), frame().query("policy == 'random'").assign(policy="again")])
    c = stats.compare(f[f.policy.isin(["random", "again", "lower"])], **ROLES, rule="interval")
    assert flags(c, "best") == {"random", "again"} and flags(c, "worse") == {"lower"}
    assert flags(stats.compare(f[f.policy.isin(["random", "again"])], **ROLES, unranked=["again"]), "best") == {"random"}


def test_several_values():
    f = frame(length=lambda t: -t.ok)
    c = stats.compare(f, **ROLES | {"value": ["ok", "length"]}, higher={"ok": True, "length": False}, unranked=["full"])
    assert c.columns == ("one, ok", "one, length", "two, ok", "two, length")
    assert flags(c, "worse", "two, length") == flags(c, "worse", "two, ok") == {"lower"} and flags(c, "best", "one, length") == {"nine"}
    assert "lower is better in one, length, two, length" in c.text()
    f.loc[f.policy == "nine", "ok"] = np.nan  # a wide frame: no such value for this arm
    assert stats.compare(f, **ROLES).cells["nine", "two"] is None


def test_text_and_markdown():
    f = frame()
    c = stats.compare(f[f.policy.isin(["random", "lower", "gone"]) & (f.problem != "p9")], **ROLES)
    legend = ("worse than random (interval of the paired difference excludes 0 and sign test p < 0.05); "
              "n = 9 clusters (problem), 95 % bootstrap intervals over clusters")
    assert c.text().splitlines() == ["policy     one     two", "random   0.40*   0.40*", "lower   (0.20)  (0.20)", "gone        -    0.40*",
                                     f"* best of the column; ( ) {legend}"]
    assert c.markdown().splitlines() == [
        "| policy | one | two |", "| --- | ---: | ---: |", "| random | **0.40** | **0.40** |",
        '| lower | <span style="color:gray">0.20</span> | <span style="color:gray">0.20</span> |', "| gone | - | **0.40** |", "",
        f"**bold** best of the column; grey {legend}"]
    assert c.cells["random", "one"].estimate.text() in c.text(intervals=True)


def test_figure_draws_bold_and_grey():
    c = stats.compare(frame(), **ROLES, unranked=["full"])
    figure = c.figure("A title")
    texts = figure.axes[0].texts
    assert len(texts) == 3 * 7 and {t.get_text() for t in texts if t.get_fontweight() == "bold"} == {"0.49"}
    assert [t.get_text() for t in texts if t.get_color() == "0.6"] == ["0.25", "0.25"]
    assert figure._repr_png_()[:4] == b"\x89PNG" and figure.get_suptitle() == "A title"


def nan(f):
    return f.assign(ok=f.ok.where(f.index != 30))


@pytest.mark.parametrize("change, roles, message", [
    (None, {"reference": "best"}, "policy 'best' is not in the frame: 'full', 'random'"),
    (None, {"unranked": ["none"]}, "policy 'none' is not in the frame"),
    (None, {"value": "accuracy"}, "no column 'accuracy'.*its columns: policy, task, problem, ok"),
    (None, {"cluster": "policy"}, "must name different columns"),
    (None, {"value": ["ok", "ok"]}, "must name different columns"),
    (None, {"rule": "t"}, "both, interval, sign"),
    (None, {"higher": {"other": True}}, "for each of ok"),
    (None, {"reference": "gone"}, "one: the reference 'gone' has no values"),
    (nan, {}, "one: policy 'random' has NaN or infinite"),
    (lambda f: f.assign(ok=f.ok.replace(f.ok[0], np.inf)), {}, "has NaN or infinite"),
    (lambda f: f.assign(problem=f.problem.where(f.index != 3)), {}, "column 'problem' has missing labels"),
    (lambda f: f[~((f.policy == "lower") & (f.problem == "p3"))], {}, "one: policy 'lower' and the reference 'random' must have the same clusters; problem 'p3'"),
    (lambda f: f[~((f.policy == "random") & (f.problem == "p3"))], {}, "must have the same clusters; problem 'p3'"),
    (lambda f: pd.concat([f, f.ok], axis=1), {}, "has 2 columns 'ok'"),
])
def test_bad_input_is_refused(change, roles, message):
    f = frame()
    with pytest.raises(ValueError, match=message):
        stats.compare(change(f) if change else f, **ROLES | roles)


def test_it_is_reached_from_the_package():
    assert kvprobe.stats is stats and "stats" in dir(kvprobe)


def test_what_cannot_be_averaged_is_refused():
    for bad in (lambda: stats.mean([1, float("nan"), 3]), lambda: stats.mean([]), lambda: stats.difference([1, 2, 3], [1]), lambda: stats.mean([[1.0, 2.0]])):
        with pytest.raises(ValueError, match="finite numbers|differ in number"):
            bad()
