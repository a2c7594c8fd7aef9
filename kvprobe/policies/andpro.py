"""How far an entry's weighted value points along the output it is part of (AnDPro, Geng et al. 2025, NeurIPS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation, attention, deletion, outputs
from kvprobe.types import CacheView, Needs, check_window, wide


@dataclass(frozen=True)
class POLICY:
    """a <v, y> summed over the window's queries and the group; chunks of neighbours stay or go together, heads share a layer's budget.

    paper: y the query's output, a its attention over the candidates. released: a max-pooled over neighbours, y the sum over
    the entries that may go (methods 8, R7); the release gave every query head a cache of its own. A chunk counts by the mean
    of its entries that no pin holds, which ranks whole chunks as their sum does.
    """

    form: Literal["paper", "released"] = "paper"
    """criterion as in the paper, or as released"""
    window: int = -1
    """newest queries that vote [tokens]; -1 means as many as the buffer holds"""
    kernel: int = 7
    """released form: neighbours over which attention is max-pooled, odd [entries]"""
    chunk: int = 4
    """adjacent tokens that stay or go together; 1 in controlled comparisons of tokens"""
    across: Literal["layer", "head"] = "layer"
    """whether the heads of a layer share its budget (released), or each has its own"""

    def __post_init__(self) -> None:
        check_window(self)
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def level(self) -> str:
        return self.across

    def score(self, view: CacheView) -> Tensor:
        if self.form == "paper":
            by = (view.query_positions >= 0).to(wide(view.keys.dtype))
            visible = attention.window_visible(view.query_positions, view.positions)
            cost = deletion.Cost("anchor", group="sum")
            return deletion.weighted(view.queries, view.keys, view.values, view.scaling, None, visible, by, cost).masked_fill(~view.real, 0.0)
        values, total = view.values.double().masked_fill(~view.free[..., None], 0.0), 0.0
        for a, _ in outputs.window_blocks(view):
            a = attention.pool(a, self.kernel, "max").masked_fill(~view.free[:, :, None, :], 0.0)
            total = total + (a * ((a @ values) @ values.mT)).sum(2)
        return total.to(wide(view.keys.dtype))

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        if self.across == "head":
            return keep
        by_chunk = allocation.chunk_scores(score, self.chunk, real & ~held, positions)
        return allocation.per_layer(lambda s, total, free: allocation.flattened(s, total, free), by_chunk, keep, held, real)

    def select(self, view: CacheView, score: Tensor, keep: Tensor) -> Tensor:
        count = keep - (view.real & ~view.free).sum(-1)
        return allocation.chunks(score, count, self.chunk, view.free, view.positions).to(score.dtype)
