"""What a model is, read off before it is used: its geometry, whether kvprobe would misread its attention, and its fingerprint."""

from __future__ import annotations

import hashlib

import torch

from .types import Geometry


def inspect(model: torch.nn.Module) -> Geometry:
    """Read a model's geometry and refuse what kvprobe would misread, naming the reason."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder; kvprobe takes decoder-only models")
    if not any("rotary" in type(m).__name__.lower() for m in model.modules()):
        raise ValueError(f"{kind} has no rotary positions; kvprobe takes models whose keys are cached after RoPE")
    for field in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, field, None) is not None:
            raise ValueError(f"{kind} caps its attention logits ({field}={getattr(config, field)}), which sdpa ignores")
    if any(name.rsplit(".", 1)[-1] in ("sinks", "sink") for name, _ in model.named_parameters()):
        raise ValueError(f"{kind} has learned attention sinks, which sdpa ignores")
    n_q = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_q
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_q
    layers = DynamicCache(config=config).layers
    kv_layers, skipped = [], {}
    for i, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            kv_layers.append(i)
        else:
            skipped[i] = _why_skipped(layer)
    for i in sources_of_shared_layers(config, len(layers)):
        if i in kv_layers:
            kv_layers.remove(i)
            skipped[i] = "later layers share its keys and values"
    if not kv_layers:
        raise ValueError(f"{kind} has no layer whose cache grows with the text: there is nothing to evict ({sorted(set(skipped.values()))})")
    return Geometry(len(layers), n_q, n_kv, d_head, config.hidden_size, tuple(kv_layers), dict(sorted(skipped.items())))


def _why_skipped(layer) -> str:
    name = type(layer).__name__
    if getattr(layer, "is_sliding", False):
        return "sliding window, bounded by itself"
    if name == "DummyLayer":
        return "keeps no cache of its own"
    if "Linear" in name:
        return "linear attention, a state and no per-token entries"
    return f"cache layer of type {name}"


def sources_of_shared_layers(config, n_layers: int) -> list[int]:
    """Layers whose keys and values later layers reuse: evicting them would evict for those unseen."""
    modes = getattr(config, "kv_sharing_modes", None)
    if not modes or "reuse" not in modes:
        return []
    types = config.layer_types
    sources = {}
    for i in range(n_layers):
        if modes[i] != "reuse":
            sources[types[i]] = i
    return sorted(set(sources.values()))


@torch.no_grad()
def check_attention(model: torch.nn.Module, native: str) -> None:
    """Compare kvprobe's attention function with the model's own eager one, on a prefill and a chunk behind it.

    This catches whatever the static checks do not know by name: an attention that needs more than queries, keys,
    values and a mask.
    """
    from .attention_function import ATTENTION

    def logits(implementation: str) -> torch.Tensor:
        from transformers import DynamicCache

        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config)
        model(ids[:, :6], cache=cache, use_cache=True, logits_to_keep=1)
        return model(ids[:, 6:], cache=cache, use_cache=True, logits_to_keep=1).logits.float()

    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(10, device=device)[None] * 7919 + 13) % vocabulary
    try:
        want, got = logits("eager"), logits(ATTENTION)
    except Exception as error:
        model.set_attn_implementation(native)
        raise ValueError(f"{type(model).__name__}: its attention function cannot be replaced: {error}") from error
    model.set_attn_implementation(native)
    scale = float(want.std()) or 1.0
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.15  # eager takes softmax in float32 even in a float64 model
    worst = float((want - got).abs().max()) / scale
    if not worst <= tolerance:
        raise ValueError(f"{type(model).__name__}: with kvprobe's attention function logits differ by {worst:.2g} of their spread from the model's own: its attention does more than sdpa can")


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits over the config's shape fields and up to 64 evenly spaced values of every parameter, in float32."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.device.type == "meta":
            continue
        flat = parameter.reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).round().long()
        digest.update(flat[at.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
