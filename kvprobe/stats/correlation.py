"""Rank correlation with an interval, also by clusters, also with a third quantity held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .bootstrap import REPLICATES, Estimate, coded, draw_counts, finite, percentiles


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
    x, y = finite(x), finite(y)
    given = None if given is None else finite(given)
    codes, n = coded(np.arange(len(x)) if clusters is None else clusters, *map(len, (x, y) if given is None else (x, y, given)))
    rho = float(_partial(x, y, given, np.ones((1, len(x))))[0])
    if np.isnan(rho):
        return Correlation(None, None, None, n)
    if n < 2:
        return Correlation(rho, np.nan, np.nan, n)
    blocks = np.array_split(draw_counts(n, seed, replicates), max(1, replicates * len(x) // 2_000_000))  # bounds memory
    drawn = np.concatenate([_partial(x, y, given, block[:, codes]) for block in blocks])
    found = drawn[~np.isnan(drawn)]
    low, high = percentiles(found)
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
