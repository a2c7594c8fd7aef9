"""Does spread or amount carry recall? Whole copies of a fact survive per head with stated marginal and correlation (after Random Attention sec. 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import draws as hashed
from kvprobe import head_sets, head_stories, head_tables, metrics, stats
from kvprobe.head_sets import HEADS, HeadSets, Hold
from kvprobe.head_tables import DELETED, KEPT

if TYPE_CHECKING:
    import pandas as pd

_SPANS = -3  # where eviction's draws have a layer, so that one seed may serve both


def fractions(name: str, text: str) -> list[float]:
    """ "0,0.5" -> [0.0, 0.5]. Raises ValueError for anything outside [0, 1]."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= x <= 1 for x in found):
        raise ValueError(f"{name}={text!r} must be numbers in 0..1, e.g. 0,0.5,1")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the correlation-dose probe."""

    marginals: str = "0.2,0.4,0.6"
    """probability that a head holds the fact, in every layer"""
    correlations: str = "0,0.5,1"
    """correlation of two heads' survivals: 0 each head for itself, 1 all heads or none"""
    survival_draws: int = 256
    """draws of the surviving heads per instance; one that gives the same heads again costs nothing"""

    def __post_init__(self) -> None:
        super().__post_init__()
        fractions("marginals", self.marginals), fractions("correlations", self.correlations)
        if self.survival_draws < 1:
            raise ValueError(f"survival_draws={self.survival_draws} must be at least 1")
        if len(self.rounds.split(",")) > 1:
            raise ValueError(f"rounds={self.rounds!r}: this probe asks once, name one number of rounds")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=96, buffer=48, rounds="1", instances=3, batch_size=3, pre=8, query=64, box=24, survival_draws=16, threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, rounds="15", query=40, instances=100, marginals="0.4"),
}


def survivors(seed: int, instances: Sequence[int], draws: int, heads: int, marginal: float, correlation: float) -> np.ndarray:
    """bool [i d h]: which heads hold the span of each instance i in each draw d, with the same answer in every layer.

    With probability `correlation` all heads take one common Bernoulli(marginal) variable, otherwise each takes its own. So each
    head survives with probability p = marginal, and the covariance of two heads is rho p + (1 - rho) p^2 - p^2 = rho p (1 - p):
    their correlation is rho = correlation exactly. Worked example: p = .4, rho = .5: both of two heads with probability
    .5 * .4 + .5 * .16 = .28, covariance .28 - .16 = .12 = .5 * .24. A draw depends on (seed, instance, draw, head) only, and
    marginals and correlations share their random numbers, so that contrasts between them are paired.
    """
    import torch

    keys = hashed.key(seed, torch.tensor(list(instances))[:, None], torch.tensor(_SPANS), torch.arange(draws))
    u = hashed.uniform(keys[..., None], torch.arange(2 + heads)).numpy()  # the coin, the common variable, each head's own
    return np.where(u[..., :1] < correlation, u[..., 1:2], u[..., 2:]) < marginal


def probability(held: int, heads: int, marginal: float, correlation: float) -> float:
    """Probability of one given set of `held` of `heads` heads: rho [all: p, none: 1 - p, else 0] + (1 - rho) p^held (1 - p)^(heads - held).

    Worked example: 3 heads, p = .4, rho = .5: none .5 * .6 + .5 * .216 = .408, all .5 * .4 + .5 * .064 = .232.
    """
    together = {0: 1 - marginal, heads: marginal}.get(held, 0.0)
    return correlation * together + (1 - correlation) * marginal**held * (1 - marginal) ** (heads - held)


def name(heads: Sequence[int], n_kv: int) -> str:
    """The case in which these heads hold the fact."""
    return {0: DELETED, n_kv: KEPT}.get(len(heads), "+".join(map(str, heads)))


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    cells = [(p, rho) for p in fractions("marginals", config.marginals) for rho in fractions("correlations", config.correlations)]
    drawn = {cell: survivors(config.seed, range(config.instances), config.survival_draws, model.geometry.n_kv, *cell) for cell in cells}
    return Session(config, model, drawn)


class Session(HeadSets):
    """Each set of heads that some draw gives is computed once per script; rows "drawn" count how often a script's draws give it."""

    def __init__(self, config: CONFIG, model, drawn: dict[tuple[float, float], np.ndarray]):
        g = model.geometry
        self.times: list[dict[tuple, dict[str, int]]] = [{} for _ in range(config.instances)]
        found: set[tuple[int, ...]] = set()
        for cell, held in drawn.items():
            for i, some in enumerate(held):
                sets = [tuple(np.flatnonzero(x).tolist()) for x in some]
                found |= set(sets)
                self.times[i][cell] = {name(s, g.n_kv): sets.count(s) for s in set(sets)}
        rules = {name(s, g.n_kv): (Hold(head_sets.sites(g, s)),) for s in sorted(found, key=lambda s: (len(s), s)) if 0 < len(s) < g.n_kv}
        super().__init__(config, model, head_stories.stories(config, model.tokenizer), head_sets.cases(config, model, rules))

    def rows_of(self, arm, story, k, log, answers) -> list[dict]:
        rows = super().rows_of(arm, story, k, log, answers)
        if not arm.evicts or arm.draw:
            return rows
        cells = self.times[story.instance]
        return rows + [dict(ask=rows[0]["ask"], metric="drawn", marginal=p, correlation=rho, value=float(times.get(arm.case, 0)), unit="draws") for (p, rho), times in cells.items()]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"correlation dose, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {self.config.rounds} rounds before the value, n={self.config.instances}"
        return Report(title, table, table.to_string(index=False), [*self.checks(rows, folder), self._as_stated(rows, folder.manifest)], {"title": title})

    def _as_stated(self, rows, manifest):
        """The drawn amount against the stated one: within 4 standard errors of a mean over independent draws of whole sets."""
        from kvprobe.runner import Check

        s, h = summary(rows, manifest), self.model.geometry.n_kv
        n = self.config.instances * self.config.survival_draws
        errors = [np.sqrt(p * (1 - p) * (1 + (h - 1) * rho) / (h * n)) for p, rho in zip(s.marginal, s.correlation)]
        worst = max((abs(a - p) / e if e else 0.0) for a, p, e in zip(s.held, s.marginal, errors))
        return Check("the drawn share of copies is the stated marginal", bool(worst <= 4), f"at most {worst:.1f} standard errors away", "<= 4")


def sets_of(rows: pd.DataFrame, n_kv: int) -> dict[str, int]:
    """Case -> number of heads, of the sets of heads that were computed."""
    every = {name(s, n_kv): k for k in range(n_kv + 1) for s in combinations(range(n_kv), k)}
    return {case: every[case] for case in dict.fromkeys(rows.case) if case in every}


def by_count(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """What k heads are worth: retrieval, R and log p [nats] averaged over all sets of k heads that were computed, all sets being likely alike."""
    sizes = sets_of(rows, manifest["model"]["kv_heads"])
    groups = {k: [c for c, size in sizes.items() if size == k] for k in sorted(set(sizes.values()))}
    table = head_tables.summarise(rows, groups, manifest["settings"]["seed"])
    return table.rename(columns={"name": "heads"})


def per_script(rows: pd.DataFrame, manifest: dict) -> dict[tuple[float, float], pd.DataFrame]:
    """(marginal, correlation) -> per script the mean over its draws: logp, retrieved, held (share of copies), any (share of draws in
    which some head holds the fact); "logp exact", "retrieved exact" put the probability of each set in the place of its share of the
    draws, nan where not every set was computed."""
    import pandas as pd

    h = manifest["model"]["kv_heads"]
    sizes, values, out = sets_of(rows, h), {m: head_tables.wide(rows, m) for m in ("logp", "retrieved")}, {}
    for (p, rho), part in rows[rows.metric == "drawn"].groupby(["marginal", "correlation"], sort=False):
        times = part.pivot(index="instance", columns="case", values="value").sort_index()
        shares, held = times.div(times.sum(axis=1), axis=0), np.array([sizes[c] for c in times])
        law = pd.Series({c: probability(k, h, p, rho) for c, k in sizes.items()}) * (1 if len(sizes) == 2**h else np.nan)
        columns = {m: (x[times.columns] * shares).sum(axis=1) for m, x in values.items()}
        columns |= {f"{m} exact": (x[law.index] * law).sum(axis=1, skipna=False) for m, x in values.items()}
        out[p, rho] = pd.DataFrame(columns | {"held": (shares * held).sum(axis=1) / h, "any": shares.loc[:, held > 0].sum(axis=1), "draws": times.sum(axis=1)})
    return out


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per marginal and correlation: R, retrieval and log p [nats] over the drawn sets, R and retrieval under the draw's exact law, and what was drawn.

    Worked example: p = .4, 3 heads, R of k heads 0, .3, .7, 1: rho = 1 gives R = .4 * 1 = .4, rho = 0 gives
    .432 * .3 + .288 * .7 + .064 = .395: R of k heads bent upwards pays for amounts that come together, bent downwards for spread.
    """
    import pandas as pd

    seed, logp, out = manifest["settings"]["seed"], head_tables.wide(rows, "logp"), []
    for (p, rho), x in per_script(rows, manifest).items():
        found = {"logp": stats.mean(x.logp, seed)}
        for suffix in ("", " exact"):
            there = bool(x[f"logp{suffix}"].notna().all())
            found[f"R{suffix}"] = metrics.recall_gain(x[f"logp{suffix}"], logp[DELETED], logp[KEPT], seed) if there else _none(x)
            found[f"retrieval{suffix}"] = stats.mean(x[f"retrieved{suffix}"], seed) if there else _none(x)
        out.append(dict(marginal=p, correlation=rho, n=len(x), draws=int(x.draws.iloc[0]), held=x.held.mean(), any=x["any"].mean()) | head_tables.flat(found))
    return pd.DataFrame(out)


def _none(x) -> stats.Estimate:
    return stats.Estimate(None, None, None, len(x))


def contrast(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per marginal, what spreading the same amount wins: R, retrieval and log p [nats] at the lowest correlation minus at the highest, paired by
    script and draw, and under the draw's exact law.

    In R it is sum_i(LP_i^low - LP_i^high) / sum_i(LP_i^kept - LP_i^deleted). Worked example: R = .395 at 0 and .4 at 1 give -.005.
    """
    import pandas as pd

    seed, logp, cells, out = manifest["settings"]["seed"], head_tables.wide(rows, "logp"), per_script(rows, manifest), []
    available = (logp[KEPT] - logp[DELETED]).to_numpy()
    recalls = metrics.recall_gain(logp[KEPT], logp[DELETED], logp[KEPT], seed).value is not None
    low, high = min(rho for _, rho in cells), max(rho for _, rho in cells)
    for p in dict.fromkeys(p for p, _ in cells):
        gap = (cells[p, low] - cells[p, high]).astype(float)
        found = {"logp": stats.mean(gap.logp, seed)}
        for suffix in ("", " exact"):
            there = bool(gap[f"logp{suffix}"].notna().all())
            found[f"R{suffix}"] = stats.ratio(gap[f"logp{suffix}"].to_numpy(), available, seed) if there and recalls else _none(gap)
            found[f"retrieval{suffix}"] = stats.mean(gap[f"retrieved{suffix}"], seed) if there else _none(gap)
        out.append(dict(marginal=p, low=low, high=high, n=len(gap)) | head_tables.flat(found))
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: cells, then the contrast per marginal, then what k heads are worth."""
    import pandas as pd

    s, d, k = summary(rows, manifest), contrast(rows, manifest), by_count(rows, manifest)
    s["what"] = [f"marginal {r.marginal:g}, correlation {r.correlation:g}" for r in s.itertuples()]
    s["drawn"] = [f"{r.held:.2f} copies, {r.any:.2f} somewhere" for r in s.itertuples()]
    d["what"] = [f"marginal {r.marginal:g}: correlation {r.low:g} - {r.high:g}" for r in d.itertuples()]
    k["what"] = [f"{r.heads} heads, mean over {r.cases} sets" for r in k.itertuples()]
    columns = {"what": "survival", "n": "n", "R": "recall R [95 %]", "retrieval": "retrieval [95 %]", "logp": "mean log p, nats [95 %]"}
    exact = columns | {"R exact": "R, exact law", "retrieval exact": "retrieval, exact law"}
    parts = (s, exact | {"drawn": "drawn"}), (d, exact), (k, columns)
    return pd.concat([head_tables.printed(x, c) for x, c in parts], ignore_index=True).fillna("-")
