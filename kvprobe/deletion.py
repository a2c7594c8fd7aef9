"""What deleting one cached entry does to a head's output, summed up over many queries (LORE-KV sec. 3.4, eq. 5, 6 and 12).

Two walks over the keys in tiles: the first finds each query's softmax and output, the second scores the entries. A query's top
entry is left out of its sums and joined again: where it has nearly all attention, 1 - a and o - v would cancel, and what the
others have does not. Norms after the projection are quadratic forms, |W x|^2 = x G x with the Gram matrix G of a query head.
So nothing of size queries x keys x head size exists, and no block of queries x keys is larger than a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .types import wide

BLOCK = {"cpu": 2**19}
"""Elements of one block of queries x keys by kind of device; 2**26 on others. On a CPU it should stay in the cache."""
HELD_BYTES = 2**26
"""The first walk's blocks are held for the second as long as they take no more than this; beyond it they are made again."""
STRIP = 32
"""Rows of a Gram matrix multiplied at a time."""
LANES = 64
"""Entries among which the largest is looked for at a time."""
LOWEST = -1e30
"""Logit of a query's top entry in a tile of which it sees nothing."""


def gram(output: Tensor) -> Tensor:
    """W_O [hq d e] of a layer -> W_O W_O^T [hq d d] in float32 or the wider dtype; once per layer and model.

    The convention of `inside.sites.head_weights`: a head's output z [d] adds z @ W_O[h].
    """
    output = output.to(wide(output.dtype))
    return output @ output.mT


@dataclass(frozen=True)
class Cost:
    """Which cost e of an entry i with value v, for a query with weights a and output o.

    projected (a / (1 - a + eps))^2 |W (v - o)|^2, LORE eq. 5 and 6; unprojected the same without W, CAOTE's square at eps 0;
    attention a, whose sum is the attention mass; anchor a <o, v>, AnDPro's criterion as its paper has it.
    An entry that a query sees alone costs nothing, by the formula; at eps 0, where that is 0 / 0, it costs all of |W v|^2.
    """

    objective: Literal["projected", "unprojected", "attention", "anchor"] = "projected"
    """what deletion costs"""
    form: Literal["squared", "magnitude"] = "squared"
    """of the norms: squared (eq. 6, deployed) or its root (eq. 12, analyses); the other objectives have one form"""
    eps: float = 1e-6
    """guard of the renormalisation in eq. 5"""
    group: Literal["mean", "sum", "max"] = "mean"
    """how the query heads that share a KV head are put together"""

    def __post_init__(self) -> None:
        for name, known in (("objective", ("projected", "unprojected", "attention", "anchor")), ("form", ("squared", "magnitude")), ("group", ("mean", "sum", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(map(repr, known))}")
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps} must be at least 0")

    @property
    def norms(self) -> bool:
        """Whether this is a norm of a change, not linear in a."""
        return self.objective in ("projected", "unprojected")


@dataclass(frozen=True)
class Psi:
    """alpha * TopAvg + (1 - alpha) * mean, TopAvg the mean of the largest ceil(kappa * count) costs (LORE app. D, A).

    Over all pairs of a query of a set and a query head of the group together; with group="max" over the queries of each head.
    """

    alpha: float = 0.0
    kappa: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1]")
        if not 0 < self.kappa <= 1:
            raise ValueError(f"kappa={self.kappa} must be in (0, 1]")

    def __call__(self, costs: Tensor) -> Tensor:
        """[.. pairs t] -> [.. t]."""
        mean = costs.mean(-2)
        if self.alpha == 0:
            return mean
        count = max(1, math.ceil(self.kappa * costs.shape[-2] - 1e-9))  # 0.1 * 30 is not 3
        return self.alpha * costs.topk(count, dim=-2, sorted=False).values.mean(-2) + (1 - self.alpha) * mean


def weighted(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None = None, visible: Tensor | None = None,
             weight: Tensor | None = None, cost: Cost = Cost()) -> Tensor:
    """[b hkv n]: costs of deletion, weighted over the queries, then put together over the group.

    queries [b hq q d] over keys and values [b hkv n d]; gram [hq d d] for the projected objective; visible: bool,
    broadcastable to [b hkv q s], of the last s of the n entries, where every query sees all others, None for all; weight [q] or [b q], None for the mean over the queries. A query that sees
    nothing costs nothing. float32, or float64 for float64 states.
    """
    b, hq, q, _ = queries.shape
    weight = torch.full((b, q), 1 / q, dtype=torch.float64) if weight is None else weight
    weight = weight.to(queries.device, wide(queries.dtype)).expand(b, q)
    score = keys.new_zeros(keys.shape[:3], dtype=wide(queries.dtype))
    for row, heads, part in _parts(queries, keys, values, scaling, gram, visible, cost):
        by_row = weight[row].repeat(part.group)[None, :, None]
        if cost.norms and cost.form == "magnitude" or cost.group == "max":
            for at, e in part.costs():
                score[row, heads, at] = _over_group(cost, e.mul_(by_row).unflatten(1, (part.group, -1)).sum(2))
        else:
            score[row, heads] = part.summed(by_row / (part.group if cost.group == "mean" else 1))
    return score


def by_set(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, sets: Mapping[str, Tensor], gram: Tensor | None = None,
           visible: Tensor | None = None, psi: Psi = Psi(), cost: Cost = Cost()) -> dict[str, Tensor]:
    """{name: [b hkv n]}: psi of the costs of each set of queries (a window, each continuation; LORE eq. 7).

    sets: bool [q] or [b q] by name; what a row has none of costs nothing. The rest is as in `weighted`. group="sum" is the
    group's size times "mean".
    """
    b, _, q, _ = queries.shape
    score = {name: keys.new_zeros(keys.shape[:3], dtype=wide(queries.dtype)) for name in sets}
    members = {name: own.to(queries.device).expand(b, q) for name, own in sets.items()}
    for row, heads, part in _parts(queries, keys, values, scaling, gram, visible, cost):
        chosen = {name: own[row].nonzero().squeeze(-1) for name, own in members.items()}
        for at, e in part.costs():
            e = e.unflatten(1, (part.group, -1))
            for name, own in chosen.items():
                if len(own):
                    score[name][row, heads, at] = _of_set(cost, psi, e if len(own) == q else e[:, :, own])
    return score


def per_query(sets: Mapping[str, Tensor], shares: Mapping[str, Tensor | float]) -> Tensor:
    """[b q] or [q] for `weighted`: each set's share (a number, or [b]), spread evenly over its queries.

    So that `weighted` gives eq. 7 with psi = mean in one go: {"window": 1, continuation m: lambda_L omega_m}.
    """
    spread = 0.0
    for name, own in sets.items():
        each = own.double() / own.sum(-1, keepdim=True).clamp(min=1)
        spread = spread + each * torch.as_tensor(shares[name], dtype=torch.float64, device=own.device).unsqueeze(-1)
    return spread


def _of_set(cost: Cost, psi: Psi, e: Tensor) -> Tensor:
    """[k g q t] -> [k t]."""
    if cost.group == "max":
        return psi(e).amax(1)
    return psi(e.flatten(1, 2)) * (e.shape[1] if cost.group == "sum" else 1)


def _over_group(cost: Cost, e: Tensor) -> Tensor:
    return {"mean": e.mean, "sum": e.sum, "max": e.amax}[cost.group](1)


def _parts(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None, visible: Tensor | None, cost: Cost) -> Iterator[tuple[int, slice, _Part]]:
    """(batch row, KV heads, the part) so that a block of it has BLOCK elements or fewer, or LANES keys."""
    (b, hq, q, _), (n_kv, n, d) = queries.shape, values.shape[1:]
    group = hq // n_kv
    if cost.objective == "projected" and (gram is None or gram.shape != (hq, d, d)):
        raise ValueError(f"the projected objective needs gram [hq d d] = {[hq, d, d]}, got {None if gram is None else list(gram.shape)}")
    block = BLOCK.get(queries.device.type, 2**26) // (group * max(q, d))
    tile = max(LANES, min(n, block // LANES * LANES))
    at_once = max(1, block // tile)
    if visible is not None:
        visible = visible.expand(b, n_kv, q, visible.shape[-1])
    for row in range(b):
        for first in range(0, n_kv, at_once):
            heads = slice(first, min(n_kv, first + at_once))
            mine = slice(heads.start * group, heads.stop * group)
            yield row, heads, _Part(
                queries[row, mine].to(wide(queries.dtype)).unflatten(0, (-1, group)).flatten(1, 2) * scaling, keys[row, heads], values[row, heads],
                gram[mine].to(wide(queries.dtype)).unflatten(0, (-1, group)) if cost.objective == "projected" else None, None if visible is None else visible[row, heads], group, tile, cost)


@dataclass
class _Peak:
    """The softmax of queries over some keys, the top one left out: everything is relative to it, so that it weighs 1.

    logit and slot (counted from the first key of all) [k m 1] of the top entry, its value own [k m d]; rest [k m 1] sum of
    the others' weights and left [k m d] sum of weight times value.
    """

    logit: Tensor
    slot: Tensor
    own: Tensor
    rest: Tensor
    left: Tensor

    def __add__(self, other: _Peak) -> _Peak:
        first = self.logit >= other.logit
        share = (self.logit - other.logit).abs_().neg_().exp_()

        def top(name: str) -> Tensor:
            return torch.where(first, getattr(self, name), getattr(other, name))

        def low(name: str) -> Tensor:
            return torch.where(first, getattr(other, name), getattr(self, name))

        return _Peak(top("logit"), top("slot"), top("own"), top("rest") + share * (low("rest") + 1), top("left") + share * (low("left") + low("own")))


@dataclass
class _Tile:
    """weight [k m t] of keys `at` relative to the top one of the tile, 0 at it, and their values [k d t] from the centre."""

    at: slice
    weight: Tensor
    peak: _Peak
    values: Tensor


@dataclass
class _Part:
    """Some KV heads of one batch row: queries [k m d], m = group x query, scaled; keys and values [k n d]; visible [k q s] of the last s keys."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gram: Tensor | None
    visible: Tensor | None
    group: int
    tile: int
    cost: Cost
    held: list[_Tile] = field(default_factory=list)

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

    def _made(self, at: slice) -> _Tile:
        weight, own = self._logits(at), self._own(at)
        logit, slot = _top(weight)
        weight.sub_(logit).exp_().scatter_(-1, slot, 0.0)
        peak = _Peak(logit, slot + at.start, _rows(own.mT, slot), weight.sum(-1, keepdim=True), weight @ own.mT)
        return _Tile(at, weight, peak, own)

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

    def _product(self, asks: Tensor, tile: _Tile, factor: Tensor) -> Tensor:
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

    def _factors(self) -> Iterator[tuple[_Tile, Tensor]]:
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

    def _inside(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """The top entries' slots counted from the tile's first, and which lie in it, both [k m 1]."""
        slot, t = self.whole.slot - tile.at.start, tile.values.shape[-1]
        return slot.clamp(0, t - 1), (slot >= 0) & (slot < t)


def _top(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of z [k m t] and its slot [k m 1]. By blocks of LANES, because amax is vectorised and argmax is not."""
    t = z.shape[-1]
    whole = t // LANES * LANES
    peaks = z[..., :whole].unflatten(-1, (-1, LANES)).amax(-1)
    if whole < t:
        peaks = torch.cat([peaks, z[..., whole:].amax(-1, keepdim=True)], -1)
    near = (peaks.argmax(-1, keepdim=True) * LANES + torch.arange(LANES, device=z.device)).clamp_(max=t - 1)
    slot = near.gather(-1, z.gather(-1, near).argmax(-1, keepdim=True))
    return z.gather(-1, slot).clamp_(min=LOWEST), slot


def _rows(values: Tensor, slot: Tensor) -> Tensor:
    """Rows `slot` [k m 1] of values [k t d]: [k m d]."""
    return values.gather(1, slot.expand(-1, -1, values.shape[-1]))
