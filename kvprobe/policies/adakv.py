"""Window attention with budgets that follow the heads' scores (Ada-KV, Feng et al. 2024, arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation
from kvprobe.policies import snapkv


@dataclass(frozen=True)
class POLICY(snapkv.POLICY):
    """snapkv's scores; the heads of a layer share its budget by how many of the layer's best entries they have (methods 6, R12).

    interpolated: that number, mixed with the even share; floor: every head's best for sure, the rest by score together
    (kvpress). Both keep the layer's total; released is interpolated with rounding, whose total drifts.
    """

    alpha: float = 0.2
    """share of the budget that is dealt evenly; 1 is uniform"""
    form: Literal["interpolated", "floor", "released"] = "interpolated"
    """how the even share is put together with the rest"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1]")

    @property
    def level(self) -> str:
        return "own" if self.form == "released" else "layer"

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        return allocation.per_layer(self._budgets, score, keep, held, real)

    def _budgets(self, score: Tensor, total: int, candidate: Tensor) -> Tensor:
        budget = allocation.adakv(score, total // len(score), self.alpha, self.form, candidate)
        if self.form == "released":
            return torch.minimum(budget, candidate.sum(-1))
        return allocation.filled(budget, score, total, candidate)
