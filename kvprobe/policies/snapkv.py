"""Attention of the newest queries, pooled over neighbours (SnapKV, Li et al. 2024, arXiv 2404.14469), as Random Attention app. F ran it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvprobe import attention
from kvprobe.types import CacheView, Needs


@dataclass(frozen=True)
class POLICY:
    """Softmax over candidates per query head, reduced over the window, pooled over neighbours, then over the group."""

    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 5
    """neighbours pooled, odd [entries]"""
    pooling: Literal["average", "max"] = "average"
    """how neighbours are pooled"""
    queries: Literal["mean", "sum"] = "mean"
    """how the window's queries are reduced"""
    group: Literal["mean", "max", "sum"] = "mean"
    """how the query heads of a KV head are reduced"""

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} must be odd and at least 1")
        if self.window == 0 or self.window < -1:
            raise ValueError(f"window={self.window} must be at least 1 query, or -1 for the buffer")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling)
        a = attention.mean_over_queries(a, view.query_positions) if self.queries == "mean" else a.sum(3)
        a = attention.pool(a, self.kernel, self.pooling)
        return {"mean": a.mean, "sum": a.sum, "max": a.amax}[self.group](2)
