"""A table of arms against a reference arm: what is worse than it, what is best (Random Attention Table 1, sec. 4.1)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bootstrap import REPLICATES, Estimate, draw_counts, exact_gap, percentiles
from .spreads import SignTest, sign_test

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.plotting import Picture

ALPHA = 0.05
"""Level of the sign test."""
RULES = {"both": f"interval of the paired difference excludes 0 and sign test p < {ALPHA}",
         "interval": "interval of the paired difference excludes 0", "sign": f"sign test p < {ALPHA}"}
"""When a cell of a comparison is worse than its reference; "both" is Random Attention's rule (sec. 4.1)."""


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
    drawn = draw_counts(n, seed, replicates)
    with np.errstate(invalid="ignore"):
        value, by_cluster = sums.sum(0) / counts.sum(0), sums / counts
        means = drawn @ sums / (drawn @ counts) if n > 1 else np.full((1, len(value)), np.nan)  # one cluster has no interval
    gap, gaps = exact_gap(value, value[at]), exact_gap(means, means[:, [at]])
    sign = 1 if higher else -1
    contest = [sign * v for v, a, r in zip(value, here, ranked) if a and r]
    out: list[Cell | None] = []
    for k in range(len(value)):
        if not here[k]:
            out.append(None)
            continue
        estimate, apart = (Estimate(float(v), *map(float, percentiles(x[:, k])), n) for v, x in ((value[k], means), (gap[k], gaps)))
        signs = sign_test(by_cluster[:, k], by_cluster[:, at])
        told = {"interval": n > 1 and (apart.high < 0 if higher else apart.low > 0),
                "sign": signs.p < ALPHA and sign * (signs.wins - signs.losses) < 0}
        best = ranked[k] and bool(exact_gap(sign * value[k], max(contest)) == 0)
        out.append(Cell(estimate, apart, signs, bool(all(told.values()) if rule == "both" else told[rule]), best))
    return out
