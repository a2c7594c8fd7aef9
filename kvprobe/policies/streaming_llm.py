"""Attention sinks and a recent window (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453), without re-rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Keep the first positions of the text and the newest entries."""

    n_sink: int = 4
    """first positions of the text that are always kept [tokens]"""

    needs = Needs(states=False)

    def __post_init__(self) -> None:
        if self.n_sink < 0:
            raise ValueError(f"n_sink={self.n_sink} must be at least 0")

    def score(self, view: CacheView) -> Tensor:
        score = view.positions.to(wide(view.keys.dtype))
        # above every position, and still in order among themselves should keep be smaller than n_sink
        return torch.where(view.positions < self.n_sink, score + 2.0**23, score)
