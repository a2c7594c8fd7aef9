"""One sampled continuation instead of several, unweighted, beside the prompt's window: a control of LORE-KV (M = 1)."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.policies import lore


@dataclass(frozen=True)
class POLICY(lore.POLICY):
    """LORE-KV with m = 1: its only continuation has weight 1, whatever its reliability."""

    m: int = 1
    """continuations sampled"""
    beta: float = 0.0
    """weight of a continuation's typicality: none, as there is nothing to weigh against"""
    gamma: float = 0.0
    """weight of its entropy: none"""
