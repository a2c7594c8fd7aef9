"""Statistics: pure functions of arrays, used by every probe and figure (Random Attention sec. 4.1, app. B, app. E).

Samples of one cluster (a problem, a planted fact) are not independent: clusters are what is drawn, counted and compared.
Random draws depend on seed, replicates and the number of clusters alone, so that everything with the same three is paired.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.plotting import Picture

REPLICATES = 4000
"""Bootstrap replicates (Random Attention app. B)."""
ALPHA = 0.05
"""Level of the sign test."""
RULES = {"both": f"interval of the paired difference excludes 0 and sign test p < {ALPHA}",
         "interval": "interval of the paired difference excludes 0", "sign": f"sign test p < {ALPHA}"}
"""When a cell of a comparison is worse than its reference; "both" is Random Attention's rule (sec. 4.1)."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % percentile interval over n clusters; value is None where it cannot be told, low and high are NaN where one
    cluster gives no interval."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    def text(self, digits: int = 2) -> str:
        """e.g. "0.60 [0.45, 0.74]", "0.60 [-]" without an interval, "n/a" without a value."""
        if self.value is None:
            return "n/a"
        if self.low is None or self.low != self.low:
            return f"{self.value:z.{digits}f} [-]"
        return f"{self.value:z.{digits}f} [{self.low:z.{digits}f}, {self.high:z.{digits}f}]"


# -- the clustered bootstrap --------------------------------------------------------------------------------------------


def bootstrap(statistic: Callable, *samples: np.ndarray, seed: int, replicates: int = REPLICATES, clusters: Sequence | None = None) -> Estimate:
    """Clustered percentile bootstrap: whole clusters are drawn with replacement, the statistic is that of their pooled samples.

    samples: arrays [n], paired; statistic(*samples, axis) reduces the last axis. clusters: labels [n]; without them every
    sample is its own cluster. Clusters of unequal sizes cost one call of the statistic per replicate.
    """
    samples = tuple(map(_numbers, samples))
    if len({len(s) for s in samples}) > 1:
        raise ValueError(f"paired samples differ in number: {[len(s) for s in samples]}")
    n = len(samples[0]) if clusters is None else _codes(clusters, len(samples[0]))[1]
    value = float(statistic(*samples, axis=-1))
    if n < 2:
        return Estimate(value, np.nan, np.nan, n)
    if clusters is not None:
        statistic, samples = _pooled(statistic, samples, clusters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all clusters equal: the interval is a point
        interval = stats.bootstrap(samples, statistic, paired=True, vectorized=True, n_resamples=replicates, method="percentile",
                                   confidence_level=0.95, rng=np.random.default_rng(seed)).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), n)


def mean(sample: np.ndarray, seed: int = 0, replicates: int = REPLICATES, clusters: Sequence | None = None) -> Estimate:
    """Mean over samples [n] with its interval."""
    sample = np.asarray(sample, dtype=float)
    if clusters is None:
        return bootstrap(np.mean, sample, seed=seed, replicates=replicates)
    return ratio(sample, np.ones_like(sample), seed, replicates, clusters)


def t_mean(sample: np.ndarray) -> Estimate:
    """Mean of few independent samples [n] with Student's t interval, m +- t(.975, n - 1) sd / sqrt(n); no interval (NaN) below 4 of them.

    For draws that are few by choice: a percentile bootstrap of 2 to 16 values covers far less than 95 %.
    """
    sample = _numbers(sample)
    n, value = len(sample), float(np.mean(sample))
    half = float(stats.t.ppf(0.975, n - 1) * sample.std(ddof=1) / np.sqrt(n)) if n >= 4 else np.nan
    return Estimate(value, value - half, value + half, n)


def difference(a: np.ndarray, b: np.ndarray, seed: int = 0, replicates: int = REPLICATES, clusters: Sequence | None = None) -> Estimate:
    """Mean of a - b, paired by sample."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"paired samples differ in number: {list(a.shape)} and {list(b.shape)}")
    return mean(a - b, seed, replicates, clusters)


def ratio(top: np.ndarray, bottom: np.ndarray, seed: int = 0, replicates: int = REPLICATES, clusters: Sequence | None = None) -> Estimate:
    """sum(top) / sum(bottom) over samples [n] with its interval; sums per cluster are all that it needs, so it is fast."""
    top, bottom = np.asarray(top, dtype=float), np.asarray(bottom, dtype=float)
    if clusters is None:
        return bootstrap(_ratio, top, bottom, seed=seed, replicates=replicates)
    codes, n = _codes(clusters, len(_numbers(top)), len(_numbers(bottom)))
    tops, bottoms = (np.bincount(codes, x, n) for x in (top, bottom))
    if n < 2:
        return Estimate(float(_ratio(top, bottom)), np.nan, np.nan, n)
    drawn = _drawn(n, seed, replicates)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = _interval(drawn @ tops / (drawn @ bottoms))
    return Estimate(float(_ratio(top, bottom)), float(low), float(high), n)


def _ratio(top, bottom, axis=-1):
    with np.errstate(divide="ignore", invalid="ignore"):
        return top.sum(axis=axis) / bottom.sum(axis=axis)


def _interval(replicates: np.ndarray) -> np.ndarray:
    """Ends [2, ...] of the percentile interval over the first axis."""
    return np.quantile(replicates, [0.025, 0.975], axis=0)


@lru_cache(maxsize=2)
def _drawn(n: int, seed: int, replicates: int) -> np.ndarray:
    """How often each cluster is drawn [replicates, n]: the same draws as scipy.stats.bootstrap makes of n units."""
    draws = np.random.default_rng(seed).integers(0, n, (replicates, n)) + n * np.arange(replicates)[:, None]
    counts = np.bincount(draws.ravel(), minlength=replicates * n).reshape(replicates, n).astype(float)
    counts.setflags(write=False)
    return counts


def _pooled(statistic: Callable, samples: tuple[np.ndarray, ...], clusters: Sequence) -> tuple[Callable, tuple[np.ndarray]]:
    """The statistic as a function of cluster numbers [..., n], and these numbers."""
    codes, n = _codes(clusters, *map(len, samples))
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    equal = len({len(m) for m in members}) == 1
    step = max(1, 2_000_000 // len(codes)) if equal else 1  # bounds memory; draws of unequal clusters differ in length

    def indices(draws):
        if equal:
            return np.stack(members)[draws].reshape(len(draws), -1)
        return np.concatenate([members[c] for c in draws[0]])[None]

    def of_clusters(drawn, axis=-1):
        draws = drawn.reshape(-1, n)
        found = [statistic(*(s[i] for s in samples), axis=-1) for i in (indices(draws[at : at + step]) for at in range(0, len(draws), step))]
        return np.concatenate(found).reshape(drawn.shape[:-1])

    return of_clusters, (np.arange(n),)


def _codes(clusters: Sequence, *lengths: int) -> tuple[np.ndarray, int]:
    """Numbers 0..n-1 of the clusters [samples], in the order of their labels, and n."""
    import pandas as pd

    if len({len(clusters), *lengths}) > 1:
        raise ValueError(f"{len(clusters)} labels for {' and '.join(map(str, dict.fromkeys(lengths)))} values: one label per value is needed")
    codes, labels = pd.factorize(pd.Series(clusters), sort=True)
    if (codes < 0).any():
        raise ValueError("a label is missing (NaN or None): every sample needs one")
    return codes, len(labels)


def _numbers(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError("values must be one or more finite numbers in one dimension: drop or explain NaN and infinities first")
    return values


def _gap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b, exactly 0 where they differ by rounding alone: a tie is not to be decided by the order of a sum."""
    gap = a - b
    return np.where(np.abs(gap) <= 1e-12 * (np.abs(a) + np.abs(b)), 0.0, gap)


# -- tests and spreads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignTest:
    """Clusters in which a is higher (wins), lower (losses) or the same (ties), and the exact two-sided p."""

    wins: int
    losses: int
    ties: int
    p: float

    def text(self) -> str:
        """e.g. "7 higher, 1 lower, 0 the same, p = 0.07"."""
        return f"{self.wins} higher, {self.losses} lower, {self.ties} the same, p = {self.p:.2g}"


def sign_test(a: np.ndarray, b: np.ndarray, clusters: Sequence | None = None) -> SignTest:
    """Exact two-sided sign test of paired a, b [n] on the mean difference per cluster; ties are dropped, p = 1 if all tie.

    Worked example: 7 wins and 1 loss give p = 2 (1 + 8) / 2^8 = 0.0703.
    """
    a, b = _numbers(a), _numbers(b)
    codes, n = _codes(np.arange(len(a)) if clusters is None else clusters, len(a), len(b))
    gap = _gap(np.bincount(codes, a, n), np.bincount(codes, b, n))
    wins, losses = int((gap > 0).sum()), int((gap < 0).sum())
    p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return SignTest(wins, losses, n - wins - losses, p)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of the means of n runs; sd is None with one run. It is no interval over clusters: say both."""

    mean: float
    sd: float | None
    n: int

    def text(self, digits: int = 2) -> str:
        """e.g. "0.60, sd 0.02 over 3 seeds"."""
        return f"{self.mean:.{digits}f}, " + ("one seed" if self.sd is None else f"sd {self.sd:.{digits}f} over {self.n} seeds")


def spread(values: np.ndarray, seeds: Sequence, clusters: Sequence | None = None) -> Spread:
    """Spread of the mean over seeds (of eviction, of sampling): values [n], their seeds [n].

    With clusters [n] every seed must hold the same ones, or the spread would be that of the problems as well: ValueError.
    """
    values = _numbers(values)
    codes, n = _codes(seeds, len(values))
    if clusters is not None:
        units, m = _codes(clusters, len(values))
        held = np.bincount(codes * m + units, minlength=n * m).reshape(n, m)
        if (held != held[0]).any():
            raise ValueError("the runs do not hold the same clusters equally often: their spread would mix runs with clusters")
    means = np.bincount(codes, values) / np.bincount(codes)
    return Spread(float(means.mean()), float(means.std(ddof=1)) if n > 1 else None, n)


def run_sd(values: np.ndarray, runs: Sequence, clusters: Sequence | None = None) -> float | None:
    """Standard deviation (ddof 1) of the mean per independent run (Random Attention Table 8); None with one run."""
    return spread(values, runs, clusters).sd


@dataclass(frozen=True)
class Correlation(Estimate):
    """Spearman's rho with its interval; dropped counts replicates that were constant and have no rho."""

    p: float | None = None
    dropped: int = 0

    @property
    def rho(self) -> float | None:
        return self.value

    def text(self, digits: int = 2) -> str:
        """e.g. "0.60 [0.45, 0.74], p = 0.003, n = 24"."""
        p = "" if self.p is None else f", p = {self.p:.2g}"
        return super().text(digits) + p + f", n = {self.n}" + (f", {self.dropped} constant replicates dropped" if self.dropped else "")


def spearman(x: np.ndarray, y: np.ndarray, clusters: Sequence | None = None, seed: int = 0, replicates: int = REPLICATES, given: np.ndarray | None = None) -> Correlation:
    """Spearman's rho of paired x, y [n]; rho is None where one of them is constant.

    given [n]: the partial rho, of what the ranks of x and y have in common beyond those of `given`: (xy - xz yz) / sqrt((1 - xz^2) (1 - yz^2)),
    with one degree of freedom less; None where `given` orders x or y already. A constant one takes nothing away.
    p: scipy's (t approximation) without clusters. Samples of a cluster are not independent, so that with clusters it is the
    two-sided share of bootstrap replicates on the other side of 0, (2 k + 2) / (replicates + 1).
    """
    x, y = _numbers(x), _numbers(y)
    given = None if given is None else _numbers(given)
    codes, n = _codes(np.arange(len(x)) if clusters is None else clusters, *map(len, (x, y) if given is None else (x, y, given)))
    rho = float(_partial(x, y, given, np.ones((1, len(x))))[0])
    if np.isnan(rho):
        return Correlation(None, None, None, n)
    if n < 2:
        return Correlation(rho, np.nan, np.nan, n)
    blocks = np.array_split(_drawn(n, seed, replicates), max(1, replicates * len(x) // 2_000_000))  # bounds memory
    drawn = np.concatenate([_partial(x, y, given, block[:, codes]) for block in blocks])
    found = drawn[~np.isnan(drawn)]
    low, high = _interval(found)
    if clusters is None:
        free = n - 2 - (given is not None)
        p = None if free < 1 else float(2 * stats.t.sf(np.sqrt(free) * abs(rho) / np.sqrt((1 - rho) * (1 + rho)), free)) if abs(rho) < 1 else 0.0
    else:
        p = min(1.0, 2 * (min((found <= 0).sum(), (found >= 0).sum()) + 1) / (len(found) + 1))
    return Correlation(rho, float(low), float(high), n, p, len(drawn) - len(found))


def _partial(x: np.ndarray, y: np.ndarray, given: np.ndarray | None, times: np.ndarray) -> np.ndarray:
    """[replicates]: `_rho`, less what both share with `given`; NaN where that leaves nothing of one of them."""
    rho = _rho(x, y, times)
    if given is None:
        return rho
    xz, yz = (np.nan_to_num(_rho(v, given, times)) for v in (x, y))
    left = (1 - xz**2) * (1 - yz**2)
    return np.where(left > 1e-12, np.clip((rho - xz * yz) / np.sqrt(np.maximum(left, 1e-12)), -1, 1), np.nan)


def _rho(x: np.ndarray, y: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Spearman's rho [replicates] of samples x, y [n] that occur `times` [replicates, n]; NaN where one is constant."""
    a, b = _centred_ranks(x, times), _centred_ranks(y, times)
    with np.errstate(invalid="ignore"):
        return np.clip((times * a * b).sum(1) / np.sqrt((times * a * a).sum(1) * (times * b * b).sum(1)), -1, 1)


def _centred_ranks(x: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Average ranks minus their mean [replicates, n]: multiples of 1/2, so that a constant gives 0 exactly."""
    order = np.argsort(x)
    starts = np.flatnonzero(np.diff(x[order], prepend=-np.inf))
    equal = np.add.reduceat(times[:, order], starts, axis=1)  # samples at each level of x
    ranks = equal.cumsum(1) - (equal + equal.sum(1, keepdims=True)) / 2
    return ranks[:, np.searchsorted(x[order][starts], x)]


# -- a table against a reference ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One arm in one column: its mean, the difference to the reference and the sign test of arm against reference."""

    estimate: Estimate
    difference: Estimate
    signs: SignTest
    worse: bool
    best: bool


@dataclass(frozen=True)
class Comparison:
    """Arms (rows) by columns; cells[arm, column] is None where the frame has no value."""

    cells: dict[tuple, Cell | None]
    arms: tuple
    columns: tuple
    reference: object
    arm: str
    cluster: str
    rule: str
    digits: int
    lower: tuple
    unranked: tuple

    @property
    def frame(self) -> pd.DataFrame:
        """Tidy: one row per arm and column, with estimate, paired difference to the reference, sign test and flags."""
        import pandas as pd

        return pd.DataFrame([{"arm": a, "column": c} | _flat(self.cells[a, c]) for a in self.arms for c in self.columns])

    def text(self, intervals: bool = False) -> str:
        """Aligned plain text: * best, ( ) worse than the reference, - no value, and a line that says so."""
        def mark(text, cell):
            return f"({text})" if cell.worse else f" {text}{'*' if cell.best else ' '}"

        table = self._table(mark, intervals, "- ")
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:]))]).rstrip() for row in table]
        return "\n".join([*lines, self._legend("*", "( )")])

    def markdown(self, intervals: bool = False) -> str:
        """A markdown table: best in bold, worse in grey, and a line that says so."""
        def mark(text, cell):
            return f'<span style="color:gray">{text}</span>' if cell.worse else f"**{text}**" if cell.best else text

        head, *body = [[x.replace("|", "\\|") for x in row] for row in self._table(mark, intervals)]
        rows = [head, ["---"] + ["---:"] * len(self.columns), *body]
        return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", self._legend("**bold**", "grey")])

    def figure(self, title: str = "", intervals: bool = False) -> Picture:
        """The table as a figure: best in bold, worse in grey, the legend under it."""
        from kvprobe import plotting

        table = self._table(lambda text, cell: text, intervals)
        inch = [0.3 + 0.085 * max(map(len, column)) for column in zip(*table)]  # a character of the table takes about 0.08 in
        width, step = max(4.8, sum(inch)), 0.25
        inch[0] += width - sum(inch)
        title, legend = ("\n".join(textwrap.wrap(t, int(width * per))) for t, per in ((title, 11), (self._legend("bold:", "grey:").replace("p < ", "p\u00a0<\u00a0"), 17)))
        height = step * (len(table) + 0.6)
        figure, ax = plotting.picture(width + 0.2, height + 0.22 * (title.count("\n") + 1.5) + 0.13 * (legend.count("\n") + 2))
        ax.set(xlim=(0, width), ylim=(height / step - 1, -1))
        ax.set_axis_off()
        for y, row in enumerate(table):
            for x, text in enumerate(row):
                cell = self.cells[self.arms[y - 1], self.columns[x - 1]] if x and y else None
                style = dict(fontweight="bold" if cell and cell.best else "normal", color="0.6" if cell and cell.worse else "0.05")
                ax.text(sum(inch[: x + 1]) - 0.1 if x else 0.05, y - 0.1, text, ha="right" if x else "left", va="center", fontsize=9, **style)
        for y, thick in ((-0.75, 1.2), (0.35, 0.7), (len(table) - 0.5, 1.2)):
            ax.axhline(y, color="0.15", lw=thick)
        figure.suptitle(title, fontsize=11)
        plotting.footer(figure, legend)
        return figure

    def _table(self, mark: Callable[[str, Cell], str], intervals: bool, missing: str = "-") -> list[list[str]]:
        """Header and rows as strings."""
        def show(cell):
            if cell is None:
                return missing
            e = cell.estimate
            return mark(e.text(self.digits) if intervals else f"{e.value:z.{self.digits}f}", cell)

        return [[self.arm, *map(str, self.columns)]] + [[str(a), *(show(self.cells[a, c]) for c in self.columns)] for a in self.arms]

    def _legend(self, best: str, worse: str) -> str:
        n = [str(self.cells[self.reference, c].estimate.n) for c in self.columns]
        lower = "" if not self.lower else "; lower is better" + ("" if set(self.lower) == set(self.columns) else f" in {', '.join(map(str, self.lower))}")
        apart = f" (without {', '.join(map(str, self.unranked))})" if self.unranked else ""
        return (f"{best} best of the column{apart}; {worse} worse than {self.reference} ({RULES[self.rule]}){lower}; "
                f"n = {n[0] if len(set(n)) == 1 else ', '.join(n)} clusters ({self.cluster}), 95 % bootstrap intervals over clusters")


def _flat(cell: Cell | None) -> dict:
    if cell is None:
        return dict(value=None, low=None, high=None, n=0, worse=False, best=False)
    e, d = cell.estimate, cell.difference
    return dict(value=e.value, low=e.low, high=e.high, n=e.n, difference=d.value, difference_low=d.low, difference_high=d.high, **vars(cell.signs),
                worse=cell.worse, best=cell.best)


def compare(frame: pd.DataFrame, *, value: str | Sequence[str], arm: str, cluster: str, reference: object, column: str | None = None,
            higher: bool | dict[str, bool] = True, unranked: Sequence = (), rule: str = "both", digits: int = 2, seed: int = 0,
            replicates: int = REPLICATES) -> Comparison:
    """Means of every arm with what is significantly worse than the reference arm, and what is best (Random Attention Table 1).

    frame: one row per sample; arm, cluster and column name columns of it, value one or more columns of numbers. Columns of the
    table are the levels of `column` times the values. A cell pools the samples of its clusters; differences are paired by cluster,
    so that an arm must have the clusters of the reference. higher: whether higher is better, one for all or one per value.
    unranked: arms that are never best, such as a full cache. rule: one of RULES. A cell without rows, or with NaN only,
    is empty; anything else that is missing is refused with a ValueError. Arms and columns keep the order of the frame.
    """
    values = [value] if isinstance(value, str) else list(value)
    unranked = [unranked] if isinstance(unranked, str) else list(unranked)
    better = {v: higher for v in values} if isinstance(higher, bool) else dict(higher)
    _check(frame, values, [arm, cluster] + [column] * (column is not None), better, rule)
    arms = tuple(frame[arm].unique())
    for name in (reference, *unranked):
        if name not in arms:
            raise ValueError(f"{arm} {name!r} is not in the frame: {', '.join(map(repr, arms))} are")
    cells, columns, lower = {}, [], []
    for level in [None] if column is None else frame[column].unique():
        part = frame if column is None else frame[frame[column] == level]
        for v in values:
            label = v if column is None else level if len(values) == 1 else f"{level}, {v}"
            columns.append(label)
            lower += [] if better[v] else [label]
            sums, counts = _sums(part, v, arm, cluster, arms, reference, label)
            found = _column(sums, counts, arms.index(reference), [a not in unranked for a in arms], better[v], rule, seed, replicates)
            cells |= {(a, label): cell for a, cell in zip(arms, found)}
    return Comparison(cells, arms, tuple(columns), reference, arm, cluster, rule, digits, tuple(lower), tuple(unranked))


def _check(frame: pd.DataFrame, values: list[str], keys: list[str], better: dict, rule: str) -> None:
    names = values + keys
    if not values or len(set(names)) < len(names):
        raise ValueError(f"value, arm, cluster and column must name different columns, not {', '.join(names)}")
    for name in names:
        if (found := list(frame.columns).count(name)) != 1:
            raise ValueError(f"the frame has {found or 'no'} column{'s' * (found > 1)} {name!r}, it must have one; its columns: {', '.join(map(str, frame.columns))}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    if set(better) != set(values):
        raise ValueError(f"higher must be True, False or one of them for each of {', '.join(values)}")
    for key in keys:
        if frame[key].isna().any():
            raise ValueError(f"column {key!r} has missing labels: every row needs one")


def _sums(part: pd.DataFrame, value: str, arm: str, cluster: str, arms: tuple, reference: object, label: object) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of values [clusters, arms]; NaN and 0 in the column of an arm without values."""
    import pandas as pd

    rows = pd.DataFrame({"arm": part[arm].to_numpy(), "cluster": part[cluster].to_numpy(), "x": part[value].astype(float).to_numpy()})
    by_arm = rows.assign(bad=~np.isfinite(rows.x), nan=rows.x.isna()).groupby("arm")
    if (mixed := by_arm.bad.any() & ~by_arm.nan.all()).any():
        raise ValueError(f"{label}: {arm} {mixed.idxmax()!r} has NaN or infinite values; a cell must be complete or wholly missing")
    grouped = rows.dropna().groupby(["cluster", "arm"]).x
    sums, counts = (x.unstack("arm").reindex(columns=list(arms)) for x in (grouped.sum(), grouped.count()))
    gaps = sums.isna()
    if gaps[reference].all():
        raise ValueError(f"{label}: the reference {reference!r} has no values, nothing can be compared with it")
    for name in arms:
        unpaired = gaps.index[gaps[name] != gaps[reference]]
        if not gaps[name].all() and len(unpaired):
            raise ValueError(f"{label}: {arm} {name!r} and the reference {reference!r} must have the same clusters; {cluster} {unpaired[0]!r} is not in both")
    return sums.to_numpy(), counts.fillna(0).to_numpy()


def _column(sums: np.ndarray, counts: np.ndarray, at: int, ranked: list[bool], higher: bool, rule: str, seed: int, replicates: int) -> list[Cell | None]:
    """Cells of all arms from sums and numbers [clusters, arms]; `at` is the reference."""
    n, here = len(sums), ~np.isnan(sums).all(0)
    drawn = _drawn(n, seed, replicates)
    with np.errstate(invalid="ignore"):
        value, by_cluster = sums.sum(0) / counts.sum(0), sums / counts
        means = drawn @ sums / (drawn @ counts) if n > 1 else np.full((1, len(value)), np.nan)  # one cluster has no interval
    gap, gaps = _gap(value, value[at]), _gap(means, means[:, [at]])
    sign = 1 if higher else -1
    contest = [sign * v for v, a, r in zip(value, here, ranked) if a and r]
    out: list[Cell | None] = []
    for k in range(len(value)):
        if not here[k]:
            out.append(None)
            continue
        estimate, apart = (Estimate(float(v), *map(float, _interval(x[:, k])), n) for v, x in ((value[k], means), (gap[k], gaps)))
        signs = sign_test(by_cluster[:, k], by_cluster[:, at])
        told = {"interval": n > 1 and (apart.high < 0 if higher else apart.low > 0),
                "sign": signs.p < ALPHA and sign * (signs.wins - signs.losses) < 0}
        best = ranked[k] and bool(_gap(sign * value[k], max(contest)) == 0)
        out.append(Cell(estimate, apart, signs, bool(all(told.values()) if rule == "both" else told[rule]), best))
    return out
