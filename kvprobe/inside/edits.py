"""Edits of attention: hide, pin, ablate, transplant. An edit changes what one attention call sees, nothing that is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kvprobe.keeplog import KeepLog
from kvprobe.models import Model
from kvprobe.types import Geometry

from . import sites
from .capture import Capture
from .read import Pass

Sites = Iterable[tuple[int, int]]


@dataclass
class Seen:
    """What one attention call sees, for an edit to change: keys, values [b hkv s d], positions [b hkv s], visible [b hkv n s].

    out [b n hq d] is None until attention has been computed from the rest.
    """

    layer: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    visible: Tensor
    at: Pass
    out: Tensor | None = None


@dataclass(frozen=True)
class Edit:
    """One intervention. layers: where it acts; heads(layer): the KV heads it touches there."""

    sites: frozenset[tuple[int, int]]

    def layers(self, geometry: Geometry) -> set[int]:
        return {layer for layer, _ in self.sites}

    def heads(self, layer: int) -> list[int]:
        return sorted(h for i, h in self.sites if i == layer)

    def extent(self) -> tuple[int, int]:
        """The smallest and the largest position that the edit names; (0, 0) for none."""
        return 0, 0

    def turns_keys(self) -> bool:
        """Whether it brings keys from elsewhere, which must stand where the cache's own do."""
        return False

    def before(self, seen: Seen, model: Model) -> None:
        """Change keys, values, positions or visibility."""

    def after(self, seen: Seen, model: Model) -> None:
        """Change the outputs."""


@dataclass(frozen=True)
class HeadMask(Edit):
    hidden: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = ()

    def extent(self) -> tuple[int, int]:
        named = [p for _, positions in self.hidden for p in positions]
        return (min(named), max(named)) if named else (0, 0)

    def before(self, seen: Seen, model: Model) -> None:
        for (layer, head), positions in self.hidden:
            if layer == seen.layer:
                gone = torch.isin(seen.positions[:, head], torch.tensor(positions, device=seen.positions.device))
                seen.visible[:, head] &= ~gone[:, None, :]


@dataclass(frozen=True)
class LogMask(Edit):
    """Every query sees what a keep log says its KV heads held when its token came."""

    log: KeepLog | None = None
    rows: tuple[int, ...] = ()

    def layers(self, geometry: Geometry) -> set[int]:
        return set(self.log.layers)

    def before(self, seen: Seen, model: Model) -> None:
        i = self.log.layers.index(seen.layer)
        died = torch.from_numpy(self.log.died[i][list(self.rows)]).to(seen.positions.device)
        p = seen.positions.long()
        known = p < died.shape[-1]
        died = died.gather(2, p.clamp(0, died.shape[-1] - 1)).masked_fill(~known, torch.iinfo(torch.int32).max)
        fired = [torch.tensor(self.log.fired[b]) for b in self.rows]
        q = seen.at.q_positions
        done = torch.stack([torch.searchsorted(f, q[b].cpu(), right=True) for b, f in enumerate(fired)]).to(p.device)
        seen.visible &= died[:, :, None, :] >= done[:, None, :, None]


@dataclass(frozen=True)
class Pin(Edit):
    start: int = 0
    stop: int = 0
    store: Capture | None = field(default=None, compare=False)

    def layers(self, geometry: Geometry) -> set[int]:
        return set(geometry.kv_layers)

    def extent(self) -> tuple[int, int]:
        return self.start, self.stop - 1

    def turns_keys(self) -> bool:
        return self.store is not None

    def before(self, seen: Seen, model: Model) -> None:
        held = set(self.heads(seen.layer))
        if self.store is None:
            self._check_held(seen, held)
        inside = (seen.positions >= self.start) & (seen.positions < self.stop)
        causal = seen.positions[:, :, None, :] <= seen.at.q_positions[:, None, :, None]
        for head in range(seen.keys.shape[1]):
            if head in held:
                seen.visible[:, head] |= inside[:, head, None, :] & causal[:, head]
            else:
                seen.visible[:, head] &= ~inside[:, head, None, :]
        if self.store is not None and held:
            self._bring_back(seen, held)

    def _check_held(self, seen: Seen, held: set[int]) -> None:
        """Without a store, the span must still be there for every query behind it."""
        q = seen.at.q_positions
        for head in held:
            for p in range(self.start, self.stop):
                lost = (q > p).any(1) & ~(seen.positions[:, head] == p).any(1)
                if bool(lost.any()):
                    raise ValueError(f"position {p} has been evicted from layer {seen.layer}, KV head {head}: give pin(..., store=capture(..., what=('k', 'v'), positions=range({self.start}, {self.stop})))")

    def _bring_back(self, seen: Seen, held: set[int]) -> None:
        """Put the span's stored keys and values behind the cache's, visible where a head of the set has lost them."""
        span = torch.arange(self.start, self.stop, device=seen.positions.device)
        there = (seen.positions[..., None] == span).any(2)  # [b hkv span]
        wanted = torch.tensor([h in held for h in range(seen.keys.shape[1])], device=there.device)[None, :, None]
        missing = wanted & ~there
        if not bool(missing.any()):
            return
        b = seen.keys.shape[0]
        for name in ("keys", "values"):
            stored = getattr(self.store, name[0])[seen.layer].to(getattr(seen, name)).expand(b, -1, -1, -1)
            setattr(seen, name, torch.cat([getattr(seen, name), stored], dim=2))
        past = span <= seen.at.q_positions[:, None, :, None]
        seen.positions = torch.cat([seen.positions, span.expand(*missing.shape).to(seen.positions)], dim=-1)
        seen.visible = torch.cat([seen.visible, missing[:, :, None, :] & past], dim=-1)


@dataclass(frozen=True)
class Ablate(Edit):
    what: Literal["k", "v", "out"] = "v"
    how: Literal["zero", "mean", "resample"] = "zero"
    positions: tuple[int, ...] | None = None
    seed: int = 0

    def extent(self) -> tuple[int, int]:
        return (min(self.positions), max(self.positions)) if self.positions else (0, 0)

    def before(self, seen: Seen, model: Model) -> None:
        if self.what == "out":
            return
        name = {"k": "keys", "v": "values"}[self.what]
        x = getattr(seen, name).clone()
        for head in self.heads(seen.layer):
            where = seen.positions[:, head] >= 0
            chosen = where if self.positions is None else where & torch.isin(seen.positions[:, head], torch.tensor(self.positions, device=where.device))
            x[:, head] = _replace(x[:, head], chosen, where, self.how, (self.seed, seen.layer, head))
        setattr(seen, name, x)

    def after(self, seen: Seen, model: Model) -> None:
        if self.what != "out":
            return
        q = seen.at.q_positions
        where = q >= 0
        chosen = where if self.positions is None else where & torch.isin(q, torch.tensor(self.positions, device=q.device))
        group = model.geometry.group
        for head in self.heads(seen.layer):
            for h in range(head * group, (head + 1) * group):
                seen.out[:, :, h] = _replace(seen.out[:, :, h], chosen, where, self.how, (self.seed, seen.layer, h))


def _replace(x: Tensor, chosen: Tensor, real: Tensor, how: str, key: tuple[int, int, int]) -> Tensor:
    """x [b s d] with the chosen entries [b s] set to zero, to the mean of the row's real ones, or to another real entry of the row."""
    if how == "zero":
        return x.masked_fill(chosen[..., None], 0)
    if how == "mean":
        mean = (x * real[..., None]).sum(1, keepdim=True) / real.sum(1).clamp(min=1)[:, None, None]
        return torch.where(chosen[..., None], mean, x)
    out = x.clone()
    for b in range(x.shape[0]):
        pool, at = real[b].nonzero().squeeze(-1), chosen[b].nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF)
        out[b, at] = x[b, pool[torch.randint(len(pool), (len(at),), generator=generator).to(pool.device)]]
    return out


@dataclass(frozen=True)
class Transplant(Edit):
    donor: Capture | None = field(default=None, compare=False)
    span: tuple[int, int] = (0, 0)
    at: int = 0
    what: tuple[str, ...] = ("k", "v")

    def extent(self) -> tuple[int, int]:
        return self.at, self.at + self.span[1] - self.span[0] - 1

    def turns_keys(self) -> bool:
        return "k" in self.what

    def before(self, seen: Seen, model: Model) -> None:
        for name in self.what:
            full = {"k": "keys", "v": "values"}[name]
            x = getattr(seen, full).clone()
            given = getattr(self.donor, name)[seen.layer].to(x)
            if name == "k":
                given = sites.rotate(model, seen.layer, given, self.at - self.span[0])
            for head in self.heads(seen.layer):
                source = given[:, self.donor.kv_heads.index(head)]
                for offset in range(self.span[1] - self.span[0]):
                    here = seen.positions[:, head] == self.at + offset
                    x[:, head] = torch.where(here[..., None], source[:, offset, None], x[:, head])
            setattr(seen, full, x)


# -- what users call --------------------------------------------------------------------------------------------------


def head_masks(hidden: Mapping[tuple[int, int], Sequence[int]] | KeepLog, rows: Sequence[int] | None = None) -> Edit:
    """Hide positions from KV heads: {(layer, KV head): positions}, or everything a keep log's rows had lost at each token."""
    if isinstance(hidden, KeepLog):
        every = frozenset((layer, h) for layer in hidden.layers for h in range(hidden.died.shape[2]))
        return LogMask(every, log=hidden, rows=tuple(range(len(hidden.fired)) if rows is None else rows))
    return HeadMask(frozenset(hidden), hidden=tuple((site, tuple(int(p) for p in positions)) for site, positions in hidden.items()))


def pin(start: int, stop: int, sites: Sites, store: Capture | None = None) -> Edit:
    """Keep the span's keys and values visible in `sites` and hidden in all others, whatever the cache has evicted.

    store: a capture of the span's k and v (positions start..stop, all KV heads), needed where the cache has evicted them.
    The same meaning as `kvprobe.SpanPin(..., elsewhere="ban")` by intervention.
    """
    if not 0 <= start < stop:
        raise ValueError(f"span [{start}, {stop}) must be a non-empty interval of positions from 0 on")
    sites = frozenset(sites)
    if store is not None and store.geometry is not None:
        lacking = sorted({layer for layer, _ in sites} - set(store.k))
        if lacking or len(store.kv_heads) != store.geometry.n_kv:
            raise ValueError(f"store must hold all KV heads of every layer that is pinned; it holds layers {list(store.k)}, KV heads {list(store.kv_heads)}")
    if store is not None and (not store.k or not store.v or store.k_positions[store.layers[0]][0, 0].tolist() != list(range(start, stop))):
        raise ValueError(f"store must hold k and v of positions {start}..{stop - 1}: capture(..., what=('k', 'v'), positions=range({start}, {stop}))")
    return Pin(frozenset(sites), start=start, stop=stop, store=store)


def ablate(sites: Sites, what: str = "v", how: str = "zero", positions: Sequence[int] | None = None, seed: int = 0) -> Edit:
    """Replace keys ("k"), values ("v") or attention outputs ("out", of the query heads that read the site) by zeros, by the
    row's mean, or by other entries of the same row ("resample")."""
    if what not in ("k", "v", "out") or how not in ("zero", "mean", "resample"):
        raise ValueError(f"ablate takes what='k', 'v' or 'out' and how='zero', 'mean' or 'resample', not {what!r} and {how!r}")
    return Ablate(frozenset(sites), what=what, how=how, positions=None if positions is None else tuple(int(p) for p in positions), seed=seed)


def transplant(donor: Capture, span: tuple[int, int], sites: Sites, at: int | None = None, what: Sequence[str] = ("k", "v")) -> Edit:
    """Put a donor's keys and/or values of positions span[0]..span[1] into the run at position `at` (default the same place).

    donor: a capture with k and v over at least that span. Keys are rotated when the span moves (interchange intervention).
    """
    what = (what,) if isinstance(what, str) else tuple(what)
    if not 0 <= span[0] < span[1]:
        raise ValueError(f"span [{span[0]}, {span[1]}) must be a non-empty interval of positions from 0 on")
    if not what or set(what) - {"k", "v"}:
        raise ValueError(f"what={what} must be of 'k' and 'v'")
    missing = [name for name in what if not getattr(donor, name)]
    if missing:
        raise ValueError(f"the donor has no {missing}: capture(..., what=('k', 'v'))")
    chosen = frozenset(sites)
    lost = [s for s in chosen if s[0] not in donor.layers or s[1] not in donor.kv_heads]
    if lost:
        raise ValueError(f"the donor has no site {lost[0]}: it holds layers {list(donor.layers)}, KV heads {list(donor.kv_heads)}")
    return Transplant(chosen, donor=_cut(donor, span), span=tuple(span), at=span[0] if at is None else at, what=what)


def _cut(donor: Capture, span: tuple[int, int]) -> Capture:
    """The donor's keys and values at the span's positions."""
    from .capture import _by_position

    wanted = list(range(*span))
    cut = {name: {i: _by_position(t, donor.k_positions[i], wanted) for i, t in getattr(donor, name).items()} for name in ("k", "v")}
    return replace(donor, **cut, k_positions={i: _by_position(p, p, wanted) for i, p in donor.k_positions.items()})
