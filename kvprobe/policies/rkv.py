"""Attention of the newest queries minus redundancy among keys (R-KV, Cai et al. 2025, arXiv 2505.24133), as Random Attention sec. 2 writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvprobe import scores
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """lam * s + (1 - lam) * (1 - mean cosine with the candidates of the head); s as SnapKV's score."""

    lam: float = 0.5
    """weight of attention; 1 - lam is the weight of being unlike the others"""
    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    importance: Literal["mean", "sum"] = "mean"
    """how the window's queries are reduced"""
    kernel: int = 5
    """neighbours over which attention is averaged, odd [entries]"""

    def __post_init__(self) -> None:
        check_window(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        s = scores.window_importance(view, self.kernel, queries=self.importance)
        return self.lam * s + (1 - self.lam) * (1 - scores.mean_cosine(view))
