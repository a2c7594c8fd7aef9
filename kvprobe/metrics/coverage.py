"""How near sets of queries come to the queries of the future (LORE eq. 13, app. F.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

SETS = ("window", "continuations", "both")
"""What a future is covered by: the prompt's newest queries, the sampled continuations, or all of them."""


def nearest(future: Tensor, queries: Tensor, valid: Tensor | None = None) -> Tensor:
    """float64 [b hq t]: the largest cosine of each future query [b hq t d] with a query of a set [b hq q d] of the same query head.

    valid [b q]: which queries of the set count, None for all. A query of length 0 has cosine 0 with everything. Raises
    ValueError where a row's set is empty.

    >>> future = torch.tensor([[[[2.0, 0.0], [0.0, 5.0]]]])
    >>> nearest(future, torch.tensor([[[[3.0, 4.0], [-1.0, 0.0]]]]))  # cosines .6, -1 and .8, 0
    tensor([[[0.6000, 0.8000]]], dtype=torch.float64)
    """
    if not queries.shape[-2] or (valid is not None and not bool(valid.any(-1).all())):
        raise ValueError("a set of queries is empty: nothing is covered by it")
    tiny = torch.finfo(torch.float64).tiny
    cosine = normalize(future.double(), dim=-1, eps=tiny) @ normalize(queries.double(), dim=-1, eps=tiny).mT
    if valid is not None:
        cosine = cosine.masked_fill(~valid[:, None, None, :].to(cosine.device), -torch.inf)
    return cosine.amax(-1).clamp(max=1.0)


def mixture(best: Tensor, weights: Tensor) -> Tensor:
    """[..]: eq. 13 as written, sum_s pi_s best_s, of the nearest cosines best [s ..] with each set; weights pi broadcast to them.

    It need not grow with the number of sets: it lies between the worst and the best of them. Raises ValueError for weights
    that are negative or do not sum to 1 over s.

    >>> mixture(torch.tensor([[0.6, 0.8], [1.0, 0.0]]), torch.tensor([[0.25], [0.75]]))
    tensor([0.9000, 0.2000], dtype=torch.float64)
    """
    weights = weights.to(best.device, torch.float64)
    if bool((weights < 0).any()) or not torch.allclose(weights.sum(0), torch.ones((), dtype=torch.float64, device=best.device), atol=1e-5):
        raise ValueError(f"the weights of the sets must not be negative and sum to 1, their sums are {weights.sum(0).flatten()[:4].tolist()}")
    return (weights * best.double()).sum(0)


def union(best: Tensor) -> Tensor:
    """[..]: the nearest cosine with all sets together, of best [s ..]. It never falls when a set is added (the paper's Fig. 1b grows).

    >>> union(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
    tensor([1.0000, 0.8000])
    """
    return best.amax(0)


@dataclass(frozen=True)
class Nearest:
    """Nearest cosines of every future query: with the window [l b hq t] and with each continuation, each [m l b hq t]; valid [b t]
    of the future. Everything else is a reduction of these: any prefix of the continuations, any weights, both forms."""

    window: Tensor
    each: Tensor
    valid: Tensor

    def coverage(self, sets: str = "both", form: Literal["mixture", "union"] = "union", m: int | None = None, weights: Tensor | None = None,
                 window_share: float = 0.5) -> Tensor:
        """[l b hq]: mean over the future's queries of how well `sets` (one of SETS) cover them. The mean over the heads is eq. 13 of a layer.

        m: the first m continuations, None for all. Of the mixture only: weights [m] or [b m] of the continuations, None for 1 / m;
        window_share: the window's weight in "both", the continuations share the rest. The default is eq. 7's at lambda_L = 1, where the
        window counts as much as all continuations together; 1 / (m + 1) counts it as one more of them. Raises ValueError for an unknown
        set or form, for continuations that are not there, and for weights of a union, which has none.

        >>> two = Nearest(torch.tensor([[[[0.6, 0.8]]]]), torch.tensor([[[[[1.0, 0.0]]]], [[[[0.0, 0.4]]]]]), torch.tensor([[True, True]]))
        >>> [round(float(two.coverage(s, "union")), 3) for s in SETS]  # (.6 + .8) / 2, (1 + .4) / 2, (1 + .8) / 2
        [0.7, 0.7, 0.9]
        >>> [round(float(two.coverage(s, "mixture")), 3) for s in SETS]  # .7, (.5 + .2) / 2, (.7 + .35) / 2
        [0.7, 0.35, 0.525]
        >>> round(float(two.coverage("continuations", "mixture", m=1)), 3)
        0.5
        """
        self._check(sets, form, weights)
        each = self._first(m) if sets != "window" else self.each[:0]
        best = torch.cat([each, self.window[None]] if sets != "continuations" else [each])
        if form == "union" or sets == "window":
            return self._mean(union(best))
        share = (torch.full((len(each),), 1 / len(each), dtype=torch.float64) if weights is None else weights).double().to(best.device)
        share = share.T.reshape(len(each), 1, -1, 1, 1) if share.ndim == 2 else share.reshape(-1, 1, 1, 1, 1)
        if sets == "both":
            share = torch.cat([share * (1 - window_share), torch.full_like(share[:1], window_share)])
        if len(share) != len(best):
            raise ValueError(f"{len(best) - (sets == 'both')} continuations have {len(share) - (sets == 'both')} weights: one each is needed")
        return self._mean(mixture(best, share))

    def mismatch(self) -> Tensor:
        """[l b hq]: 1 - coverage by the window, LORE's Mis(X) (sec. 4.5) before its mean over heads.

        >>> seen = Nearest(torch.tensor([[[[0.6, 0.8]]]]), torch.zeros(0, 1, 1, 1, 2), torch.tensor([[True, False]]))
        >>> round(float(seen.mismatch()), 3)  # the second query does not count
        0.4
        """
        return 1 - self.coverage("window")

    def _first(self, m: int | None) -> Tensor:
        m = len(self.each) if m is None else m
        if not 1 <= m <= len(self.each):
            raise ValueError(f"m={m} continuations: there are {len(self.each)}, at least 1 is needed")
        return self.each[:m]

    def _mean(self, best: Tensor) -> Tensor:
        valid = self.valid[:, None].to(best.device)
        return torch.where(valid, best.double(), 0.0).sum(-1) / valid.sum(-1)

    @staticmethod
    def _check(sets: str, form: str, weights: Tensor | None) -> None:
        for name, value, known in (("sets", sets, SETS), ("form", form, ("mixture", "union"))):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(known)}")
        if weights is not None and (form == "union" or sets == "window"):
            raise ValueError("weights are those of the continuations in a mixture: the union and the window alone have none")


def measure(future: Mapping[int, Tensor], valid: Tensor, window: Mapping[int, Tensor], window_valid: Tensor | None = None,
            continuations: Mapping[int, Tensor] | None = None, written: Tensor | None = None) -> Nearest:
    """Nearest cosines of a future's queries {layer: [b hq t d]}, valid [b t], in every layer.

    window {layer: [b hq w d]}, window_valid [b w]; continuations {layer: [b m hq t' d]}, written [b m t'] (a Lookahead's queries and
    valid). A layer's queries are asked for when its turn comes and let go after it, so that a mapping may read them from a file.

    >>> at = {3: torch.eye(2)[None, None]}
    >>> measure(at, torch.ones(1, 2, dtype=torch.bool), at).coverage("window")  # a set covers itself
    tensor([[[1.]]], dtype=torch.float64)
    """
    windows, each = [], []
    for layer in future:
        ahead = future[layer]
        windows.append(nearest(ahead, window[layer].to(ahead.device), window_valid).cpu())
        each.append(_each(ahead, None if continuations is None else continuations[layer], written).cpu())
    return Nearest(torch.stack(windows), torch.stack(each, dim=1), valid.cpu())


def _each(ahead: Tensor, queries: Tensor | None, written: Tensor | None) -> Tensor:
    """[m b hq t]"""
    if queries is None:
        return ahead.new_zeros(0, *ahead.shape[:3], dtype=torch.float64)
    return torch.stack([nearest(ahead, queries[:, m].to(ahead.device), None if written is None else written[:, m]) for m in range(queries.shape[1])])
