"""Recurrence of attention (LazyEviction, Zhang et al. 2026, arXiv 2506.15969), in the form of a third-party port of its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Keep an entry while the time since it was last attended to is within the longest gap seen between such times.

    Per query head, then the largest of the group. An entry is attended to when a query gives it `alpha` of its attention
    over everything visible. The port's window W is the plan's buffer.
    """

    alpha: float = 1e-4
    """attention that counts as attending"""

    needs = Needs()

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in (0, 1]")

    def observe(self, attention: Tensor, query_positions: Tensor, key_positions: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns [b hkv s g]: `last`, the position of the newest query that attended (at first the entry's own), and
        `interval`, the largest gap between such queries (at first 0; the entry's own query is a gap of 0)."""
        last, interval = _grown(columns, key_positions, attention.shape[2])
        asked = query_positions[:, None, None, :, None].to(torch.int32)
        at = torch.where(attention >= self.alpha, asked, -1)  # [b hkv g n s]
        before = last.transpose(2, 3)[..., None, :]
        upto = torch.cat([before, at], dim=3)
        upto = upto.cummax(3).values if at.shape[3] > 1 else torch.maximum(upto, before)
        gaps = torch.where(at < 0, 0, at - upto[..., :-1, :]).amax(3).transpose(2, 3)
        return {**columns, "last": upto[..., -1, :].transpose(2, 3).contiguous(), "interval": torch.maximum(interval, gaps)}

    def score(self, view: CacheView) -> Tensor:
        last, interval = view.columns["last"], view.columns["interval"]
        since = (view.now[:, None, None, None] - 1 - last).clamp(min=0)
        # each pair once: entries of one history must tie exactly, and a vectorised exp differs in its last digit from a scalar one
        pairs, where = (since.long() << 32 | interval.long()).unique(return_inverse=True)
        return recurrence(pairs >> 32, pairs & (2**32 - 1), wide(view.keys.dtype))[where].amax(-1)


def _grown(columns: Mapping[str, Tensor], key_positions: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The columns with this forward's entries as they are born."""
    old = columns["last"].shape[2] if "last" in columns else 0
    born = key_positions[:, :, old:, None].to(torch.int32).expand(-1, -1, -1, group)
    if not old:
        return born, torch.zeros_like(born)
    return torch.cat([columns["last"], born], dim=2), torch.cat([columns["interval"], torch.zeros_like(born)], dim=2)


def recurrence(since: Tensor, interval: Tensor, dtype: torch.dtype) -> Tensor:
    """2 / (1 + exp(1 + since / (interval + 1e-5))) + [interval > 0] 2 / (1 + exp(interval - 1)); a sigmoid cannot overflow."""
    since, interval = since.to(dtype), interval.to(dtype)
    recent = 2 * torch.sigmoid(-(1 + since / (interval + 1e-5)))
    return recent + torch.where(interval > 0, 2 * torch.sigmoid(1 - interval), 0.0)
