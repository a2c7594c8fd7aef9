"""Forcing a script: ours against the two things one would do with stock transformers, and against itself."""

from __future__ import annotations

from functools import partial

import torch
from measure import Result, ratio, rounds, spend
from stock import stock_cache
from torch import Tensor

from kvprobe import engine
from kvprobe.eviction_cache import EvictionCache
from kvprobe.models import Model
from kvprobe.policies import random
from kvprobe.types import Plan

KEEP = 256
SCORED = 4
"""The last tokens of the script are scored; the last of them is not fed."""


def script(model: Model, batch: int, length: int) -> Tensor:
    return torch.randint(10, model.model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch))


def ours(model: Model, ids: Tensor, buffer: int, longest: int = engine.MAX_CHUNK) -> Tensor:
    """log p of the script's last tokens, with a round every `buffer` tokens."""
    cache = EvictionCache(model.model.config, model.geometry, Plan(KEEP, buffer), random.POLICY())
    first = ids.shape[1] - SCORED
    return engine.force(model, cache, ids[:, :-1], targets=ids[:, first:], first=first, longest=longest).logp


@torch.no_grad()
def prefill(stock, ids: Tensor) -> None:
    """The same tokens in one plain forward, logits of the last only."""
    stock(input_ids=ids[:, :-1], cache=stock_cache(stock), use_cache=True, logits_to_keep=1)


class TokenByToken:
    """The rival: one token a step on a stock cache that grows. Steps are timed at `samples` cache lengths in the middle of
    equal parts of the script, and the sum is scaled to all tokens: a whole pass takes about a minute per script.
    """

    def __init__(self, stock, ids: Tensor, samples: int, steps: int = 2):
        self.stock, self.ids, self.samples, self.steps = stock, ids, samples, steps
        n = ids.shape[1] - 1
        self.lengths = [round((i + 0.5) * n / samples) for i in range(samples)]
        self.full = stock_cache(stock)
        with torch.no_grad():
            for at in range(0, self.lengths[-1], 128):
                stock(input_ids=ids[:, at : min(at + 128, self.lengths[-1])], cache=self.full, use_cache=True, logits_to_keep=1)

    def _at(self, length: int):
        cache = stock_cache(self.stock)
        for i, layer in enumerate(self.full.layers):
            cache.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), i)
        return cache

    @torch.no_grad()
    def __call__(self) -> float:
        total = 0.0
        for length in self.lengths:
            cache = self._at(length)

            def step() -> None:
                at = cache.get_seq_length()
                self.stock(input_ids=self.ids[:, at : at + 1], cache=cache, use_cache=True, logits_to_keep=1)

            step()
            total += sum(spend(step) for _ in range(self.steps)) / self.steps
        return total / self.samples * (self.ids.shape[1] - 1)


def speed(model: Model, stock, say, batch: int, n: int, length: int = 1000, buffers=(64, 16)) -> list[Result]:
    ids = script(model, batch, length)
    rival = TokenByToken(stock, ids, samples=10 if batch == 1 else 4)
    seconds = rounds(n, [
        ("token by token", rival),
        ("prefill", lambda: spend(partial(prefill, stock, ids))),
        *[(f"r={r}", lambda r=r: spend(partial(ours, model, ids, r))) for r in buffers],
    ], say)
    faster = {(1, 64): 14.0, (1, 16): 7.5, (8, 64): 4.5}
    against = {(1, 64): (1.15, 1.2), (8, 16): (1.4, None)}
    note = f"token by token: {rival.steps} steps at each of {rival.samples} cache lengths, scaled to {length - 1} tokens"
    results = []
    for r in buffers:
        mine = seconds[f"r={r}"]
        goal, slack = against.get((batch, r), (None, None))
        results += [
            Result(f"force: stock token by token / ours, batch {batch}, r={r}", ratio(seconds["token by token"], mine), faster.get((batch, r)), more=True, note=note),
            Result(f"force: ours / one plain prefill, batch {batch}, r={r}", ratio(mine, seconds["prefill"]), goal, slack=slack),
        ]
    return results


def exact(model: Model, say, length: int = 1000, buffers=(64, 16)) -> list[Result]:
    """The largest difference in log p between a round per forward and a token per forward, same engine, same rounds."""
    ids = script(model, 1, length)
    results = []
    for r in buffers:
        worst = float((ours(model, ids, r) - ours(model, ids, r, longest=1)).abs().max())
        say(f"  r={r}: largest difference {worst:.2g}")
        results.append(Result(f"exact: |log p, a round a forward - a token a forward|, r={r}", (worst,), 1e-4, form=".1e",
                              note=f"last {SCORED} tokens of {length}, {model.model.dtype}"))
    return results
