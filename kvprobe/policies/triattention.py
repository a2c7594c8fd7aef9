"""Expected attention of calibrated pre-RoPE queries, a trigonometric series in distance (TriAttention, 2026, arXiv 2604.04921; methods 21)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import calibration
from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """S(k) = mean over offsets of sum_f |mean q_f||k_f| cos(omega_f (t0 - p + offset) + phi_f) + sum_f (E|q_f| - |mean q_f|) |k_f|.

    Per query head z-scored over the candidates that no pin holds, then the largest of the group. t0 is the position of the
    newest entry. Phases in float64. Dimensions that are not rotated count as frequency 0.
    """

    statistics: str = ""
    """file of `kvprobe calibrate triattention`; empty: made once for the model from the built-in filler, and kept in the cache folder"""
    offsets: int = 17
    """future distances 1, 2, 4, ... averaged over"""
    shared_over_layers: bool = False
    """one set per KV head for all layers, by the mean score over layers (as Random Attention ran it)"""

    needs = Needs()

    def __post_init__(self) -> None:
        if not 1 <= self.offsets <= 40:
            raise ValueError(f"offsets={self.offsets} must be in 1..40")

    def bind(self, model) -> POLICY:
        """This policy with the statistics of the model. Raises ValueError for statistics of another model."""
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "_tables", calibration.load(self.statistics, model) if self.statistics else calibration.automatic(model))
        return bound

    @property
    def facts(self) -> dict:
        """Where the statistics come from, for a run's manifest."""
        return {} if not hasattr(self, "_tables") else self._tables.about

    def score(self, view: CacheView) -> Tensor:
        if not hasattr(self, "_tables"):
            raise ValueError("triattention needs its model's statistics: make the cache through kvprobe.cache(model, ...) or policy.bind(model)")
        series = self._series(view)
        counted = (view.real if view.pinned is None else view.real & ~view.pinned)[:, :, None, :]
        n = counted.sum(-1, keepdim=True).clamp(min=1)
        mean = series.masked_fill(~counted, 0.0).sum(-1, keepdim=True) / n
        spread = ((series - mean).square().masked_fill(~counted, 0.0).sum(-1, keepdim=True) / n).sqrt().clamp(min=1e-6)
        return ((series - mean) / spread).amax(2).masked_fill(~view.real, 0.0)

    def across_layers(self, score: Tensor, positions: Tensor) -> Tensor:
        if not self.shared_over_layers:
            return score
        if bool((positions != positions[:1]).any()):
            raise ValueError("shared_over_layers needs every layer to hold the same entries: pins that differ between layers do not go with it")
        return score.mean(0, keepdim=True).expand_as(score)

    def _series(self, view: CacheView) -> Tensor:
        """S [b hkv g c] of every candidate and query head."""
        table, keys = self._tables.of(view.layer, view.keys.device), view.keys.to(wide(view.keys.dtype))
        delta = 2 ** torch.arange(self.offsets, device=keys.device)
        ahead = table.rotary.phase((view.now - 1)[:, None] + delta).mean(1)  # [b f], before any float32
        # cached keys hold one factor of the rotation's scale, queries would bring the other
        centre = table.rotary.dimensions(table.mean * table.rotary.scale * ahead[:, None, :], keys.shape[-1]).to(keys.dtype)  # [b hq d]
        spare = (table.rotary.scale * (table.norm - table.mean.abs())).to(keys.dtype)  # [hq f]
        length = table.rotary.pairs(keys).abs().to(keys.dtype)  # [b hkv c f]
        hkv = keys.shape[1]
        first = torch.einsum("bhgd,bhcd->bhgc", centre.unflatten(1, (hkv, -1)), keys)
        second = torch.einsum("hgf,bhcf->bhgc", spare.unflatten(0, (hkv, -1)), length)
        return first + second


calibrate = calibration.from_filler
