"""The largest attention any query of the window pays, times the projected value's norm (DefensiveKV, Feng et al. 2025, arXiv 2510.13334)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation, attention, projections, scores
from kvprobe.types import CacheView, Needs, check_window, wide


@dataclass(frozen=True)
class POLICY:
    """max over the window and the group of pooled attention, no less than its mean over the entries, times |W_O v|_1 over its sum across heads.

    Stage 1 holds, per head, the most attended entries up to a share `threshold` of the attention, the window's own part
    taken off; the budget of the layer (or the model) goes to the rest by score together (methods 10). Pins are outside both stages.
    """

    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 5
    """neighbours averaged, odd [entries]; each query's row keeps its sum"""
    threshold: float = 0.9
    """attention that stage 1 holds for sure; 0 leaves it out"""
    across: Literal["layer", "model"] = "layer"
    """whose heads share a budget; model is Layer-DefensiveKV"""
    form: Literal["free", "released"] = "free"
    """the window's part: what pins get; as released, by an oversight, what as many entries before the window get"""

    def __post_init__(self) -> None:
        check_window(self)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def level(self) -> str:
        return self.across

    def bind(self, model) -> POLICY:
        """This policy with the model's output projections at hand."""
        return projections.bound(self, model)

    def score(self, view: CacheView) -> Tensor:
        free = view.free
        a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling)
        rows, mean = self._pooled(a, free), attention.mean_over_queries(a, view.query_positions).mean(2)
        worst = rows.amax((2, 3)).masked_fill(~free, 0.0)
        prior = worst.sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp(min=1)
        norms = projections.value_norms(projections.output(self, view.layer), view.values).masked_fill(~view.real, 0.0)
        score = torch.maximum(worst, prior) * norms / scores.over_heads(norms, view)[0].clamp(min=torch.finfo(norms.dtype).tiny)
        sure = self._sure(attention.mean_over_queries(rows, view.query_positions).mean(2), mean, view)
        return torch.where(sure, score + score.amax() + 1, score)

    def _pooled(self, a: Tensor, free: Tensor) -> Tensor:
        """[b hkv g w c]: rows over the free entries, averaged over neighbours, their sums as before."""
        rows = a.masked_fill(~free[:, :, None, None], 0.0)
        pooled = attention.pool(rows, self.kernel, "average").masked_fill(~free[:, :, None, None], 0.0)
        return pooled * (rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny))

    def _sure(self, rows: Tensor, mean: Tensor, view: CacheView) -> Tensor:
        """bool [b hkv c]: stage 1, at most what the plan leaves each head."""
        if self.threshold == 0:
            return torch.zeros_like(view.real)
        pinned = view.real & ~view.free
        part = mean.masked_fill(~pinned, 0.0).sum(-1)
        if self.form == "released":
            last = (view.free.flip(-1).cumsum(-1).flip(-1) <= view.query_positions.shape[-1]) & view.free
            part = mean.masked_fill(~last, 0.0).sum(-1)
        place = allocation.ranks(rows, view.free)
        mass = rows.masked_fill(~view.free, 0.0).gather(-1, place.argsort(-1)).cumsum(-1)
        count = (mass < (self.threshold - part)[..., None]).sum(-1)
        return (place < torch.minimum(count, view.room)[..., None]) & view.free

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        share = allocation.per_layer if self.across == "layer" else allocation.per_model
        return share(lambda s, total, free: allocation.flattened(s, total, free), score, keep, held, real)
