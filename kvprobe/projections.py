"""Output projections of a bound policy: what a head's value adds to the model's stream."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .types import wide

BLOCK_BYTES = {"cpu": 2**20}
"""Ceiling for projected values held at a time [bytes] by kind of device; 2**26 on others. On a CPU they should stay in the cache."""


def bound(policy, model):
    """A copy of the policy that knows its model, for `output`. What a policy's `bind` returns."""
    made = dataclasses.replace(policy)
    object.__setattr__(made, "_model", model)
    object.__setattr__(made, "_made", {})
    return made


def output(policy, layer: int) -> Tensor:
    """W_O [hq d e] of a layer of the bound policy's model. Raises ValueError where it was not bound."""
    if not hasattr(policy, "_model"):
        name = type(policy).__module__.rsplit(".", 1)[-1]
        raise ValueError(f"{name} needs its model's output projections: use kvprobe.compress or kvprobe.cache(model, ...), or policy.bind(model)")
    from .inside.sites import head_weights

    return head_weights(policy._model, "O", layer)


def kept(policy, layer: int, make) -> Tensor:
    """What `make(W_O)` gives for a layer, made once per bound policy."""
    output(policy, layer)  # refuses a policy that is not bound
    if layer not in policy._made:
        policy._made[layer] = make(output(policy, layer))
    return policy._made[layer]


def value_norms(weights: Tensor, values: Tensor) -> Tensor:
    """[b hkv c]: |W_O^h v|_1 of values [b hkv c d], weights [hq d e], mean over the query heads h of the group (methods 7).

    float32 or the wider dtype; a block of entries at a time.
    """
    b, n_kv, c, d = values.shape
    group, dtype = weights.shape[0] // n_kv, wide(values.dtype)
    weights, norms = weights.to(values.device, dtype).unflatten(0, (n_kv, group)), []
    step = max(1, BLOCK_BYTES.get(values.device.type, 2**26) // (b * n_kv * weights.shape[-1] * weights.element_size()))
    for i in range(0, c, step):
        part = values[:, :, i : i + step].to(dtype)
        norms.append(sum(torch.linalg.vector_norm(part @ weights[:, g], 1, dim=-1) for g in range(group)) / group)
    return torch.cat(norms, -1)
