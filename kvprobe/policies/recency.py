"""The newest entries (sliding window). With prompt protection this is Prefix Sliding (Random Attention, sec. 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Keep the newest entries."""

    needs = Needs(states=False)

    def score(self, view: CacheView) -> Tensor:
        return view.positions.to(wide(view.keys.dtype))
