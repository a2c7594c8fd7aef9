"""Numbers from rows: pure functions of arrays, each with the estimator it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

REPLICATES = 4000
"""Bootstrap replicates (Random Attention app. B)."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % percentile interval over n instances; value is None where it cannot be told."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    def text(self, digits: int = 2) -> str:
        """e.g. "0.60 [0.45, 0.74]", "n/a" without a value."""
        if self.value is None:
            return "n/a"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def bootstrap(statistic: Callable, *samples: np.ndarray, seed: int, replicates: int = REPLICATES) -> Estimate:
    """Instance-clustered percentile bootstrap: instances are drawn with replacement, all samples of one together.

    samples: arrays [n], one number per instance; statistic(*samples, axis) reduces the last axis.
    """
    n = len(samples[0])
    value = float(statistic(*map(np.asarray, samples), axis=-1))
    if n < 2:
        return Estimate(value, value, value, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all instances equal: the interval is a point
        interval = stats.bootstrap(samples, statistic, paired=True, vectorized=True, n_resamples=replicates, method="percentile",
                                   confidence_level=0.95, rng=np.random.default_rng(seed)).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), n)


def mean(sample: np.ndarray, seed: int = 0, replicates: int = REPLICATES) -> Estimate:
    """Mean over instances with its interval."""
    return bootstrap(np.mean, np.asarray(sample, dtype=float), seed=seed, replicates=replicates)


def difference(a: np.ndarray, b: np.ndarray, seed: int = 0, replicates: int = REPLICATES) -> Estimate:
    """Mean of a - b, paired by instance."""
    return mean(np.asarray(a, dtype=float) - np.asarray(b, dtype=float), seed, replicates)


def recall_gain(logp: np.ndarray, deleted: np.ndarray, kept: np.ndarray, seed: int = 0, replicates: int = REPLICATES) -> Estimate:
    """Recall R = sum(LP - LP_deleted) / sum(LP_kept - LP_deleted), a ratio of sums (Random Attention eq. 4).

    R is 1 where the condition is worth as much as keeping the fact everywhere, 0 where it is worth nothing. The value
    is None where the interval of the denominator contains 0: nothing was there to be recalled. Worked example:
    LP = (-1, -3), deleted = (-9, -5), kept = (-1, -1): (8 + 2) / (8 + 4) = 0.833.
    """
    logp, deleted, kept = (np.asarray(x, dtype=float) for x in (logp, deleted, kept))
    available = difference(kept, deleted, seed, replicates)
    if available.low <= 0 <= available.high:
        return Estimate(None, None, None, len(logp))

    def ratio(gain, room, axis=-1):
        with np.errstate(divide="ignore", invalid="ignore"):
            return gain.sum(axis=axis) / room.sum(axis=axis)

    return bootstrap(ratio, logp - deleted, kept - deleted, seed=seed, replicates=replicates)


def survival(keep: int, buffer: int, rounds: int, prompt: int = 0) -> float:
    """Probability that an unpinned entry outlives `rounds` uniform rounds: ((K - l) / (K + r - l))^n (methods R1)."""
    return ((keep - prompt) / (keep + buffer - prompt)) ** rounds
