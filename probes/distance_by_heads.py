"""Recall of a planted fact by the KV heads that hold it and by its distance in rounds (Random Attention sec. 5.2, app. B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import conditions, head_sets, head_stories, head_tables, metrics, stats
from kvprobe.head_sets import HEADS, HeadSets, Hold
from kvprobe.head_tables import DELETED, FULL, KEPT

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the distance-by-heads probe."""

    rounds: str = "3,15,39,57"
    """rounds before the value at which the question is branched off one run"""
    sets: str = "subsets"
    """sets of KV heads that hold the fact: numbers joined by + (0,1+2), natural, singles, pairs, triples, subsets; kept and deleted always run"""
    layers: str = "all"
    """layers of those heads, e.g. 0-9 or 3,5; in the others the fact is banned"""
    full: bool = False
    """also ask the cache that evicts nothing, at every distance"""
    instances: int = 8
    """planted facts, each with its own filler, variable and value"""
    eviction_seeds: int = 3
    """fresh eviction seeds under which everything is repeated, the endpoints too"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sets.replace(",", " ").split():
            raise ValueError(f"sets={self.sets!r} names no set of KV heads; write numbers joined by +, e.g. 0,1+2, or natural, singles, pairs, triples, subsets")
        if "best-" in self.sets:
            raise ValueError(f"sets={self.sets!r}: this probe ranks nothing, name the sets (planted_fact finds the best ones)")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=96, buffer=48, rounds="1,2", instances=2, batch_size=2, eviction_seeds=2, pre=8, query=64, box=24, threads=1),
    # the two heads that are worth little alone, the pair of them, and the strong head: all seven sets would take a quarter of an hour
    "demo": CONFIG(sets="1,2,0+1", rows_per_batch=40, threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, query=40, instances=100, full=True),
}


def rules(config: CONFIG, geometry) -> dict[str, tuple[Hold, ...]]:
    """The sets named, by name; "natural" holds nothing and bans nothing."""
    found, _ = conditions.parse(config.sets, geometry, config.layers)
    return {c.name: () if c.sites is None else (Hold(c.sites),) for c in found if c.evicts and c.name not in (KEPT, DELETED)}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    found = head_sets.cases(config, model, rules(config, model.geometry), full=config.full)
    return Session(config, model, head_stories.stories(config, model.tokenizer), found)


class Session(HeadSets):
    """Every set at every distance, branched off one run."""

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"distance by heads, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, n={self.config.instances}, {self.config.eviction_seeds} eviction seeds"
        return Report(title, table, table.to_string(index=False), self.checks(rows, folder), {"title": title})


def seed_spread(rows: pd.DataFrame, case: str, ask: str) -> float:
    """Standard deviation (ddof 1) over eviction seeds of R, each seed's between its own endpoints; nan with one seed.

    R of a seed s is sum_i(LP_is - LP_is^deleted) / sum_i(LP_is^kept - LP_is^deleted). Worked example: R = .2, .3, .4 under three
    seeds gives 0.1.
    """
    logp = rows[(rows.metric == "logp") & (rows.ask == ask)].groupby(["draw", "case"]).value.sum().unstack()
    found = (logp[case] - logp[DELETED]) / (logp[KEPT] - logp[DELETED])
    return float(np.std(found, ddof=1)) if len(found) > 1 else np.nan


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per set and distance: retrieval, recall R between the endpoints of that distance, log p [nats], spread of R over eviction seeds."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for ask in dict.fromkeys(rows.ask):
        names = list(dict.fromkeys(rows.case))
        found = head_tables.summarise(rows, {n: [n] for n in names}, seed, ask)
        found["seed_sd"] = [np.nan if n in (FULL, KEPT, DELETED) or np.isnan(r) else seed_spread(rows, n, ask) for n, r in zip(names, found.R)]
        out.append(found.assign(rounds=int(ask.split()[0])))
    table = pd.concat(out, ignore_index=True)
    table["heads"] = [{KEPT: "all (kept)", DELETED: "none (deleted)", FULL: "full cache"}.get(n, n) for n in table.name]
    return table


def trend(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """How each set's recall changes from the first distance to the last: R(last) - R(first), with its interval.

    Both are ratios of sums over the same instances, so instances are drawn for both at once; without a value where one of them has
    none. Worked example: R = .9 at 3 rounds and .6 at 57 gives -.3.
    """
    import pandas as pd

    asks = list(dict.fromkeys(rows.ask))
    first, last = head_tables.wide(rows, "logp", asks[0]), head_tables.wide(rows, "logp", asks[-1])

    def change(a, kept_a, low_a, b, kept_b, low_b, axis=-1):
        def r(x, kept, low):
            return (x - low).sum(axis=axis) / (kept - low).sum(axis=axis)
        return r(b, kept_b, low_b) - r(a, kept_a, low_a)

    seed, out = manifest["settings"]["seed"], []
    there = all(metrics.recall_gain(x[KEPT], x[DELETED], x[KEPT], seed).value is not None for x in (first, last))
    for name in [n for n in first if n not in (KEPT, DELETED, FULL)]:
        samples = [x[c].to_numpy() for x in (first, last) for c in (name, KEPT, DELETED)]
        found = stats.bootstrap(change, *samples, seed=seed) if there else stats.Estimate(None, None, None, len(first))
        out.append(dict(name=name, n=len(first)) | head_tables.flat({"R": found}))
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed, and each set's change in R from the first distance to the last."""
    import pandas as pd

    s = summary(rows, manifest)
    s["sd"] = ["-" if np.isnan(x) else f"{x:.2f}" for x in s.seed_sd]
    columns = {"heads": "heads that hold it", "rounds": "rounds", "n": "n", "retrieval": "retrieval [95 %]", "R": "recall R [95 %]", "sd": "seed sd of R", "logp": "mean log p, nats [95 %]"}
    table = head_tables.printed(s, columns)
    d = trend(rows, manifest)
    if len(d) and s["rounds"].nunique() > 1:
        d["heads"], d["rounds"] = d.name, f"{s['rounds'].min()} to {s['rounds'].max()}"
        change = head_tables.printed(d, {k: columns[k] for k in ("heads", "rounds", "n", "R")}).assign(**{"retrieval [95 %]": "change in R:"})
        table = pd.concat([table, change[[c for c in table if c in change]]], ignore_index=True).fillna("-")
    return table
