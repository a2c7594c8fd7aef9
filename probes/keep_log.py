"""What each policy keeps, for how long and in how many heads (Random Attention app. D, Fig. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import needles, retention, stats
from kvprobe.arms import Arm
from kvprobe.comparing import COMMON, Comparing, Story

if TYPE_CHECKING:
    import pandas as pd

METRICS = {"slot_coverage": "slot coverage", "position_coverage": "position coverage", "decorrelation": "decorrelation", "prompt_union": "prompt held, any head",
           "prompt_head": "prompt held, per head"}
"""Means over all rounds of a run; the prompt's share after the last round is in the protection probe."""
BANDS = 16
"""Age bands of equal width up to the oldest."""


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the keep-log probe."""

    policies: str = "random,random(shared=True),recency,streaming_llm,h2o,snapkv,rkv,rkv_accumulated,rkv_released,vase,triattention"
    """policies compared: names, with options in brackets, e.g. random,random(shared=True),rkv(lam=0.1); all means every installed one"""
    protection: str = "both"
    """whether the prompt is pinned: with, without, or both"""
    rounds: int = 57
    """rounds of every script: its length is keep + 2 * buffer + (rounds - 1) * buffer tokens"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")

    @property
    def length(self) -> int:
        """Tokens of a script."""
        return self.plan.fires_at + (self.rounds - 1) * self.buffer


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=48, buffer=8, rounds=6, instances=4, batch_size=2, policies="random,random(shared=True),recency,h2o,vase,triattention", threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=960, buffer=64, rounds=57, instances=16, policies="random,random(shared=True),recency,streaming_llm,h2o,snapkv,rkv,rkv_accumulated,rkv_engine,rkv_released,vase,triattention"),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: scripts need one")
    return Session(config, model, stories(config, model.tokenizer))


def stories(config: CONFIG, tokenizer) -> list[Story]:
    """A stub as the prompt and reasoning text as the body."""
    filler, head = needles.Filler(config.filler, tokenizer), needles.stub(tokenizer)
    if config.length <= len(head):
        raise ValueError(f"scripts of {config.length} tokens leave no body after the prompt of {len(head)}")
    texts = [filler.passage(config.length - len(head), (), np.random.default_rng([config.seed, 2, i])) for i in range(config.instances)]
    return [Story(i, np.concatenate([head, text]), len(head)) for i, text in enumerate(texts)]


class Session(Comparing):
    """Keep logs of every arm. Policies that read positions and draws only are not run through the model: their logs are the same without."""

    def __init__(self, config: CONFIG, model, stories):
        from kvprobe import arms

        made = arms.make(arms.split(config.policies), config.protection, config.eviction_seeds, model, full=False)
        super().__init__(config, model, stories, made)

    def simulates(self, arm: Arm) -> bool:
        return not arm.policy.needs.states

    def rows_of(self, arm: Arm, story: Story, k: int, log, answers) -> list[dict]:
        found = retention.coverage(log, k)
        union, head = retention.prompt_survival(log, k, story.prompt)
        values = {"slot_coverage": found.slots, "position_coverage": found.positions, "decorrelation": found.decorrelation,
                  "prompt_union": float(union.mean()), "prompt_head": float(head.mean()), "rounds": float(log.rounds(k))}
        rows = [dict(metric=name, low=None, high=None, value=value, unit="rounds" if name == "rounds" else "fraction") for name, value in values.items()]
        sums = retention.ages(log, k, story.prompt, story.prompt if arm.protect else 0)
        for low, high in bands(log.fired[k][-1] - story.prompt):
            rows += [dict(metric=f"age_{name}", low=low, high=high, value=value, unit="fraction") for name, value in retention.band(sums, low, high).items()]
        return rows

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        rounds = sorted({int(x) for x in rows[rows.metric == "rounds"].value})
        title = f"keep log, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {'/'.join(map(str, rounds))} rounds, prompt of {self.stories[0].prompt} tokens, n={len(self.stories)}"
        return Report(title, table, table.to_string(index=False), self._checks(rows, folder), {"title": title, "rounds": rounds})

    def _checks(self, rows, folder):
        from kvprobe import keeplog
        from kvprobe.runner import Check

        by_label = {(a.label, a.draw): a for a in self.arms}
        wrong, uneven = [], 0
        for _, log, members in folder.logs():
            for k, (instance, label, draw) in enumerate(members):
                wrong += keeplog.audit(log, k, self.pins(by_label[label, draw], self.stories[instance]), self.stories[instance].prompt)
                last = log.rounds(k) - 1
                uneven += int((log.held(k, last).sum(-1) != self.plan.keep + self.plan.buffer).sum())
        checks = [Check("equal budgets: every head of every arm holds K + r entries after its last round", not uneven, f"{uneven} sites differ", "0"),
                  Check("audit: protected prompts are held at every round", not wrong, f"{len(wrong)} breaches" + (f", first: {wrong[0]}" if wrong else ""), "no breach")]
        uniform = rows[(rows.policy == "random") & rows.metric.isin(["age_head", "age_uniform"])]
        if len(uniform):
            wide = uniform.pivot_table(index=["protect", "draw", "instance", "low"], columns="metric", values="value")
            per = (wide.age_head - wide.age_uniform).groupby("instance").mean()
            far = stats.mean(per.to_numpy(), self.config.seed)
            checks.append(Check("random eviction follows its closed form", abs(far.value) < 0.01, f"mean difference over age bands {far.text(4)}", "within 0.01"))
        return checks


def bands(oldest: int) -> list[tuple[int, int]]:
    """Half-open age bands; the last one holds the oldest positions, which were candidates from the first round on."""
    edges = np.unique(np.linspace(0, oldest, BANDS + 1).round().astype(int))
    edges[-1] += 1
    return [(int(a), int(z)) for a, z in zip(edges, edges[1:])]


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per policy, protection and metric (age bands apart): mean over instances and eviction seeds with its interval, and the spread over seeds."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for (policy, protect, metric, low, high), part in rows.groupby(["policy", "protect", "metric", "low", "high"], dropna=False, sort=False):
        e = stats.mean(part.groupby("instance").value.mean().to_numpy(), seed)
        by_draw = part.groupby("draw").value.mean()
        out.append(dict(policy=policy, protect=protect, metric=metric, low=low, high=high, value=e.value, ci_low=e.low, ci_high=e.high, n=e.n,
                        seed_sd=by_draw.std(ddof=1) if len(by_draw) > 1 else None, seeds=len(by_draw)))
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: one line per arm; the last two columns are the oldest age band."""
    import pandas as pd

    s = summary(rows, manifest)
    oldest = s[s.metric == "age_head"].low.max()
    lines = []
    for (policy, protect), part in s.groupby(["policy", "protect"], sort=False):
        plain = part.set_index("metric")
        line = {"policy": policy, "prompt": "pinned" if protect else "-"}
        line |= {label: f"{plain.loc[name, 'value']:.3f}" for name, label in METRICS.items()}
        old = part[part.low == oldest].set_index("metric")
        for name, label in (("age_head", "oldest, per head [95 %]"), ("age_union", "oldest, any head [95 %]")):
            line[label] = stats.Estimate(old.loc[name, "value"], old.loc[name, "ci_low"], old.loc[name, "ci_high"], 0).text(3)
        line["seed sd"] = "-" if pd.isna(old.loc["age_head", "seed_sd"]) else f"{old.loc['age_head', 'seed_sd']:.3f}"
        lines.append(line)
    return pd.DataFrame(lines)
