"""DapQ-like: attention of synthetic tokens at the positions where the answer will stand (DapQ, arXiv 2603.11564; no code was found)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import attention, lookahead, scores
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """The prompt's first and last tokens are put behind it once more, in one forward on a copy; their queries vote over the prompt's keys.

    The paper's pooling, GQA rule and protected positions are not known: nothing is pooled, the group is meaned, the run's pins protect.
    """

    prefix: int = 4
    """synthetic tokens that repeat the prompt's first ones"""
    suffix: int = 28
    """synthetic tokens that repeat its last ones, behind them"""
    kernel: int = 1
    """neighbours pooled, odd [entries]; 1 pools nothing"""
    pooling: Literal["average", "max"] = "max"
    """how neighbours are pooled"""
    reduce: Literal["mean", "sum"] = "mean"
    """how the synthetic queries are put together; either ranks alike"""
    group: Literal["mean", "max", "sum"] = "mean"
    """how the query heads of a KV head are put together"""

    looks_ahead = True
    needs = Needs()

    def __post_init__(self) -> None:
        check_window(self)
        if min(self.prefix, self.suffix) < 0 or self.prefix + self.suffix < 1:
            raise ValueError(f"prefix={self.prefix} and suffix={self.suffix} must not be negative, and one of them at least 1")

    def check(self, plan) -> None:
        lookahead.refuse_rounds(self, plan)

    def synthetic(self, prompt: Sequence[int]) -> list[int]:
        """The ids [prefix + suffix]; a prompt that has fewer is taken round and round."""
        n, prompt = len(prompt), list(prompt)
        return [prompt[i % n] for i in range(self.prefix)] + [prompt[(n - self.suffix + i) % n] for i in range(self.suffix)]

    def queries(self, engine) -> dict[int, Tensor]:
        """Layer -> post-RoPE queries [b hq prefix+suffix d] at positions n, n+1, ..."""
        cache = engine.cache
        ids = torch.tensor([self.synthetic(prompt) for prompt in engine.prompts])
        with lookahead.untouched(cache), lookahead.hearing(cache.geometry.kv_layers) as heard:
            lookahead.step(engine.model, lookahead.spare(cache), ids, lookahead.real_columns(cache))
        return {layer: q[0] for layer, q in heard.items()}

    def score(self, view: CacheView) -> Tensor:
        asked = lookahead.needed(self, view)[view.layer].to(view.keys.device)
        a = attention.weights(asked, view.keys, view.real[:, :, None, :], view.scaling)
        return scores.reduced(a, torch.ones_like(view.now[:, None], dtype=torch.bool).expand(-1, asked.shape[2]), self.kernel, self.pooling, self.reduce, self.group)
