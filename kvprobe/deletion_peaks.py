"""The softmax of queries over some keys with each query's top entry apart, and how those of several tiles are joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 64
"""Entries among which the largest is looked for at a time."""
LOWEST = -1e30
"""Logit of a query's top entry in a tile of which it sees nothing."""


@dataclass
class Peak:
    """The softmax of queries over some keys, the top one left out: everything is relative to it, so that it weighs 1.

    logit and slot (counted from the first key of all) [k m 1] of the top entry, its value own [k m d]; rest [k m 1] sum of
    the others' weights and left [k m d] sum of weight times value.
    """

    logit: Tensor
    slot: Tensor
    own: Tensor
    rest: Tensor
    left: Tensor

    def __add__(self, other: Peak) -> Peak:
        first = self.logit >= other.logit
        share = (self.logit - other.logit).abs_().neg_().exp_()

        def top(name: str) -> Tensor:
            return torch.where(first, getattr(self, name), getattr(other, name))

        def low(name: str) -> Tensor:
            return torch.where(first, getattr(other, name), getattr(self, name))

        return Peak(top("logit"), top("slot"), top("own"), top("rest") + share * (low("rest") + 1), top("left") + share * (low("left") + low("own")))


@dataclass
class Tile:
    """weight [k m t] of keys `at` relative to the top one of the tile, 0 at it, and their values [k d t] from the centre."""

    at: slice
    weight: Tensor
    peak: Peak
    values: Tensor


def top_entry(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of z [k m t] and its slot [k m 1]. By blocks of LANES, because amax is vectorised and argmax is not."""
    t = z.shape[-1]
    whole = t // LANES * LANES
    peaks = z[..., :whole].unflatten(-1, (-1, LANES)).amax(-1)
    if whole < t:
        peaks = torch.cat([peaks, z[..., whole:].amax(-1, keepdim=True)], -1)
    near = (peaks.argmax(-1, keepdim=True) * LANES + torch.arange(LANES, device=z.device)).clamp_(max=t - 1)
    slot = near.gather(-1, z.gather(-1, near).argmax(-1, keepdim=True))
    return z.gather(-1, slot).clamp_(min=LOWEST), slot


def rows_at(values: Tensor, slot: Tensor) -> Tensor:
    """Rows `slot` [k m 1] of values [k t d]: [k m d]."""
    return values.gather(1, slot.expand(-1, -1, values.shape[-1]))
