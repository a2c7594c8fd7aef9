"""Uniform draw per KV head and round (Random Attention, sec. 3; shared draw app. D; contiguous blocks Fig. 3c)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.types import CacheView, Needs


@dataclass(frozen=True)
class POLICY:
    """Random eviction."""

    shared: bool = False
    """one draw for all KV heads of a layer: the control without diversity across heads"""
    block: int = 1
    """evict contiguous blocks of this many positions [tokens]; at most keep"""

    needs = Needs()

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block} must be at least 1 token")

    def score(self, view: CacheView) -> Tensor:
        if self.block == 1:
            return view.rand(shared=self.shared)
        if self.block > view.keep:
            raise ValueError(f"block={self.block} is larger than keep={view.keep}: no head could hold one block")
        block = view.positions.div(self.block, rounding_mode="floor")
        return torch.where(self._begun(view, block), -1.0, view.rand(shared=self.shared, counters=block))

    def _begun(self, view: CacheView, block: Tensor) -> Tensor:
        """[b hkv c]: is this entry the rest of a block that an earlier round began to evict?

        Blocks go oldest entry first, so a block was begun when positions in front of its first entry are missing for
        another reason than a ban.
        """
        new = torch.ones_like(block, dtype=torch.bool)
        new[..., 1:] = block[..., 1:] != block[..., :-1]
        first = torch.where(new, view.positions, -1).cummax(-1).values
        start = block * self.block
        return first - start > view.banned(start, first)
