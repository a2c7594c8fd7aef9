"""Costs of deletion for a block of KV heads and queries, in two walks over the keys.

The walks go in tiles: the first finds each query's softmax and output, the second scores the entries. A query's top
entry is left out of its sums and joined again: where it has nearly all attention, 1 - a and o - v would cancel, and what the
others have does not. Norms after the projection are quadratic forms, |W x|^2 = x G x with the Gram matrix G of a query head.
So nothing of size queries x keys x head size exists, and no block of queries x keys is larger than a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .deletion_peaks import Peak, Tile, rows_at, top_entry

if TYPE_CHECKING:
    from .deletion import Cost

HELD_BYTES = 2**26
"""The first walk's blocks are held for the second as long as they take no more than this; beyond it they are made again."""
STRIP = 32
"""Rows of a Gram matrix multiplied at a time."""


@dataclass
class Part:
    """Some KV heads of one batch row: queries [k m d], m = group x query, scaled; keys and values [k n d]; visible [k q s] of the last s keys."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gram: Tensor | None
    visible: Tensor | None
    group: int
    tile: int
    cost: Cost
    held: list[Tile] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.keys.shape[1]
        self.first = n if self.visible is None else n - self.visible.shape[-1]  # of the keys that some query may not see
        seen = None if self.visible is None else self.visible.any(1)
        self.unseen = None if seen is None or bool(seen.all()) else torch.cat([seen.new_zeros(len(seen), self.first), ~seen], -1)
        self.sees = None if self.visible is None or self.first else self.visible.any(2).repeat(1, self.group)[..., None]
        self.centre = self._centre() if self.cost.norms else None
        self._attend()

    def _centre(self) -> Tensor:
        """[k d 1]: the mean value of the entries that anything sees: what all values share cancels in v - o, so it goes before."""
        dtype = self.queries.dtype
        if self.unseen is None:
            return self.values.mean(1, dtype=dtype)[..., None]
        return (self.values.masked_fill(self.unseen[..., None], 0).sum(1, dtype=dtype) / (~self.unseen).sum(1, keepdim=True).clamp(min=1))[..., None]

    # -- the first walk: each query's softmax and output ---------------------------------------------------------------

    def _spans(self) -> list[slice]:
        n = self.keys.shape[1]
        return [slice(start, min(n, start + self.tile)) for start in range(0, n, self.tile)]

    def _attend(self) -> None:
        room, whole = HELD_BYTES, None
        for at in self._spans():
            tile = self._made(at)
            whole = tile.peak if whole is None else whole + tile.peak
            room -= tile.weight.nbytes + tile.values.nbytes
            if room >= 0:
                self.held.append(tile)
        self.whole = whole

    def _made(self, at: slice) -> Tile:
        weight, own = self._logits(at), self._own(at)
        logit, slot = top_entry(weight)
        weight.sub_(logit).exp_().scatter_(-1, slot, 0.0)
        peak = Peak(logit, slot + at.start, rows_at(own.mT, slot), weight.sum(-1, keepdim=True), weight @ own.mT)
        return Tile(at, weight, peak, own)

    def _logits(self, at: slice) -> Tensor:
        z = self.queries @ self.keys[:, at].to(self.queries.dtype).mT
        if at.stop > self.first and not bool((visible := self.visible[..., max(0, at.start - self.first) : at.stop - self.first]).all()):
            z[..., max(0, self.first - at.start) :].unflatten(1, (self.group, -1)).masked_fill_(~visible.unsqueeze(1), -torch.inf)
        return z

    def _own(self, at: slice) -> Tensor:
        """[k d t]: values from the centre, transposed."""
        values = self.values[:, at].mT
        own = torch.empty(values.shape, dtype=self.queries.dtype, device=values.device)
        own.copy_(values) if self.centre is None else torch.sub(values.to(own.dtype), self.centre, out=own)
        return own if self.unseen is None else own.masked_fill_(self.unseen[:, None, at], 0.0)

    # -- the second walk: what each entry costs ------------------------------------------------------------------------

    def costs(self) -> Iterator[tuple[slice, Tensor]]:
        """(keys, [k m t]) of every pair of a query and an entry, a tile at a time."""
        asks, top = self._asks(), self._of_top()
        for tile, factor in self._factors():
            e = factor if asks is None else self._product(asks, tile, factor)
            slot, inside = self._inside(tile)
            e.scatter_add_(-1, slot, top * inside)
            yield tile.at, e if self.sees is None else e.mul_(self.sees)

    def summed(self, by: Tensor) -> Tensor:
        """[k n]: costs that are under no root, weighted with `by` [k or 1, m, 1] and summed over all pairs.

        The sum over queries comes first, so that nothing but its factor is made per pair.
        """
        asks, top = self._asks(), self._of_top()
        by = (by if self.sees is None else by * self.sees).expand_as(top)
        asks, lower, d = by if asks is None else asks * by, self._lower(), self.values.shape[-1]
        along, others = asks[..., :d].contiguous().mT, asks[..., d:].mT  # apart, because a product of d + 1 + g rows takes longer than both
        score = torch.cat([self._sum(along @ factor, others @ factor, tile.values, lower) for tile, factor in self._factors()], -1)
        score.scatter_add_(-1, self.whole.slot.squeeze(-1), (top * by).squeeze(-1))
        return score.clamp_(min=0.0) if self.cost.norms else score

    def _sum(self, along: Tensor, others: Tensor, own: Tensor, lower: list[Tensor]) -> Tensor:
        """[k t] from sums over queries of factors times `asks`, along [k d t] and others [k 1+g t]: their products with values and squares."""
        if self.cost.objective == "attention":
            return along.squeeze(1)
        if self.cost.norms:
            by_head = (own.unsqueeze(2) * others[:, None, 1:]).flatten(1, 2)
            for i, rows in enumerate(lower):
                along[:, i * STRIP : (i + 1) * STRIP].baddbmm_(rows, by_head[:, : rows.shape[-1]])
            if not lower:
                along += by_head
        score = along.mul_(own).sum(1)
        return score + others[:, 0] if self.cost.norms else score

    def _lower(self) -> list[Tensor]:
        """Strips of rows [k STRIP (j g)] of each head's Gram matrix, no further than its diagonal blocks, those left of them twice.

        v G v is the same, with fewer products.
        """
        if self.gram is None:
            return []
        strips = []
        for i in range(0, self.values.shape[-1], STRIP):
            rows = self.gram[:, :, i : i + STRIP, : i + STRIP].permute(0, 2, 3, 1).contiguous()
            rows[:, :, :i] *= 2
            strips.append(rows.flatten(2))
        return strips

    def _product(self, asks: Tensor, tile: Tile, factor: Tensor) -> Tensor:
        """[k m t]: cost of every pair but a query's top one."""
        own, d = tile.values, self.values.shape[-1]
        e = asks[..., :d] @ own
        if self.cost.norms:
            e = e.add_(asks[..., d, None]).unflatten(1, (-1, e.shape[1] // (asks.shape[-1] - d - 1))).add_(self._squares(own).unsqueeze(2)).flatten(1, 2).clamp_(min=0.0)
        return (e.sqrt_() if self.cost.form == "magnitude" and self.cost.norms else e).mul_(factor)

    def _squares(self, own: Tensor) -> Tensor:
        """[k g t]: |W_h v|^2, or [k 1 t] |v|^2, of values [k d t]."""
        if self.gram is None:
            return own.square().sum(1, keepdim=True)
        projected = self.gram.flatten(1, 2) @ own
        return projected.unflatten(1, (self.group, -1)).mul_(own.unsqueeze(1)).sum(2)

    def _factors(self) -> Iterator[tuple[Tile, Tensor]]:
        """Tiles with what multiplies their products [k m t], 0 at a query's top entry. Held ones are used up."""
        held, self.held = self.held, []
        total = self.whole.rest + 1
        for i, at in enumerate(self._spans()):
            tile = held[i] if i < len(held) else self._made(at)
            f = tile.weight.scatter_(-1, tile.peak.slot - at.start, (tile.peak.slot != self.whole.slot).to(tile.weight.dtype))
            gap = self.whole.logit - tile.peak.logit
            if not self.cost.norms:
                f.mul_(gap.neg_().exp_() / total)
            else:
                f.div_(torch.sub(gap.exp_() * total * (1 + self.cost.eps), f))  # a / (1 - a + eps)
                f = f if self.cost.form == "magnitude" else f.square_()
            if i < len(held):
                held[i] = None
            yield tile, f

    def _asks(self) -> Tensor | None:
        """[k m c]: a query's side of the product; None where there is none."""
        if self.cost.objective == "attention":
            return None
        out = (self.whole.left + self.whole.own) / (self.whole.rest + 1)
        if self.cost.objective == "anchor":
            return out
        projected = self._projected(out)
        own = (projected * out).sum(-1, keepdim=True)
        heads = torch.eye(1 if self.gram is None else self.group, dtype=out.dtype, device=out.device)  # whose |W_h v|^2
        heads = heads.repeat_interleave(out.shape[1] // len(heads), 0).expand(len(out), -1, -1)
        return torch.cat([projected.mul_(-2), own, heads], -1)

    def _projected(self, x: Tensor) -> Tensor:
        """[k m d] -> each row times its query head's Gram matrix."""
        return x.clone() if self.gram is None else (x.unflatten(1, (self.group, -1)) @ self.gram).flatten(1, 2)

    def _of_top(self) -> Tensor:
        """[k m 1]: cost of each query's top entry."""
        rest, own = self.whole.rest, self.whole.own
        if not self.cost.norms:
            a = 1 / (1 + rest)
            return a if self.cost.objective == "attention" else a * ((self.whole.left + own) * a * own).sum(-1, keepdim=True)
        nothing = 0.0 if self.centre is None else -self.centre.mT  # the origin
        change = own - torch.where(rest > 0, self.whole.left / rest.clamp(min=torch.finfo(rest.dtype).tiny), nothing)
        square = (self._projected(change) * change).sum(-1, keepdim=True).clamp_(min=0.0)
        share = rest / (1 + rest)  # 1 - a, exactly
        share = share / (share + self.cost.eps) if self.cost.eps else torch.ones_like(rest)
        root = share / (1 + rest) * square.sqrt()
        return root if self.cost.form == "magnitude" else root.square()

    def _inside(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The top entries' slots counted from the tile's first, and which lie in it, both [k m 1]."""
        slot, t = self.whole.slot - tile.at.start, tile.values.shape[-1]
        return slot.clamp(0, t - 1), (slot >= 0) & (slot < t)
