"""LAQ++: Lookahead Q-Cache where the prompt's last 8 queries vote beside the greedy tokens (arXiv 2505.20334)."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.policies import laq


@dataclass(frozen=True)
class POLICY(laq.POLICY):
    """LAQ with w2 = 8, the release's default. It protects those 8: here the run's pins do."""

    w2: int = 8
    """newest prompt queries that vote beside the greedy tokens"""
