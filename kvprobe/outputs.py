"""Attention of the newest queries in float64, for policies that score what an entry adds to the attention output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import attention
from .types import CacheView, wide


def window_blocks(view: CacheView) -> Iterator[tuple[Tensor, Tensor]]:
    """(weights, scaled logits) [b hkv g*n c], n queries of the window at a time; softmax per query head over the candidates it sees.

    Float64, because differences of outputs cancel where one entry has nearly all attention. Padding queries weigh nothing.
    Blocks, so that a long prompt's query x key matrix is never held whole.
    """
    dtype = wide(view.queries.dtype)
    queries, keys = attention.grouped(view.queries, view.keys.shape[1]).to(dtype), view.keys.to(dtype).transpose(-1, -2)
    group, window, c = *queries.shape[2:4], keys.shape[-1]
    visible = attention.window_visible(view.query_positions, view.positions)
    block = max(1, attention.BLOCK_BYTES // (8 * queries[..., 0, 0].numel() * c))
    for i in range(0, window, block):
        z = (queries[:, :, :, i : i + block].flatten(2, 3) @ keys).double() * view.scaling
        if visible is None:
            yield z.softmax(-1), z
            continue
        seen = visible[:, :, i : i + block].repeat(1, 1, group, 1)
        masked = z.clone()
        masked[..., c - seen.shape[-1] :].masked_fill_(~seen, -torch.inf)
        a = masked.softmax(-1)
        yield a if seen.shape[-1] < c else a.masked_fill(~seen.any(-1, keepdim=True), 0.0), z


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean [... m c] between rows of a [... m d] and b [... c d], by a product: nothing of shape [m c d] exists."""
    square = a.square().sum(-1)[..., None] - 2 * (a @ b.transpose(-1, -2)) + b.square().sum(-1)[..., None, :]
    return square.clamp(min=0).sqrt()


def window_size(view: CacheView) -> Tensor:
    """[b 1 1]: real queries of the window."""
    return (view.query_positions >= 0).sum(-1).clamp(min=1)[:, None, None]
