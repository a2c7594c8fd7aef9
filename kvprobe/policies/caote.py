"""Change of the head's output when one entry is dropped (CAOTE, Goel et al. 2025, arXiv 2504.14051)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import outputs
from kvprobe.types import CacheView, Needs, check_window, wide

LEAST = 1e-30
"""Attention of all others at least, where it divides: scores stay finite in float32."""


@dataclass(frozen=True)
class POLICY:
    """a / (1 - a) * |o - v| per query and query head, attention and outputs over the candidates; mean over queries, summed over the group."""

    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    centre: Literal["output", "mean"] = "output"
    """what a value is compared with: the query's output o, or the unweighted mean of the candidates' values (FastCAOTE)"""

    def __post_init__(self) -> None:
        check_window(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def score(self, view: CacheView) -> Tensor:
        values = view.values.double().masked_fill(~view.real[..., None], 0.0)
        mean = values.sum(2, keepdim=True) / view.real.sum(-1)[..., None, None].clamp(min=1)
        change = _change if self.centre == "output" else _change_from_mean
        total = sum(change(a, values, mean).sum(2) for a, _ in outputs.window_blocks(view))
        return (total / outputs.window_size(view)).to(wide(view.keys.dtype))


def _without_top(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entry with most attention [b hkv m 1], the attention of the others [b hkv m c] and its sum: 1 - a where a may be near 1."""
    top = a.argmax(-1, keepdim=True)
    others = a.scatter(-1, top, 0.0)
    return top, others, others.sum(-1, keepdim=True)


def _change(a: Tensor, values: Tensor, mean: Tensor) -> Tensor:
    """[b hkv m c]: |o - o without j|.

    For the entry with most attention o - v would cancel like 1 - a, so there the same is written a * |o without j - v|; every
    other a is at most a half. An entry alone costs |v|. Distances are taken from the mean value, so that a common
    offset of the values does not cancel either.
    """
    top, others, rest = _without_top(a)
    most = a.gather(-1, top)
    own = values.gather(2, top.expand(-1, -1, -1, values.shape[-1]))
    left = others @ values
    cost = a / (1 - others) * outputs.distances(left + most * own - mean, values - mean)
    return cost.scatter(-1, top, most * (left / rest.clamp(min=torch.finfo(rest.dtype).tiny) - own).norm(dim=-1, keepdim=True))


def _change_from_mean(a: Tensor, values: Tensor, mean: Tensor) -> Tensor:
    top, others, rest = _without_top(a)
    return a / (1 - others).scatter(-1, top, rest).clamp(min=LEAST) * (values - mean).norm(dim=-1)[..., None, :]
