"""Attention over a cache as pure functions: grouped heads, visible keys, and the attention a policy scores by.

Query head h shares KV head h // group. Softmax is taken per query head, then pooled over the group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .types import wide

BLOCK_BYTES = 64 * 2**20
"""Ceiling for one block of an explicit query x key matrix [bytes]."""


def grouped(query: Tensor, n_kv: int) -> Tensor:
    """[b hq n d] -> [b hkv g n d]."""
    return query.unflatten(1, (n_kv, -1))


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float, dropout: float = 0.0) -> Tensor:
    """Attention outputs [b n hq d] of queries [b hq n d] over keys and values [b hkv s d].

    visible: bool, broadcastable to [b hkv n s], or what `folded` made of it, or None for all. The group is folded into
    the query axis, so that no key or value is repeated per query head.
    """
    b, hq, n, d = query.shape
    n_kv = keys.shape[1]
    if visible is not None and visible.dtype == torch.bool:
        visible = folded(visible, n, hq // n_kv, query.dtype)
    out = F.scaled_dot_product_attention(grouped(query, n_kv).reshape(b, n_kv, -1, d), keys, values, attn_mask=visible, dropout_p=dropout, scale=scaling)
    return out.view(b, hq, n, values.shape[-1]).transpose(1, 2).contiguous()


def folded(visible: Tensor, n: int, group: int, dtype: torch.dtype) -> Tensor:
    """visible as `attend` hands it to sdpa: additive, repeated over the group.

    Layers that see the same slots share it: sdpa would make it from a bool mask again in each of them.
    """
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, -torch.inf).expand(-1, -1, n, -1).repeat(1, 1, group, 1)


def weights(query: Tensor, keys: Tensor, visible: Tensor | None, scaling: float, merge: str | None = None) -> Tensor:
    """Attention weights [b hkv g n s] in float32 or the model's wider dtype.

    visible: bool [1|b 1|hkv 1|n slots], of the last so many slots, where the others are seen by all; None for all seen. A query
    that sees nothing gets zeros, not nan. merge="max" takes the largest raw logit of the group before the softmax: [b hkv 1 n s].
    """
    dtype = wide(query.dtype)
    asking = grouped(query, keys.shape[1]).to(dtype) * scaling
    logits = (asking.flatten(2, 3) @ keys.to(dtype).transpose(-1, -2)).unflatten(2, asking.shape[2:4])
    logits = logits.amax(2, keepdim=True) if merge == "max" else logits
    if visible is None:
        return logits.softmax(-1)
    logits[..., logits.shape[-1] - visible.shape[-1] :].masked_fill_(~visible.unsqueeze(2), -torch.inf)
    a = logits.softmax(-1)
    if visible.shape[-1] < a.shape[-1]:
        return a
    blind = ~visible.any(-1)[:, :, None, :, None]
    return a.masked_fill(blind, 0.0) if bool(blind.any()) else a


def blocks(query: Tensor, keys: Tensor, visible: Tensor, scaling: float):
    """(first query, weights [b hkv g i s]) of a block of queries at a time, so that the query x key matrix of a long
    prompt is never held whole."""
    b, hq, n, _ = query.shape
    block = max(1, BLOCK_BYTES // (8 * b * hq * keys.shape[-2]))
    visible = visible.expand(-1, -1, n, -1)
    for i in range(0, n, block):
        yield i, weights(query[:, :, i : i + block], keys, visible[:, :, i : i + block], scaling)


def attention_mass(query: Tensor, keys: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Attention each key receives from all queries, meaned over the group: [b hkv s]."""
    total = torch.zeros(query.shape[0], *keys.shape[1:3], dtype=wide(query.dtype), device=keys.device)
    for _, a in blocks(query, keys, visible, scaling):
        total += a.sum(3).mean(2)
    return total


def window_attention(query: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, scaling: float, merge: str | None = None) -> Tensor:
    """Attention of a window of queries over the candidates only: [b hkv g w c], with merge="max" [b hkv 1 w c].

    query [b hq w d] at query_positions [b w] (negative: padding, gets zeros); positions [b hkv c] (negative: no entry).
    A query sees candidates up to its own position.
    """
    return weights(query, keys, window_visible(query_positions, positions), scaling, merge)


def window_visible(query_positions: Tensor, positions: Tensor) -> Tensor | None:
    """bool [b hkv w s]: which of the last s candidates each query of a window sees; every query sees all before them, which at
    prompt end are all but a few. None when it is all of them, as in a round of rows of one length."""
    some = ((positions < 0) | (positions > query_positions.amin(-1)[:, None, None])).flatten(0, 1).any(0)
    if not bool(some.any()):
        return None
    p = positions[:, :, None, int(some.to(torch.int8).argmax()) :]
    return (p >= 0) & (p <= query_positions[:, None, :, None])


def mean_over_queries(attention: Tensor, query_positions: Tensor) -> Tensor:
    """[b hkv g w c] -> [b hkv g c], the mean over the window's real queries."""
    count = (query_positions >= 0).sum(-1).clamp(min=1)
    return attention.sum(3) / count[:, None, None, None].to(attention.dtype)


def pool(score: Tensor, kernel: int, kind: str) -> Tensor:
    """Pool neighbours along the last axis, stride 1, same length.

    Average pooling counts the zero padding at the edges in its denominator, as the releases do; max pads with -inf.
    """
    if kernel == 1:
        return score
    flat = score.reshape(1, -1, score.shape[-1])
    if kind == "average":
        out = F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        out = F.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return out.view(score.shape)
