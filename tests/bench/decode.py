"""A decode step between rounds, against a stock one at the same physical length, stock against itself beside it."""

from __future__ import annotations

import torch
from forcing import script
from measure import Result, spend
from stock import stock_cache

from kvprobe import engine
from kvprobe.eviction_cache import EvictionCache
from kvprobe.models import Model
from kvprobe.policies import random
from kvprobe.types import Plan

KEEP, BUFFER = 256, 64


@torch.no_grad()
def steps(model: Model, stock, say, n: int, per_round: int = 30) -> list[Result]:
    """Each round: caches of K + r entries (ours right after a round), then three variants step in turn."""
    length = KEEP + 2 * BUFFER
    ids = script(model, 1, length + per_round + 1)
    ratios: dict[str, list[float]] = {"ours": [], "stock": []}
    for i in range(n):
        ours = EvictionCache(model.model.config, model.geometry, Plan(KEEP, BUFFER), random.POLICY())
        engine.force(model, ours, ids[:, :length])
        caches = {"ours": ours, "stock": stock_cache(stock), "itself": stock_cache(stock)}
        for name in ("stock", "itself"):
            stock(input_ids=ids[:, : KEEP + BUFFER], cache=caches[name], use_cache=True, logits_to_keep=1)
        assert ours.layers[0].keys.shape == caches["stock"].layers[0].keys.shape
        seconds = dict.fromkeys(caches, 0.0)
        order = list(caches)
        for j in range(per_round + 1):
            token = ids[:, length + j : length + j + 1]
            for k in range(3):
                name = order[(i + j + k) % 3]
                runs = model.model if name == "ours" else stock
                took = spend(lambda: runs(input_ids=token, cache=caches[name], use_cache=True, logits_to_keep=1))
                seconds[name] += took if j else 0.0  # the first step warms up
        assert len(ours.recorder.fired[0]) == 1 and ours.layers[0].keys.shape == caches["stock"].layers[0].keys.shape
        ratios["ours"].append(seconds["ours"] / seconds["itself"])
        ratios["stock"].append(seconds["stock"] / seconds["itself"])
        say(f"  round {i + 1}/{n}: ours {1e3 * seconds['ours'] / per_round:.2f} ms, stock {1e3 * seconds['stock'] / per_round:.2f} ms a step")
    note = f"{per_round} interleaved steps of each a round, {KEEP + BUFFER}..{KEEP + BUFFER + per_round} entries"
    return [
        Result("step: decode step outside rounds / stock step", tuple(ratios["ours"]), 1.02, form=".3f", note=note),
        Result("step: stock step / stock step (the noise)", tuple(ratios["stock"]), form=".3f", note=note),
    ]


LENGTHS = (512, 1024, 4096)


@torch.no_grad()
def generation(model: Model, stock, say, n: int, per_round: int = BUFFER) -> list[Result]:
    """Time per token, rounds included, of a long generation under random eviction against the full cache, from given lengths on.

    Each round of the measurement steps both caches `per_round` times in turn, which holds exactly one eviction round.
    """
    ids = script(model, 1, max(LENGTHS) + (n + 1) * per_round)
    results = []
    for length in LENGTHS:
        ours = EvictionCache(model.model.config, model.geometry, Plan(KEEP, BUFFER), random.POLICY())
        engine.force(model, ours, ids[:, :length])
        full = stock_cache(stock)
        for i in range(0, length, engine.MAX_CHUNK):
            stock(input_ids=ids[:, i : min(length, i + engine.MAX_CHUNK)], cache=full, use_cache=True, logits_to_keep=1)
        ratios, at = [], length
        for i in range(n + 1):
            seconds = dict(ours=0.0, full=0.0)
            for j in range(per_round):
                token = ids[:, at : at + 1]
                position = torch.tensor([[at]])
                for name in ("ours", "full") if (i + j) % 2 else ("full", "ours"):
                    runs, cache = (model.model, ours) if name == "ours" else (stock, full)
                    seconds[name] += spend(lambda: runs(input_ids=token, position_ids=position, cache=cache, use_cache=True, logits_to_keep=1))
                at += 1
            if i:  # the first round warms up
                ratios.append(seconds["ours"] / seconds["full"])
        say(f"  from {length}: ours {1e3 * seconds['ours'] / per_round:.1f} ms, full {1e3 * seconds['full'] / per_round:.1f} ms a token")
        mine, theirs = (sum(x.keys.nbytes + x.values.nbytes for x in c.layers) / 2**20 for c in (ours, full))
        results.append(Result(f"generation: token under random eviction / full cache, from {length} on", tuple(ratios), 1.02 if length < max(LENGTHS) else 0.95, form=".3f",
                              note=f"K = {KEEP}, r = {BUFFER}, {per_round} interleaved tokens of each a round, one eviction round among them"))
        results.append(Result(f"generation: cache bytes under eviction / full, at {at} ({mine:.0f} and {theirs:.0f} MB)", (mine / theirs,), form=".3f"))
    return results
