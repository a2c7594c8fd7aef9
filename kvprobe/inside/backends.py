"""Three ways to see an attention call: nnsight (the reference), the core's attention function (the cheapest), TransformerLens.

A backend runs one forward and hands every asked layer's (q, k, v, mask, scaling, output) to a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvprobe.models import Model

from . import sites

Reading = Callable[..., dict]


def with_nnsight(model: Model, layers: Sequence[int], feed: dict, read: Reading, wrapper=None, remote=False, outputs: bool = True) -> tuple[dict[int, dict], Tensor]:
    """Through an nnsight trace. The block lives here, so that callers need no readable source. outputs: also read what the
    attention call returns, which costs a stop per layer.
    """
    import nnsight

    names = sites.attention_modules(model.model)
    w = sites.wrap(wrapper if wrapper is not None else model.model)
    calls = [(layer, names[layer]) for layer in sorted(layers)]  # values must be read in the order of execution
    own = owned(feed.get("cache"))
    more = {"remote": remote} if remote else {}
    with torch.no_grad(), w.trace(**feed, **more):
        got = nnsight.save({})
        for layer, name in calls:
            call = sites.attention_call(w, name)
            arguments, options = call.inputs
            q, k, v, mask = arguments[1:5]
            result = call.output[0] if outputs else None
            got[layer] = read(layer, q, k, v, mask, options.get("scaling"), result, layer in own)
            del arguments, options, q, k, v, mask, result  # else they live until the next layer's are there
        logits = w.output.logits.save()
    return dict(got), logits


def with_attention_function(model: Model, layers: Sequence[int], feed: dict, read: Reading) -> tuple[dict[int, dict], Tensor]:
    """Through the attention function that kvprobe has put into the model."""
    from kvprobe import attention_function

    wanted, got, own = set(layers), {}, owned(feed.get("cache"))

    def listen(module, q, k, v, mask, scaling, out) -> None:
        if module.layer_idx in wanted:
            got[module.layer_idx] = read(module.layer_idx, q, k, v, mask, scaling, out, module.layer_idx in own)

    with torch.no_grad(), attention_function.listening(listen):
        logits = model.model(**feed).logits
    return got, logits


def owned(cache) -> set[int]:
    """Layers whose keys an evicting cache holds."""
    geometry = getattr(cache, "geometry", None)
    return set(geometry.kv_layers) if geometry is not None else set()
