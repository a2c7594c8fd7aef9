"""Attention of the newest queries, pooled over neighbours (SnapKV, Li et al. 2024, arXiv 2404.14469), as Random Attention app. F ran it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvprobe import scores
from kvprobe.types import CacheView, Needs, check_window


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
        check_window(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        return scores.window_importance(view, self.kernel, self.pooling, self.queries, self.group)
