"""Calls for users that are more than one class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import registry
from .eviction_cache import EvictionCache
from .models import Model, prepare
from .needles import Filler, Layout, Script, build
from .pins import Pin, PromptPin
from .types import POSITIONS, Plan


def cache(model, *, policy="random", keep: int | None = None, keep_ratio: float | None = None, length: int | None = None,
          buffer: int = 64, buffer_in_keep: bool = False, protect_prompt: bool = False, pins: Sequence[Pin] = (), row_pins: Sequence[Sequence[Pin]] | None = None,
          pins_free: bool = False, schedule: str = "rounds", instances: Sequence[int] | None = None, seed: int = 0,
          positions: str = "original", **policy_options) -> EvictionCache:
    """A cache that evicts by itself, for a user's own `model.generate(..., cache=...)` or forward.

    model: what `kvprobe.load` returned, or a transformers model (kvprobe's attention function is put into it).
    policy: a name of `kvprobe list`, a .py file or a policy; policy_options are its fields. "prefix_sliding" is recency with protect_prompt. keep: entries per KV head
    that survive a round, or keep_ratio of `length` tokens. buffer: newest entries, never scored; a round fires after the
    step at which a row holds keep + 2 * buffer entries. buffer_in_keep counts the buffer inside keep. protect_prompt pins the first forward's tokens.
    positions: "original" (every key stays at its token's own position) or "renumbered" (after each round the survivors are
    re-rotated to stand right before the next token). instances: an integer per batch row that random draws depend on. Raises ValueError for bad input before any work.
    """
    if not isinstance(model, Model):
        model = prepare(model)
    if isinstance(policy, str):
        policy, switches = registry.alias(policy)
        protect_prompt = protect_prompt or switches.get("protect_prompt", False)
    buffer = 0 if schedule == "prompt_end" else buffer
    plan = Plan(Plan.resolve_keep(keep, keep_ratio, length, buffer if buffer_in_keep else 0), buffer, pins_free, schedule)
    pins = tuple(pins) if isinstance(pins, Iterable) else (pins,)
    common = (*pins, PromptPin()) if protect_prompt else pins
    chosen = registry.make_policy(policy, policy_options, model)
    rotate = rotation(model, positions)
    return EvictionCache(model.model.config, model.geometry, plan, chosen, pins=common, row_pins=row_pins, instances=instances, seed=seed, rotate=rotate)


def rotation(model: Model, positions: str):
    """What re-rotates keys after a round: None for "original". Raises ValueError for another word or a rotary embedding
    that depends on the text's length."""
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r} is unknown; known: {', '.join(POSITIONS)}")
    if positions == "original":
        return None
    import torch

    from .inside.sites import rotate

    layer, g = model.geometry.kv_layers[0], model.geometry
    rotate(model, layer, torch.zeros(1, g.n_kv, 1, g.d_head, dtype=model.model.dtype, device=model.device), 1)  # refuse now
    return lambda layer, keys, by: rotate(model, layer, keys, by)


def plant(model: Model, instances: int = 1, *, pre: int = 112, age: int = 256, second_box: bool = False, filler: str = "builtin", seed: int = 0, query: int = 40) -> list[Script]:
    """Scripts with a planted fact, as the planted-fact probe builds them (protocols 2); `ids` of each are a numpy array.

    age: tokens from the start of the box to the start of the value. Raises ValueError where the filler does not do.
    """
    layout = Layout(pre=pre, age=age, second_box=second_box, query=query)
    return build(model.tokenizer, Filler(filler, model.tokenizer), layout, range(instances), seed)


def sites(model: Model, heads: Iterable[int], layers: Iterable[int] | None = None) -> frozenset[tuple[int, int]]:
    """Sites (layer, KV head) of some heads in some layers, all evicted ones by default. Raises ValueError for one that does not exist."""
    chosen = frozenset((layer, head) for layer in (model.geometry.kv_layers if layers is None else layers) for head in heads)
    for layer, head in chosen:
        model.geometry.check_site(layer, head)
    return chosen
