"""Steps an evicting cache and the reference through the same text and compares them after every forward."""

from __future__ import annotations

import torch

from oracle import Reference, cache_sets

ATOL = 1e-10


@torch.no_grad()
def feed(model, cache, ids, mask=None):
    """A plain forward of `ids` [b n]; mask [b columns so far] of real columns, None without padding."""
    extra = {}
    if mask is not None:
        extra = dict(attention_mask=mask.long(), position_ids=(mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :])
    return model.model(input_ids=ids, cache=cache, use_cache=True, **extra).logits


def walk(model, cache, reference: Reference, ids, *, prefill: int, longest: int, mask=None, atol: float = ATOL) -> int:
    """Feed `ids` [b n] as one prefill and forwards of up to `longest` columns; returns the rounds of all rows.

    Raises AssertionError unless logits of real columns and every keep-set agree after each forward.
    """
    at, end = 0, ids.shape[1]
    while at < end:
        n = prefill if at == 0 else min(longest, cache.room or end, end - at)
        part = None if mask is None else mask[:, at : at + n]
        want = reference.feed(ids[:, at : at + n], part)
        got = feed(model, cache, ids[:, at : at + n], None if mask is None else mask[:, : at + n])
        real = torch.ones(ids.shape[0], n, dtype=torch.bool) if part is None else part.bool()
        worst = float((got - want)[real].abs().max())
        assert worst <= atol, f"logits of columns {at}..{at + n - 1} differ by {worst:.1e}"
        assert cache_sets(cache) == reference.kept, f"keep-sets differ after column {at + n - 1}"
        at += n
    return len(reference.history)
