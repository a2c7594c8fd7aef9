"""The sign test, and spreads over runs (Random Attention sec. 4.1, Table 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .bootstrap import coded, exact_gap, finite


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
    a, b = finite(a), finite(b)
    codes, n = coded(np.arange(len(a)) if clusters is None else clusters, len(a), len(b))
    gap = exact_gap(np.bincount(codes, a, n), np.bincount(codes, b, n))
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
    values = finite(values)
    codes, n = coded(seeds, len(values))
    if clusters is not None:
        units, m = coded(clusters, len(values))
        held = np.bincount(codes * m + units, minlength=n * m).reshape(n, m)
        if (held != held[0]).any():
            raise ValueError("the runs do not hold the same clusters equally often: their spread would mix runs with clusters")
    means = np.bincount(codes, values) / np.bincount(codes)
    return Spread(float(means.mean()), float(means.std(ddof=1)) if n > 1 else None, n)


def run_sd(values: np.ndarray, runs: Sequence, clusters: Sequence | None = None) -> float | None:
    """Standard deviation (ddof 1) of the mean per independent run (Random Attention Table 8); None with one run."""
    return spread(values, runs, clusters).sd
