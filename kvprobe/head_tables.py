"""Tables of probes that choose which sites keep a planted fact: a column per case, groups of cases with intervals, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import metrics, stats

if TYPE_CHECKING:
    import pandas as pd

KEPT, DELETED, FULL = "kept", "deleted", "full"
"""The endpoints, and the cache that evicts nothing: cases of every such probe."""


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
