"""The clustered bootstrap: an estimate with its interval, draws that everything with the same seed shares (Random Attention app. B)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

REPLICATES = 4000
"""Bootstrap replicates (Random Attention app. B)."""


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


def bootstrap(statistic: Callable, *samples: np.ndarray, seed: int, replicates: int = REPLICATES, clusters: Sequence | None = None) -> Estimate:
    """Clustered percentile bootstrap: whole clusters are drawn with replacement, the statistic is that of their pooled samples.

    samples: arrays [n], paired; statistic(*samples, axis) reduces the last axis. clusters: labels [n]; without them every
    sample is its own cluster. Clusters of unequal sizes cost one call of the statistic per replicate.
    """
    samples = tuple(map(finite, samples))
    if len({len(s) for s in samples}) > 1:
        raise ValueError(f"paired samples differ in number: {[len(s) for s in samples]}")
    n = len(samples[0]) if clusters is None else coded(clusters, len(samples[0]))[1]
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
    sample = finite(sample)
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
    codes, n = coded(clusters, len(finite(top)), len(finite(bottom)))
    tops, bottoms = (np.bincount(codes, x, n) for x in (top, bottom))
    if n < 2:
        return Estimate(float(_ratio(top, bottom)), np.nan, np.nan, n)
    drawn = draw_counts(n, seed, replicates)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = percentiles(drawn @ tops / (drawn @ bottoms))
    return Estimate(float(_ratio(top, bottom)), float(low), float(high), n)


def _ratio(top, bottom, axis=-1):
    with np.errstate(divide="ignore", invalid="ignore"):
        return top.sum(axis=axis) / bottom.sum(axis=axis)


def percentiles(replicates: np.ndarray) -> np.ndarray:
    """Ends [2, ...] of the percentile interval over the first axis."""
    return np.quantile(replicates, [0.025, 0.975], axis=0)


@lru_cache(maxsize=2)
def draw_counts(n: int, seed: int, replicates: int) -> np.ndarray:
    """How often each cluster is drawn [replicates, n]: the same draws as scipy.stats.bootstrap makes of n units."""
    draws = np.random.default_rng(seed).integers(0, n, (replicates, n)) + n * np.arange(replicates)[:, None]
    counts = np.bincount(draws.ravel(), minlength=replicates * n).reshape(replicates, n).astype(float)
    counts.setflags(write=False)
    return counts


def _pooled(statistic: Callable, samples: tuple[np.ndarray, ...], clusters: Sequence) -> tuple[Callable, tuple[np.ndarray]]:
    """The statistic as a function of cluster numbers [..., n], and these numbers."""
    codes, n = coded(clusters, *map(len, samples))
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


def coded(clusters: Sequence, *lengths: int) -> tuple[np.ndarray, int]:
    """Numbers 0..n-1 of the clusters [samples], in the order of their labels, and n."""
    import pandas as pd

    if len({len(clusters), *lengths}) > 1:
        raise ValueError(f"{len(clusters)} labels for {' and '.join(map(str, dict.fromkeys(lengths)))} values: one label per value is needed")
    codes, labels = pd.factorize(pd.Series(clusters), sort=True)
    if (codes < 0).any():
        raise ValueError("a label is missing (NaN or None): every sample needs one")
    return codes, len(labels)


def finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError("values must be one or more finite numbers in one dimension: drop or explain NaN and infinities first")
    return values


def exact_gap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b, exactly 0 where they differ by rounding alone: a tie is not to be decided by the order of a sum."""
    gap = a - b
    return np.where(np.abs(gap) <= 1e-12 * (np.abs(a) + np.abs(b)), 0.0, gap)
