"""Output projections of a bound policy: what a head's value adds to the model's stream."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .types import wide

BLOCK_BYTES = {"cpu": 2**20}
"""Ceiling for projected values held at a time [bytes] by kind of device; 2**26 on others. On a CPU they should stay in the cache."""


_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> {(what, layer): (state of its weight, what was made of it)}


def bound(policy, model):
    """A copy of the policy that knows its model, for `output`. What a policy's `bind` returns."""
    made = dataclasses.replace(policy)
    object.__setattr__(made, "_model", model)
    return made


def output(policy, layer: int) -> Tensor:
    """W_O [hq d e] of a layer of the bound policy's model. Raises ValueError where it was not bound."""
    if not hasattr(policy, "_model"):
        name = type(policy).__module__.rsplit(".", 1)[-1]
        raise ValueError(f"{name} needs its model's output projections: use kvprobe.compress or kvprobe.cache(model, ...), or policy.bind(model)")
    from .inside.sites import head_weights

    return head_weights(policy._model, "O", layer)


def kept(policy, layer: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What `make(W_O)` gives for a layer, made once per model, whichever policy asks; again when the weight has been written to."""
    weight = output(policy, layer)
    state = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, float(weight.sum()))  # the sum tells what a version does not, writing to .data
    mine = _made.setdefault(policy._model.model, {})
    if mine.get((make, layer), (None,))[0] != state:
        mine[make, layer] = state, make(weight)
    return mine[make, layer][1]


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
