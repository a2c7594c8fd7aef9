"""Attention that a Gaussian of future queries is expected to pay, times the value's norm (Expected Attention, Devoto et al. 2025, arXiv 2510.00636), as kvpress has it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import rotary
from kvprobe.types import CacheView, Needs, wide


@dataclass(frozen=True)
class POLICY:
    """Mean and covariance of all queries so far before their rotation, per query head, turned to the mean of the next positions.

    a = softmax(k mu / sqrt d + k Sigma k / 2d) over the entries behind the sinks, mean over the group; (a + eps) |v| (methods 11, R14).
    Queries are turned back from the cached ones, so that normalisation of queries is part of them.
    """

    n_future: int = 512
    """next positions that the rotation is averaged over [tokens]"""
    n_sink: int = 4
    """first positions, always kept, whose queries do not count"""
    covariance: bool = True
    """whether the spread of queries counts, or their mean alone"""
    value_norm: bool = True
    """whether the value's norm counts"""
    eps: float = 0.0
    """added to the attention"""

    needs = Needs()

    def __post_init__(self) -> None:
        if self.n_future < 1 or self.n_sink < 0 or not self.eps >= 0:
            raise ValueError(f"n_future={self.n_future} must be at least 1, n_sink={self.n_sink} and eps={self.eps} at least 0")

    def bind(self, model) -> POLICY:
        """This policy with the model's rotary embedding at hand."""
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "_rotary", {layer: rotary.read(model, layer) for layer in model.geometry.kv_layers})
        return bound

    def _of(self, layer: int) -> rotary.Rotary:
        if not hasattr(self, "_rotary"):
            raise ValueError("expected_attention needs its model's rotary embedding: use kvprobe.compress or kvprobe.cache(model, ...), or policy.bind(model)")
        return self._rotary[layer]

    def watch(self, layer: int, queries: Tensor, query_positions: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Moments of the queries turned back to position 0: count [b], mean [b hq d], scatter about it [b hq d d]."""
        dtype, counts = wide(queries.dtype), query_positions >= self.n_sink
        turned = self._of(layer).to(queries.device).turned(queries.to(dtype), -query_positions[:, None].clamp(min=0))
        some, n = counts[:, None, :, None].to(dtype), counts.sum(-1)[:, None, None].to(dtype)
        mean = (turned * some).sum(2) / n.clamp(min=1)
        away = (turned - mean[:, :, None]) * some
        scatter = away.mT @ away
        if state:  # put two parts' moments together (Chan et al.)
            old, gap = state["count"][:, None, None], mean - state["mean"]
            whole = (old + n).clamp(min=1)
            scatter = state["scatter"] + scatter + (old * n / whole)[..., None] * gap[..., :, None] * gap[..., None, :]
            mean, n = state["mean"] + gap * n / whole, old + n
        return {"count": n[:, 0, 0], "mean": mean, "scatter": scatter}

    def score(self, view: CacheView) -> Tensor:
        keys, group = view.keys.to(wide(view.keys.dtype)), view.state["mean"].shape[1] // view.keys.shape[1]
        turn = self._of(view.layer).to(keys.device).mean_turn(view.now, self.n_future, keys.shape[-1]).to(keys.dtype)  # [b d d]
        mean = (view.state["mean"] @ turn).unflatten(1, (-1, group))
        logit = mean @ keys.mT * view.scaling
        if self.covariance:
            spread = view.state["scatter"] / view.state["count"].clamp(min=1)[:, None, None, None]
            spread = (turn[:, None].mT @ spread @ turn[:, None]).unflatten(1, (-1, group))
            logit = logit + torch.stack([((keys @ spread[:, :, g]) * keys).sum(-1) for g in range(group)], 2) * view.scaling**2 / 2
        sink = (view.positions < self.n_sink) & view.real
        open_ = (view.real & ~sink)[:, :, None]
        a = logit.masked_fill(~open_, -torch.inf).softmax(-1).masked_fill(~open_, 0.0).mean(2)
        score = a + self.eps
        if self.value_norm:
            score = score * view.values.to(score.dtype).norm(dim=-1)
        return score.masked_fill(~view.real, 0.0).masked_fill(sink, float(score.max()) + 1)
