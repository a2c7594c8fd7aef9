"""Projected cost of deleting a prompt token, over the prompt's window and sampled futures (LORE-KV, sec. 3, eq. 2-7, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation, attention, deletion, lookahead, projections, reliability
from kvprobe.types import CacheView, Needs, check_window


@dataclass(frozen=True)
class Future:
    """What a look ahead gave: the continuations, their weights [b m] and the signals behind them."""

    lookahead: object
    weights: Tensor
    reliability: reliability.Reliability


@dataclass(frozen=True)
class POLICY:
    """S = psi(window) + lam_l * sum_m omega_m psi(continuation m); defaults are LORE-KV /E (Table 4).

    /D is beta=1, gamma=1, lam_d=0.3; log probability only (1, 1, 0); uniform (0, 0, 0); typicality only (1, 0, 0).
    """

    window: int = 32
    """newest prompt queries (w) [tokens]"""
    m: int = 4
    """continuations sampled (M); 0 is the window alone"""
    t: int = 8
    """tokens of each (T)"""
    lam_l: float = 1.0
    """weight of the look ahead (lambda_L)"""
    beta: float = 1.0
    """weight of a continuation's typicality"""
    gamma: float = 1.3
    """weight of its entropy, against it"""
    lam_d: float = 0.0
    """weight of its disagreement with the others, against it (lambda_D)"""
    normalised: bool = False
    """typicality over its standard error (an ablation)"""
    drop_worst: int = 0
    """continuations of lowest reliability that are left out (app. F.4)"""
    objective: Literal["projected", "unprojected", "attention", "anchor"] = "projected"
    """what deletion costs: eq. 6, without W_O, the attention, or AnDPro's criterion"""
    form: Literal["squared", "magnitude"] = "squared"
    """squared norm (eq. 6) or its root (eq. 12)"""
    eps: float = 1e-6
    """guard of the renormalisation in eq. 5"""
    group: Literal["mean", "sum", "max"] = "mean"
    """how the query heads of a KV head are put together"""
    alpha: float = 0.0
    """weight of the average of the top costs in psi"""
    kappa: float = 0.1
    """share of costs that are top"""
    tau: float = 0.0
    """how strongly budgets follow the heads' total cost (eq. 11); 0 is uniform"""
    lam_k: float = 0.0
    """weight of likeness to kept keys, against (diversity)"""
    lam_v: float = 0.0
    """weight of likeness to kept values, against (diversity)"""
    chunk: int = 4
    """adjacent tokens that stay or go together; 1 in mechanism analyses"""
    temperature: float = 1.0
    """of sampling; 0 decodes greedily"""
    block: int = 0
    """continuations sampled at a time; 0 is all"""

    @property
    def level(self) -> str:
        return "layer" if self.tau else "head"

    def __post_init__(self) -> None:
        check_window(self)
        if self.window < 1 or self.m < 0 or self.t < 1 or self.chunk < 1 or self.block < 0 or self.drop_worst < 0:
            raise ValueError(f"window={self.window}, t={self.t} and chunk={self.chunk} must be at least 1; m={self.m}, block={self.block} and drop_worst={self.drop_worst} at least 0")
        if self.m and self.drop_worst >= self.m:
            raise ValueError(f"drop_worst={self.drop_worst} leaves nothing of m={self.m} continuations")
        if min(self.lam_l, self.tau, self.lam_k, self.lam_v, self.temperature) < 0:
            raise ValueError("lam_l, tau, lam_k, lam_v and temperature must not be negative")
        if self.chunk > 1 and (self.lam_k or self.lam_v):
            raise ValueError(f"chunk={self.chunk}: the greedy diversity rule picks single tokens, use chunk=1")
        deletion.Cost(self.objective, self.form, self.eps, self.group)
        deletion.Psi(self.alpha, self.kappa)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def looks_ahead(self) -> bool:
        return self.m > 0 and self.lam_l > 0

    def check(self, plan) -> None:
        lookahead.refuse_rounds(self, plan)

    def bind(self, model) -> POLICY:
        """This policy with the model's output projections at hand."""
        return projections.bound(self, model)

    def queries(self, engine) -> Future | None:
        """Sample the continuations and weigh them; None where only the window scores."""
        from kvprobe.generation_input import eos

        if not self.looks_ahead:
            return None
        found = lookahead.sample(engine.model, engine.cache, engine.logits, self.m, self.t, seed=engine.seed, temperature=self.temperature,
                                 block=self.block or None, eos=tuple(eos(engine.model)), source=engine.source)
        return self.weigh(found)

    def given(self, found) -> Future | None:
        """A look ahead made before, with this policy's own weights; None where only the window scores."""
        return self.weigh(found) if self.looks_ahead else None

    def weigh(self, found) -> Future:
        """A look ahead with this policy's reliability weights; it may have been sampled before, with as many continuations or more."""
        found = found.first(self.m, self.t)
        lengths = found.valid.sum(-1)
        c, entropy, variance = (reliability.mean_over_steps(x, lengths) for x in (found.logq + found.entropy, found.entropy, found.variance))
        signals = reliability.Reliability(c, entropy, variance, lengths, reliability.distances(found.queries.values(), lengths))
        by = reliability.Weighting(self.beta, self.gamma, self.lam_d, self.normalised)
        return Future(found, reliability.filtered(signals.weights(by), signals.score(by), self.drop_worst), signals)

    def score(self, view: CacheView) -> Tensor:
        future = lookahead.needed(self, view) if self.looks_ahead else None
        if future is not None and not isinstance(future, Future):
            future = self.weigh(future)
        queries, sets, visible = self._asked(view, future)
        gram = self._gram(view.layer, view.keys.device) if self.objective == "projected" else None
        cost = deletion.Cost(self.objective, self.form, self.eps, self.group)
        shares = {"window": torch.ones(len(view.now), device=queries.device)}
        if future is not None:
            shares |= {str(m): self.lam_l * future.weights[:, m].to(queries.device) for m in range(future.weights.shape[1])}
        if self.alpha == 0 and self.group != "max":  # a mean of means is one weighted sum, which is cheaper
            score = deletion.weighted(queries, view.keys, view.values, view.scaling, gram, visible, deletion.per_query(sets, shares), cost)
        else:
            psi = deletion.by_set(queries, view.keys, view.values, view.scaling, sets, gram, visible, deletion.Psi(self.alpha, self.kappa), cost)
            score = sum(share.to(psi[name].dtype)[:, None, None] * psi[name] for name, share in shares.items())
        return score.masked_fill(~view.real, 0.0)

    def _asked(self, view: CacheView, future: Future | None):
        """(queries [b hq q d], {set: bool [b q]}, visible [b hkv q s] of the last s candidates): the window sees causally, the look ahead the whole prompt."""
        at = view.query_positions
        visible = attention.window_visible(at, view.positions)
        if future is None:
            return view.queries, {"window": at >= 0}, visible
        found = future.lookahead
        ahead = found.queries[view.layer].to(view.queries.device).transpose(1, 2).flatten(2, 3)  # [b hq m*t d]
        valid = found.valid.to(at.device)
        none = torch.zeros_like(at, dtype=torch.bool)
        sets = {"window": torch.cat([at >= 0, torch.zeros_like(valid.flatten(1))], dim=1)}
        for m in range(found.m):
            own = torch.zeros_like(valid)
            own[:, m] = valid[:, m]
            sets[str(m)] = torch.cat([none, own.flatten(1)], dim=1)
        if visible is not None:
            later = view.real[:, :, None, -visible.shape[-1] :].expand(-1, -1, ahead.shape[2], -1)
            visible = torch.cat([visible, later], dim=2)
        return torch.cat([view.queries, ahead], dim=2), sets, visible

    def _gram(self, layer: int, device) -> Tensor:
        return projections.kept(self, layer, deletion.gram).to(device)

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """Budgets by eq. 11 over the entries that no pin holds; with tau 0 what every head was given."""
        if self.tau == 0:
            return keep
        return allocation.per_layer(lambda s, total, free: allocation.head_budgets(s, total, self.tau, free, self.eps), score, keep, held, real)

    def select(self, view: CacheView, score: Tensor, keep: Tensor) -> Tensor:
        """Chunks, or the greedy diversity rule, as scores whose largest are what they keep."""
        if self.chunk == 1 and not (self.lam_k or self.lam_v):
            return score
        candidate = view.free
        held = view.real & ~candidate
        plain, count = score.masked_fill(~candidate, 0.0), keep - held.sum(-1)
        if self.chunk > 1:
            chosen = allocation.chunks(plain, count, self.chunk, candidate, view.positions)
        else:
            chosen = allocation.diverse(plain, count, view.keys, view.values, self.lam_k, self.lam_v, candidate, held)
        return chosen.to(score.dtype)
