"""How two criteria's orders of the same entries differ: what both would keep, and rank correlation (LORE app. F.3, Figs. 9 and 10).

Scores are [.. n], entries oldest first, usually [l b hkv n]. Protected entries are kept whatever their score: they are in both top
sets and in no correlation. `real` (bool, broadcastable to the scores, None for all) marks the slots that hold an entry.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import oracle
from . import fidelity


def overlap(a: Tensor, b: Tensor, keep: int, protected: Tensor | None = None, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(over all `keep` entries, over the free slots) [..]: share of its top B that one score has in common with the other (Fig. 9).

    B = keep holds the protected entries; the free slots are the rest of it, nan where there are none. Ties go to the newest
    entry, as in every eviction. Symmetric. Raises ValueError where the protected entries do not fit, or scores are not finite.

    >>> a, b = torch.tensor([9.0, 5, 4, 3, 0]), torch.tensor([0.0, 1, 4, 3, 9])  # B = 3 with 0 protected: {0, 1, 2} and {0, 2, 4}
    >>> [round(float(x), 3) for x in overlap(a, b, 3, torch.tensor([True, False, False, False, False]))]
    [0.667, 0.5]
    """
    protected = torch.zeros_like(a, dtype=torch.bool) if protected is None else protected.expand_as(a)
    _finite(a, b, _candidate(a, protected, real))
    if bool((protected.sum(-1) > keep).any()):
        raise ValueError(f"keep={keep} cannot hold {int(protected.sum(-1).max())} protected entries")
    mine, other = (oracle.top(s, keep, protected, real) for s in (a, b))
    return fidelity.recall(mine, other, protected)


def spearman(a: Tensor, b: Tensor, protected: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """[..]: Spearman's rho of two scores over the candidates, tied ones sharing their average rank; nan where a score is constant over them.

    It is a description of one prompt's entries, which are no sample: intervals come from prompts (kvprobe.stats).

    >>> a, b = torch.tensor([1.0, 2, 2, 4, 99]), torch.tensor([1.0, 3, 2, 4, 0])  # ranks 0, 1.5, 1.5, 3 and 0, 2, 1, 3
    >>> round(float(spearman(a, b, torch.tensor([False] * 4 + [True]))), 4)  # 4.5 / sqrt(4.5 * 5)
    0.9487
    """
    candidate = _candidate(a, protected, real)
    _finite(a, b, candidate)
    x, y = (_centred(s, candidate) for s in (a, b))
    return ((x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()).clamp(-1, 1)


def average_ranks(score: Tensor, candidate: Tensor | None = None) -> Tensor:
    """float64 [.. n]: 0 for the lowest candidate, equal ones share the mean of their ranks; nan for what is no candidate.

    >>> average_ranks(torch.tensor([7.0, 1.0, 7.0, 3.0]))
    tensor([2.5000, 0.0000, 2.5000, 1.0000], dtype=torch.float64)
    """
    candidate = torch.ones_like(score, dtype=torch.bool) if candidate is None else candidate.expand_as(score)
    values, order = score.masked_fill(~candidate, torch.inf).sort(dim=-1, stable=True)
    n = score.shape[-1]
    place, other = torch.arange(n, device=score.device).expand_as(order), values[..., 1:] != values[..., :-1]
    begins = torch.cat([torch.ones_like(other[..., :1]), other], -1) if n > 1 else torch.ones_like(values, dtype=torch.bool)
    ends = torch.cat([other, torch.ones_like(other[..., :1])], -1) if n > 1 else begins
    first = place.masked_fill(~begins, 0).cummax(-1).values
    last = place.masked_fill(~ends, n).flip(-1).cummin(-1).values.flip(-1)
    shared = (first + last).double() / 2
    return torch.empty_like(shared).scatter_(-1, order, shared).masked_fill(~candidate, torch.nan)


def pooled(x: Tensor, over: Literal["site", "layer", "model"]) -> Tensor:
    """Entries [l b hkv n] put into one ranking per site [l b hkv n], layer [l b hkv*n] or model [b l*hkv*n].

    The default of every table is a rho per site, and then means of it; one ranking over sites also asks which site's entries matter more.

    >>> [tuple(pooled(torch.zeros(2, 1, 3, 5), over).shape) for over in ("site", "layer", "model")]
    [(2, 1, 3, 5), (2, 1, 15), (1, 30)]
    """
    if over not in ("site", "layer", "model"):
        raise ValueError(f"over={over!r} is unknown; known: site, layer, model")
    return x if over == "site" else x.flatten(2) if over == "layer" else x.transpose(0, 1).flatten(1)


def layerwise(x: Tensor) -> Tensor:
    """[l b]: mean over the KV heads of a value per site [l b hkv], over those that have one (Fig. 10c: layer-wise Spearman).

    >>> layerwise(torch.tensor([[[0.5, 1.0]], [[torch.nan, 0.25]]]))
    tensor([[0.7500],
            [0.2500]])
    """
    return x.nanmean(-1)


def overall(x: Tensor) -> Tensor:
    """[b]: mean over all sites of a value per site [l b hkv], over those that have one.

    >>> overall(torch.tensor([[[0.5, 1.0]], [[torch.nan, 0.0]]]))
    tensor([0.5000])
    """
    return x.nanmean((0, 2))


def _candidate(a: Tensor, protected: Tensor | None, real: Tensor | None) -> Tensor:
    candidate = torch.ones_like(a, dtype=torch.bool)
    for mask in (None if protected is None else ~protected, real):
        candidate = candidate if mask is None else candidate & mask.to(a.device)
    return candidate


def _finite(a: Tensor, b: Tensor, candidate: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"scores of different entries: {list(a.shape)} and {list(b.shape)}")
    if not bool(((a.isfinite() & b.isfinite()) | ~candidate).all()):
        raise ValueError("a candidate's score is not finite: it has no rank")


def _centred(score: Tensor, candidate: Tensor) -> Tensor:
    """Ranks minus their mean, multiples of 1/2, so that a constant gives exactly 0; 0 for what is no candidate."""
    ranks = average_ranks(score, candidate) - (candidate.sum(-1, keepdim=True) - 1).double() / 2
    return ranks.masked_fill(~candidate, 0.0)
