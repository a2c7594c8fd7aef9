"""R-KV as its authors released it (Cai et al. 2025, arXiv 2505.24133; methods 19): softmax importance minus softmax redundancy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe import attention, scores
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """lam * importance - (1 - lam) * redundancy, both softmaxed over candidates; the newest similar entry is spared.

    Importance: the largest raw logit of the group, softmax over candidates, mean over queries, max-pooled.
    """

    lam: float = 0.1
    """weight of importance"""
    window: int = 8
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 7
    """neighbours over which importance is max-pooled, odd [entries]"""
    threshold: float = 0.5
    """cosine above which two keys are alike"""

    def __post_init__(self) -> None:
        check_window(self)
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be a cosine in [-1, 1]")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling, merge="max")
        importance = attention.pool(attention.mean_over_queries(a, view.query_positions).squeeze(2), self.kernel, "max")
        return self.lam * importance - (1 - self.lam) * scores.softmax(scores.spared_cosine(view, self.threshold), view.real)
