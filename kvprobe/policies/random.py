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

    needs = Needs(states=False, draws=True)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block} must be at least 1 token")

    def check(self, plan) -> None:
        """Raise ValueError for a plan under which no head could hold one block."""
        if self.block > plan.keep:
            raise ValueError(f"block={self.block} is larger than keep={plan.keep}: no head could hold one block")

    def score(self, view: CacheView) -> Tensor:
        if self.block == 1:
            return view.rand(shared=self.shared)
        block = view.positions.div(self.block, rounding_mode="floor").cummax(-1).values  # an empty slot counts to the block before it
        return torch.where(self._begun(view, block), -1.0, view.rand(shared=self.shared, counters=block))

    def _begun(self, view: CacheView, block: Tensor) -> Tensor:
        """[b hkv c]: is this entry the rest of a block that an earlier round began to evict?

        A block loses its oldest entries first, so it was begun when of its positions up to this one fewer are here than
        bans leave. (Pinned entries stay, so that looking at the block's first position would not do.)
        """
        start, stop = block * self.block, view.positions + 1
        here = view.real & (view.banned(view.positions, stop) == 0)
        upto = here.cumsum(-1)
        opens = torch.ones_like(here)
        opens[..., 1:] = block[..., 1:] != block[..., :-1]
        before = torch.where(opens, upto - here.long(), 0).cummax(-1).values
        return stop - start - view.banned(start, stop) > upto - before
