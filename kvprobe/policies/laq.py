"""Attention of a few greedy tokens written on a prompt that SnapKV has evicted, over the whole prompt (Lookahead Q-Cache, arXiv 2505.20334)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import attention, lookahead, scores
from kvprobe.policies import snapkv
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class POLICY:
    """Two stages: evict a copy by SnapKV under the same budget and pins and write on it; score the whole prompt by what those tokens ask.

    The first token is the full cache's, and what is written in the end goes on from the full cache's logits, as released.
    """

    window: int = 32
    """newest prompt queries by which the first stage evicts [tokens]"""
    t: int = 8
    """greedy tokens, at most: an end of text ends them [tokens]"""
    w2: int = 0
    """newest prompt queries that vote beside them; 0 is LAQ, 8 is LAQ++"""
    kernel: int = 7
    """neighbours pooled in either stage, odd [entries]"""
    pooling: Literal["average", "max"] = "max"
    """how neighbours are pooled"""
    reduce: Literal["mean", "sum"] = "mean"
    """how the queries are put together; either ranks alike"""
    group: Literal["mean", "max", "sum"] = "mean"
    """how the query heads of a KV head are put together; as released each has a set of its own"""
    released_mask: bool = False
    """hide the last keys from the queries by the release's triangle, which takes queries behind the prompt for its last ones"""

    looks_ahead = True

    def __post_init__(self) -> None:
        check_window(self)
        if self.window < 1 or self.t < 1 or self.w2 < 0:
            raise ValueError(f"window={self.window} and t={self.t} must be at least 1, w2={self.w2} at least 0")

    @property
    def needs(self) -> Needs:
        return Needs(window=max(self.window, self.w2))

    def check(self, plan) -> None:
        lookahead.refuse_rounds(self, plan)

    def queries(self, engine) -> lookahead.Lookahead:
        """One greedy continuation of each prompt, on the evicted copy."""
        from kvprobe.generation_input import eos

        first = snapkv.POLICY(window=self.window, kernel=self.kernel, pooling=self.pooling, queries=self.reduce, group=self.group)
        with lookahead.untouched(engine.cache):
            copy = engine.cache.branch(1, policy=first)
            copy.evict_now()
            return lookahead.greedy(engine.model, copy, engine.logits, self.t, columns=lookahead.real_columns(engine.cache), eos=tuple(eos(engine.model)), source=engine.source)

    def given(self, found: lookahead.Lookahead) -> lookahead.Lookahead:
        """A look ahead made before, cut to this policy's length."""
        return found.first(1, self.t)

    def score(self, view: CacheView) -> Tensor:
        found, device = lookahead.needed(self, view), view.keys.device
        own = slice(view.queries.shape[2] - min(self.w2, view.queries.shape[2]), None)
        asked = torch.cat([view.queries[:, :, own], found.queries[view.layer][:, 0].to(device)], dim=2)
        at, valid = view.query_positions[:, own], found.valid[:, 0].to(device)
        asks = torch.cat([at >= 0, valid], dim=1)
        if self.released_mask:
            last = view.now[:, None] - asks.sum(1, keepdim=True) + asks.cumsum(1) - 1
        else:
            last = torch.cat([at, (view.now[:, None] - 1).expand_as(valid)], dim=1)
        p = view.positions[:, :, None, :]
        a = attention.weights(asked, view.keys, (p >= 0) & (p <= last[:, None, :, None]) & asks[:, None, :, None], view.scaling)
        apart = scores.own_window(view, at) if self.w2 else None
        return scores.reduced(a, asks, self.kernel, self.pooling, self.reduce, self.group, apart)
