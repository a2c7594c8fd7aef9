"""What several policies score by: the vote of the newest queries, and how alike the keys are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attention
from .types import CacheView, wide

TILE = 256
"""Columns of a similarity matrix made at a time [entries]."""


def window_importance(view: CacheView, kernel: int = 5, pooling: str = "average", queries: str = "mean", group: str = "mean") -> Tensor:
    """[b hkv c]: attention of the window's queries over the candidates, softmax per query head, reduced over the queries,
    pooled over neighbours, then over the group (SnapKV as Random Attention app. F ran it)."""
    a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling)
    a = attention.mean_over_queries(a, view.query_positions) if queries == "mean" else a.sum(3)
    a = attention.pool(a, kernel, pooling)
    return {"mean": a.mean, "sum": a.sum, "max": a.amax}[group](2)


def unit_keys(view: CacheView) -> Tensor:
    """[b hkv c d]: keys divided by their norm (+ 1e-8, as R-KV's release does), zero where a slot holds no entry."""
    keys = view.keys.to(wide(view.keys.dtype))
    return (keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)) * view.real[..., None]


def mean_cosine(view: CacheView, itself: bool = True) -> Tensor:
    """[b hkv c]: mean cosine of each key with all candidates of its KV head.

    A product with the mean unit key, so that no candidate x candidate matrix exists. itself=False leaves the diagonal out
    of the sum, not out of the count (the released forms).
    """
    unit = unit_keys(view)
    total = torch.einsum("bhcd,bhd->bhc", unit, unit.sum(2))
    if not itself:
        total = total - unit.square().sum(-1)
    return total / view.real.sum(-1, keepdim=True)


def softmax(score: Tensor, real: Tensor) -> Tensor:
    """Softmax over the candidates of each KV head [b hkv c], 0 where a slot holds no entry."""
    return score.masked_fill(~real, -torch.inf).softmax(-1).nan_to_num(0.0)


def spared_cosine(view: CacheView, threshold: float) -> Tensor:
    """[b hkv c]: mean cosine with the others, where each entry spares the newest one that resembles it (R-KV's release).

    Entry i does not count against the last j with cos(i, j) > threshold; where there is none, not against the first entry.
    Tiles of columns from the newest back, and entries that have found their j are left alone: never candidate x candidate.
    """
    unit, real = unit_keys(view), view.real
    b, h, c, d = unit.shape
    flat = unit.reshape(b * h, c, d)
    spares = _last_alike(flat, threshold)
    first = real.to(torch.int8).argmax(-1).view(b * h, 1).expand(-1, c)
    spares = torch.where(spares < 0, first, spares)
    cosine = (flat * flat.gather(1, spares[..., None].expand(-1, -1, d))).sum(-1)
    cosine = cosine.masked_fill(spares == torch.arange(c, device=spares.device), 0.0)  # the diagonal is zero
    total = torch.einsum("rcd,rd->rc", flat, flat.sum(1)) - flat.square().sum(-1)
    total = total.scatter_add(1, spares, -cosine)
    return total.view(b, h, c) / real.sum(-1, keepdim=True)


def _last_alike(flat: Tensor, threshold: float) -> Tensor:
    """[r c]: per entry of flat [r c d] the last other entry whose cosine exceeds the threshold, -1 where there is none."""
    rows, c, _ = flat.shape
    found = torch.full((rows, c), -1, dtype=torch.int64, device=flat.device)
    for r in range(rows):
        open_ = torch.arange(c, device=flat.device)  # entries that have found none yet
        for stop in range(c, 0, -TILE):
            start = max(0, stop - TILE)
            columns = torch.arange(start, stop, device=flat.device)
            alike = flat[r, open_] @ flat[r, start:stop].T > threshold
            alike &= open_[:, None] != columns
            last = torch.where(alike, columns, -1).amax(-1)
            found[r, open_] = last
            open_ = open_[last < 0]
            if not len(open_):
                break
    return found
