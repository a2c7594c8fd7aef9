"""What probes share that choose which sites keep a planted fact: settings, conditions as rules about spans, and the session.

A session is a `Comparing` whose arms are conditions (`Case`): everything up to the first round is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import arms, planting, registry, stats
from .comparing import COMMON, NEVER, Comparing, Story, answer_rows, eviction_seed
from .head_checks import audit_check, far_check, near_check, rounds_check
from .head_tables import DELETED, FULL, KEPT, wide
from .pins import SpanPin
from .types import watches

if TYPE_CHECKING:
    import pandas as pd

ABLE = 0.5
"""Retrieval of the full cache from which on kept is judged against it: a model that cannot answer at all is no measure of an instrument."""


@dataclass(frozen=True)
class HEADS(COMMON):
    """Settings of a probe that chooses the sites of a planted fact."""

    policies: str = "random"
    """the one policy that evicts everything else"""
    instances: int = 24
    """planted facts, each with its own filler, variable and value"""
    eviction_seeds: int = 1
    """fresh eviction seeds under which everything is repeated"""
    rounds: str = "8"
    """rounds before the value at which the question is branched off one run, e.g. 3,15,39,57"""
    pre: int = 112
    """filler before the fact [tokens]"""
    box: int = 16
    """room of the fact, filled up with filler [tokens]"""
    query: int = 24
    """room of the query, filled up with filler in front [tokens]"""
    rows_per_batch: int = 24
    """rows computed together: the scripts of a batch, each under as many conditions as fit"""

    def __post_init__(self) -> None:
        super().__post_init__()
        planting.rounds_of(self.rounds)
        if len(arms.split(self.policies)) > 1:
            raise ValueError(f"policies={self.policies!r}: one policy evicts around the fact, name one")
        if self.protection != "without":
            raise ValueError(f"protection={self.protection!r}: a planted-fact probe protects no prompt (Random Attention app. B), only 'without' is allowed")
        for name in ("pre", "box", "query", "rows_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


# -- conditions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hold:
    """Tokens start..stop of a span, counted from its start, are held in `sites`, a set of (layer, KV head), and go first everywhere else."""

    sites: frozenset[tuple[int, int]]
    span: str = "x"
    start: int = 0
    stop: int | None = None

    def pin(self, story: Story) -> SpanPin:
        a, z = story.spans[self.span]
        return SpanPin(a + self.start, z if self.stop is None else a + self.stop, self.sites, elsewhere="ban")


@dataclass(frozen=True)
class Case(arms.Arm):
    """A condition by name: its rules, under one eviction seed."""

    case: str = ""
    holds: tuple[Hold, ...] = ()

    @property
    def label(self) -> str:
        return self.case


@dataclass(frozen=True)
class Together(arms.Arm):
    """Cases of one policy and one eviction seed, computed as rows of one batch."""

    members: tuple[Case, ...] = ()


def together(cases: Iterable[Case], size: int) -> list[Together]:
    """Cases in groups of at most `size`, none across eviction seeds, in order."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.evicts, case.draw), []).append(case)
    return [Together(g[0].name, g[0].policy, False, g[0].draw, tuple(g[i : i + size])) for g in groups.values() for i in range(0, len(g), size)]


def sites(geometry, heads: Iterable[int], layers: Iterable[int] | None = None) -> frozenset[tuple[int, int]]:
    """All sites of some KV heads, in some layers (None: every layer that is evicted). Raises ValueError for one that does not exist."""
    found = frozenset((layer, head) for layer in (geometry.kv_layers if layers is None else layers) for head in heads)
    for layer, head in found:
        geometry.check_site(layer, head)
    return found


def cases(config: HEADS, model, rules: Mapping[str, Sequence[Hold]], spans: Sequence[str] = ("x",), full: bool = True) -> list[Case]:
    """The cases of `rules` under every eviction seed, with the endpoints (all `spans` held everywhere, banned everywhere) and the full cache.

    A policy that draws nothing has one seed: others would repeat it.
    """
    g, policy = model.geometry, arms.policy_of(config.policies.strip(), model)
    ends = {KEPT: sites(g, range(g.n_kv)), DELETED: frozenset()}
    every = {name: tuple(Hold(held, span) for span in spans) for name, held in ends.items()} | {k: tuple(v) for k, v in rules.items()}
    seeds = config.eviction_seeds if policy.needs.draws else 1
    whole = [Case(arms.FULL, None, False, case=FULL)] if full else []
    return whole + [Case(config.policies.strip(), policy, False, draw, name, holds) for draw in range(seeds) for name, holds in every.items()]


class HeadSets(Comparing):
    """Base of a session: every case on every script, some cases at a time as rows of a batch. A probe gives scripts, cases and `report`."""

    def __init__(self, config: HEADS, model, stories: Sequence[Story], cases: Sequence[Case]):
        super().__init__(config, model, stories, cases)
        self.by_member = {(arm.case, arm.draw): arm for arm in self.arms}
        cuts = list(dict.fromkeys(cut for _, cut in self.batches))
        self.batches = [(group, cut) for cut in cuts for group in together(self.arms, max(1, config.rows_per_batch // len(cut)))]

    def tokens(self, batch: int) -> int:
        return len(self.batches[batch][0].members) * super().tokens(batch)

    @property
    def bytes_needed(self) -> int:
        g, n = self.model.geometry, len(self.stories[0].ids)
        return len(self.arms) * len(self.stories) * (len(g.kv_layers) * g.n_kv * n + 20_000) + 10_000_000

    def pins(self, arm: Case, story: Story) -> tuple:
        return tuple(hold.pin(story) for hold in arm.holds)

    def base(self, arm: Case, story: Story) -> dict:
        return dict(case=arm.case, draw=arm.draw, instance=story.instance)

    def rows_of(self, arm: Case, story: Story, k: int, log, answers) -> list[dict]:
        return [row for answer in answers for row in answer_rows(story, k, answer)]

    def compute(self, batch: int, rows, tick):
        """Rows, keep log and the log's members (instance, case, draw) of one batch."""
        group, cut = self.batches[batch]
        pairs = [(self.stories[i], case) for i in cut for case in group.members]
        log, answers = self.run(group, cut, [story for story, _ in pairs], tick)
        if group.evicts:
            self._equal(group, log)
        out = [self.base(case, story) | row for k, (story, case) in enumerate(pairs) for row in self.rows_of(case, story, k, log, answers)]
        return out, log if group.evicts else None, [[story.instance, case.case, case.draw] for story, case in pairs]

    def run(self, group: Together, cut: range, stories: Sequence[Story], tick):
        """The log is that of the last question's branch, so that it holds every round up to the value."""
        _, answers = super().run(group, cut, stories, tick)
        return answers[-1].log, answers

    def _start(self, group: Together, cut: range, stories, ids, tick):
        size, seed = len(group.members), eviction_seed(self.config.seed, group.draw)
        row_pins = [self.pins(group.members[k % size], story) for k, story in enumerate(stories)]
        if watches(group.policy):  # watches every query in its own way: shares nothing
            cache = self._empty(group.policy, stories, seed, row_pins)
            self._feed(cache, ids, stories[0].prompt, tick)
            return cache
        if self._prefix is None or self._prefix[0] != cut:
            self._prefix = None  # frees the old one first
            self._prefix = cut, self._shared(stories[::size], ids[::size])
        plain = group.policy if group.evicts else registry.make_policy("random")
        return self._prefix[1].branch(size, row_pins=row_pins, plan=None if group.evicts else NEVER, policy=plain, seed=seed)

    def checks(self, rows: pd.DataFrame, folder) -> list:
        """The instrument's checks that every such probe prints: audit, rounds, and the endpoints at each distance."""
        asks = list(dict.fromkeys(rows.ask))
        first = min(self.stories[0].asks, key=lambda a: a.at)
        logged = ((log, k, self.pins(self.by_member[case, draw], self.stories[i])) for _, log, members in folder.logs() for k, (i, case, draw) in enumerate(members))
        told = rows[(rows.metric == "rounds") & (rows.case != FULL)].groupby("ask").value.unique().map(lambda v: sorted(map(int, v))).to_dict()
        return [audit_check(logged, first.at + len(first.query) - 1), rounds_check(told), *self._ends(rows, asks)]

    def _ends(self, rows, asks: Sequence[str]) -> list:
        applies = self.config.model != "tiny"  # a random model recalls nothing
        found = [wide(rows, "logp", ask) for ask in asks]
        apart = [stats.difference(x[KEPT], x[DELETED], self.config.seed) for x in found]
        told = ", ".join(f"{d.text()} at {ask}" for d, ask in zip(apart, asks))
        out = [far_check(min(d.value for d in apart), told, len(found[0]), applies)]
        if FULL in found[0]:
            below, got = stats.difference(found[0][KEPT], found[0][FULL], self.config.seed), wide(rows, "retrieved", asks[0])[FULL].mean()
            able = got >= ABLE  # else the rest of the cache may be worth more than the fact
            told = f"kept - full = {below.text()}" + ("" if able else f" (not judged: the full cache itself retrieves {got:.2f})")
            out.insert(0, near_check(below.value, told, len(found[0]), applies and bool(able)))
        return out
