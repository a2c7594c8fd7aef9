"""How far each sampled continuation of a prompt is to be believed (LORE-KV sec. 3.3, app. C.3): signals, weights, filtering.

Axes: M continuations of at most T steps; any axes may stand before them (batch rows). A continuation that ended early has
fewer valid steps (`lengths`, its last token's step among them), and what it holds beyond them is never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import wide


@dataclass(frozen=True)
class Weighting:
    """R_m = beta c_m - gamma H_m - disagreement D_m, eq. 3; the weights are softmax(R), eq. 4."""

    beta: float
    gamma: float
    disagreement: float
    normalised: bool = False
    """c in units of its standard error, sqrt(V / T_m) (app. C.3)"""


PRESETS = {
    "/E": Weighting(1.0, 1.3, 0.0),
    "/D": Weighting(1.0, 1.0, 0.3),
    "log-probability": Weighting(1.0, 1.0, 0.0),
    "both": Weighting(1.0, 1.3, 0.3),
    "uniform": Weighting(0.0, 0.0, 0.0),
    "typicality": Weighting(1.0, 0.0, 0.0),
}
"""Table 4 and app. C.3."""


def steps(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, H and V [.. M T] in nats: log q(y) + H, entropy and varentropy of the distribution q that the tokens were sampled from.

    logits [.. M T vocabulary], as sampled from: -inf bans a token; tokens [.. M T]. Eq. 2 and 9. float32 or the wider dtype.
    """
    log_q = logits.to(wide(logits.dtype)).log_softmax(-1)
    q = log_q.exp()
    surprise = -log_q.masked_fill(q == 0, 0.0)  # 0 log 0
    entropy = (q * surprise).sum(-1)
    varentropy = (q * (surprise - entropy[..., None]).square()).sum(-1)
    return log_q.gather(-1, tokens[..., None]).squeeze(-1) + entropy, entropy, varentropy


def mean_over_steps(x: Tensor, lengths: Tensor) -> Tensor:
    """[.. M T] -> [.. M], each over its own valid steps."""
    valid = torch.arange(x.shape[-1], device=x.device) < lengths[..., None]
    return torch.where(valid, x, 0.0).sum(-1) / lengths.clamp(min=1)


def distances(queries: Iterable[Tensor], lengths: Tensor) -> Tensor:
    """[.. M M]: mean of 1 - cos between the queries of two continuations over the steps both have, layers and query heads (eq. 10).

    queries: one [.. M hq T d] per layer, post-RoPE; layers may live on different devices. A query of norm 0 has cosine 0 with
    any other. A pair without a common step has distance 0. Float64.
    """
    common = torch.minimum(lengths[..., :, None], lengths[..., None, :])
    total, count = torch.zeros(common.shape, dtype=torch.float64, device=lengths.device), 0
    for layer in queries:
        x = layer.to(wide(layer.dtype))
        valid = torch.arange(x.shape[-2], device=x.device) < common.to(x.device)[..., None]
        unit = torch.nn.functional.normalize(x.nan_to_num(0.0, 0.0, 0.0), dim=-1, eps=torch.finfo(x.dtype).tiny)
        cosine = torch.einsum("...mhtd,...rhtd->...mrt", unit, unit).double()
        total += torch.where(valid, x.shape[-3] - cosine, 0.0).sum(-1).to(total.device)
        count += x.shape[-3]
    off_diagonal = ~torch.eye(common.shape[-1], dtype=torch.bool, device=common.device)
    return total / (count * common).clamp(min=1) * off_diagonal


def standardised(disagreement: Tensor, least: float = 1e-6) -> Tensor:
    """[.. M]: D less its mean over the continuations, over its standard deviation (with 1 / M, as D-bar in the paper, which leaves it open).

    0 for M <= 2, and where the deviation is no more than `least`: what rounding in float32 leaves of no spread at all.
    """
    spread = disagreement.std(-1, correction=0, keepdim=True)
    if disagreement.shape[-1] <= 2:
        return torch.zeros_like(disagreement)
    away = disagreement - disagreement.mean(-1, keepdim=True)
    return torch.where(spread > least, away / spread.clamp(min=least), 0.0)


@dataclass(frozen=True)
class Reliability:
    """The signals of M continuations: c, H, V [.. M], mean over valid steps; lengths [.. M]; distance [.. M M] of their queries."""

    typicality: Tensor
    entropy: Tensor
    varentropy: Tensor
    lengths: Tensor
    distance: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, lengths: Tensor, queries: Iterable[Tensor]) -> Reliability:
        """From what sampling saw: logits [.. M T vocabulary], tokens [.. M T], lengths [.. M], queries [.. M hq T d] per layer."""
        signals = (mean_over_steps(x, lengths) for x in steps(logits, tokens))
        return cls(*signals, lengths, distances(queries, lengths))

    @property
    def disagreement(self) -> Tensor:
        """[.. M]: D of eq. 10, the mean distance to the others."""
        return self.distance.sum(-1) / max(1, self.distance.shape[-1] - 1)

    @property
    def normalised(self) -> Tensor:
        """[.. M]: c over its standard error; 0 where nothing was uncertain."""
        error = (self.varentropy / self.lengths.clamp(min=1)).sqrt()
        return torch.where(error > 0, self.typicality / error, 0.0)

    def score(self, by: Weighting) -> Tensor:
        """[.. M]: R of eq. 3."""
        c = self.normalised if by.normalised else self.typicality
        return by.beta * c - by.gamma * self.entropy - by.disagreement * standardised(self.disagreement).to(c.dtype)

    def weights(self, by: Weighting) -> Tensor:
        """[.. M]: omega of eq. 4."""
        return self.score(by).softmax(-1)

    def first(self, m: int) -> Reliability:
        """The first m continuations alone (nested prefixes of one draw): their disagreement is among themselves."""
        if not 1 <= m <= self.lengths.shape[-1]:
            raise ValueError(f"m={m} is out of range: there are {self.lengths.shape[-1]} continuations")
        return Reliability(self.typicality[..., :m], self.entropy[..., :m], self.varentropy[..., :m], self.lengths[..., :m], self.distance[..., :m, :m])


def filtered(weights: Tensor, score: Tensor, worst: int) -> Tensor:
    """Weights [.. M] without the `worst` continuations of lowest score [.. M], the others' summing to 1 again (hard filtering, app. F.4).

    Of equal scores the later continuation goes first. Raises ValueError where none would be left.
    """
    m = weights.shape[-1]
    if not 0 <= worst < m:
        raise ValueError(f"worst={worst} of {m} continuations: at least one must be left")
    order = score.sort(dim=-1, descending=True, stable=True).indices
    left = torch.ones_like(weights).scatter(-1, order[..., m - worst :], 0.0)
    weights = weights * left
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, left / left.sum(-1, keepdim=True))  # a weight that is 0 may be all that is left
