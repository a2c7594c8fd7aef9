"""The attention function that stands in a model for its own, and the mask function that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "kvprobe"
"""Name under which the attention function is registered with transformers."""


def attention_forward(module, query, key, value, attention_mask, kvprobe_cache=None, scaling=None, dropout=0.0, **kwargs):
    """The attention function behind `attn_implementation="kvprobe"`: stock sdpa unless an evicting cache is at work."""
    if kvprobe_cache is None:
        out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = kvprobe_cache.attend(module, query, key, value, attention_mask, scaling, dropout)
    for listen in _LISTENERS:
        listen(module, query, key, value, attention_mask, scaling, out[0])
    return out


_LISTENERS: list[Callable] = []


@contextmanager
def listening(listen: Callable) -> Iterator[None]:
    """Within this context every attention call is also told to `listen`(module, q, k, v, mask, scaling, out)."""
    _LISTENERS.append(listen)
    try:
        yield
    finally:
        _LISTENERS.remove(listen)


def register() -> None:
    """Tell transformers about the attention function. Its mask function goes with it: without one, masks are lost silently."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
