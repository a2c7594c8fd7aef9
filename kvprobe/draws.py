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


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> on int64 copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)).mul_(_MUL1)
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_MUL2)
    return x.bitwise_xor_(_shift(x, 31))


def key(seed: int, *parts: Tensor) -> Tensor:
    """Fold integer tensors (broadcast together) into one int64 key per element; order matters."""
    k = _mix(torch.full((), seed & 0x7FFFFFFFFFFFFFFF, dtype=torch.int64, device=parts[0].device) + _GAMMA)
    for part in parts:
        k = _mix((k ^ _mix(part.to(torch.int64) + _GAMMA)) + _GAMMA)
    return k


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, one per element of `keys` and `counters` (broadcast together)."""
    x = _mix(counters.to(torch.int64).mul(_GAMMA).add(keys))
    return _shift(x, 11).to(torch.float64).mul_(2.0**-53)
