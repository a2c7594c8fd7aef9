"""Who gets how many entries, and which: budgets of heads and layers, and the rules that pick entries by their scores.

Pure functions of scores [.. n], oldest entry first. `candidate` (bool, like the scores; None for all) marks what may be picked:
protected entries and empty slots may not, and counts are of picks alone. Ties are broken towards the newest entry,
between heads towards the first. Kept sets are bool [.. n], so that their order is the entries' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor


def ranks(score: Tensor, candidate: Tensor | None = None) -> Tensor:
    """int64 [.. n]: 0 for the best; the newest of equals comes first, what is no candidate last."""
    order = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    if candidate is not None:
        out = (~candidate).expand_as(score).flip(-1).gather(-1, order)
        order = order.gather(-1, out.to(torch.int8).sort(dim=-1, stable=True).indices)
    place = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place).flip(-1)


def _counts(count: int | Tensor, score: Tensor) -> Tensor:
    """[.. 1]"""
    return torch.as_tensor(count, device=score.device).expand(score.shape[:-1])[..., None]


def top(score: Tensor, count: int | Tensor, candidate: Tensor | None = None) -> Tensor:
    """The `count` (one number, or [..]) best candidates; all where there are fewer."""
    keep = ranks(score, candidate) < _counts(count, score)
    return keep if candidate is None else keep & candidate


def chunks(score: Tensor, count: int | Tensor, size: int, candidate: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """The best chunks of `size` neighbours by the mean score of their candidates, taken whole; the last is cut by the entries' own scores.

    Exactly `count` candidates. Chunks are counted from position 0 (positions [.. n] of the entries, None for 0..n-1; those of
    no candidate are ignored). LORE Table 4, protocols 5.
    """
    n = score.shape[-1]
    candidate = torch.ones_like(score, dtype=torch.bool) if candidate is None else candidate.expand_as(score)
    of, sums, sizes = _by_chunk(score, size, candidate, positions)
    place = ranks(sums / sizes.clamp(min=1), sizes > 0).gather(-1, of)
    first = place * n + ranks(score, candidate)  # chunk by chunk, the best entry of each first
    return top(-first.double(), count, candidate)


def chunk_scores(score: Tensor, size: int, candidate: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """float64 [.. n]: for each candidate the mean score of its chunk's candidates, 0 for the others; what `chunks` ranks chunks by."""
    candidate = torch.ones_like(score, dtype=torch.bool) if candidate is None else candidate.expand_as(score)
    of, sums, sizes = _by_chunk(score, size, candidate, positions)
    return (sums / sizes.clamp(min=1)).gather(-1, of).masked_fill(~candidate, 0.0)


def _by_chunk(score: Tensor, size: int, candidate: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(chunk of each entry [.. n], sums of the candidates' scores [.. chunks], their numbers [.. chunks])."""
    if size < 1:
        raise ValueError(f"chunks of size={size} entries: at least 1")
    positions = torch.arange(score.shape[-1], device=score.device) if positions is None else positions
    of = (positions.expand_as(score).long() // size).masked_fill(~candidate, 0).clamp(min=0)
    many = int(of.amax()) + 1
    sums = score.new_zeros(*score.shape[:-1], many, dtype=torch.float64).scatter_add_(-1, of, score.double().masked_fill(~candidate, 0.0))
    return of, sums, torch.zeros_like(sums).scatter_add_(-1, of, candidate.double())


def diverse(score: Tensor, count: int | Tensor, keys: Tensor, values: Tensor, by_key: float, by_value: float, candidate: Tensor | None = None,
            start: Tensor | None = None) -> Tensor:
    """Greedy picks of argmax S_i / max S - by_key max_j cos(k_i, k_j) - by_value max_j cos(v_i, v_j), j over `start` and the picks before (LORE app. D, C).

    score [.. n], keys and values [.. n d]; start bool [.. n]: entries that are in from the beginning, the protected ones.
    While there are none, nothing is subtracted. The largest score is that of a candidate; where it is not positive, S stays as it is.
    """
    n, shape = score.shape[-1], score.shape
    candidate = torch.ones_like(score, dtype=torch.bool) if candidate is None else candidate.expand_as(score)
    left = candidate.reshape(-1, n).clone()
    need = torch.minimum(_counts(count, score).reshape(-1, 1), left.sum(-1, keepdim=True))
    gain = score.reshape(-1, n).double().masked_fill(~left, -torch.inf)
    largest = gain.amax(-1, keepdim=True)
    gain = torch.where(largest > 0, gain / largest, gain)
    states = [(by, _unit(x).reshape(-1, n, x.shape[-1])) for by, x in ((by_key, keys), (by_value, values)) if by]
    near = [_nearest(unit, torch.zeros_like(left) if start is None else start.expand(shape).reshape(-1, n)) for _, unit in states]
    rows, keep = torch.arange(len(left), device=score.device), torch.zeros_like(left)
    for done in range(int(need.max()) if need.numel() else 0):
        worth = gain.clone()
        for (by, _), close in zip(states, near, strict=True):
            worth -= by * close.masked_fill(close == -torch.inf, 0.0)
        pick = n - 1 - worth.masked_fill(~left, -torch.inf).flip(-1).argmax(-1)
        going = done < need.squeeze(-1)
        keep[rows[going], pick[going]], left[rows[going], pick[going]] = True, False
        near = [torch.maximum(close, (unit @ unit[rows, pick][..., None]).squeeze(-1)) for (_, unit), close in zip(states, near, strict=True)]
    return keep.view(shape)


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.double(), dim=-1)


def _nearest(unit: Tensor, start: Tensor) -> Tensor:
    """[r n]: largest cosine of unit [r n d] with an entry of `start` [r n], -inf without one."""
    close = torch.full(unit.shape[:2], -torch.inf, dtype=unit.dtype, device=unit.device)
    for row in start.any(-1).nonzero().squeeze(-1).tolist():
        close[row] = (unit[row] @ unit[row, start[row]].mT).amax(-1)
    return close


# -- budgets of heads -----------------------------------------------------------------------------------------------


def flattened(score: Tensor, total: int, candidate: Tensor | None = None) -> Tensor:
    """int64 [.. h]: how many of the `total` best of all heads together each has, score [.. h n]."""
    h, n = score.shape[-2:]
    together = top(score.transpose(-1, -2).flip(-1).flatten(-2), total, None if candidate is None else candidate.transpose(-1, -2).flip(-1).flatten(-2))
    return together.unflatten(-1, (n, h)).flip(-1).sum(-2)


def filled(budget: Tensor, score: Tensor, total: int, candidate: Tensor | None = None) -> Tensor:
    """Budgets [.. h] made to add up to `total`: the missing slots go to the highest scores [.. h n] that they leave out.

    No head gets more than it has candidates; the total is at most all of them. Raises ValueError for budgets above `total`.
    """
    have = torch.full_like(budget, score.shape[-1]) if candidate is None else candidate.expand_as(score).sum(-1)
    budget = torch.minimum(budget, have)
    missing = have.sum(-1).clamp(max=total) - budget.sum(-1)
    if bool((missing < 0).any()):
        raise ValueError(f"budgets add up to {int(budget.sum(-1).max())}, more than total={total}")
    out = ranks(score, candidate) >= budget[..., None]
    return budget + flattened(score, missing, out if candidate is None else out & candidate)


def head_budgets(score: Tensor, total: int, tau: float, candidate: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """int64 [.. h]: floor(total (E_h + eps)^tau / sum), E_h the sum of a head's candidate scores [.. h n] (LORE eq. 11), made exact by `filled`.

    tau 0 is uniform. A negative E counts as 0.
    """
    if tau < 0:
        raise ValueError(f"tau={tau} must be at least 0")
    energy = score.double() if candidate is None else score.double().masked_fill(~candidate, 0.0)
    share = (tau * (energy.sum(-1).clamp(min=0.0) + eps).log()).softmax(-1)
    return filled((total * share + 1e-9).floor().long(), score, total, candidate)


def adakv(score: Tensor, base: int, alpha: float, form: Literal["interpolated", "floor", "released"] = "interpolated", candidate: Tensor | None = None) -> Tensor:
    """int64 [.. h]: Ada-KV's budgets of heads with scores [.. h n], `base` each on average; alpha is the share that is dealt evenly.

    f_h counts a head's entries among the best h * base of all. interpolated: f (1 - alpha) + base alpha, floored and made
    exact by `filled`; released: round(f (1 - alpha) + int(base alpha)), halves to even, whose total drifts; floor: every
    head's best int(base alpha) for sure, the rest by score together (kvpress). methods 6, R12.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must be in [0, 1]")
    total = base * score.shape[-2]
    if form == "floor":
        sure = torch.full(score.shape[:-1], int(base * alpha), dtype=torch.int64, device=score.device)
        return filled(sure, score, total, candidate)
    f = flattened(score, total, candidate).double()
    if form == "interpolated":
        return filled((f * (1 - alpha) + base * alpha + 1e-9).floor().long(), score, total, candidate)
    if form == "released":
        return (f * (1 - alpha) + int(base * alpha)).round().long()
    raise ValueError(f"form={form!r} is unknown; known: 'interpolated', 'floor', 'released'")


def per_layer(budgets: Callable[[Tensor, int, Tensor], Tensor], score: Tensor, keep: Tensor, held: Tensor, real: Tensor) -> Tensor:
    """A policy's `allocate` from budgets(score [h n], total, candidate [h n]) -> [h] of one layer's free entries, for every layer and row."""
    candidate, held = real & ~held, held.sum(-1)
    free, out = (keep - held).sum(-1), held.clone()
    for i, b in ((i, b) for i in range(score.shape[0]) for b in range(score.shape[1])):
        out[i, b] += budgets(score[i, b].masked_fill(~candidate[i, b], 0.0), int(free[i, b]), candidate[i, b])
    return out


def per_model(budgets: Callable[[Tensor, int, Tensor], Tensor], score: Tensor, keep: Tensor, held: Tensor, real: Tensor) -> Tensor:
    """The same where the heads of all layers share one budget: they are given as heads of one layer."""
    (layers, _, heads, _), rows = score.shape, [x.transpose(0, 1).flatten(1, 2)[None] for x in (score, keep, held, real)]
    return per_layer(budgets, *rows)[0].unflatten(1, (layers, heads)).transpose(0, 1)


# -- budgets of layers ----------------------------------------------------------------------------------------------


def pyramid(layers: int, base: int, candidates: int, beta: float = 20, window: int = 0, released: bool = False, cases: bool = True) -> list[int]:
    """PyramidKV's budgets by layer, falling evenly, `base` on average; the protected `window` comes on top (methods 5, R11).

    released: whole steps, whose total drifts; else the fractions are floored and the missing slots go to the largest of
    them. cases: as released, everything is kept where there are no more than `base` candidates, and all layers get
    `base` where the prompt (candidates and window) is shorter than 2 base.
    """
    if layers < 1 or base < 0 or beta < 1:
        raise ValueError(f"layers={layers}, base={base}, beta={beta}: at least 1 layer, no negative base, and beta 1 or more")
    if candidates <= base:
        return [candidates] * layers
    if layers == 1 or cases and candidates + window < 2 * base:
        return [base] * layers
    least = int(base // beta)
    most = 2 * base - least
    if most >= candidates:
        most, least = candidates, 2 * base - candidates
    if released:
        return [most - i * ((most - least) // (layers - 1)) for i in range(layers)]
    over = [divmod(most * (layers - 1) - i * (most - least), layers - 1) for i in range(layers)]
    missing = layers * base - sum(whole for whole, _ in over)
    served = sorted(range(layers), key=lambda i: (-over[i][1], i))[:missing]
    return [whole + (i in served) for i, (whole, _) in enumerate(over)]
