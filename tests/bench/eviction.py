"""One random round over all layers, 1088 candidates -> 1024, against a plain gather of what it keeps."""

from __future__ import annotations

import numpy as np
import torch
from measure import Result, ratio, rounds, spend
from transformers import LlamaConfig

from kvprobe.eviction_cache import EvictionCache
from kvprobe.policies import random
from kvprobe.types import Geometry, Plan

KEEP, BUFFER = 1024, 64


class Round:
    """The cache's own round (draw, positions, log, order kept, old tensors freed as they are replaced) on random entries."""

    def __init__(self, layers: int, heads: int, d_head: int, dtype: torch.dtype):
        self.shape, self.dtype = (layers, heads, d_head), dtype
        config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=d_head, hidden_size=heads * d_head)
        geometry = Geometry(layers, heads, heads, d_head, heads * d_head, tuple(range(layers)))
        self.cache = EvictionCache(config, geometry, Plan(KEEP, BUFFER), random.POLICY())

    def __call__(self) -> float:
        cache, (_, heads, d_head) = self.cache, self.shape
        slots = cache.plan.fires_at
        cache.reset()
        cache._start(1, torch.device("cpu"))
        for layer in cache.layers:
            new = torch.randn(1, heads, slots, d_head).to(self.dtype)
            layer.lazy_initialization(new, new)
            layer.keys, layer.values, layer.seen, layer.scaling = new, new.clone(), slots, 1.0
        cache.tail, cache.seen, cache.prompt = [torch.arange(slots, dtype=torch.int32)[None]], [slots], [1]
        cache.count += slots
        cache.pins = cache._pin_table()
        took = spend(lambda: cache._round(np.array([True])))
        assert cache.layers[-1].keys.shape[-2] == KEEP + BUFFER and len(cache.recorder.fired[0]) == 1
        cache.reset()
        return took


class Gather:
    """torch.gather of the kept keys and values, indices ready; a layer's old tensors go as they are replaced, as in ours."""

    def __init__(self, layers: int, heads: int, d_head: int, dtype: torch.dtype):
        self.shape, self.dtype = (layers, heads, d_head), dtype
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


GOALS = {((30, 3, 64), torch.float32): 0.5, ((36, 8, 128), torch.float32): 0.6, ((30, 3, 64), torch.bfloat16): 0.3, ((36, 8, 128), torch.bfloat16): 0.3}


def one_round(say, n: int) -> list[Result]:
    results = []
    for (shape, dtype), goal in GOALS.items():
        ours, plain = Round(*shape, dtype), Gather(*shape, dtype)
        ours(), plain()
        name = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        seconds = rounds(n, [("ours", ours), ("gather", plain)])
        say(f"  {name}: ours {1e3 * min(seconds['ours']):.1f} ms, gather {1e3 * min(seconds['gather']):.1f} ms (fastest of {n})")
        results.append(Result(f"round: random 1088 -> 1024 / plain gather, {name}", ratio(seconds["ours"], seconds["gather"]), goal))
    return results
