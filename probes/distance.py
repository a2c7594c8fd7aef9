"""Recall of a fact by its distance in rounds, stated once or restated (Random Attention sec. 5.2 and 5.3: what the text restates need not be kept)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import metrics, needles, planting, stats
from kvprobe.arms import Arm, make, split
from kvprobe.comparing import COMMON, Ask, Comparing, Story, answer_rows, script_facts

if TYPE_CHECKING:
    import pandas as pd

FACTORS = ("once", "verbatim", "derived")
DERIVED = "\nSo {var}2 = {value}.\n"
ENDS = ("kept", "deleted")


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the distance probe."""

    policies: str = "random,random(shared=True),h2o,rkv,vase,keydiff"
    """policies compared: names, with options in brackets, e.g. random,random(shared=True),rkv(lam=0.1); all means every installed one"""
    rounds: str = "3,15,39,57"
    """rounds before the value at which the question is branched off one run"""
    factors: str = "once,verbatim,derived"
    """how the fact is stated: once, restated verbatim once, or restated once as another variable's value"""
    pre: int = 112
    """filler before the fact [tokens]"""
    apart: int = 48
    """from the fact's box to the restatement's [tokens]"""
    box: int = 16
    """room of each statement, filled up with filler [tokens]"""
    query: int = 40
    """room of the query, filled up with filler in front [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        planting.rounds_of(self.rounds)
        if self.protection == "both":
            raise ValueError("protection=both: this probe compares distances, run it once with and once without")
        unknown = [f for f in self.stated if f not in FACTORS]
        if unknown or not self.stated:
            raise ValueError(f"factors={self.factors!r}: known are {', '.join(FACTORS)}")
        if self.apart < self.box:
            raise ValueError(f"apart={self.apart} must be at least box={self.box}")
        first, statements = planting.rounds_of(self.rounds)[0], 1 if set(self.stated) == {"once"} else 2
        if first * self.buffer < statements * self.box:
            raise ValueError(f"rounds={self.rounds!r}: {first} rounds of {self.buffer} cannot delete the {statements} boxes of {self.box} tokens that the deleted endpoint loses: ask later")

    @property
    def stated(self) -> tuple[str, ...]:
        return tuple(f.strip() for f in self.factors.split(",") if f.strip())


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=160, buffer=48, rounds="1,2", instances=2, batch_size=2, pre=8, apart=32, query=64, policies="random,h2o", eviction_seeds=2, threads=1, box=24),
    "demo": CONFIG(policies="random,h2o,rkv,vase,keydiff", query=24, threads=1),  # the shared draw would take it beyond a quarter of an hour
    "paper": CONFIG(keep=1024, buffer=64, pre=448, instances=100),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model, [stories(config, model.tokenizer, factor) for factor in config.stated])


def stories(config: CONFIG, tokenizer, factor: str) -> list[Story]:
    """Stub, filler, the fact's box, perhaps a restatement's, filler up to the last question. All factors share filler, names and values."""
    filler, head = needles.Filler(config.filler, tokenizer), needles.stub(tokenizer)
    first, plan, out = len(head) + config.pre, config.plan, []
    for i, value in enumerate(planting.values(config.seed, 5, config.instances)):
        var = needles.VARIABLES[i % len(needles.VARIABLES)]
        rng = np.random.default_rng([config.seed, 6, i])
        said = [needles.FACT] + {"once": [], "verbatim": [needles.FACT], "derived": [DERIVED]}[factor]
        boxes = [planting.filled(filler, needles.encode(tokenizer, text.format(var=var, value=value)), config.box, (var, value), np.random.default_rng([config.seed, 7, i, k]))
                 for k, text in enumerate(said)]
        marks = [planting.Mark(f"box{k}", first + k * config.apart, ids, over=k > 0) for k, ids in enumerate(boxes)]
        if marks[-1].start + config.box > planting.first_candidates(plan):
            raise ValueError(f"a statement ends at {marks[-1].start + config.box}: only positions below {planting.first_candidates(plan)} are candidates from the first round on")
        asked, answer = needles.locate(tokenizer, needles.QUERY.format(var=var) + value, value)
        query = planting.filled(filler, asked[: answer[0]], config.query, (var, value), np.random.default_rng([config.seed, 8, i]), front=True)
        asks = tuple(Ask(f"{n} rounds", planting.asked_after(plan, n, config.query), query, asked[answer[0] :]) for n in planting.rounds_of(config.rounds))
        if asks[0].at < marks[-1].start + config.box:
            raise ValueError(f"the first question comes after {asks[0].at} tokens, before the last statement has ended")
        ids, spans = planting.write(filler, head, marks, asks[-1].at, (var, var + "2", value, "passcode"), rng)
        out.append(Story(i, ids, len(head), asks, spans, f"{var} = {value}"))
    return out


@dataclass(frozen=True)
class FactorArm(Arm):
    """An arm on the stories of one factor; end: kept or deleted for the endpoints."""

    factor: str = "once"
    end: str = ""

    @property
    def label(self) -> str:
        return f"{super().label}, {self.factor}" + (f", {self.end}" if self.end else "")


class Session(Comparing):
    """Every arm runs on every factor; the endpoints hold or ban all statements in all sites under the random policy."""

    def __init__(self, config: CONFIG, model, by_factor: list[list[Story]]):
        self.by_factor = dict(zip(config.stated, by_factor))
        plain = make(split(config.policies), config.protection, config.eviction_seeds, model, full=False)
        ends = make(["random"], config.protection, 1, model, full=False)
        arms = [FactorArm(**vars(a), factor=f, end=e) for f in config.stated for e, some in [("", plain), *((end, ends) for end in ENDS)] for a in some]
        for some in by_factor:  # each factor's scripts are checked like any probe's
            super().__init__(config, model, some, arms)
        cuts = [range(i, min(i + config.batch_size, config.instances)) for i in range(0, config.instances, config.batch_size)]
        self.batches = [(a, cut) for cut in cuts for a in arms]

    def compute(self, batch, rows, tick):
        arm = self.batches[batch][0]
        if self.stories is not self.by_factor[arm.factor]:
            self.stories, self._prefix = self.by_factor[arm.factor], None
        return super().compute(batch, rows, tick)

    def facts(self) -> dict:
        return super().facts() | {"factors": {factor: script_facts(stories) for factor, stories in self.by_factor.items()}}

    def base(self, arm: Arm, story: Story) -> dict:
        return super().base(arm, story) | dict(factor=arm.factor, end=arm.end)

    def pins(self, arm: Arm, story: Story) -> tuple:
        from kvprobe.pins import SpanPin

        sites = {"kept": None, "deleted": frozenset()}
        spans = [span for name, span in story.spans.items() if name.startswith("box")]
        return super().pins(arm, story) + tuple(SpanPin(*span, sites=sites[arm.end], elsewhere="ban") for span in spans if arm.end)

    def rows_of(self, arm: Arm, story: Story, k: int, log, answers) -> list[dict]:
        return [row for answer in answers for row in answer_rows(story, k, answer)]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        title = f"distance, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, n={self.config.instances}"
        s = summary(rows, folder.manifest)
        told = rows[rows.metric == "rounds"].groupby("ask").value.unique().map(lambda v: sorted(map(int, v))).to_dict()
        far = [stats.difference(*(_logp(rows, f, a, end=e) for e in ENDS), self.config.seed) for f in self.config.stated for a in told]
        checks = [Check("rounds before the value, counted from the keep log, are those asked for", all(v == [int(k.split()[0])] for k, v in told.items()), str(told), "as named"),
                  Check("the endpoints kept and deleted are far apart", min(d.value for d in far) >= 3 if self.config.model != "tiny" else None, f"least {min(d.value for d in far):.2f} nats over factors and distances", ">= 3 nats")]
        return Report(title, table, table.to_string(index=False), checks, {"title": title, "undefined": int(s.R.isna().sum())})


def _logp(rows: pd.DataFrame, factor: str, ask: str, policy: str = "random", end: str = "") -> np.ndarray:
    part = rows[(rows.metric == "logp") & (rows.factor == factor) & (rows.ask == ask) & (rows.policy == policy) & (rows.end == end)]
    return part.groupby("instance").value.mean().sort_index().to_numpy()


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per factor, policy and distance: recall R between the endpoints of the same distance, retrieval and log p with intervals, spread over eviction seeds."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for (factor, policy, ask), part in rows[rows.end == ""].groupby(["factor", "policy", "ask"], sort=False):
        kept, deleted = (_logp(rows, factor, ask, end=e) for e in ENDS)
        mine = _logp(rows, factor, ask, policy)
        r = metrics.recall_gain(mine, deleted, kept, seed)
        got = stats.mean(part[part.metric == "retrieved"].groupby("instance").value.mean().to_numpy(), seed)
        spread = part[part.metric == "logp"].groupby("draw").value.mean()
        out.append(dict(factor=factor, policy=policy, rounds=int(ask.split()[0]), n=len(mine), R=r.value, R_low=r.low, R_high=r.high, retrieval=got.value,
                        retrieval_low=got.low, retrieval_high=got.high, logp=mine.mean(), kept=kept.mean(), deleted=deleted.mean(),
                        seed_sd=spread.std(ddof=1) if len(spread) > 1 else None))
    return pd.DataFrame(out).astype(dict.fromkeys(("R", "R_low", "R_high"), float))  # None, where nothing was there to be recalled, is nan


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, key):
        return stats.Estimate(*(None if pd.isna(v) else float(v) for v in (r[key], r[f"{key}_low"], r[f"{key}_high"])), r["n"]).text()

    s = summary(rows, manifest)
    return pd.DataFrame([{"stated": r.factor, "policy": r.policy, "rounds": int(r["rounds"]), "n": int(r.n), "recall R [95 %]": text(r, "R"), "retrieval [95 %]": text(r, "retrieval"),
                          "log p (kept, deleted) [nats]": f"{r.logp:.2f} ({r.kept:.2f}, {r.deleted:.2f})", "seed sd of log p": "-" if pd.isna(r.seed_sd) else f"{r.seed_sd:.2f}"} for _, r in s.iterrows()])
