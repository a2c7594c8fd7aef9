"""Metrics: pure functions of arrays and tensors, each with a worked example.

Here: numbers from rows, each with the estimator it is. One module per subject beside them, loaded when it is asked for (they need torch):
coverage (and mismatch), fidelity (Recall@B, output error), ranking (top-B overlap, Spearman), composition (enrichment by class of token),
perturbation (the oracle score), layer_maps (perturbation energy, gain by head), equivalence (budgets that match), divergence (KL along a text).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module as _import

import numpy as np

from kvprobe.stats import REPLICATES, Estimate, bootstrap, difference, mean, ratio

__all__ = ["REPLICATES", "Estimate", "bootstrap", "difference", "mean", "recall_gain", "recallable", "survival"]
_MODULES = ("coverage", "fidelity", "ranking", "composition", "layer_maps", "perturbation", "equivalence", "divergence")


def __getattr__(name: str):
    if name in _MODULES:
        return _import(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*__all__, *_MODULES]


def recall_gain(logp: np.ndarray, deleted: np.ndarray, kept: np.ndarray, seed: int = 0, replicates: int = REPLICATES,
                clusters: Sequence | None = None) -> Estimate:
    """Recall R = sum(LP - LP_deleted) / sum(LP_kept - LP_deleted), a ratio of sums (Random Attention eq. 4).

    R is 1 where the condition is worth as much as keeping the fact everywhere, 0 where it is worth nothing. The value
    is None where kept is not surely better than deleted (`recallable`): nothing was there to be recalled. Worked example:
    LP = (-1, -3), deleted = (-9, -5), kept = (-1, -1): (8 + 2) / (8 + 4) = 0.833.
    """
    logp, deleted, kept = (np.asarray(x, dtype=float) for x in (logp, deleted, kept))
    available = difference(kept, deleted, seed, replicates, clusters)
    if not recallable(available):
        return Estimate(None, None, None, available.n)
    return ratio(logp - deleted, kept - deleted, seed, replicates, clusters)


def recallable(available: Estimate) -> bool:
    """Whether kept - deleted is surely above 0: its whole interval is; of one cluster, which has none, the value. Were kept worse,
    the ratio would be turned upside down."""
    return bool(available.value > 0 if available.n < 2 else available.low > 0)


def survival(keep: int, buffer: int, rounds: int, prompt: int = 0) -> float:
    """Probability that an unpinned entry outlives `rounds` uniform rounds: ((K - l) / (K + r - l))^n (methods R1)."""
    return ((keep - prompt) / (keep + buffer - prompt)) ** rounds
