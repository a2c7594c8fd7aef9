"""What several policies score by: the vote of the newest queries, and how alike the keys are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attention
from .types import CacheView, wide

TILE = 128
"""Columns of a similarity matrix made at a time [entries]."""


def window_importance(view: CacheView, kernel: int = 5, pooling: str = "average", queries: str = "mean", group: str = "mean") -> Tensor:
    """[b hkv c]: attention of the window's queries over the candidates, softmax per query head, reduced over the queries,
    pooled over neighbours, then over the group (SnapKV as Random Attention app. F ran it)."""
    a = attention.window_attention(view.queries, view.query_positions, view.keys, view.positions, view.scaling)
    return reduced(a, view.query_positions >= 0, kernel, pooling, queries, group, own_window(view, view.query_positions))


def own_window(view: CacheView, query_positions: Tensor) -> Tensor | None:
    """bool [b hkv c]: pinned entries of the queries' own window; what they pay each other is pooled into no neighbour (methods 3)."""
    first = query_positions.masked_fill(query_positions < 0, 2**31 - 1).amin(-1)[:, None, None]
    return None if view.pinned is None else view.pinned & (view.positions >= first)


def over_heads(x: Tensor, view: CacheView) -> tuple[Tensor, Tensor]:
    """Sums of x [b hkv c] over the KV heads that hold an entry of the same position, and their number, both [b hkv c].

    Pins and rounds leave different entries to the heads, so that the same slot is another token in each.
    """
    at, real = view.positions.clamp(min=0).long().flatten(1), view.real.flatten(1)
    none = x.new_zeros(len(at), int(at.max()) + 1)
    total, heads = none.scatter_add(1, at, x.flatten(1).masked_fill(~real, 0.0)), none.scatter_add(1, at, real.to(x.dtype))
    return total.gather(1, at).view_as(x), heads.gather(1, at).view_as(x)


def reduced(a: Tensor, asks: Tensor, kernel: int, pooling: str, queries: str, group: str, apart: Tensor | None = None) -> Tensor:
    """[b hkv c] of attention [b hkv g q c]: over the queries that count (asks, bool [b q]; the others' is 0), pooled over neighbours
    but those apart (bool [b hkv c]), then over the group."""
    a = attention.mean_over_queries(a, torch.where(asks, 0, -1)) if queries == "mean" else a.sum(3)
    a = a if apart is None else a.masked_fill_(apart[:, :, None], 0.0)
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
    Tiles from the newest back, and entries that have found their j are left alone: never candidate x candidate.
    """
    unit, real = unit_keys(view), view.real
    b, h, c, d = unit.shape
    flat = unit.reshape(b * h, c, d)
    spares = _last_alike(flat, real.view(b * h, c), threshold)
    first = real.to(torch.int8).argmax(-1).view(b * h, 1).expand(-1, c)
    spares = torch.where(spares < 0, first, spares)
    cosine = (flat * flat.gather(1, spares[..., None].expand(-1, -1, d))).sum(-1)
    cosine = cosine.masked_fill(spares == torch.arange(c, device=spares.device), 0.0)  # the diagonal is zero
    total = torch.einsum("rcd,rd->rc", flat, flat.sum(1)) - flat.square().sum(-1)
    total = total.scatter_add(1, spares, -cosine)
    return total.view(b, h, c) / real.sum(-1, keepdim=True)


def _last_alike(flat: Tensor, real: Tensor, threshold: float) -> Tensor:
    """[r c]: per entry of flat [r c d] the last other real entry whose cosine exceeds the threshold, -1 where there is none."""
    found = torch.full(flat.shape[:2], -1, dtype=torch.int64, device=flat.device)
    for unit, entry, into in zip(flat, real, found):
        slots = entry.nonzero().squeeze(-1)  # an empty slot's cosine of 0 may exceed the threshold
        unit, last = unit[slots], torch.full_like(slots, -1)
        for stop in range(len(slots), 0, -TILE):
            _look_in(unit, last, max(0, stop - TILE), stop, threshold)
        into[slots] = torch.where(last < 0, -1, slots[last])
    return found


def _look_in(unit: Tensor, last: Tensor, start: int, stop: int, threshold: float) -> None:
    """Find in the tile start..stop what older entries resemble, then for the tile's own entries in the tile and before it.

    Newer tiles come first, so that whoever has found one is done. While most older ones have not, one product serves both ways.
    """
    tile, mine = unit[start:stop], last[start:stop]
    older = (last[:start] < 0).nonzero().squeeze(-1)
    most = 2 * len(older) >= start
    cosine = (unit[:start] if most else unit[older]) @ tile.T
    found = last[:start] if most else last[older]
    _note(found, cosine, threshold, start)
    if not most:
        last[older] = found
    _note(mine, (tile @ tile.T).fill_diagonal_(-torch.inf), threshold, start)
    if most:
        _note(mine, cosine.T, threshold, 0)
        return
    open_ = (mine < 0).nonzero().squeeze(-1)
    found = mine[open_]
    _note(found, tile[open_] @ unit[:start].T, threshold, 0)
    mine[open_] = found


def _note(last: Tensor, cosine: Tensor, threshold: float, first: int) -> None:
    """Where nothing was found yet, write into last [n] the last column of cosine [n m], counted from `first`, above the threshold."""
    if not cosine.numel():
        return
    some = ((last < 0) & (cosine.amax(-1) > threshold)).nonzero().squeeze(-1)  # to rule a row out is cheaper than to search it
    if len(some):
        columns = torch.arange(first, first + cosine.shape[-1], device=cosine.device)
        last[some] = torch.where(cosine[some] > threshold, columns, -1).amax(-1)
