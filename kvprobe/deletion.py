"""What deleting one cached entry does to a head's output, summed up over many queries (LORE-KV sec. 3.4, eq. 5, 6 and 12).

What a cost is, and how it is put together over queries, sets of queries and the query heads of a group; the costs themselves are
made block by block (deletion_walks.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .deletion_peaks import LANES
from .deletion_walks import Part
from .types import wide

BLOCK = {"cpu": 2**19}
"""Elements of one block of queries x keys by kind of device; 2**26 on others. On a CPU it should stay in the cache."""


def gram(output: Tensor) -> Tensor:
    """W_O [hq d e] of a layer -> W_O W_O^T [hq d d] in float32 or the wider dtype; once per layer and model.

    The convention of `inside.sites.head_weights`: a head's output z [d] adds z @ W_O[h].
    """
    output = output.to(wide(output.dtype))
    return output @ output.mT


@dataclass(frozen=True)
class Cost:
    """Which cost e of an entry i with value v, for a query with weights a and output o.

    projected (a / (1 - a + eps))^2 |W (v - o)|^2, LORE eq. 5 and 6; unprojected the same without W, CAOTE's square at eps 0;
    attention a, whose sum is the attention mass; anchor a <o, v>, AnDPro's criterion as its paper has it.
    An entry that a query sees alone costs nothing, by the formula; at eps 0, where that is 0 / 0, it costs all of |W v|^2.
    """

    objective: Literal["projected", "unprojected", "attention", "anchor"] = "projected"
    """what deletion costs"""
    form: Literal["squared", "magnitude"] = "squared"
    """of the norms: squared (eq. 6, deployed) or its root (eq. 12, analyses); the other objectives have one form"""
    eps: float = 1e-6
    """guard of the renormalisation in eq. 5"""
    group: Literal["mean", "sum", "max"] = "mean"
    """how the query heads that share a KV head are put together"""

    def __post_init__(self) -> None:
        for name, known in (("objective", ("projected", "unprojected", "attention", "anchor")), ("form", ("squared", "magnitude")), ("group", ("mean", "sum", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(map(repr, known))}")
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps} must be at least 0")

    @property
    def norms(self) -> bool:
        """Whether this is a norm of a change, not linear in a."""
        return self.objective in ("projected", "unprojected")


@dataclass(frozen=True)
class Psi:
    """alpha * TopAvg + (1 - alpha) * mean, TopAvg the mean of the largest ceil(kappa * count) costs (LORE app. D, A).

    Over all pairs of a query of a set and a query head of the group together; with group="max" over the queries of each head.
    """

    alpha: float = 0.0
    kappa: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1]")
        if not 0 < self.kappa <= 1:
            raise ValueError(f"kappa={self.kappa} must be in (0, 1]")

    def __call__(self, costs: Tensor) -> Tensor:
        """[.. pairs t] -> [.. t]."""
        mean = costs.mean(-2)
        if self.alpha == 0:
            return mean
        count = max(1, math.ceil(self.kappa * costs.shape[-2] - 1e-9))  # 0.1 * 30 is not 3
        return self.alpha * costs.topk(count, dim=-2, sorted=False).values.mean(-2) + (1 - self.alpha) * mean


def weighted(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None = None, visible: Tensor | None = None,
             weight: Tensor | None = None, cost: Cost = Cost()) -> Tensor:
    """[b hkv n]: costs of deletion, weighted over the queries, then put together over the group.

    queries [b hq q d] over keys and values [b hkv n d]; gram [hq d d] for the projected objective; visible: bool,
    broadcastable to [b hkv q s], of the last s of the n entries, where every query sees all others, None for all; weight [q] or [b q],
    None for the mean over the queries. A query that sees nothing costs nothing. float32, or float64 for float64 states.
    """
    b, hq, q, _ = queries.shape
    weight = torch.full((b, q), 1 / q, dtype=torch.float64) if weight is None else weight
    weight = weight.to(queries.device, wide(queries.dtype)).expand(b, q)
    score = keys.new_zeros(keys.shape[:3], dtype=wide(queries.dtype))
    for row, heads, part in _parts(queries, keys, values, scaling, gram, visible, cost):
        by_row = weight[row].repeat(part.group)[None, :, None]
        if cost.norms and cost.form == "magnitude" or cost.group == "max":
            for at, e in part.costs():
                score[row, heads, at] = _over_group(cost, e.mul_(by_row).unflatten(1, (part.group, -1)).sum(2))
        else:
            score[row, heads] = part.summed(by_row / (part.group if cost.group == "mean" else 1))
    return score


def by_set(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, sets: Mapping[str, Tensor], gram: Tensor | None = None,
           visible: Tensor | None = None, psi: Psi = Psi(), cost: Cost = Cost()) -> dict[str, Tensor]:
    """{name: [b hkv n]}: psi of the costs of each set of queries (a window, each continuation; LORE eq. 7).

    sets: bool [q] or [b q] by name; what a row has none of costs nothing. The rest is as in `weighted`. group="sum" is the
    group's size times "mean".
    """
    b, _, q, _ = queries.shape
    score = {name: keys.new_zeros(keys.shape[:3], dtype=wide(queries.dtype)) for name in sets}
    members = {name: own.to(queries.device).expand(b, q) for name, own in sets.items()}
    for row, heads, part in _parts(queries, keys, values, scaling, gram, visible, cost):
        chosen = {name: own[row].nonzero().squeeze(-1) for name, own in members.items()}
        for at, e in part.costs():
            e = e.unflatten(1, (part.group, -1))
            for name, own in chosen.items():
                if len(own):
                    score[name][row, heads, at] = _of_set(cost, psi, e if len(own) == q else e[:, :, own])
    return score


def per_query(sets: Mapping[str, Tensor], shares: Mapping[str, Tensor | float]) -> Tensor:
    """[b q] or [q] for `weighted`: each set's share (a number, or [b]), spread evenly over its queries.

    So that `weighted` gives eq. 7 with psi = mean in one go: {"window": 1, continuation m: lambda_L omega_m}.
    """
    spread = 0.0
    for name, own in sets.items():
        each = own.double() / own.sum(-1, keepdim=True).clamp(min=1)
        spread = spread + each * torch.as_tensor(shares[name], dtype=torch.float64, device=own.device).unsqueeze(-1)
    return spread


def _of_set(cost: Cost, psi: Psi, e: Tensor) -> Tensor:
    """[k g q t] -> [k t]."""
    if cost.group == "max":
        return psi(e).amax(1)
    return psi(e.flatten(1, 2)) * (e.shape[1] if cost.group == "sum" else 1)


def _over_group(cost: Cost, e: Tensor) -> Tensor:
    return {"mean": e.mean, "sum": e.sum, "max": e.amax}[cost.group](1)


def _parts(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None, visible: Tensor | None, cost: Cost) -> Iterator[tuple[int, slice, Part]]:
    """(batch row, KV heads, the part) so that a block of it has BLOCK elements or fewer, or LANES keys."""
    (b, hq, q, _), (n_kv, n, d) = queries.shape, values.shape[1:]
    group = hq // n_kv
    if cost.objective == "projected" and (gram is None or gram.shape != (hq, d, d)):
        raise ValueError(f"the projected objective needs gram [hq d d] = {[hq, d, d]}, got {None if gram is None else list(gram.shape)}")
    block = BLOCK.get(queries.device.type, 2**26) // (group * max(q, d))
    tile = max(LANES, min(n, block // LANES * LANES))
    at_once = max(1, block // tile)
    if visible is not None:
        visible = visible.expand(b, n_kv, q, visible.shape[-1])
    for row in range(b):
        for first in range(0, n_kv, at_once):
            heads = slice(first, min(n_kv, first + at_once))
            mine = slice(heads.start * group, heads.stop * group)
            yield row, heads, Part(
                queries[row, mine].to(wide(queries.dtype)).unflatten(0, (-1, group)).flatten(1, 2) * scaling, keys[row, heads], values[row, heads],
                gram[mine].to(wide(queries.dtype)).unflatten(0, (-1, group)) if cost.objective == "projected" else None, None if visible is None else visible[row, heads], group, tile, cost)
