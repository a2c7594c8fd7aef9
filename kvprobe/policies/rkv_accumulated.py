"""R-KV whose attention accumulates over every query since the entry came (Cai et al. 2025 in Random Attention sec. 5.3's wording)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe import scores
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """lam * s + (1 - lam) * (1 - mean cosine); s as H2O's score: the form that can find a fact stated once."""

    lam: float = 0.5
    """weight of attention; 1 - lam is the weight of being unlike the others"""

    needs = Needs(attn_mass=True)

    def __post_init__(self) -> None:
        check_window(self)

    def score(self, view: CacheView) -> Tensor:
        return self.lam * view.columns["attn_mass"] + (1 - self.lam) * (1 - scores.mean_cosine(view))
