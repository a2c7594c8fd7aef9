"""What probes share that choose which sites keep a planted fact: settings, scripts, conditions as rules about spans, checks, tables.

A session is a `Comparing` whose arms are conditions (`Case`): everything up to the first round is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import arms, keeplog, metrics, needles, planting, registry, stats
from kvprobe.comparing import COMMON, NEVER, Ask, Comparing, Story, answer_rows, eviction_seed
from kvprobe.pins import SpanPin
from kvprobe.types import watches

if TYPE_CHECKING:
    import pandas as pd

KEPT, DELETED, FULL = "kept", "deleted", "full"
"""The endpoints, and the cache that evicts nothing: cases of every such probe."""
NATS_APART, NATS_BELOW = 3.0, 0.5
"""Least distance between the endpoints, and how far the fact kept everywhere may fall below the full cache, in mean log p [nats]."""
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


@dataclass(frozen=True)
class Wording:
    """What is said and asked; {var}, {x} and {y} are the variable and its two values. apart: between the starts of the boxes [tokens]."""

    boxes: tuple[str, ...] = (needles.FACT.replace("{value}", "{x}"),)
    query: str = needles.QUERY
    answer: str = "{x}"
    apart: int = 0


ONE = Wording()
SPANS = ("x", "y")
"""Names of the boxes' spans; "x value" is the span of the value's tokens in box x, "x answer" where they stand after the last question."""


def stories(config: HEADS, tokenizer, wording: Wording = ONE) -> list[Story]:
    """Stub, filler, the boxes, filler up to the last question. Raises ValueError for boxes that the first round could not take."""
    filler, head, plan = needles.Filler(config.filler, tokenizer), needles.stub(tokenizer), config.plan
    first, last = len(head) + config.pre, planting.first_candidates(plan)
    stop = first + (len(wording.boxes) - 1) * wording.apart + config.box
    if stop > last:
        raise ValueError(f"the last box ends at {stop}: only positions below {last} are candidates from the first round on")
    asked = planting.asked_after(plan, planting.rounds_of(config.rounds)[0], config.query)
    if asked < stop:
        raise ValueError(f"the first question comes after {asked} tokens, before the last box has ended at {stop}: ask later")
    numbers = planting.values(config.seed, 5, 2 * config.instances)
    found = [_story(config, tokenizer, filler, head, first, wording, i, {"x": numbers[i], "y": numbers[-1 - i]}) for i in range(config.instances)]
    if len({(len(s.asks[0].value), *s.spans.values()) for s in found}) > 1:
        raise ValueError("the values take different numbers of tokens: instances could not be compared")
    return found


def _story(config: HEADS, tokenizer, filler, head, first: int, wording: Wording, i: int, numbers: dict) -> Story:
    words = dict(var=needles.VARIABLES[i % len(needles.VARIABLES)], **numbers)
    forbidden = (words["var"], words["var"] + "2", *numbers.values(), "passcode")
    marks, inside = [], {}
    for k, (name, text) in enumerate(zip(SPANS, wording.boxes)):
        ids, (a, z) = needles.locate(tokenizer, text.format(**words), numbers[name])
        start = first + k * wording.apart
        marks.append(planting.Mark(name, start, planting.filled(filler, ids, config.box, forbidden, np.random.default_rng([config.seed, 7, i, k]))))
        inside[f"{name} value"] = (start + a, start + z)
    answer = wording.answer.format(**words)
    asked, span = needles.locate(tokenizer, wording.query.format(**words) + answer, answer)
    query = planting.filled(filler, asked[: span[0]], config.query, forbidden, np.random.default_rng([config.seed, 8, i]), front=True)
    asks = tuple(Ask(f"{n} rounds", planting.asked_after(config.plan, n, config.query), query, asked[span[0] :]) for n in planting.rounds_of(config.rounds))
    for name, _ in zip(SPANS, wording.boxes):
        a, z = needles.locate(tokenizer, wording.query.format(**words) + answer, numbers[name])[1]
        behind = asks[-1].at + config.query - span[0]
        inside[f"{name} answer"] = (behind + a, behind + z)
    ids, spans = planting.write(filler, head, marks, asks[-1].at, forbidden, np.random.default_rng([config.seed, 6, i]))
    facts = ", ".join(f"{words['var']}{'' if name == 'x' else '2'} = {numbers[name]}" for name, _ in zip(SPANS, wording.boxes))
    return Story(i, ids, len(head), asks, spans | inside, facts)


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


# -- checks of the instrument -------------------------------------------------------------------------------------------


def audit_check(logged: Iterable, before: int):
    """Whether logs show the spans in exactly the named sites. logged: (log, row, pins); before: the position of the token whose logits
    give the first value that is asked for, by which banned spans must be gone."""
    from kvprobe.runner import Check

    wrong, count, last = [], 0, 0
    for log, k, pins in logged:
        wrong += keeplog.audit(log, k, pins)
        gone = [round_ for pin in pins for round_ in keeplog.gone_by(log, k, pin).values()]
        last, count = max([last, *(g + 1 for g in gone)]), count + log.rounds(k)
        if any(g >= log.rounds(k, before=before) for g in gone):
            wrong.append(f"row {k}: the banned box was not gone before the value was asked for")
    told = f"{len(wrong)} breaches in {count} row-rounds" + (f", first: {wrong[0]}" if wrong else f"; banned boxes gone by round {last}")
    return Check("audit: the log shows the box in exactly the named sites at every round", not wrong, told, "no breach")


def rounds_check(told: Mapping[str, list[int]]):
    """told: per question, named after its rounds, the counts that the keep logs gave."""
    from kvprobe.runner import Check

    return Check("rounds before the value, counted from the keep log, are those asked for", all(v == [int(k.split()[0])] for k, v in told.items()), str(dict(told)), "as named")


def near_check(value: float, told: str, n: int, applies: bool, least: float = NATS_BELOW):
    """value: kept - full, in mean log p [nats]."""
    from kvprobe.runner import Check

    return Check("the fact kept everywhere under eviction is worth about the full cache", value >= -least if applies else None, f"{told} nats, n={n}", f">= {-least:g} nats")


def far_check(value: float, told: str, n: int, applies: bool, least: float = NATS_APART):
    """value: kept - deleted, in mean log p [nats], the least of several."""
    from kvprobe.runner import Check

    return Check("the endpoints kept and deleted are far apart", value >= least if applies else None, f"{told} nats, n={n}", f">= {least:g} nats")


# -- tables -------------------------------------------------------------------------------------------------------------

COLUMNS = ("retrieval", "R", "logp")


def wide(rows: pd.DataFrame, metric: str, ask: str | None = None) -> pd.DataFrame:
    """One row per instance, one column per case, the mean over eviction seeds; of one question where `ask` names it."""
    part = rows[(rows.metric == metric) & (True if ask is None else rows.ask == ask)]
    return part.pivot_table(index="instance", columns="case", values="value", aggfunc="mean").sort_index()


def summarise(rows: pd.DataFrame, groups: Mapping[str, Sequence[str]], seed: int, ask: str | None = None) -> pd.DataFrame:
    """Per group of cases: n, retrieval, recall R and log p [nats], each with its 95 % interval over instances as columns.

    The cases of a group are averaged within each instance first. R lies between the endpoints of the same question.
    """
    import pandas as pd

    logp, got = wide(rows, "logp", ask), wide(rows, "retrieved", ask)
    out = []
    for name, members in groups.items():
        mine = logp[list(members)].mean(axis=1)
        found = dict(retrieval=stats.mean(got[list(members)].mean(axis=1), seed), R=metrics.recall_gain(mine, logp[DELETED], logp[KEPT], seed), logp=stats.mean(mine, seed))
        out.append(dict(name=name, cases=len(members), n=len(logp)) | flat(found))
    return pd.DataFrame(out)


def flat(found: Mapping[str, stats.Estimate]) -> dict:
    """Estimates as columns key, key_low, key_high; nan where there is no value."""
    def number(x):
        return np.nan if x is None else float(x)

    return {column: number(v) for key, e in found.items() for column, v in ((key, e.value), (f"{key}_low", e.low), (f"{key}_high", e.high))}


def told(row: Mapping, key: str, digits: int = 2) -> str:
    """A value of a table's row and its interval as text, "n/a" without a value."""
    parts = [None if np.isnan(row[k]) else float(row[k]) for k in (key, f"{key}_low", f"{key}_high")]
    return stats.Estimate(*parts, n=0).text(digits)


def printed(table: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """A table as printed: columns[column of the table] is what it is called; numbers with an interval become text."""
    import pandas as pd

    return pd.DataFrame({title: [told(r, key) for _, r in table.iterrows()] if f"{key}_low" in table else table[key] for key, title in columns.items()})
