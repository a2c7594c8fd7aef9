"""What deleting an entry would cost the queries of a future: the oracle score S* (LORE eq. 12, app. F.1)."""

from __future__ import annotations

import torch  # noqa: F401, for the worked example
from torch import Tensor

from .. import deletion

ANALYSIS = deletion.Cost(form="magnitude")
"""Eq. 12: the root of what is deployed (eq. 6), so that a single query ranks alike; scale and shares differ."""


def oracle_score(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, gram: Tensor | None = None, visible: Tensor | None = None,
                 valid: Tensor | None = None, cost: deletion.Cost = ANALYSIS) -> Tensor:
    """S* [b hkv n] of one layer: the mean over the future's queries of a / (1 - a + eps) |W_O (v - o)|, softmax over the n keys only, the mean over the group.

    queries [b hq t d] over keys and values [b hkv n d]; gram [hq d d]: W_O W_O^T of each query head (`deletion.gram`); visible: bool, broadcastable to
    [b hkv t n], None for all; valid [b t]: which queries count, None for all.

    >>> keys, values = torch.zeros(1, 1, 3, 1), torch.tensor([[[[0.0], [0.0], [3.0]]]])  # each weighs 1/3, the output is 1
    >>> oracle_score(torch.ones(1, 1, 2, 1), keys, values, 1.0, torch.tensor([[[4.0]]]), cost=deletion.Cost(form="magnitude", eps=0.0))  # 1/2 of 2 |v - 1|
    tensor([[[1., 1., 2.]]])
    """
    weight = None if valid is None else valid.double() / valid.sum(-1, keepdim=True)
    return deletion.weighted(queries, keys, values, scaling, gram, visible, weight, cost)
