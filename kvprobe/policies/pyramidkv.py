"""Window attention with budgets that fall from layer to layer (PyramidKV, Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation
from kvprobe.policies import snapkv


@dataclass(frozen=True)
class POLICY(snapkv.POLICY):
    """snapkv's scores; a layer's free entries per head fall evenly, the model's total stays what a uniform budget has (methods 5).

    The released form takes whole steps and the uniform budget for a prompt shorter than twice the budget; its total drifts.
    """

    beta: float = 20.0
    """how far the last layer falls: its free entries are the uniform ones divided by this"""
    form: Literal["exact", "released"] = "exact"
    """whole steps and the case list as released, or the exact total"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta={self.beta} must be at least 1")

    @property
    def level(self) -> str:
        return "own" if self.form == "released" else "model"

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        have, held = (real & ~held).sum(-1), held.sum(-1)
        out, released = held.clone(), self.form == "released"
        for b in range(score.shape[1]):
            total = int((keep - held)[:, b].sum())
            base = total // held[:, b].numel()
            layers = allocation.pyramid(len(score), base, int(have[:, b].max()), self.beta, int(held[:, b].max()), released=released, cases=released)
            budget = torch.minimum(torch.tensor(layers, device=have.device)[:, None].expand_as(have[:, b]), have[:, b])
            out[:, b] += budget if released else _even(budget, have[:, b], total)
        return out


def _even(budget: Tensor, have: Tensor, total: int) -> Tensor:
    """budget [l h] made to add up to `total`, an entry at a time from the first layer on: pins that differ between heads, layers with less than their share."""
    while (missing := total - int(budget.sum())) != 0:
        open_ = ((budget < have) if missing > 0 else (budget > 0)).flatten()
        some = (open_ & (open_.cumsum(0) <= abs(missing))).view_as(budget)
        if not bool(some.any()):
            raise ValueError(f"budgets for {total} entries where there are {int(have.sum())}")
        budget = budget + some.long() * (1 if missing > 0 else -1)
    return budget
