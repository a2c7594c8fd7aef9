"""The one round of the toolkit: pins + scores -> who goes -> gather. Prompt-time and decode-time eviction both end here.

Entries are ordered by (score, position): of equal scores the oldest goes first. Kept entries stay in chronological
order, so that pooling over neighbours and "the newest r" mean what they say at the next round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def biased(score: Tensor, bias: Tensor | None, surplus: Tensor, real: Tensor, sites: str = "") -> Tensor:
    """Scores with their pins, checked.

    score, bias, real [l b hkv c]; surplus [l b hkv] entries that must go. Raises ValueError where two pins contradict
    each other, the policy returned nan or inf, or the pins hold more than may stay, with the numbers.
    """
    check_finite(score, real, sites)
    if bias is None:
        return score
    total = score + bias.to(score.dtype)
    if bool((total.isnan() & real).any()):
        bad = (total.isnan() & real).nonzero()[0].tolist()
        raise ValueError(f"two pins disagree about the entry at [layer, row, KV head, candidate] {bad}: one holds it, one bans it")
    held = ((total == torch.inf) & real).sum(-1)
    stays = real.sum(-1) - surplus
    if bool((held > stays).any()):
        worst = int((held - stays).argmax())
        raise ValueError(
            f"keep={int(stays.flatten()[worst])} cannot hold {int(held.flatten()[worst])} pinned entries of one KV head"
        )
    return total


def check_finite(score: Tensor, real: Tensor, sites: str = "") -> None:
    """Raise ValueError naming the first entry, of those that are real, whose score [l b hkv c] is nan or inf."""
    if not bool(torch.isfinite(score).logical_or_(~real).all()):
        bad = (~torch.isfinite(score) & real).nonzero()[0].tolist()
        raise ValueError(f"the policy returned a score that is not finite at [layer, row, KV head, candidate] {bad}{sites}")


def evicted(score: Tensor, surplus: Tensor | int, real: Tensor | None = None) -> Tensor:
    """Which entries go: the `surplus` lowest of each row by (score, position), oldest first among equals.

    score [... c] may hold +-inf; surplus is one number, or one per row [...]; real [... c] marks slots that hold an
    entry (all, if None). Returns bool [... c] with exactly `surplus` True per row.
    """
    if real is not None:
        score = score.masked_fill(~real, torch.inf)
    if isinstance(surplus, int):
        if surplus == 0:
            return torch.zeros_like(score, dtype=torch.bool)
        # whichever are fewer, those that go or those that stay, are cheaper to find
        stay = score.shape[-1] - surplus
        if surplus <= stay:
            cut = score.topk(surplus, dim=-1, largest=False).values[..., -1:]
            gone = score <= cut
        else:
            cut = score.topk(stay, dim=-1).values[..., -1:] if stay else score.new_full((), torch.inf)
            gone = score < cut if stay else torch.ones_like(score, dtype=torch.bool)
        if int(gone.sum()) == gone.numel() // gone.shape[-1] * surplus:
            return gone  # no row has a tie at its cut
        need = torch.tensor(surplus, device=score.device)
    else:
        need = surplus[..., None]
        cut = score.sort(dim=-1).values.gather(-1, (need - 1).clamp(min=0))
    below = score < cut
    tied = score == cut
    if real is not None:
        tied &= real
    room = need - below.sum(-1, keepdim=True)
    tied &= tied.cumsum(-1, dtype=torch.int32) <= room
    return (below | tied) & (need > 0)


def slots_kept(keep: Tensor, width: int) -> Tensor:
    """Flat slot numbers of the kept entries when every row keeps the same count: keep [... s] -> int64 [rows * width].

    Row-major, hence chronological within a row; ready for one `index_select` over all rows, which copies whole rows
    (a `gather` with an expanded index goes element by element).
    """
    rows = keep.numel() // keep.shape[-1]
    slots = keep.reshape(-1).nonzero().squeeze(-1)
    assert slots.numel() == rows * width
    return slots


def slots_padded(keep: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The same where counts differ: flat slots [rows * width] padded on the left, and which of them are entries [... width]."""
    slots = keep.to(torch.int8).sort(dim=-1, stable=True).indices[..., keep.shape[-1] - width :]
    rows = keep.numel() // keep.shape[-1]
    offset = torch.arange(rows, device=keep.device).view(*keep.shape[:-1], 1) * keep.shape[-1]
    return (slots + offset).reshape(-1), keep.gather(-1, slots)


def take(entries: Tensor, slots: Tensor, width: int) -> Tensor:
    """Rows of entries [b hkv s ...] named by flat slots into [b hkv] x s -> [b hkv width ...]."""
    b, h, s, *rest = entries.shape
    return entries.reshape(b * h * s, *rest).index_select(0, slots.to(entries.device)).view(b, h, width, *rest)
