"""Turns what an attention call sees into what was asked for; the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvprobe import attention as att

from .capture import Request


@dataclass
class Pass:
    """One forward: where its queries and keys stand in each row's text.

    q_positions [b n], -1 for padding. k_positions [b hkv s] per evicted layer; other layers hold the newest columns of
    `columns` [b t].
    """

    q_positions: Tensor
    columns: Tensor
    evicted: dict[int, Tensor] = field(default_factory=dict)

    def keys_at(self, layer: int, keys: Tensor) -> Tensor:
        """Positions [b hkv s] of a layer's keys."""
        if layer in self.evicted:
            return self.evicted[layer]
        return self.columns[:, None, -keys.shape[-2] :].expand(-1, keys.shape[1], -1)


def visible(at: Pass, layer: int, keys: Tensor, mask: Tensor | None, own: bool) -> Tensor:
    """bool [b hkv|1 n s]: what each query sees. `own`: the layer's cache is evicted, so that the model's mask is not used."""
    k, q = at.keys_at(layer, keys)[:, :, None, :], at.q_positions[:, None, :, None]
    seen = (k >= 0) & (k <= q)
    if mask is not None and not own:
        mask = mask[..., -seen.shape[-1] :]
        shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = seen & shown.expand(-1, seen.shape[1] if shown.shape[1] == 1 else -1, -1, -1)
    return seen


@dataclass
class Reader:
    """Cuts one layer's q, k, v, weights and outputs down to a request, as copies, so that the rest can be freed."""

    request: Request
    text: int  # positions that the longest row's text will have
    lengths: list[int] | None = None  # those of each row
    hold_keys: bool = False  # keys and values of a later step will replace these: keep references, copy at the end
    cached: bool = False  # keys and values are a cache's own tensors
    _rows_of: tuple[Pass, Tensor, bool] | None = None
    _pool: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, at: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, out: Tensor | None, own: bool) -> dict:
        r, got = self.request, {}
        rows, every = self.rows(at)
        if "q" in r.what:
            got["q"] = self._cut("q", layer, q, r.q_heads, rows, every)
        if "out" in r.what:
            got["out"] = self._cut("out", layer, out.transpose(1, 2), r.q_heads, rows, every)
        if "attn" in r.what:
            got["attn"] = self._weights(at, layer, q, k, visible(at, layer, k, mask, own), scaling, rows)
        if "k" in r.what or "v" in r.what:
            held = {name: x for name, x in (("k", k), ("v", v)) if name in r.what}
            where = at.keys_at(layer, k)
            got |= {"held": held, "where": where} if self.hold_keys else self.keys(layer, held, where)
        return got

    def rows(self, at: Pass) -> tuple[Tensor, bool]:
        """Columns of this forward [b m] whose positions were asked for, -1 where a row has fewer than another; and whether
        they are all columns of all rows. Made once per forward."""
        if self._rows_of is None or self._rows_of[0] is not at:
            q = at.q_positions.cpu()
            wanted = torch.zeros(len(q), self.text, dtype=torch.bool)
            for b, columns in enumerate(self.wanted(len(q))):
                wanted[b, columns] = True
            hit = (q >= 0) & wanted.gather(1, q.clamp(min=0))
            width = int(hit.sum(1).max()) if hit.numel() else 0
            order = hit.to(torch.int8).sort(dim=1, stable=True).indices[:, hit.shape[1] - width :]
            found = torch.where(hit.gather(1, order), order, -1).to(at.q_positions.device)
            self._rows_of = at, found, bool(hit.all())
        return self._rows_of[1:]

    def wanted(self, rows: int) -> list[list[int]]:
        """Positions asked for in each row's own text."""
        lengths = self.lengths or [self.text] * rows
        self.request.columns(max(lengths))  # refuse what no row has
        return [self.request.columns(length, strict=False) for length in lengths]

    def _cut(self, name: str, layer: int, x: Tensor, heads: tuple[int, ...], rows: Tensor, every: bool) -> Tensor:
        """x [b h n d] at some heads and rows [b m], zeros where there is none."""
        all_heads = len(heads) == x.shape[1]
        if every and all_heads:
            return _owned(x)
        x = x if all_heads else x[:, list(heads)]
        return self._keep(name, layer, x if every else _pick(x, rows.to(x.device)))

    def _keep(self, name: str, layer: int, x: Tensor) -> Tensor:
        """A copy of x. All layers of one kind share one block of memory: small tensors that stay among large ones that go
        would leave the heap full of holes."""
        if self.hold_keys:
            return x.clone()
        i, n = self.request.layers.index(layer), len(self.request.layers)
        pool = self._pool.get(name)
        if pool is None or pool.shape[1:] != x.shape or pool.device != x.device:
            pool = self._pool[name] = x.new_empty(n, *x.shape)
        return pool[i].copy_(x)

    def _weights(self, at: Pass, layer: int, q: Tensor, k: Tensor, seen: Tensor, scaling: float, rows: Tensor) -> Tensor:
        """Attention weights [b hq m text] over positions, one block of rows at a time."""
        group = q.shape[1] // k.shape[1]
        heads = torch.tensor(self.request.q_heads)
        result = torch.zeros(q.shape[0], len(heads), rows.shape[1], self.text, dtype=att.wide(q.dtype), device=q.device)
        kv = heads // group
        where = at.keys_at(layer, k)[:, kv].clamp(min=0)
        block = max(1, att.BLOCK_BYTES // (8 * q.shape[0] * len(heads) * k.shape[-2]))
        seen = seen.expand(-1, k.shape[1], -1, -1)
        for i in range(0, rows.shape[1], block):
            part = rows[:, i : i + block].to(q.device)
            picked = _pick(q[:, heads], part)
            shown = seen[:, kv].gather(2, part.clamp(min=0)[:, None, :, None].expand(-1, len(heads), -1, seen.shape[-1]))
            shown &= (part >= 0)[:, None, :, None]
            w = att.weights(picked, k[:, kv], shown, scaling)[:, :, 0]
            result[:, :, i : i + block].scatter_add_(3, where[:, :, None, :].expand(-1, -1, part.shape[1], -1), w)
        return result

    def keys(self, layer: int, held: dict[str, Tensor], where: Tensor) -> dict:
        """Keys and values of the asked heads and positions [b hkv s d], and where they stand."""
        heads = list(self.request.kv_heads)
        all_heads = len(heads) == where.shape[1]
        where = where if all_heads else where[:, heads]
        cut = {}
        if self.request.positions is None:
            hidden = (where < 0)[..., None]
            some = bool(hidden.any())
            for name, x in held.items():
                x = x if all_heads else x[:, heads]
                x = x.masked_fill(hidden.to(x.device), 0) if some else x
                cut[name] = self._keep(name, layer, x) if self.cached and all_heads and not some else _owned(x)
            return cut | {"k_positions": where}
        rows = self.wanted(where.shape[0])
        width = max(map(len, rows))
        wanted = torch.tensor([[-2] * (width - len(row)) + row for row in rows], device=where.device)[:, None, :]  # -2 is nowhere
        match = where[:, :, None, :] == wanted[..., None]
        there, slot = match.any(-1), match.to(torch.int8).argmax(-1)
        for name, x in held.items():
            index = slot[..., None].expand(*slot.shape, x.shape[-1]).to(x.device)
            cut[name] = self._keep(name, layer, x[:, heads].gather(2, index).masked_fill_(~there[..., None].to(x.device), 0))
        return cut | {"k_positions": torch.where(there, wanted.to(where.dtype), -1)}


def _owned(x: Tensor) -> Tensor:
    """x itself where it is all that its memory holds, else a copy: a view of something larger would keep that alive."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _pick(x: Tensor, rows: Tensor) -> Tensor:
    """x [b h n d] at rows [b m], zeros where there is none."""
    first, m = int(rows[0, 0]) if rows.numel() else 0, rows.shape[1]
    if bool((rows == torch.arange(first, first + m, device=rows.device)).all()):
        return x[:, :, first : first + m]
    picked = x.gather(2, rows.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return picked.masked_fill_((rows < 0)[:, None, :, None], 0)
