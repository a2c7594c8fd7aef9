"""Where in a model the future shows: perturbation energy by layer and query head, recall gain by layer and KV head (LORE app. F.6, Fig. 12)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import deletion
from . import fidelity
from .perturbation import ANALYSIS


def energy(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None = None, visible: Tensor | None = None,
           weight: Tensor | None = None, cost: deletion.Cost = ANALYSIS) -> Tensor:
    """[b hq] of one layer: what deletion costs, summed over all entries, weighted over the queries (weight [q] or [b q], None for their mean).

    The arguments are those of `deletion.weighted`: queries [b hq q d], keys and values [b hkv n d], gram [hq d d]. The query heads
    that share a KV head are told apart (the paper's "GQA-expanded attention heads"), so that cost.group has no say. Nothing of
    size queries x keys is held.

    >>> keys, values = torch.zeros(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])  # both weigh 1/2, the output is 2
    >>> energy(torch.ones(1, 2, 1, 1), keys, values, 1.0, torch.tensor([[[1.0]], [[4.0]]]), cost=deletion.Cost(form="magnitude", eps=0.0))
    tensor([[2., 4.]])
    """
    group = queries.shape[1] // keys.shape[1]
    grams = [None if gram is None else gram[g::group] for g in range(group)]
    out = [deletion.weighted(queries[:, g::group], keys, values, scaling, own, visible, weight, cost).sum(-1) for g, own in enumerate(grams)]
    return torch.stack(out, dim=-1).flatten(1)


def shares(energy: Tensor) -> Tensor:
    """[l b hq]: each head's share of a row's energy [l b hq], 1 over all layers and heads; summed over heads, that of a layer.

    >>> shares(torch.tensor([[[1.0, 2.0]], [[3.0, 2.0]]])).sum(-1)
    tensor([[0.3750],
            [0.6250]], dtype=torch.float64)
    """
    return energy.double() / energy.double().sum((0, 2), keepdim=True)


def recall_difference(kept: Tensor, control: Tensor, best: Tensor, protected: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(over all entries, over the free slots) [l b hkv]: how much more of the oracle's entries `best` are kept than by a control.

    All are bool [l b hkv n]; nan where a site has no free slot: a missing cell of a map, not a zero.

    >>> kept, control, best = (torch.tensor([p in s for p in range(5)]) for s in ({0, 1, 2}, {0, 1, 4}, {0, 2, 3}))
    >>> [round(float(x), 3) for x in recall_difference(kept, control, best, torch.arange(5) == 0)]  # 2/3 - 1/3, and 1/2 - 0
    [0.333, 0.5]
    """
    mine, other = (fidelity.recall(x, best, protected) for x in (kept, control))
    return mine[0] - other[0], mine[1] - other[1]
