"""Tables of how sampled futures were weighted: arms against uniform weights, the plane, a signal against a future's utility."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import stats
from .prompt_tables import per_prompt
from .prompting import CHANCE, METRICS

if TYPE_CHECKING:
    import pandas as pd

PLANE = "plane"
"""Name of the rows of the plane's points."""
PARTICLE = "particle"
"""Name of the rows of single continuations."""
SIGNALS = {"typicality": "c", "normalised": "c / its standard error", "entropy": "H", "varentropy": "V", "disagreement": "D", "/E": "R of /E", "/D": "R of /D"}
"""What is set against a continuation's utility, by metric."""
SPREAD = {"max_weight": "share", "effective": "continuations"}
"""Largest weight, and 1 / sum of squares."""
COVERAGE = {"coverage_mixture": "cosine", "coverage_union": "cosine"}
"""Mean cosine of a future query with the nearest query of the continuations: by their weights (eq. 13), or of all that have any weight together."""
UTILITY = {"recall_free": "Recall@B, free slots", "coverage_mixture": "coverage"}
"""What a signal is set against: the recall of what a continuation's own score keeps, and how near its queries are to the future's."""
DIGITS = {"recall": 3, "recall_free": 3, "error": 4, "logp": 2, "retrieved": 2, "coverage_mixture": 4, "coverage_union": 4, "max_weight": 2, "effective": 2}
REFERENCE = "uniform"
CONTRASTS = {"/E over the window only": ("/E", "window only"), "uniform over the window only": ("uniform", "window only"), "uniform over a single one": ("uniform", "a single one"),
             "uniform over one fewer, left out at random": ("uniform", "uniform, one left out at random"),
             "worst of /E left out over one left out at random": ("/E leaves the worst out, rest alike", "uniform, one left out at random"),
             "worst of /D left out over one left out at random": ("/D leaves the worst out, rest alike", "uniform, one left out at random"),
             "/E over its worst left out, rest alike": ("/E", "/E leaves the worst out, rest alike"), "/E over /D": ("/E", "/D")}


def _marks(rows: pd.DataFrame) -> list[str]:
    return [a for a in dict.fromkeys(rows.arm) if a not in (PLANE, PARTICLE, CHANCE)]


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per arm and metric: the mean over seeds and then prompts, its difference from uniform weights (paired by prompt), intervals over prompts."""
    import pandas as pd

    seed, out, marks = manifest["settings"]["seed"], [], _marks(rows)
    each = {at: part.to_numpy() for at, part in rows[rows.arm.isin(marks)].groupby(["arm", "metric", "instance"]).value.mean().groupby(level=["arm", "metric"])}
    for name, metric in ((a, m) for a in marks for m in DIGITS if (a, m) in each):
        mine, against = each[name, metric], each[REFERENCE, metric]
        e, gap = stats.mean(mine, seed), stats.difference(mine, against, seed) if len(mine) == len(against) else stats.Estimate(None, None, None, len(mine))
        out.append(dict(arm=name, metric=metric, n=e.n, value=e.value, low=e.low, high=e.high, gap=gap.value, gap_low=gap.low, gap_high=gap.high))
    return pd.DataFrame(out).astype(dict.fromkeys(("gap", "gap_low", "gap_high"), float))


def plane(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per point of the plane: recall over the free slots less that of uniform weights, with its interval over prompts, and the effective number of continuations."""
    import pandas as pd

    seed, part, out = manifest["settings"]["seed"], rows[rows.arm == PLANE], []
    even = per_prompt(rows, "recall_free", arm=REFERENCE)
    for (d, g, b), mine in part.groupby(["lam_d", "gamma", "beta"]):
        gap, effective = stats.difference(per_prompt(mine, "recall_free"), even, seed), stats.mean(per_prompt(mine, "effective"), seed)
        out.append(dict(beta=b, gamma=g, lam_d=d, n=gap.n, gap=gap.value, gap_low=gap.low, gap_high=gap.high, effective=effective.value, effective_low=effective.low, effective_high=effective.high))
    return pd.DataFrame(out)


def correlations(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per utility and signal: Spearman's rho over a prompt's continuations (of all seeds), the mean over prompts with its interval over them.

    A prompt whose continuations all have the same utility or signal has no rho and is left out: n counts the rest.
    """
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    wide = rows[rows.arm == PARTICLE].pivot_table(index=["instance", "draw", "particle"], columns="metric", values="value")
    for utility in UTILITY:
        for signal in SIGNALS:
            rho = np.array([own[signal].corr(own[utility], method="spearman") if own[[signal, utility]].nunique().min() > 1 else np.nan for _, own in wide.groupby(level="instance")])
            rho = rho[~np.isnan(rho)]
            e = stats.mean(rho, seed) if len(rho) else stats.Estimate(None, None, None, 0)
            out.append(dict(utility=utility, signal=signal, rho=e.value, low=e.low, high=e.high, n=e.n))
    return pd.DataFrame(out).astype(dict.fromkeys(("rho", "low", "high"), float))


def contrasts(rows: pd.DataFrame, manifest: dict) -> dict[str, dict[str, stats.Estimate]]:
    """Mean differences over prompts, by name and metric."""
    seed = manifest["settings"]["seed"]
    return {name: {m: stats.difference(per_prompt(rows, m, arm=a), per_prompt(rows, m, arm=b), seed) for m in METRICS} for name, (a, b) in CONTRASTS.items()}


def text(rows: pd.DataFrame, manifest: dict) -> str:
    """The tables as printed."""
    p, c = plane(rows, manifest), correlations(rows, manifest)
    lines = [report_table(rows, manifest).to_string(index=False), "", f"free-slot recall less that of uniform weights, points of the plane: {p.gap.min():+.4f} to {p.gap.max():+.4f}"]
    best = p.loc[p.gap.idxmax()]
    lines += [f"  best beta={best.beta:g} gamma={best.gamma:g} lambda_D={best.lam_d:g}: {stats.Estimate(*map(float, (best.gap, best.gap_low, best.gap_high)), int(best.n)).text(4)}, effective number {best.effective:.2f}",
              "Spearman's rho of signal and utility within prompts, mean over prompts [95 %]"]
    for r in c.itertuples():
        lines.append(f"  {UTILITY[r.utility]}, {SIGNALS[r.signal]}: " + (stats.Estimate(r.rho, r.low, r.high, r.n).text() if r.n else "n/a") + f", n={r.n}")
    lines += ["differences, mean over prompts"] + [f"  {name}: " + ", ".join(f"{m} {e.text(DIGITS[m])}" for m, e in by.items()) for name, by in contrasts(rows, manifest).items()]
    return "\n".join(lines)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The arms' table as printed."""
    import pandas as pd

    s = summary(rows, manifest)
    heads = {"recall": "Recall@B", "recall_free": "free slots", "error": "output error", "logp": "log p [nats]", "retrieved": "retrieval", "coverage_mixture": "coverage",
             "effective": "effective number", "max_weight": "largest weight"}
    cell = {(r.arm, r.metric): stats.Estimate(r.value, r.low, r.high, r.n).text(DIGITS[r.metric]) for r in s.itertuples()}
    return pd.DataFrame([{"arm": name, "n": int(s[s.arm == name].n.max())} | {head: cell.get((name, m), "-") for m, head in heads.items()} for name in dict.fromkeys(s.arm)])
