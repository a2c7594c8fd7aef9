"""From the oracle suite's rows to tables: means over sampling seeds, then over prompts, with 95 % intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import stats
from .orders import CRITERIA, FULL

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("layer", "head", "sets", "cls", "other", "top", "position", "point")
"""Columns that tell single layers, heads, pairs, ... apart; a row of a plain mean has none of them."""


def means_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of an arm and budget alone: recall, error, answers."""
    told = [c for c in COLUMNS if c in rows]
    return rows[rows[told].isna().all(axis=1)]


def matrix(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """[prompts, groups]: mean over whatever `by` does not name (sampling seeds), one column per group of `by`; NaN where a prompt has none."""
    by = list(by)
    wide = rows.groupby(["instance", *by], sort=False).value.mean()
    return wide.unstack(by if len(by) > 1 else by[0]).sort_index()


def estimates(wide: pd.DataFrame, seed: int) -> pd.DataFrame:
    """One row per column of [prompts, groups]: n, value, low, high over the prompts that have it; n = 0 and no value where none has."""
    import pandas as pd

    out = []
    for key in wide.columns:
        x = wide[key].to_numpy(dtype=float)
        x = x[~np.isnan(x)]
        e = stats.mean(x, seed, clusters=np.arange(len(x))) if len(x) else stats.Estimate(np.nan, np.nan, np.nan, 0)
        out.append(dict(zip(wide.columns.names, key if isinstance(key, tuple) else (key,))) | dict(n=e.n, value=e.value, low=e.low, high=e.high))
    return pd.DataFrame(out)


def summary(rows: pd.DataFrame, by: Sequence[str], seed: int) -> pd.DataFrame:
    """`estimates` of `matrix`."""
    return estimates(matrix(rows, by), seed)


def long_enough(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """Rows of the prompts of which a budget of `most` is half or less: near the whole prompt every set agrees with every other."""
    n = rows[rows.metric == "tokens"].set_index("instance").value
    return rows[rows.instance.isin(n.index[n >= 2 * most])]


def ordered(names) -> list[str]:
    """Criteria in their own order, others behind."""
    names = list(dict.fromkeys(names))
    known = (FULL, *CRITERIA)
    return [c for c in known if c in names] + [c for c in names if c not in known]


def headline(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per criterion at the main budget: recall, output error, log p, KL, and Spearman's rho with the oracle."""
    s = manifest["settings"]
    means = means_of(rows)
    part = means[(means.keep == s["budget"]) & means.arm.notna()]
    rho = rows[(rows.metric == "spearman") & (rows.other == "oracle") & rows.layer.isna()]
    import pandas as pd

    return summary(pd.concat([part, rho]), ["metric", "arm"], s["seed"])


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    found = headline(rows, manifest)
    most = found.groupby("arm").n.max()

    def told(r) -> str:
        text = stats.Estimate(r.value, r.low, r.high, r.n).text(2 if r.metric == "logp" else 3)
        return text if r.n == most[r.arm] else f"{text}, n={r.n}"

    cell = {(r.arm, r.metric): told(r) for r in found.itertuples()}
    heads = {"recall": "Recall@B", "recall_free": "free slots", "error": "output error", "logp": "log p [nats]", "retrieved": "retrieval", "kl": "KL [nats/token]", "spearman": "rho with the oracle"}
    return pd.DataFrame([{"criterion": a, "n": int(most[a])} | {head: cell.get((a, m), "-") for m, head in heads.items()} for a in ordered(found.arm)])


def deletions(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per deletion: instance, position, sample, layer and head of a single site, true costs and predictions as columns; none where nothing was deleted."""
    from .deletions import PREDICTORS

    if "sample" not in rows:
        return rows.iloc[:0].assign(sample=None)
    own = rows[rows.metric.isin(["kl_deleted", "logp_lost", *PREDICTORS])]
    keys = ["instance", "sample", "position", "layer", "head"]
    return own.assign(**{k: own[k].fillna(-1) for k in keys if k in ("layer", "head")}).pivot_table(index=keys, columns="metric", values="value", sort=False).reset_index()


def predictions(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Spearman's rho of a prediction and a true cost over the deletions of a prompt, the mean over prompts: per predictor, cost, and kind (all sites: the even sample; one site)."""
    import pandas as pd

    from .deletions import PREDICTORS

    made, out = deletions(rows), []
    kinds = {"all sites at once": made[made["sample"] == "even"], "one site": made[made["sample"].astype(str).str.startswith("site")]}
    for kind, own in kinds.items():
        for predictor in PREDICTORS:
            for cost in ("kl_deleted", "logp_lost"):
                rho = [part[predictor].corr(part[cost], method="spearman") for _, part in own.groupby("instance") if part[[predictor, cost]].nunique().min() > 1]
                e = stats.mean(np.array(rho), seed) if rho else stats.Estimate(np.nan, np.nan, np.nan, 0)
                out.append(dict(kind=kind, predictor=predictor, cost=cost, n=e.n, value=e.value, low=e.low, high=e.high))
    return pd.DataFrame(out)


def text(rows: pd.DataFrame, manifest: dict) -> str:
    """Table and coverage as printed."""
    seed = manifest["settings"]["seed"]
    covered = summary(rows[rows.metric == "coverage"], ["sets", "form", "m"], seed)
    lines = [f"  {r.sets}{f', M={int(r.m)}, {r.form}' if r.m else ''}: {stats.Estimate(r.value, r.low, r.high, r.n).text(4)}" for r in covered.itertuples()]
    out = report_table(rows, manifest).to_string(index=False) + "\n\ncoverage of the future's queries, mean over layers and query heads\n" + "\n".join(lines)
    if not manifest["settings"]["deletions"]:
        return out
    told = [f"  {r.kind}, {r.predictor.removeprefix('predicted_')} and {'KL' if r.cost == 'kl_deleted' else 'loss of log p'}: {stats.Estimate(r.value, r.low, r.high, r.n).text()}, n={r.n}" for r in predictions(rows, seed).itertuples() if r.n]
    return out + "\n\nSpearman's rho of predicted and true cost of a deletion, within prompts\n" + "\n".join(told)


def about(manifest: dict, *facts: str) -> str:
    """Two lines for a figure's footer."""
    from ..prompting import about as told

    s = manifest["settings"]
    over = "the prompt's keys" if s["fidelity_over"] == "prompt" else "the prompt's and the generated keys"
    return told(manifest, f"chunk 1, uniform budgets, w = {s['window']}, M = {s['m']}, T = {s['t']}", f"future: greedy, at most {s['future']} tokens, outputs over {over}", *facts)
