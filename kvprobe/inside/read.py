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
    text: int  # positions the whole text will have
    hold_keys: bool = False  # keys and values of a later step will replace these: keep references, copy at the end

    def __call__(self, at: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, out: Tensor | None, own: bool) -> dict:
        r, got = self.request, {}
        rows = self._rows(at)
        if "q" in r.what:
            got["q"] = self._cut(q[:, list(r.q_heads)], rows)
        if "out" in r.what:
            got["out"] = self._cut(out.transpose(1, 2)[:, list(r.q_heads)], rows)
        if "attn" in r.what:
            got["attn"] = self._weights(at, layer, q, k, visible(at, layer, k, mask, own), scaling, rows)
        if "k" in r.what or "v" in r.what:
            held = {name: x for name, x in (("k", k), ("v", v)) if name in r.what}
            where = at.keys_at(layer, k)
            got |= {"held": held, "where": where} if self.hold_keys else self.keys(held, where)
        return got

    def _rows(self, at: Pass) -> Tensor:
        """Columns of this forward [b m] whose positions were asked for, -1 where a row has fewer than another."""
        wanted = torch.zeros(self.text, dtype=torch.bool)
        wanted[self.request.columns(self.text)] = True
        q = at.q_positions.cpu()
        hit = (q >= 0) & wanted[q.clamp(min=0)]
        width = int(hit.sum(1).max()) if hit.numel() else 0
        order = hit.to(torch.int8).sort(dim=1, stable=True).indices[:, hit.shape[1] - width :]
        return torch.where(hit.gather(1, order), order, -1).to(at.q_positions.device)

    def _cut(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [b h n d] at rows [b m], zeros where there is none; always a copy."""
        rows = rows.to(x.device)
        picked = x.gather(2, rows.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        return picked.masked_fill_((rows < 0)[:, None, :, None], 0)

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
            picked = self._cut(q[:, heads], part)
            shown = seen[:, kv].gather(2, part.clamp(min=0)[:, None, :, None].expand(-1, len(heads), -1, seen.shape[-1]))
            shown &= (part >= 0)[:, None, :, None]
            w = att.weights(picked, k[:, kv], shown, scaling)[:, :, 0]
            result[:, :, i : i + block].scatter_add_(3, where[:, :, None, :].expand(-1, -1, part.shape[1], -1), w)
        return result

    def keys(self, held: dict[str, Tensor], where: Tensor) -> dict:
        """Keys and values of the asked heads and positions [b hkv s d], and where they stand."""
        heads = list(self.request.kv_heads)
        where = where[:, heads]
        if self.request.positions is None:
            shown = (where >= 0)[..., None]
            return {name: x[:, heads] * shown.to(x.device) for name, x in held.items()} | {"k_positions": where.clone()}
        wanted = torch.tensor(self.request.columns(self.text), device=where.device)
        match = where[:, :, None, :] == wanted[None, None, :, None]
        there, slot = match.any(-1), match.to(torch.int8).argmax(-1)
        cut = {}
        for name, x in held.items():
            index = slot[..., None].expand(*slot.shape, x.shape[-1]).to(x.device)
            cut[name] = x[:, heads].gather(2, index).masked_fill_(~there[..., None].to(x.device), 0)
        return cut | {"k_positions": torch.where(there, wanted, -1)}
