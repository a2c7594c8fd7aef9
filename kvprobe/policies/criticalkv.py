"""Half by attention, the rest by attention times the projected value's norm (CriticalKV, Feng et al. 2025, arXiv 2502.03805), as kvpress has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation, projections
from kvprobe.policies import snapkv
from kvprobe.types import CacheView


@dataclass(frozen=True)
class POLICY(snapkv.POLICY):
    """snapkv's score s; a share `first` of a head's free entries by s, the others by (s + eps) |W_O v|_1, mean over the group (methods 7).

    In the released form pins use up the first stage's share, as the window does in kvpress.
    """

    first: float = 0.5
    """share of the free entries that go by attention alone"""
    eps: float = 1e-4
    """added to the attention in the second stage; matters where it is about 1 / candidates"""
    adaptive: bool = False
    """whether heads share a layer's budget by their scores (CriticalAdaKV)"""
    alpha: float = 0.2
    """with adaptive: share of the budget that every head has for sure"""
    form: Literal["free", "released"] = "free"
    """what the first stage is a share of: the free entries, or all that are kept"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.first <= 1 or not 0 <= self.alpha <= 1 or not self.eps >= 0:
            raise ValueError(f"first={self.first} and alpha={self.alpha} must be in [0, 1], eps={self.eps} at least 0")

    def bind(self, model) -> POLICY:
        """This policy with the model's output projections at hand."""
        return projections.bound(self, model)

    @property
    def level(self) -> str:
        return "layer" if self.adaptive else "head"

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        if not self.adaptive:
            return keep

        def budgets(s: Tensor, total: int, free: Tensor) -> Tensor:
            return allocation.filled(allocation.adakv(s, total // len(s), self.alpha, "floor", free), s, total, free)

        return allocation.per_layer(budgets, score, keep, held, real)

    def select(self, view: CacheView, score: Tensor, keep: Tensor) -> Tensor:
        return self.staged(view, score, self.later(view, score), keep)

    def later(self, view: CacheView, score: Tensor) -> Tensor:
        """[b hkv c]: what the second stage goes by, whatever the budget."""
        return (score + self.eps) * projections.value_norms(projections.output(self, view.layer), view.values)

    def staged(self, view: CacheView, score: Tensor, later: Tensor, keep: Tensor) -> Tensor:
        """[b hkv c]: `later`, with the first stage's entries above all others."""
        held = (view.real & ~view.free).sum(-1)
        first = (keep - held) * self.first if self.form == "free" else (keep * self.first - held).clamp(min=0)
        chosen = allocation.top(score, (first + 1e-9).floor().long(), view.free)
        return torch.where(chosen, later.amax(-1, keepdim=True) + 1 + score, later)
