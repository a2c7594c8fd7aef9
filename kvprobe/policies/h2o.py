"""Attention accumulated over every query since the entry came (H2O, Zhang et al. 2023, arXiv 2306.14048; Random Attention sec. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe.types import CacheView, Needs


@dataclass(frozen=True)
class POLICY:
    """Keep the heavy hitters: softmax over all visible entries per query head, summed over queries, mean over the group."""

    needs = Needs(attn_mass=True)

    def score(self, view: CacheView) -> Tensor:
        return view.columns["attn_mass"]
