"""Keys unlike the mean key direction (KeyDiff, Park et al. 2025, arXiv 2504.15364), as kvpress released it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Minus the cosine of a key with the mean unit key of its KV head's candidates."""

    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        keys = view.keys.to(wide(view.keys.dtype))
        tiny = torch.finfo(keys.dtype).tiny
        # no unit key is ever written: an empty slot and a zero key weigh nothing
        inverse = keys.norm(dim=-1).clamp(min=tiny).reciprocal().masked_fill(~view.real, 0.0)
        anchor = (inverse[..., None, :] @ keys).squeeze(-2)
        along = (keys @ anchor[..., None]).squeeze(-1)
        return -along * inverse / anchor.norm(dim=-1, keepdim=True).clamp(min=tiny)
