"""Which budget a baseline needs to be as good as a method at its own (LORE app. F.7, Table 16 and Fig. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Match:
    """Budgets that match, and what is saved, all [..].

    own: the method's budget; needed: the baseline's [entries per KV head]; saving = 1 - own / needed, the paper's measure (128 against
    208: .385; negative where the baseline needs less). bound: 0 where `needed` was found, 1 where the baseline never gets there on
    its grid and needs more than `needed`, its largest budget (so that saving is a lower bound), -1 where it is better even at
    its smallest and both are upper bounds.
    """

    own: np.ndarray
    needed: np.ndarray
    bound: np.ndarray

    @property
    def saving(self) -> np.ndarray:
        return 1 - self.own / self.needed


def needed(budgets: Sequence[float], curve: np.ndarray, target: np.ndarray, higher: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(budget, bound) [..]: the smallest budget at which a curve [.. k] over `budgets` [k] reaches target [..]; bound as in `Match`.

    Between neighbouring budgets the curve is linear in the logarithm of the budget; where it is not monotone, its first crossing
    counts. higher: whether more is better (fidelity) or less (an error). Raises ValueError for budgets that do not rise from
    above 0, and for values that are not finite.

    >>> needed([64, 256], np.array([0.8, 0.9]), np.array([0.85, 0.95, 0.7]))  # half of the way in log B: sqrt(64 * 256)
    (array([128., 256.,  64.]), array([ 0,  1, -1]))
    """
    budgets, curve, target = (np.asarray(x, dtype=float) for x in (budgets, curve, target))
    _check(budgets, curve, target)
    sign = 1 if higher else -1
    target = sign * target
    curve = np.broadcast_to(sign * curve, (*np.broadcast_shapes(curve.shape[:-1], target.shape), len(budgets)))
    reached = curve >= target[..., None]
    first = reached.argmax(-1)
    before = np.maximum(first - 1, 0)
    low, high = (np.take_along_axis(curve, i[..., None], -1)[..., 0] for i in (before, first))
    with np.errstate(divide="ignore", invalid="ignore"):
        way = np.where(first > 0, (target - low) / (high - low), 0.0)
    bound = np.where(~reached.any(-1), 1, np.where((first == 0) & (high > target), -1, 0))
    return np.where(bound == 1, budgets[-1], budgets[before] * (budgets[first] / budgets[before]) ** way), bound


def equivalence(budgets: Sequence[float], method: np.ndarray, baseline: np.ndarray, higher: bool = True) -> Match:
    """[.. k]: for each budget of the method the one that the baseline needs to match it; both curves [.. k] are over the same budgets [k].

    Leading axes are curves of their own (prompts, or replicates of a bootstrap over them: the interval of a saving is taken from means
    over prompts, not the other way round). Rules and errors as in `needed`.

    >>> match = equivalence([64, 128, 256], np.array([0.7, 0.8, 0.9]), np.array([0.6, 0.7, 0.8]))
    >>> match.needed, match.saving, match.bound
    (array([128., 256., 256.]), array([0.5, 0.5, 0. ]), array([0, 0, 1]))
    """
    method, baseline = np.asarray(method, dtype=float), np.asarray(baseline, dtype=float)
    if method.shape[-1:] != np.shape(budgets):
        raise ValueError(f"{np.shape(budgets)} budgets for curves {list(method.shape)}: one value per budget is needed")
    found, bound = needed(budgets, baseline[..., None, :], method, higher)
    return Match(np.broadcast_to(np.asarray(budgets, dtype=float), found.shape), found, bound)


def _check(budgets: np.ndarray, curve: np.ndarray, target: np.ndarray) -> None:
    if budgets.ndim != 1 or not len(budgets) or budgets[0] <= 0 or (np.diff(budgets) <= 0).any():
        raise ValueError(f"budgets {budgets.tolist()} must rise from above 0")
    if curve.shape[-1:] != budgets.shape:
        raise ValueError(f"{len(budgets)} budgets for a curve {list(curve.shape)}: one value per budget is needed")
    if not (np.isfinite(budgets).all() and np.isfinite(curve).all() and np.isfinite(target).all()):
        raise ValueError("budgets, curves and targets must be finite: drop or explain NaN first")
