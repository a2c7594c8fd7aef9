"""What a keep log says a policy retained: coverage, prompt survival, survival by age, decorrelation (Random Attention app. D; protocols 4, 8).

All functions take one row of a log. Means run over the layers, and over all rounds unless a round is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .keeplog import KeepLog
from .metrics import survival


@dataclass(frozen=True)
class Coverage:
    """Means over rounds and layers.

    slots: share of candidate slot indices that some head keeps right after a round (Random Attention's count: 8 independent
    heads give 1 - 1e-10, a shared draw K / (K + r)). positions: share of the positions that some head held as a candidate
    that some head still holds right after the round (settles at .978 for 8 independent heads, K=1024, r=64; at .967 for 3
    heads, K=256, r=16). decorrelation: size of the union over heads of the kept candidates over heads x K, 1 when heads are
    disjoint, 1 / heads when they are identical.
    """

    slots: float
    positions: float
    decorrelation: float


def coverage(log: KeepLog, row: int, only: Sequence[int] | None = None) -> Coverage:
    """only: the rounds looked at, all by default. Raises ValueError for a row without rounds."""
    slots, positions, apart = [], [], []
    for n, died, _ in _rounds(log, row, buffer=False, only=only):
        before, after = died >= n, died > n
        held = after.any(1).sum(-1)
        positions.append((held / before.any(1).sum(-1)).mean())
        apart.append((held / after.sum((1, 2))).mean())
        slots.append(_slots(before, after).mean())
    return Coverage(float(np.mean(slots)), float(np.mean(positions)), float(np.mean(apart)))


def _slots(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[l]: share of slot indices that some head keeps; before, after bool [l hkv p]. Slots of a layer: as many as its fullest head has; shorter heads have empty last slots."""
    width = before.sum(-1).max(1)
    index = before.cumsum(-1) - 1
    out = np.zeros((before.shape[0], width.max()), dtype=bool)
    layer, _, _ = np.nonzero(after)
    out[layer, index[after]] = True
    return out.sum(-1) / width


def _rounds(log: KeepLog, row: int, buffer: bool, only: Sequence[int] | None = None):
    """(n, died [l hkv p], length) per round, over the positions that were candidates (buffer=True: over all seen)."""
    if not log.fired[row]:
        raise ValueError(f"row {row} had no round: nothing was evicted, there is nothing to measure")
    for n, length in enumerate(log.fired[row]):
        if only is not None and n not in only:
            continue
        yield n, log.died[:, row, :, : length if buffer else length - log.buffer], length


def prompt_survival(log: KeepLog, row: int, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """(by any head, by a given head): share of the first `prompt` positions still held after each round [rounds]."""
    died = log.died[:, row, :, :prompt]
    after = [died > n for n in range(log.rounds(row))]
    return np.array([a.any(1).mean() for a in after]), np.array([a.mean() for a in after])


@dataclass(frozen=True)
class Ages:
    """Sums over rounds per age (index; 0 is unused): how often a body position of that age existed, the mean share of heads
    that held it, the share of layers in which some head did, and what a uniform draw predicts for one head."""

    count: np.ndarray
    head: np.ndarray
    union: np.ndarray
    uniform: np.ndarray


def ages(log: KeepLog, row: int, first: int, pinned: int = 0) -> Ages:
    """Survival by age = length at the round - position [tokens] of the positions from `first` on; pinned: entries of a protected prompt."""
    last = log.fired[row][-1] if log.fired[row] else 0
    out = Ages(*(np.zeros(last + 1) for _ in range(4)))
    entered = np.searchsorted(np.array(log.fired[row]) - log.buffer, np.arange(last), side="right")  # rounds before it was a candidate
    for n, died, length in _rounds(log, row, buffer=True):
        held = died[..., first:] > n
        age = length - np.arange(first, length)
        out.count[age] += 1
        out.head[age] += held.mean((0, 1))
        out.union[age] += held.any(1).mean(0)
        draws = np.maximum(0, n + 1 - entered[first:length])
        out.uniform[age] += [survival(log.keep, log.buffer, d, pinned) for d in draws]
    return out


def band(sums: Ages, low: int, high: int) -> dict[str, float]:
    """Shares of the ages low <= age < high; empty where no position was that old."""
    inside = slice(low, high)
    n = sums.count[inside].sum()
    return {} if not n else {name: float(getattr(sums, name)[inside].sum() / n) for name in ("head", "union", "uniform")}
