"""Futures of one draw, scored apart: every weighting of them is a mixture of the same parts (LORE eq. 7)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import deletion
from .metrics import coverage
from .policies import lore

if TYPE_CHECKING:
    from .prompt_reading import Prompt


@dataclass(frozen=True)
class Hard(lore.POLICY):
    """LORE-KV that leaves its worst continuations out and weighs the others alike (hard filtering, app. F.4)."""

    drop_worst: int = 1

    def weigh(self, found) -> lore.Future:
        future = super().weigh(found)
        left = (future.weights > 0).to(future.weights.dtype)
        return dataclasses.replace(future, weights=left / left.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Walk:
    """One draw, its scores apart: window [l b hkv n] and each continuation's psi [m l b hkv n]; cosines [m x] of every future query
    (of each layer and query head) with the nearest query of each continuation."""

    window: Tensor
    each: Tensor
    cosines: Tensor

    def mixed(self, weights: Tensor, lam_l: float = 1.0) -> Tensor:
        """[l b hkv n]: eq. 7 with weights [m] of the first m continuations."""
        return self.window + lam_l * torch.tensordot(weights.to(self.each.dtype), self.each[: len(weights)], dims=1)


def walk(policy: lore.POLICY, prompt: Prompt, found) -> Walk:
    """All of a draw's continuations in one walk over the keys, with the cost that the policy has."""
    cache, at, future = prompt.cache, prompt.cache.window_positions, prompt.truth.ahead
    none = torch.zeros(found.m, at.shape[1] + found.m * found.t, dtype=torch.bool, device=at.device)
    sets = {"window": none[0].clone(), **{k: none[k] for k in range(found.m)}}
    sets["window"][: at.shape[1]] = at[0] >= 0
    for k in range(found.m):
        sets[k][at.shape[1] + k * found.t :][: found.t] = found.valid[0, k]
    cost, psi, cosines = deletion.Cost(policy.objective, policy.form, policy.eps, policy.group), [], []
    for i, layer in enumerate(cache.geometry.kv_layers):
        held = cache.layers[layer]
        ahead = found.queries[layer].to(held.keys.device)
        causal = cache.positions[i, :, :, None, :] <= at[:, None, :, None]
        visible = torch.cat([causal, torch.ones_like(causal[:, :, :1]).expand(-1, -1, found.m * found.t, -1)], dim=2).to(held.keys.device)
        queries = torch.cat([held.queries, ahead.transpose(1, 2).flatten(2, 3)], dim=2)
        mine = deletion.by_set(queries, held.keys, held.values, held.scaling, sets, policy._gram(layer, held.keys.device), visible, cost=cost)
        psi.append(torch.stack([mine["window"], *(mine[k] for k in range(found.m))]).to(cache.kept_device))
        asked = future.queries[layer][0][:, future.valid[0]].expand(found.m, -1, -1, -1).to(ahead.device)
        cosines.append(coverage.nearest(asked, ahead[0], found.valid[0]).flatten(1).to(cache.kept_device))
    scores = torch.stack(psi, dim=1)
    return Walk(scores[0], scores[1:], torch.cat(cosines, dim=1))


def spread(weights: Tensor) -> dict[str, float]:
    """Of weights [m]: the largest, and the effective number of continuations."""
    return {"max_weight": float(weights.max()), "effective": float(1 / weights.double().square().sum())}
