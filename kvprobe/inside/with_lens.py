"""TransformerLens as an independent witness: its own attention code over the same weights, one forward, no cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvprobe.models import Model
from kvprobe.versions import require

_BRIDGES: WeakKeyDictionary = WeakKeyDictionary()
NAMES = {"q": "attn.hook_rot_q", "k": "attn.hook_rot_k", "v": "attn.hook_v", "out": "attn.hook_z"}


def bridge(model: Model):
    """A TransformerBridge over a copy of the model (it rewires what it is given), made once."""
    if model.model not in _BRIDGES:
        require("transformer-lens")
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        theirs = copy.deepcopy(model.model)
        _BRIDGES[model.model] = build_bridge_from_module(theirs, type(theirs).__name__, hf_config=theirs.config, dtype=theirs.dtype, device=model.device)
    return _BRIDGES[model.model]


def with_transformer_lens(model: Model, layers: Sequence[int], feed: dict, read: Callable[..., dict]) -> tuple[dict[int, dict], Tensor]:
    """Through TransformerLens' run_with_cache. Raises ValueError where it has no such hook, or a cache is asked for."""
    if feed.get("cache") is not None:
        raise ValueError("backend 'transformer_lens' takes one forward without a cache: TransformerLens 4.3 loses transformers' cache silently")
    own = bridge(model)
    wanted = {f"blocks.{i}.{n}" for i in layers for n in NAMES.values()}
    more = {"attention_mask": feed["attention_mask"]} if feed.get("attention_mask") is not None else {}
    with torch.no_grad():
        logits, seen = own.run_with_cache(feed["input_ids"], names_filter=lambda n: n in wanted, **more)
    got = {}
    for i in layers:
        missing = [n for n in NAMES.values() if f"blocks.{i}.{n}" not in seen]
        if missing:
            raise ValueError(f"TransformerLens gives no {missing} in layer {i} of {type(model.model).__name__}: use backend='nnsight'")
        parts = {kind: seen[f"blocks.{i}.{n}"] for kind, n in NAMES.items()}
        scaling = own.blocks[i].attn.original_component.scaling if hasattr(own.blocks[i].attn, "original_component") else None
        q, k, v = (parts[kind].transpose(1, 2) for kind in ("q", "k", "v"))
        out = parts["out"]
        out = out if out.ndim == 4 else out.unflatten(-1, (q.shape[1], -1))
        got[i] = read(i, q, k, v, None, scaling, out, False)
    return got, logits
