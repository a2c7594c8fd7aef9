"""R-KV as the engine of VaSE and Random Attention ran it (Cai et al. 2025; methods 19 and R2): averaged attention minus softmax redundancy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe import scores
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """lam * s - (1 - lam) * softmax(mean cosine with the others); no threshold, nothing spared: of restatements the newest
    can be the most penalised."""

    lam: float = 0.5
    """weight of attention"""
    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 5
    """neighbours over which attention is averaged, odd [entries]"""

    def __post_init__(self) -> None:
        check_window(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        redundancy = scores.softmax(scores.mean_cosine(view, itself=False), view.real)
        return self.lam * scores.window_importance(view, self.kernel) - (1 - self.lam) * redundancy
