"""Saliency of an entry's value, key or both on the attention output (OBCache, Gu et al. 2025, arXiv 2510.07651), p = 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import attention, outputs
from kvprobe.types import CacheView, Needs, check_window, wide


@dataclass(frozen=True)
class POLICY:
    """With weights A, scaled logits Z and outputs o of the newest queries over the candidates, summed over queries and the group:

    value A^2 |v|^2; key (A Z)^2 |v - o|^2; joint both and 2 A^2 Z (|v|^2 - <v, o>), which is A^2 |v + Z (v - o)|^2.
    Z as it is: unlike attention, key and joint change when a constant is added to all logits of a query.
    """

    form: Literal["value", "key", "joint"] = "joint"
    """what is deleted: the value, the key, or both (the paper's VK)"""
    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 1
    """neighbours pooled per query head, odd [entries]; 1 for none"""
    pooling: Literal["average", "max"] = "max"
    """how neighbours are pooled"""

    def __post_init__(self) -> None:
        check_window(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        values = view.values.double()
        group = view.queries.shape[1] // values.shape[1]
        total = sum(self._saliency(a, z, values).unflatten(2, (group, -1)).sum(3) for a, z in outputs.window_blocks(view))
        return attention.pool(total, self.kernel, self.pooling).sum(2).to(wide(view.keys.dtype))

    def _saliency(self, a: Tensor, z: Tensor, values: Tensor) -> Tensor:
        """[b hkv m c] per query."""
        size = values.square().sum(-1)[..., None, :]
        if self.form == "value":
            return a.square() * size
        if self.form == "key":
            return (a * z * outputs.distances(a @ values, values)).square()
        out = a @ values
        along = out @ values.transpose(-1, -2)
        gap = size - 2 * along + out.square().sum(-1, keepdim=True)
        return a.square() * torch.addcmul(size + 2 * z * (size - along), z.square(), gap)
