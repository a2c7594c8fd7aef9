"""Builds the stories of probes that plant something: marks at fixed positions in reasoning text, by token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .needles import HIGHEST, LOWEST, Filler
from .types import Plan


@dataclass(frozen=True)
class Mark:
    """Token ids to be put at position `start` of the text; the room behind them is filler."""

    name: str
    start: int
    ids: np.ndarray


def write(filler: Filler, head: np.ndarray, marks: Sequence[Mark], length: int, forbidden: Sequence[str], rng: np.random.Generator) -> tuple[np.ndarray, dict]:
    """ids [length]: head, then filler with the marks in it, and the spans of the marks. Raises ValueError for marks that overlap or do not fit."""
    at, gaps, spans = len(head), [], {}
    for mark in sorted(marks, key=lambda m: m.start):
        if mark.start < at or mark.start + len(mark.ids) > length:
            raise ValueError(f"{mark.name} at {mark.start}, {len(mark.ids)} tokens long, does not fit between {at} and {length}")
        gaps.append(mark.start - at)
        at = mark.start + len(mark.ids)
        spans[mark.name] = (mark.start, at)
    gaps.append(length - at)
    pieces = iter(np.split(filler.passage(sum(gaps), forbidden, rng), np.cumsum(gaps)[:-1]))
    parts = [head, next(pieces)]
    for mark in sorted(marks, key=lambda m: m.start):
        parts += [mark.ids, next(pieces)]
    return np.concatenate(parts), spans


def asked_after(plan: Plan, rounds: int, query: int) -> int:
    """Tokens to feed before a query of `query` tokens, so that `rounds` rounds have fired before the value behind it."""
    return plan.fires_at + (rounds - 1) * plan.buffer + max(1, plan.buffer // 2) - query  # a round is felt one token after it fires


def first_candidates(plan: Plan) -> int:
    """Positions below this one are candidates of the first round: facts there live through every round."""
    return plan.keep + plan.buffer


def values(seed: int, stream: int, count: int) -> list[str]:
    """Distinct four-digit values, 5000-9999."""
    if not 0 < count <= HIGHEST - LOWEST + 1:
        raise ValueError(f"instances={count} must be in 1..{HIGHEST - LOWEST + 1}: that many four-digit values are distinct")
    return [str(v) for v in np.random.default_rng([seed, stream]).permutation(np.arange(LOWEST, HIGHEST + 1))[:count]]


def rounds_of(text: str) -> tuple[int, ...]:
    """ "15,57" -> (15, 57). Raises ValueError for anything but whole numbers from 1 on, rising."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdigit() and int(p) for p in parts) or [int(p) for p in parts] != sorted({int(p) for p in parts}):
        raise ValueError(f"{text!r} must be whole numbers of rounds from 1 on, rising, e.g. 15,57")
    return tuple(int(p) for p in parts)
