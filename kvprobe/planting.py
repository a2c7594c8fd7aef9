"""Builds the stories of probes that plant something: marks at fixed positions in reasoning text, by token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .needles import HIGHEST, LOWEST, Filler
from .types import Plan


@dataclass(frozen=True)
class Mark:
    """Token ids to be put at position `start` of the text; the room behind them is filler. over: they replace filler, so that
    all other tokens are those of the text without them; otherwise the filler goes on behind them."""

    name: str
    start: int
    ids: np.ndarray
    over: bool = False


def write(filler: Filler, head: np.ndarray, marks: Sequence[Mark], length: int, forbidden: Sequence[str], rng: np.random.Generator) -> tuple[np.ndarray, dict]:
    """ids [length]: head, then filler with the marks in it, and the spans of the marks. Raises ValueError for marks that overlap or do not fit."""
    at, spans, ids, open_ = len(head), {}, np.zeros(length, dtype=np.int64), np.ones(length, dtype=bool)
    for mark in sorted(marks, key=lambda m: m.start):
        stop = mark.start + len(mark.ids)
        if mark.start < at or stop > length:
            raise ValueError(f"{mark.name} at {mark.start}, {len(mark.ids)} tokens long, does not fit between {at} and {length}")
        spans[mark.name], at, open_[mark.start : stop] = (mark.start, stop), stop, mark.over
    ids[: len(head)], open_[: len(head)] = head, False
    ids[open_] = filler.passage(int(open_.sum()), forbidden, rng)
    for mark in marks:
        ids[slice(*spans[mark.name])] = mark.ids
    return ids, spans


def filled(filler: Filler, ids: np.ndarray, room: int, forbidden: Sequence[str], rng: np.random.Generator, front: bool = False) -> np.ndarray:
    """ids with filler up to `room`, behind or in front. Raises ValueError where they do not fit."""
    if len(ids) > room:
        raise ValueError(f"a statement or query takes {len(ids)} tokens with this tokenizer, its room is {room}")
    pad = filler.passage(room - len(ids), forbidden, rng)
    return np.concatenate([pad, ids] if front else [ids, pad])


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
