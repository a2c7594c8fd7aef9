"""The uniform draw as a hash, so that it depends on nothing but what it is a draw of.

A draw is a function of (seed, instance, layer, KV head, round, position): the same on any device, in any batch, order
or number of workers, and shared by the conditions of an instance (protocols 1). A generator's stream would depend on
who else draws; a counter-based hash does not. The finaliser is that of SplitMix64 (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 wraps, so the constants are given as signed numbers
_MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL2 = 0x94D049BB133111EB - (1 << 64)
_TOKENS = -2  # where eviction has a layer, so that one seed may serve both


def _shift(x: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Logical right shift: torch's >> on int64 copies the sign bit."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> tuple[Tensor, Tensor]:
    """The finaliser in place, and the scratch it used: fresh memory costs more than the arithmetic."""
    scratch = _shift(x, 30)
    x.bitwise_xor_(scratch).mul_(_MUL1)
    x.bitwise_xor_(_shift(x, 27, scratch)).mul_(_MUL2)
    return x.bitwise_xor_(_shift(x, 31, scratch)), scratch


def key(seed: int, *parts: Tensor) -> Tensor:
    """Fold integer tensors (broadcast together) into one int64 key per element; order matters."""
    k, _ = _mix_(torch.full((), seed & 0x7FFFFFFFFFFFFFFF, dtype=torch.int64, device=parts[0].device) + _GAMMA)
    for part in parts:
        k, _ = _mix_((k ^ _mix_(part.to(torch.int64) + _GAMMA)[0]) + _GAMMA)
    return k


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, one per element of `keys` and `counters` (broadcast together)."""
    # expanded counters would otherwise pass their zero strides on, as a layout with the candidates outermost
    counters = counters.to(torch.int64, memory_format=torch.contiguous_format)
    x, scratch = _mix_(torch.add(keys, counters, alpha=_GAMMA))
    return x.view(torch.float64).copy_(_shift(x, 11, scratch)).mul_(2.0**-53)


def sampling(seed: int, instances: Tensor, step: int) -> Tensor:
    """float64 [b] in [0, 1): the number that picks a row's new token number `step`; it depends on nothing else."""
    return uniform(key(seed, instances, torch.full((), _TOKENS, device=instances.device)), torch.full_like(instances, step))
