"""GVote-like: what queries drawn from a Gaussian put into their top, as many entries as that takes (GVote, arXiv 2509.03136; no code was found)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import allocation, attention, lookahead
from kvprobe.types import CacheView, Needs


@dataclass(frozen=True)
class POLICY:
    """Future queries are drawn from a Gaussian fitted to the prompt's; each votes for its top B_0 keys, and whoever has a vote is kept.

    B_0: how many keys hold `nucleus` of the attention of the prompt's last query, per query head. The Gaussian has the mean and the
    full covariance of the newest `window` queries, turned back to before RoPE. One draw of coefficients serves all heads of a layer, so
    that where queries are linear in hidden states (no query norm), this is a Gaussian of hidden states, projected. Sample s stands at
    position n + s. The paper's covariance, positions, GQA rule and protected positions are not known: a KV head keeps the union over its
    query heads, and the run's pins on top. It sets its own budget: `keep` only says whether a prompt is long enough to be compressed
    at all (keep < n), unless `capped`. Never compare it at equal budgets: report what it kept.
    """

    samples: int = 8
    """future queries drawn per query head (S)"""
    nucleus: float = 0.95
    """attention that the last query's nucleus holds (p_nuc)"""
    window: int = 512
    """newest prompt queries that the Gaussian is fitted to [tokens]"""
    capped: bool = False
    """no KV head keeps more than `keep`: those with the fewest votes go, of equals those with the least mean attention"""

    level = "own"
    looks_ahead = True

    def __post_init__(self) -> None:
        if self.samples < 1 or self.window < 1:
            raise ValueError(f"samples={self.samples} and window={self.window} must be at least 1")
        if not 0 < self.nucleus <= 1:
            raise ValueError(f"nucleus={self.nucleus} must be in (0, 1]")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, draws=True)

    def bind(self, model) -> POLICY:
        """This policy with the model's rotary embedding at hand."""
        import dataclasses

        bound = dataclasses.replace(self)
        object.__setattr__(bound, "_model", model)
        return bound

    def check(self, plan) -> None:
        lookahead.refuse_rounds(self, plan)

    def score(self, view: CacheView) -> Tensor:
        """Votes [b hkv c] plus half the mean attention, which is below 1 and only orders equals."""
        visible = view.real[:, :, None, :]
        b0 = self._nucleus(attention.weights(view.queries[:, :, -1:], view.keys, visible, view.scaling))
        a = attention.weights(self.drawn(view), view.keys, visible, view.scaling)
        votes = (allocation.ranks(a, visible[:, :, None]) < b0).sum((2, 3))
        return votes.to(a.dtype) + a.mean((2, 3)) / 2

    def _nucleus(self, a: Tensor) -> Tensor:
        """[b hkv g 1 1]: the fewest keys that hold `nucleus` of a [b hkv g 1 c]."""
        before = a.sort(-1, descending=True).values.double().cumsum(-1)
        return (before < self.nucleus * before[..., -1:]).sum(-1, keepdim=True) + 1

    def drawn(self, view: CacheView) -> Tensor:
        """Post-RoPE queries [b hq samples d]: mean + sum_t z_t (q_t - mean) / sqrt(count - 1), z standard normal, has exactly their covariance."""
        from kvprobe.inside.sites import rotate

        if not hasattr(self, "_model"):
            raise ValueError("gvote turns queries by its model's rotary embedding: use kvprobe.compress, or policy.bind(model)")
        at = view.query_positions
        real = (at >= 0)[:, None, :, None]
        shape = view.queries.shape[:3]
        before = rotate(self._model, view.layer, view.queries, (-at.clamp(min=0))[:, None, :].expand(shape)).to(torch.float64)
        count = real.sum(2, keepdim=True)
        mean = before.masked_fill(~real, 0.0).sum(2, keepdim=True) / count
        away = (before - mean).masked_fill(~real, 0.0) / (count - 1).clamp(min=1).sqrt()
        samples = mean + self._normal(view)[:, None] @ away
        to = view.now[:, None] + torch.arange(self.samples, device=at.device)
        return rotate(self._model, view.layer, samples.to(view.queries.dtype), to[:, None, :].expand(samples.shape[:3]))

    def _normal(self, view: CacheView) -> Tensor:
        """float64 [b samples w]: a standard normal per (seed, instance, layer, sample, query's position), so that neighbours and padding change nothing."""
        sample = torch.arange(self.samples, device=view.query_positions.device)
        counters = sample[:, None] * 2**32 + view.query_positions[:, None, :].long().clamp(min=0)
        u = view.rand(shared=True, counters=counters.flatten(1)[:, None])[:, 0].unflatten(-1, counters.shape[1:])
        return torch.special.ndtri(u.clamp(min=2.0**-54))

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """Entries with a vote or a pin; where `capped`, `keep` at most."""
        wanted = (((score >= 1) | held) & real).sum(-1)
        return torch.minimum(wanted, keep) if self.capped else wanted
