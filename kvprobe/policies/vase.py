"""Entries of large value range, and the others sampled by attention (VaSE, Chang et al. 2026, arXiv 2606.03928), as Random Attention ran it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import scores
from kvprobe.types import CacheView, Needs, check_window

ABOVE = 2.0**20
"""Between the sampled and the large set: far above any log p + Gumbel."""


@dataclass(frozen=True)
class POLICY:
    """Keep the n_large entries of largest value range, sinks first; fill up by sampling without replacement, by attention.

    Gumbel-top-k on log p has the law of sequential sampling (methods R16). Entries of no attention come last, in uniform order.
    """

    n_large: int = -1
    """entries kept for their value range; -1 means a quarter of keep + buffer"""
    n_sink: int = 4
    """first positions of the text, counted into the large set [tokens]"""
    window: int = -1
    """newest queries whose attention is sampled by [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 5
    """neighbours over which attention is averaged, odd [entries]"""

    def __post_init__(self) -> None:
        check_window(self)
        if self.n_large < -1 or self.n_sink < 0:
            raise ValueError(f"n_large={self.n_large} must be at least 0, or -1 for a quarter of keep + buffer; n_sink={self.n_sink} at least 0")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, draws=True)

    def check(self, plan) -> None:
        """Raise ValueError for a large set that would not fit."""
        if self.n_large > plan.keep:
            raise ValueError(f"n_large={self.n_large} is larger than keep={plan.keep}")

    def score(self, view: CacheView) -> Tensor:
        rank = self._rank(view)
        n_large = min((view.keep + view.buffer) // 4 if self.n_large < 0 else self.n_large, view.keep)
        p = scores.window_importance(view, self.kernel).double()
        u = view.rand().clamp(min=2.0**-54)
        sampled = torch.where(p > 0, p.clamp(min=torch.finfo(p.dtype).tiny).log() - (-u.log()).log(), u - ABOVE)
        return torch.where(rank < n_large, ABOVE - rank, sampled)

    def _rank(self, view: CacheView) -> Tensor:
        """[b hkv c]: place by value range, the newest first among equals, sinks before all, empty slots behind."""
        spread = view.values.amax(-1) - view.values.amin(-1)
        spread = spread.masked_fill(view.positions < self.n_sink, torch.inf).masked_fill(~view.real, -torch.inf)
        order = spread.flip(-1).argsort(dim=-1, descending=True, stable=True)
        c = order.shape[-1]
        return torch.empty_like(order).scatter_(-1, c - 1 - order, torch.arange(c, device=order.device).expand_as(order))
