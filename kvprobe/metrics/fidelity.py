"""How near a compressed cache is to the full one, as pure functions: agreement with an oracle's set, change of attention outputs (LORE app. F.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attend
from ..types import wide


def recall(kept: Tensor, best: Tensor, protected: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(over all entries, over the free slots) [..]: share of the oracle's entries `best` that are `kept` (eq. 14, Recall@B).

    All are bool [.. n]. B is the size of `best`, which holds what is protected; the free slots are the rest of it, nan where
    there is none. B = 4 of 8, positions 0 and 7 protected; best {0, 2, 3, 7}, kept {0, 3, 5, 7}: 3 / 4 and 1 / 2.

    >>> kept, best, protected = (torch.zeros(8, dtype=torch.bool).index_fill(0, torch.tensor(x), True) for x in ([0, 3, 5, 7], [0, 2, 3, 7], [0, 7]))
    >>> [float(x) for x in recall(kept, best, protected)]
    [0.75, 0.5]
    """
    protected = torch.zeros_like(best) if protected is None else protected
    shared = kept & best

    def share(of: Tensor) -> Tensor:
        return (shared & of).sum(-1).double() / (best & of).sum(-1)

    return share(torch.ones_like(best)), share(~protected)


def random_recall(n: int, keep: int, protected: int) -> tuple[float, float]:
    """What `recall` of a uniform draw of the free slots is on average, for n entries of which `protected` are in both sets.

    (P + (B - P)^2 / (n - P)) / B and (B - P) / (n - P); 1 where everything stays. n = 100, B = 40, P = 20:
    20 of 80 are drawn, so that 5 of the oracle's 20 are met, (20 + 5) / 40.

    >>> random_recall(100, 40, 20)
    (0.625, 0.25)
    """
    if not 0 <= protected <= n or protected > keep or keep < 1:
        raise ValueError(f"n={n}, keep={keep}, protected={protected}: the protected entries must fit into both")
    if keep >= n or protected == keep:
        return 1.0, 1.0 if keep >= n else float("nan")
    free = (keep - protected) / (n - protected)
    return (protected + (keep - protected) * free) / keep, free


def outputs(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, visible: Tensor | None = None) -> Tensor:
    """Attention outputs [b hq q d] of queries [b hq q d] over keys and values [b hkv s d], in float32 or the wider dtype.

    visible: bool, broadcastable to [b hkv q s], None for all.
    """
    dtype = wide(queries.dtype)
    return attend(queries.to(dtype), keys.to(dtype), values.to(dtype), visible, scaling).transpose(1, 2)


def output_error(retained: Tensor, full: Tensor, valid: Tensor | None = None) -> Tensor:
    """[b hq]: 1 - the mean over queries of the cosine of two outputs [b hq q d], eq. 15; valid [b q] says which queries count.

    >>> output_error(torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]]), torch.tensor([[[[3.0, 0.0], [1.0, 0.0]]]]))  # cosines 1 and 0
    tensor([[0.5000]], dtype=torch.float64)
    """
    cosine = torch.nn.functional.cosine_similarity(retained.double(), full.double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    valid = torch.ones_like(cosine[:, 0], dtype=torch.bool) if valid is None else valid.to(cosine.device)
    return 1 - torch.where(valid[:, None], cosine, 0.0).sum(-1) / valid.sum(-1, keepdim=True)
