"""Projected cost of deletion by the prompt's window alone, no look ahead: a control of LORE-KV (M = 0, lambda_L = 0)."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.policies import lore


@dataclass(frozen=True)
class POLICY(lore.POLICY):
    """LORE-KV with m = 0, which looks nowhere: it runs in rounds, too."""

    m: int = 0
    """continuations sampled: none"""
