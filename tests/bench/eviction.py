"""One round over all layers under every policy, 1088 candidates -> 1024, against a plain gather of what it keeps and against a random round.

The states are random: keys, values and queries normal, columns what the policy itself makes of random attention. One query
head per KV head, except where a row says otherwise.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from measure import Result, ratio, rounds, spend
from transformers import LlamaConfig

import kvprobe
from kvprobe.eviction_cache import EvictionCache
from kvprobe.registry import make_policy
from kvprobe.types import Geometry, Plan

KEEP, BUFFER = 1024, 64
SMALL, LARGE = (30, 3, 64), (36, 8, 128)  # layers, KV heads, head size of SmolLM2-135M and Qwen3-4B
GROUP = {SMALL: 3, LARGE: 4}
RANDOM = {(SMALL, torch.float32): 0.5, (LARGE, torch.float32): 0.5, (SMALL, torch.bfloat16): 0.3, (LARGE, torch.bfloat16): 0.3}
"""The random round against the gather, at most."""
GOALS = {"keydiff": 0.95, "snapkv": 2.5, "rkv": 4.0, "rkv_released": 15.0}
"""The others against the gather, at most, in float32."""
GROUPED = ("snapkv", "rkv")
"""Policies also timed with as many query heads per KV head as the model of that shape has."""


class Round:
    """The cache's own round (score, positions, log, order kept, old tensors freed as they are replaced) on random entries.

    Raises ValueError where the policy needs a model.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, policy: str = "random", group: int = 1):
        layers, heads, d_head = shape
        self.shape, self.dtype, self.group = shape, dtype, group
        config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=heads * group, num_key_value_heads=heads, head_dim=d_head,
                             hidden_size=heads * group * d_head)
        geometry = Geometry(layers, heads * group, heads, d_head, heads * group * d_head, tuple(range(layers)))
        made = make_policy(policy)
        if hasattr(made, "bind"):
            raise ValueError("it needs what only a model can tell it")
        self.cache = EvictionCache(config, geometry, Plan(KEEP, BUFFER), made)
        generator = torch.Generator().manual_seed(0)
        self.random = partial(torch.randn, generator=generator)
        self.columns = self._columns()
        self()  # the first is slower, and shows what cannot be scored

    def _columns(self) -> dict[str, torch.Tensor]:
        _, heads, _ = self.shape
        slots, needs, observe = self.cache.plan.fires_at, self.cache.policy.needs, getattr(self.cache.policy, "observe", None)
        attention = self.random(1, heads, self.group, BUFFER, slots).mul(3).softmax(-1)
        columns = {"attn_mass": attention.sum(3).mean(2)} if needs.attn_mass else {}
        if observe is not None:
            at = torch.arange(slots, dtype=torch.int32)
            columns = observe(attention, at[None, -BUFFER:], at.expand(1, heads, slots), columns)
        return columns

    def __call__(self) -> float:
        cache, (_, heads, d_head) = self.cache, self.shape
        slots = cache.plan.fires_at
        cache.reset()
        cache._start(1, torch.device("cpu"))
        for layer in cache.layers:
            new = self.random(1, heads, slots, d_head).to(self.dtype)
            layer.lazy_initialization(new, new)
            layer.keys, layer.values, layer.seen, layer.scaling = new, new.flip(2), slots, d_head**-0.5
            layer.columns = dict(self.columns)
            if cache.window:
                layer.queries = self.random(1, heads * self.group, cache.window, d_head).to(self.dtype)
        cache.tail, cache.seen, cache.prompt = [torch.arange(slots, dtype=torch.int32)[None]], [slots], [1]
        cache.window_positions = cache.tail[0][:, -cache.window :] if cache.window else None
        cache.count += slots
        cache.pins = cache._pin_table()
        took = spend(lambda: cache._round(np.array([True])))
        assert cache.layers[-1].keys.shape[-2] == KEEP + BUFFER and len(cache.recorder.fired[0]) == 1
        cache.reset()
        return took


class Gather:
    """torch.gather of the kept keys and values, indices ready; a layer's old tensors go as they are replaced, as in ours."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        _, heads, d_head = shape
        kept = torch.rand(1, heads, KEEP + BUFFER).argsort(-1)[..., :KEEP].sort(-1).values
        self.index = kept[..., None].expand(1, heads, KEEP, d_head)

    def __call__(self) -> float:
        layers, heads, d_head = self.shape
        entries = [[torch.randn(1, heads, KEEP + BUFFER, d_head).to(self.dtype) for _ in "kv"] for _ in range(layers)]

        def gather() -> None:
            for layer in entries:
                layer[0] = layer[0].gather(2, self.index)
                layer[1] = layer[1].gather(2, self.index)

        return spend(gather)


def variants(say, shape: tuple[int, int, int], dtype: torch.dtype) -> dict:
    """name -> what is timed: the gather, the random round, and in float32 every other policy that random states can feed."""
    made = {"gather": Gather(shape, dtype), "random": Round(shape, dtype)}
    if dtype != torch.float32:
        return made
    for name in sorted(set(kvprobe.available("policy")) - {"random"}):
        try:
            made[name] = Round(shape, dtype, name)
        except ValueError as reason:
            say(f"  {name} is left out: {reason}")
    return made | {f"{name}, {GROUP[shape]} query heads": Round(shape, dtype, name, GROUP[shape]) for name in GROUPED if name in made}


def one_round(say, n: int) -> list[Result]:
    results = []
    for (shape, dtype), most in RANDOM.items():
        timed = variants(say, shape, dtype)
        where = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        seconds = rounds(n, list(timed.items()))
        say(f"  {where}, medians of {n} [ms]: " + ", ".join(f"{name} {1e3 * float(np.median(s)):.1f}" for name, s in seconds.items()))
        for name in list(timed)[1:]:
            goal = most if name == "random" else GOALS.get(name)
            results.append(Result(f"round: {name} 1088 -> 1024 / plain gather, {where}", ratio(seconds[name], seconds["gather"]), goal))
        for name in list(timed)[2:]:
            results.append(Result(f"round: {name} / random round, {where}", ratio(seconds[name], seconds["random"])))
    return results
