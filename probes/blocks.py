"""Planted-fact recall when the history goes in contiguous blocks (Random Attention Fig. 3c, here on forced scripts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import metrics, needles, stats
from kvprobe.arms import Arm
from kvprobe.comparing import COMMON, Ask, Comparing, Story, answer_rows
from kvprobe.registry import make_policy
from kvprobe.types import Plan

if TYPE_CHECKING:
    import pandas as pd

ENDS = ("kept", "deleted")


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the blocks probe; `policies` and `keep` are set by `blocks` and `keeps`."""

    policies: str = "random"
    """always random: its block is what is varied"""
    blocks: str = "1,4,16,64"
    """sizes of the contiguous blocks that are evicted [tokens]"""
    keeps: str = "256,128"
    """entries per KV head that survive a round, one run each (K)"""
    instances: int = 24
    """scripts, each with its own filler, names and values"""
    pre: int = 112
    """filler between stub and box [tokens]"""
    age: int = 256
    """from the start of the box to the start of the value [tokens]"""
    query: int = 40
    """room of the query, filled up with filler in front [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep != CONFIG.keep:
            raise ValueError(f"keep={self.keep}: the blocks probe runs at several budgets, name them with keeps")
        if self.policies != "random" or self.protection != "without":
            raise ValueError("the blocks probe compares random eviction with itself: policies=random, protection=without")
        for keep in self.numbers("keeps"):
            Plan(keep, self.buffer)
            for block in self.numbers("blocks"):
                make_policy("random", dict(block=block))
                if block > keep:
                    raise ValueError(f"block={block} is larger than keep={keep}: no head could hold one block")
        self.layout

    def numbers(self, name: str) -> tuple[int, ...]:
        """The field as whole numbers."""
        parts = [p.strip() for p in getattr(self, name).split(",")]
        if not all(p.isdigit() and int(p) for p in parts):
            raise ValueError(f"{name}={getattr(self, name)!r} must be whole numbers from 1 on, e.g. 1,4,16")
        return tuple(dict.fromkeys(map(int, parts)))

    @property
    def layout(self) -> needles.Layout:
        return needles.Layout(pre=self.pre, age=self.age, query=self.query, second_box=False)


PRESETS = {
    "smoke": CONFIG(model="tiny", keeps="64,32", blocks="1,8", buffer=8, instances=4, batch_size=2, pre=40, age=128, query=60, eviction_seeds=2, threads=1),
    "demo": CONFIG(batch_size=12, threads=1),
    "paper": CONFIG(keeps="1024,512", blocks="1,4,16,64,256", buffer=64, pre=448, age=1536, instances=100),
}


@dataclass(frozen=True)
class BlockArm(Arm):
    """Random eviction by blocks at one K; end: kept or deleted for the endpoints of that K."""

    keep: int = 0
    block: int = 1
    end: str = ""

    @property
    def label(self) -> str:
        return f"K={self.keep}, " + (self.end or f"block {self.block}")


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    filler = needles.Filler(config.filler, model.tokenizer)
    scripts = needles.build(model.tokenizer, filler, config.layout, range(config.instances), config.seed)
    return Session(config, model, [story(s, config.query) for s in scripts])


def story(script: needles.Script, query: int) -> Story:
    """A script of the planted-fact probe as a story with one question."""
    a, z = script.answer
    ask = Ask("value", a - query, script.ids[a - query : a], script.ids[a:z])
    return Story(script.instance, script.ids[: a - query], script.stub, (ask,), {"box": script.box}, f"{script.variable} = {script.value}")


class Session(Comparing):
    """Arms differ in block and K; each K has its own endpoints and its own shared prefix."""

    def __init__(self, config: CONFIG, model, stories):
        def arm(keep, block, end, draw):
            return BlockArm(f"random(block={block})", make_policy("random", dict(block=block)), False, draw, keep, block, end)

        arms = [arm(keep, block, end, draw) for keep in config.numbers("keeps") for end, blocks in [("", config.numbers("blocks")), ("kept", (1,)), ("deleted", (1,))]
                for block in blocks for draw in range(1 if end else config.eviction_seeds)]
        for keep in config.numbers("keeps"):
            self.plan = Plan(keep, config.buffer)
            super().__init__(config, model, stories, arms)
        self._at(arms[0].keep)

    def _check(self) -> None:
        for keep in self.config.numbers("keeps"):
            self._at(keep)
            super()._check()

    def _at(self, keep: int) -> None:
        if self.plan.keep != keep:
            self.plan, self._prefix = Plan(keep, self.config.buffer), None

    def compute(self, batch, rows, tick):
        self._at(self.batches[batch][0].keep)
        return super().compute(batch, rows, tick)

    def facts(self) -> dict:
        return super().facts() | {"plan": {"keep": self.config.keeps, "buffer": self.config.buffer}}

    def base(self, arm: BlockArm, story: Story) -> dict:
        return super().base(arm, story) | dict(keep=arm.keep, block=arm.block, end=arm.end)

    def pins(self, arm: BlockArm, story: Story) -> tuple:
        from kvprobe.pins import SpanPin

        sites = {"kept": None, "deleted": frozenset()}
        return (SpanPin(*story.spans["box"], sites=sites[arm.end], elsewhere="ban"),) if arm.end else ()

    def rows_of(self, arm: BlockArm, story: Story, k: int, log, answers) -> list[dict]:
        return answer_rows(story, k, answers[0])

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        told = {int(k): sorted(map(int, v)) for k, v in rows[rows.metric == "rounds"].groupby("keep").value.unique().items()}
        title = f"blocks, {self.model.name}, r={self.config.buffer}, {'; '.join(f'K={k}: {v} rounds before the value' for k, v in told.items())}, n={len(self.stories)}"
        far = [stats.difference(_logp(rows, keep, "kept"), _logp(rows, keep, "deleted"), self.config.seed).value for keep in told]
        check = Check("the endpoints kept and deleted are far apart", min(far) >= 3 if self.config.model != "tiny" else None, f"least {min(far):.2f} nats", ">= 3 nats")
        return Report(title, table, table.to_string(index=False), [check], {"title": title, "rounds_before_value": told})


def _logp(rows: pd.DataFrame, keep: int, end: str, block: int = 1) -> np.ndarray:
    part = rows[(rows.metric == "logp") & (rows.keep == keep) & (rows.end == end) & (rows.block == block)]
    return part.groupby("instance").value.mean().sort_index().to_numpy()


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per K and block: blocks per head, recall R between that K's endpoints, retrieval and log p with intervals, spread over eviction seeds."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for (keep, block), part in rows[rows.end == ""].groupby(["keep", "block"], sort=False):
        mine, kept, deleted = _logp(rows, keep, "", block), _logp(rows, keep, "kept"), _logp(rows, keep, "deleted")
        r = metrics.recall_gain(mine, deleted, kept, seed)
        got = stats.mean(part[part.metric == "retrieved"].groupby("instance").value.mean().to_numpy(), seed)
        spread = part[part.metric == "logp"].groupby("draw").value.mean()
        out.append(dict(keep=keep, block=block, blocks_per_head=keep / block, n=len(mine), R=r.value, R_low=r.low, R_high=r.high, retrieval=got.value, retrieval_low=got.low,
                        retrieval_high=got.high, logp=mine.mean(), kept=kept.mean(), deleted=deleted.mean(), seed_sd=spread.std(ddof=1) if len(spread) > 1 else None))
    return pd.DataFrame(out).astype(dict.fromkeys(("R", "R_low", "R_high"), float))  # None, where nothing was there to be recalled, is nan


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, key):
        return stats.Estimate(*(None if pd.isna(v) else float(v) for v in (r[key], r[f"{key}_low"], r[f"{key}_high"])), r["n"]).text()

    s = summary(rows, manifest)
    return pd.DataFrame([{"K": int(r.keep), "block": int(r.block), "blocks per head": f"{r.blocks_per_head:g}", "n": int(r.n), "recall R [95 %]": text(r, "R"), "retrieval [95 %]": text(r, "retrieval"),
                          "log p (kept, deleted) [nats]": f"{r.logp:.2f} ({r.kept:.2f}, {r.deleted:.2f})", "seed sd of log p": "-" if pd.isna(r.seed_sd) else f"{r.seed_sd:.2f}"} for _, r in s.iterrows()])
