"""Attention of the newest query, one set for all heads of a layer (TOVA, Oren et al. 2024, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe import attention, scores
from kvprobe.types import CacheView, Needs


@dataclass(frozen=True)
class POLICY:
    """Softmax over the candidates per query head, mean over all query heads of the layer that hold the entry.

    Kept sets are the same for all heads of a layer unless pins differ between them.
    """

    needs = Needs(window=1)

    def score(self, view: CacheView) -> Tensor:
        a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling).sum(3).mean(2)
        total, heads = scores.over_heads(a, view)
        return total / heads.clamp(min=1)
