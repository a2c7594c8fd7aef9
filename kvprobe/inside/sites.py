"""Where a model's attention is: the modules, the call inside them, and the weights of one head."""

from __future__ import annotations

from functools import reduce
from importlib import metadata
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvprobe.models import Model
from kvprobe.versions import require

_WRAPPED: WeakKeyDictionary = WeakKeyDictionary()
_found: WeakKeyDictionary = WeakKeyDictionary()  # model -> its attention modules


def attention_modules(model: nn.Module) -> dict[int, str]:
    """Layer number -> dotted name of its softmax attention module. Layers of other kinds are absent. Looked for once per model."""
    if model in _found:
        return dict(_found[model])
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and "attention" in type(module).__name__.lower() and _output(module) is not None:
            found.setdefault(module.layer_idx, name)
    if not found:
        raise ValueError(f"{type(model).__name__} has no module that looks like attention (a layer_idx and an output projection)")
    _found[model] = dict(sorted(found.items()))
    return dict(_found[model])


def _output(module: nn.Module) -> nn.Linear | None:
    return next((getattr(module, n) for n in ("o_proj", "out_proj", "dense") if hasattr(module, n)), None)


def wrap(model):
    """The nnsight wrapper of a live model, made once; wrappers are passed through."""
    from nnsight import NNsight

    require("nnsight")
    if hasattr(model, "_module") and hasattr(model, "trace"):  # its wrappers share no class of their own
        return model
    if model not in _WRAPPED:
        _WRAPPED[model] = NNsight(model)
    return _WRAPPED[model]


def envoy(wrapper, name: str):
    """The nnsight envoy of a module by its dotted name."""
    return reduce(lambda e, part: e[int(part)] if part.isdigit() else getattr(e, part), name.split("."), wrapper)


def attention_call(wrapper, name: str):
    """The operation inside an attention module that calls the attention function.

    nnsight numbers assignments too, so that the call is the last operation of its name. Raises LookupError naming the
    model, nnsight's version and the labels that exist.
    """
    source = envoy(wrapper, name).source
    labels = [n for n in source.names if n.startswith("attention_interface")]
    if not labels:
        raise LookupError(f"{type(wrapper._module).__name__}.{name} has no operation attention_interface_* under nnsight {metadata.version('nnsight')}; it has: {', '.join(source.names)}")
    return getattr(source, labels[-1])


def modeling(module: nn.Module):
    """The module (file) that defines an attention class: its own rotary function lives there."""
    import sys

    return sys.modules[type(module).__module__]


def list_sites(model):
    """A DataFrame of every layer: its kind of cache, whether it can be evicted, and the shapes of a capture per token."""
    import pandas as pd

    g, names = model.geometry, attention_modules(model.model)
    return pd.DataFrame([{"layer": i, "module": names.get(i), "evicted": i in g.kv_layers, "why not": g.skipped.get(i, ""),
                          "query heads": g.n_q if i in names else 0, "KV heads": g.n_kv if i in names else 0, "head size": g.d_head if i in names else 0}
                         for i in range(g.n_layers)])


# -- weights of one head ----------------------------------------------------------------------------------------------


def head_weights(model: Model, which: str, layer: int, backend: str = "transformers") -> Tensor:
    """Weights of every head of a layer, one convention from either backend.

    which: "O" [hq d e] (a head's output z [d] adds z @ W_O[h] to the residual stream), "Q" [hq e d], "K" and "V" [hkv e d].
    backend: "transformers" or "transformer_lens". Biases and norms are not in it.
    """
    if which not in ("O", "Q", "K", "V"):
        raise ValueError(f"which={which!r} is unknown; known: 'O', 'Q', 'K', 'V'")
    if backend == "transformer_lens":
        from .with_lens import bridge

        return getattr(bridge(model), f"W_{which}")[layer].detach()
    names = attention_modules(model.model)
    if layer not in names:
        raise ValueError(f"layer {layer} has no softmax attention; layers that do: {list(names)}")
    attention = model.model.get_submodule(names[layer])
    d = getattr(attention, "head_dim", model.geometry.d_head)
    if which == "O":
        w = _output(attention).weight
        return w.view(w.shape[0], -1, d).permute(1, 2, 0)
    w = _input(attention, which, model.geometry, d)
    return w.view(-1, d, w.shape[-1]).transpose(1, 2)


def _input(attention: nn.Module, which: str, geometry, d: int) -> Tensor:
    """[heads * d, e], from separate or fused projections."""
    if hasattr(attention, "qkv_proj"):
        w, q, kv = attention.qkv_proj.weight, geometry.n_q * d, geometry.n_kv * d
        return dict(Q=w[:q], K=w[q : q + kv], V=w[q + kv : q + 2 * kv])[which]
    w = getattr(attention, f"{which.lower()}_proj").weight
    if which == "Q" and w.shape[0] == 2 * geometry.n_q * d:  # gated queries: each head's rows are its query, then its gate
        return w.view(geometry.n_q, 2, d, -1)[:, 0].reshape(geometry.n_q * d, -1)
    return w


# -- rotary positions -------------------------------------------------------------------------------------------------


@torch.no_grad()
def rotate(model: Model, layer: int, keys: Tensor, by: int | Tensor) -> Tensor:
    """Post-RoPE keys [b hkv s d] as they would be `by` positions later, through the model's own rotary module.

    by: one number, or one per key [b hkv s]. Rotations add up, so that no pre-RoPE key is needed. Raises ValueError for
    rotary embeddings whose angles depend on the text's length.
    """
    by = torch.as_tensor(by, device=keys.device).expand(keys.shape[:3])
    if not bool(by.any()):
        return keys
    config = model.model.config.get_text_config(decoder=True)
    kind = _rope_kind(config, layer)
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"rotary embedding {kind!r} depends on the text's length: keys cannot be moved by a rotation")
    attention = model.model.get_submodule(attention_modules(model.model)[layer])
    flat = keys.reshape(-1, 1, *keys.shape[2:])  # every (row, KV head) as a row of its own: each has its own angles
    cos, sin = _cos_sin(model.model, config, layer, flat, by.reshape(-1, keys.shape[2]))
    scale = (cos.double() ** 2 + sin.double() ** 2).sqrt().mean().to(cos.dtype)  # some kinds scale keys on top, once is enough
    return _turn(attention, flat, cos / scale, sin / scale).view(keys.shape)


def _turn(attention: nn.Module, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The model's own rotation of keys; some files define it for one tensor, most for queries and keys at once."""
    import inspect

    apply = modeling(attention).apply_rotary_pos_emb
    return apply(keys, cos, sin) if list(inspect.signature(apply).parameters)[1] == "cos" else apply(keys, keys, cos, sin)[1]


def _rope_kind(config, layer: int) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    if types and types[layer] in parameters:
        parameters = parameters[types[layer]]
    return parameters.get("rope_type", "default")


def _cos_sin(model: nn.Module, config, layer: int, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [b s d] at positions [b s], as the model computes them: its own keys were rotated with the same."""
    import inspect

    rotary = next(m for m in model.modules() if "rotary" in type(m).__name__.lower() and hasattr(m, "forward"))
    more = {"layer_type": config.layer_types[layer]} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
    return rotary(keys, positions, **more)
