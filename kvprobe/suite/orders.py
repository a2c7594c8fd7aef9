"""The criteria of the oracle suite as orders of a prompt's entries: one scoring each, any budget (LORE app. F.1).

The analyses have no chunks, no adaptive budgets and no diversity, so that an order of the entries at each site says all that a
criterion would keep at any budget. CriticalKV alone goes in two stages whose border moves with the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import allocation
from ..prompting import Arm, Prompt, arm
from ..walking import Walking

ORACLE, RANDOM, WINDOW_ONLY, SINGLE, LORE_E, LORE_D = "oracle", "random", "window only", "single continuation", "LORE /E", "LORE /D"
ATTENTION, CRITICAL, ANDPRO = "window attention", "CriticalKV", "AnDPro"
FULL = "full cache"
"""What is compressed, as a mark: what it answers is the most that can be expected of any criterion."""
CRITERIA = (RANDOM, ATTENTION, CRITICAL, ANDPRO, WINDOW_ONLY, SINGLE, LORE_E, LORE_D, ORACLE)
"""In the order of tables and legends: the floor, what the prompt alone says, what continuations say, the ceiling."""
BASELINES = (ATTENTION, CRITICAL, ANDPRO, WINDOW_ONLY)
"""Criteria that see the prompt alone."""


def arms(config, model) -> list[Arm]:
    """Every criterion at the main budget, those that sample or draw once per sampling seed; chunk 1 and uniform budgets in all."""
    from ..oracle import Given

    w, ahead = config.window, dict(t=config.t, form=config.form, chunk=1)
    made = {
        RANDOM: ("random", {}), ATTENTION: ("snapkv", {}), CRITICAL: ("criticalkv", {}), ANDPRO: ("andpro", dict(chunk=1, across="head")),
        WINDOW_ONLY: ("window_only", dict(form=config.form, chunk=1)), SINGLE: ("single_continuation", ahead),
        LORE_E: ("lore", dict(m=config.m, **ahead)), LORE_D: ("lore", dict(m=config.m, gamma=1.0, lam_d=0.3, **ahead))}
    out = []
    for name, (policy, options) in made.items():
        options = options if policy == "random" else dict(window=w) | options
        given = ",".join(f"{k}={v!r}" for k, v in options.items())
        out += arm(name, f"{policy}({given})" if given else policy, config.budget, config, model)
    return [*out, Arm(ORACLE, Given(), config.budget)]


@dataclass(frozen=True)
class Order:
    """How one arm orders the entries of a prompt: score [l 1 hkv n], what it ranks by (at the main budget where that matters)."""

    arm: Arm
    score: Tensor
    protected: Tensor
    staged: Mapping[int, Tensor] | None = None
    """{budget: score} of a criterion whose order depends on it"""

    def ranks(self, keep: int) -> Tensor:
        """int [l 1 hkv n]: 0 for what is kept first; protected entries before all others, the newest first among equals."""
        score = self.score if self.staged is None else self.staged[keep]
        return allocation.ranks(score.masked_fill(self.protected, torch.inf)).to(torch.int32)


class Watched:
    """A policy whose scores are noted as it evicts; it evicts as ever. budgets: counts at which it, CriticalKV, also goes through its stages.

    Views are let go with their layer: they hold its keys and values.
    """

    def __init__(self, policy, budgets: Sequence[int] = ()):
        self.policy, self.budgets, self.scores, self.needs = policy, budgets, {}, policy.needs
        self.selected: dict[int, dict[int, Tensor]] = {keep: {} for keep in budgets}

    def score(self, view) -> Tensor:
        score = self.scores[view.layer] = self.policy.score(view)
        later = self.policy.later(view, score) if self.budgets else None
        for keep in self.budgets:
            self.selected[keep][view.layer] = self.policy.staged(view, score, later, torch.full(score.shape[:2], keep, device=score.device))
        return score

    def __getattr__(self, name: str):
        if name in ("policy", "queries", "select", "check") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.policy, name)


def order(session: Walking, prompt: Prompt, a: Arm) -> Order:
    """The arm's order of the prompt's entries; nothing is left evicted."""
    from ..oracle import Given
    from ..policies import lore

    protected, layers = prompt.truth.protected, prompt.cache.geometry.kv_layers
    if isinstance(a.policy, Given):
        return Order(a, prompt.truth.score, protected)
    if isinstance(a.policy, lore.POLICY):
        scores = session.scores(a, prompt)
        return Order(a, torch.stack([scores[layer].to(protected.device) for layer in layers]), protected)
    watched = Watched(a.policy, session.config.budgets if a.name == CRITICAL else ())
    session.evict(prompt.cache, a, watched, None)

    def stacked(scores: dict[int, Tensor]) -> Tensor:
        return torch.stack([scores[layer].to(protected.device) for layer in layers])

    if a.name != CRITICAL:
        return Order(a, stacked(watched.scores), protected)
    staged = {keep: stacked(scores) for keep, scores in watched.selected.items()}
    return Order(a, staged[a.keep], protected, staged)


class Ranked:
    """Orders of all arms of a prompt. `kept(keep)` is what each would keep."""

    def __init__(self, orders: list[Order]):
        self.orders = orders
        self._ranks = [None if o.staged else o.ranks(0) for o in orders]
        self._last: tuple = (None, None)

    @property
    def arms(self) -> list[Arm]:
        return [o.arm for o in self.orders]

    def kept(self, keep: int) -> Tensor:
        """bool [l arms hkv n]: `keep` entries per site, the protected ones among them."""
        if self._last[0] != keep:
            self._last = keep, torch.cat([(o.ranks(keep) if r is None else r) < keep for o, r in zip(self.orders, self._ranks)], dim=1)
        return self._last[1]


def ranked(session: Walking, prompt: Prompt) -> Ranked:
    """The orders of every arm of the session."""
    with torch.no_grad():
        return Ranked([order(session, prompt, a) for a in session.arms])
