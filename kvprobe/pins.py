"""Pins: rules that hold a span's entries (+inf) or send them away first (-inf), whatever the policy scores.

Every pin is a half-open interval of positions and a set of sites, so that one table serves any mix of pins in a batch
whose rows have pins of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .types import Geometry, Plan


@dataclass(frozen=True)
class SpanPin:
    """Hold positions start..stop in `sites`, a set of (layer, KV head) in the model's numbering; None means all.

    elsewhere: "ban" evicts the span from every other site at the first round that may take it (the planted-fact probe,
    Random Attention app. B); "free" leaves it to the policy there.
    """

    start: int
    stop: int
    sites: frozenset[tuple[int, int]] | None = None
    elsewhere: Literal["ban", "free"] = "ban"

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) must be a non-empty interval of positions from 0 on")
        if self.elsewhere not in ("ban", "free"):
            raise ValueError(f"elsewhere={self.elsewhere!r} is unknown; known: 'ban', 'free'")

    def interval(self, prompt: int, now: int) -> tuple[int, int]:
        return self.start, self.stop


@dataclass(frozen=True)
class PromptPin:
    """Hold the row's prompt, that is all real tokens of the first forward, in every site."""

    sites = None
    elsewhere = "free"

    def interval(self, prompt: int, now: int) -> tuple[int, int]:
        return 0, prompt


@dataclass(frozen=True)
class SinkPin:
    """Hold the first n positions of the text in every site."""

    n: int = 4
    sites = None
    elsewhere = "free"

    def interval(self, prompt: int, now: int) -> tuple[int, int]:
        return 0, self.n


@dataclass(frozen=True)
class WindowPin:
    """Hold the newest n positions in every site, each round anew."""

    n: int = 32
    sites = None
    elsewhere = "free"

    def interval(self, prompt: int, now: int) -> tuple[int, int]:
        return max(0, now - self.n), now


Pin = SpanPin | PromptPin | SinkPin | WindowPin


def check(pins: Iterable[Pin], geometry: Geometry) -> None:
    """Raise ValueError for a pin at a site that does not exist."""
    for pin in pins:
        for layer, head in pin.sites or ():
            geometry.check_site(layer, head)


def check_fits(pins: Sequence[Pin], geometry: Geometry, plan: Plan, length: int | None = None) -> None:
    """Raise ValueError where pins contradict each other or hold more than `keep` at a site, as far as it is known before a run.

    length: of the prompt where all evicting is done at its end, so that everything is known; None: a window that moves on while
    text is written stands apart from every span sooner or later, while one at a prompt's unknown end may lie over them.
    """
    for site in {(layer, head) for layer in geometry.kv_layers for head in range(geometry.n_kv)}:
        held, banned, moving = set(), set(), 0
        for pin in pins:
            inside = pin.sites is None or site in pin.sites
            if length is not None:
                span = range(*(min(p, length) for p in pin.interval(length, length)))
            elif isinstance(pin, WindowPin):
                moving, span = max(moving, pin.n - plan.buffer), range(0)  # the buffer is never evicted anyway
            else:
                span = range(0) if isinstance(pin, PromptPin) else range(*pin.interval(0, 0))
            (held if inside else banned if pin.elsewhere == "ban" else set()).update(span)
        if held & banned:
            raise ValueError(f"two pins disagree about position {min(held & banned)} at layer {site[0]}, KV head {site[1]}: one holds it, one bans it")
        count = max(len(held), moving) if plan.schedule == "prompt_end" else len(held) + moving
        if count > plan.keep and not plan.pins_free:
            raise ValueError(f"keep={plan.keep} cannot hold {count} pinned entries of layer {site[0]}, KV head {site[1]}")


class PinTable:
    """The pins of every row of a batch, as tensors.

    value[j] [l b hkv] is +inf, -inf or 0: what the j-th pin of a row does to the entries of its interval at a site.
    """

    def __init__(self, rows: Sequence[Sequence[Pin]], geometry: Geometry, device: torch.device):
        self.rows = [tuple(pins) for pins in rows]
        for pins in set(self.rows):
            check(pins, geometry)
        self.depth = max((len(pins) for pins in self.rows), default=0)
        self.value = [self._values(j, geometry).to(device) for j in range(self.depth)]

    def _values(self, j: int, geometry: Geometry) -> Tensor:
        row_of = {layer: i for i, layer in enumerate(geometry.kv_layers)}
        value = torch.zeros(len(row_of), len(self.rows), geometry.n_kv)
        for b, pins in enumerate(self.rows):
            if j >= len(pins):
                continue
            if pins[j].sites is None:
                value[:, b] = torch.inf
                continue
            value[:, b] = -torch.inf if pins[j].elsewhere == "ban" else 0.0
            for layer, head in pins[j].sites:
                value[row_of[layer], b, head] = torch.inf
        return value

    def _intervals(self, j: int, prompt: Sequence[int], now: Sequence[int], device) -> tuple[Tensor, Tensor]:
        ends = [pins[j].interval(prompt[b], now[b]) if j < len(pins) else (0, 0) for b, pins in enumerate(self.rows)]
        return torch.tensor(ends, device=device).unbind(-1)

    def bias(self, positions: Tensor, prompt: Sequence[int], now: Sequence[int]) -> Tensor | None:
        """[l b hkv c] of 0, +inf and -inf, nan where pins contradict each other; None without pins."""
        total = None
        for j, value in enumerate(self.value):
            start, stop = (x[None, :, None, None] for x in self._intervals(j, prompt, now, positions.device))
            inside = (positions >= start) & (positions < stop)
            part = torch.where(inside, value[..., None], 0.0)
            total = part if total is None else total + part
        return total

    def banned(self, layer: int, start: Tensor, stop: Tensor) -> Tensor:
        """How many positions of [start, stop) (both [b hkv c]) are banned at the layer in the layer's row `layer`, overlaps counted once."""
        width = max((pin.stop for pins in self.rows for pin in pins if isinstance(pin, SpanPin)), default=0)  # no other pin bans
        positions = torch.arange(width, device=start.device)
        banned = torch.zeros(*start.shape[:-1], width, dtype=torch.bool, device=start.device)
        never = [0] * len(self.rows)
        for j, value in enumerate(self.value):
            a, z = (x[:, None, None] for x in self._intervals(j, never, never, start.device))
            banned |= (positions >= a) & (positions < z) & (value[layer] == -torch.inf)[..., None]
        before = torch.nn.functional.pad(banned.cumsum(-1), (1, 0))
        return before.gather(-1, stop.clamp(0, width).long()) - before.gather(-1, start.clamp(0, width).long())

    def held_before(self, boundary: Sequence[int], prompt: Sequence[int], now: Sequence[int]):
        """numpy [l b hkv]: positions before boundary[b] that a pin holds at each site, overlapping pins counted once."""
        width = max(max(boundary, default=0), 1)
        positions = torch.arange(width).expand(1, 1, 1, width)
        before = positions < torch.tensor(list(boundary))[None, :, None, None]
        held = torch.zeros((), dtype=torch.bool)
        for j, value in enumerate(self.value):
            start, stop = (x[None, :, None, None] for x in self._intervals(j, prompt, now, "cpu"))
            inside = (positions >= start) & (positions < stop) & before
            held = held | (inside & (value.cpu() == torch.inf)[..., None])
        return held.sum(-1).numpy() if held.ndim else 0
