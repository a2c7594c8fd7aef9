"""Drives an evicting cache without a model: the queries, keys and values of each step are given or made up."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import LlamaConfig

import kvprobe
from kvprobe import draws
from kvprobe.attention_function import ATTENTION, attention_forward, register
from kvprobe.eviction_cache import EvictionCache
from kvprobe.registry import make_policy
from kvprobe.types import CacheView


def geometry(layers: int = 1, heads: int = 2, group: int = 1, d: int = 2) -> kvprobe.Geometry:
    return kvprobe.Geometry(layers, heads * group, heads, d, heads * group * d, tuple(range(layers)))


def cache(keep: int, buffer: int, policy="random", *, layers: int = 1, heads: int = 2, group: int = 1, d: int = 2, pins_free: bool = False,
          schedule: str = "rounds", options: dict | None = None, **rest) -> EvictionCache:
    """An empty cache as a model of that shape would have it."""
    register()
    shape = geometry(layers, heads, group, d)
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=shape.n_q, num_key_value_heads=heads, hidden_size=shape.d_model, head_dim=d)
    config._attn_implementation = ATTENTION
    plan = kvprobe.Plan(keep, buffer, pins_free, schedule)
    return EvictionCache(config, shape, plan, make_policy(policy, options), **rest)


def step(cache: EvictionCache, n: int = 1, batch: int = 1, *, query=None, key=None, mask=None, scaling: float = 1.0) -> list[torch.Tensor]:
    """One forward of n tokens through every layer; query [b hq n d] and key [b hkv n d] default to zeros. Returns outputs per layer."""
    shape = cache.geometry
    query = torch.zeros(batch, shape.n_q, n, shape.d_head) if query is None else query
    key = torch.zeros(batch, shape.n_kv, n, shape.d_head) if key is None else key
    outputs = []
    for layer in shape.kv_layers:
        extra: dict = {}
        keys, values = cache.update(key, key.clone(), layer, kwargs=extra)
        module = SimpleNamespace(layer_idx=layer, num_key_value_groups=shape.group, is_causal=True, training=False)
        outputs.append(attention_forward(module, query, keys, values, mask, scaling=scaling, **extra)[0])
    return outputs


def walk(cache: EvictionCache, total: int, batch: int = 1, longest: int = 10**9) -> EvictionCache:
    """Feed up to `total` tokens in all, in steps as long as rounds and `longest` allow."""
    at = cache.get_seq_length()
    while at < total:
        n = min(longest, cache.room or total, total - at)
        step(cache, n, batch)
        at += n
    return cache


def held(cache: EvictionCache, layer: int = 0, row: int = 0, head: int = 0) -> list[int]:
    """The positions a head holds."""
    return [p for p in cache.positions[layer, row, head].tolist() if p >= 0]


def view(keys: torch.Tensor, values: torch.Tensor | None = None, *, positions=None, queries=None, query_positions=None, layer: int = 0, keep: int = 1,
         buffer: int = 0, now=None, number: int = 0, seed: int = 0, instances=None, pinned=None, columns=None) -> CacheView:
    """What a policy would be shown of keys [b hkv c d] at positions [b hkv c] (0, 1, ... by default); queries [b hq w d]
    are the newest ones. Draws are those of the toolkit."""
    b, h, c, _ = keys.shape
    positions = torch.arange(c).expand(b, h, c) if positions is None else positions
    now = torch.full((b,), int(positions.max()) + 1) if now is None else torch.as_tensor(now)
    if queries is not None and query_positions is None:
        query_positions = now[:, None] - torch.arange(queries.shape[2], 0, -1)
    instance = torch.arange(b) if instances is None else torch.as_tensor(instances)
    parts = instance[:, None], torch.full((), layer), torch.arange(h)[None], torch.full((), number)
    return CacheView(layer=layer, positions=positions, keys=keys, values=keys if values is None else values, now=now, round=torch.full((b,), number),
                     keep=keep, buffer=buffer, scaling=1.0, queries=queries, query_positions=query_positions, columns=columns or {},
                     rand=lambda: draws.uniform(draws.key(seed, *parts)[..., None], positions),
                     banned=lambda start, stop: torch.zeros(b, h, c), pinned=pinned)
