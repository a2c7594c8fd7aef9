"""Scoring by deletion cost (LORE eq. 6) with 64 queries, against the explicit softmax(Q K^T) V of the same queries, and against projecting every pair.

States are random. The explicit form is the plain one for grouped heads: no key or value is repeated, the weights of all heads are
held. The direct projection takes W_O (v - o) of every pair of a query and an entry; it is timed on a few pairs of a query
and a query head with all keys, and multiplied up.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from measure import Result, ratio, rounds, spend
from torch import Tensor

from kvprobe import deletion

QUERIES = 64
SHAPES = ((9, 3, 64, 576), (32, 8, 128, 4096))  # query heads, KV heads, head size, model width of SmolLM2-135M and an 8B model
GOALS = {1024: 2.6, 4096: 1.5, 16384: 1.5}
"""Times the explicit attention, at most, by keys."""
DIRECT = {576: 100, 4096: 1000}
"""The direct projection against ours at least, by model width, from 4,096 keys."""
SLICE = 2


def states(shape: tuple[int, int, int, int], n: int, rest: float | None = None) -> tuple[Tensor, ...]:
    """Queries [1 hq 64 d], keys and values [1 hkv n d], W_O [hq d e]; with `rest` the first key takes all but that much of the median query's attention."""
    hq, hkv, d, width = shape
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, output = (torch.randn(*s, generator=generator) for s in ((1, hq, QUERIES, d), (1, hkv, n, d), (1, hkv, n, d), (hq, d, width)))
    if rest is not None:
        queries[..., 0], keys[..., 0], keys[:, :, 0] = 4.0, 0.0, 0.0
        others = (queries @ keys[:, :, 1:].repeat_interleave(hq // hkv, 1).mT * d**-0.5).logsumexp(-1).median()
        keys[:, :, 0, 0] = (others - math.log(rest)) / 4 * d**0.5
    return queries, keys, values, output / width**0.5


def explicit(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    grouped = (queries * keys.shape[-1] ** -0.5).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    return (grouped @ keys.mT).softmax(-1) @ values


def direct(queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, pairs: int) -> Tensor:
    """[pairs n] of the first queries of the first head, each pair projected as eq. 6 says."""
    made = []
    for q in range(pairs):
        a = (keys[0, 0] @ queries[0, 0, q] * keys.shape[-1] ** -0.5).softmax(-1)
        change = (a / (1 - a + 1e-6))[:, None] * (values[0, 0] - a @ values[0, 0])
        made.append((change @ output[0]).square().sum(-1))
    return torch.stack(made)


def error(shape: tuple[int, int, int, int], n: int = 1024) -> tuple[float, float]:
    """The largest relative error over all entries in float32 against float64, and the median of 1 - a of the top entry."""
    made = states(shape, n, rest=2e-4)
    wide = [x.double() for x in made]
    scaling = shape[2] ** -0.5
    score, want = (deletion.weighted(*x[:3], scaling, deletion.gram(x[3])).double() for x in (made, wide))
    group = wide[0].unflatten(1, (shape[1], -1)).flatten(2, 3)
    rest = 1 - (group @ wide[1].mT * scaling).softmax(-1).amax(-1)
    return float(((score - want) / want).abs().max()), float(rest.median())


@torch.no_grad()
def scoring(say, n: int) -> list[Result]:
    results = []
    for shape in SHAPES:
        name = "/".join(map(str, shape))
        for length, goal in GOALS.items():
            *attended, output = states(shape, length)
            gram, scaling = deletion.gram(output), shape[2] ** -0.5
            ours = partial(deletion.weighted, *attended, scaling, gram)
            variants = [("explicit", partial(spend, partial(explicit, *attended))), ("deletion", partial(spend, ours)),
                        ("unprojected", partial(spend, partial(ours, cost=deletion.Cost("unprojected"))))]
            if length >= 4096:
                variants.append(("direct", partial(spend, partial(direct, *attended, output, SLICE))))
            for _, run in variants:
                run()
            seconds = rounds(n, variants, say)
            where = f"{name}, {length} keys"
            results.append(Result(f"deletion: projected / explicit attention, {where}", ratio(seconds["deletion"], seconds["explicit"]), goal))
            results.append(Result(f"deletion: unprojected / explicit attention, {where}", ratio(seconds["unprojected"], seconds["explicit"])))
            if "direct" in seconds:
                times = QUERIES * shape[0] / SLICE
                results.append(Result(f"deletion: direct projection / projected, {where}", tuple(times * x for x in ratio(seconds["direct"], seconds["deletion"])), DIRECT[shape[3]],
                                      more=True, form=".0f", note=f"direct projection: {SLICE} of {QUERIES} x query heads pairs timed, the rest multiplied up"))
        worst, rest = error(shape)
        results.append(Result(f"deletion: relative error in float32, {name}, 1 - a = {rest:.1e}", (worst,), 1e-4, form=".1e"))
    return results
