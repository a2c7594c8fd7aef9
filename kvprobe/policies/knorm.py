"""Keys of small norm, which attract attention (Devoto et al. 2024, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Minus the L2 norm of a key."""

    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        return -view.keys.to(wide(view.keys.dtype)).norm(dim=-1)
