"""Recall of a fact of which the same amount survives, spread over KV heads or all together, beside what k heads are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.correlation_dose import by_count, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "correlation_dose"
KEYS = (("R", "recall R\n[share of the available log p]"), ("retrieval", "retrieval\n[fraction of facts]"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """part "cells": R and retrieval per marginal and correlation, drawn and exact; part "heads": what k heads are worth and, in columns
    "R line" and "retrieval line", the straight line between no head and all heads."""
    import pandas as pd

    count = by_count(rows, manifest)
    for key, _ in KEYS:
        low, high = count[key].iloc[0], count[key].iloc[-1]
        count[f"{key} line"] = low + (high - low) * count.heads / count.heads.max()
    return pd.concat([count.assign(part="heads"), summary(rows, manifest).assign(part="cells")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: left what k heads are worth, right recall by correlation, a line per marginal."""
    from kvprobe import plotting

    count, cells = table[table.part == "heads"], table[table.part == "cells"]
    figure, axes = plotting.grid(11.6, 6.6, 2, 2, sharey="row")
    colors = plotting.colors([f"{p:g}" for p in sorted(cells.marginal.unique())])
    for (left, right), (key, label) in zip(axes, KEYS):
        left.plot(count.heads, count[key], color="0.25", lw=1.2, label="mean over all sets of k heads")
        left.plot(count.heads, count[f"{key} line"], color="0.5", lw=1, ls="--", label="straight line: only the amount counts\n(bent above it, spread pays)")
        for r in count.to_dict("records"):
            plotting.whisker(left, r["heads"], r[key], r[f"{key}_low"], r[f"{key}_high"], color="0.25")
        for p, part in cells.sort_values("correlation").groupby("marginal"):
            color, shift = colors[f"{p:g}"], 0.02 * (list(colors).index(f"{p:g}") - 1)
            right.plot(part.correlation, part[f"{key} exact"], color=color, lw=1.2)
            for i, r in enumerate(part.to_dict("records")):
                plotting.whisker(right, r["correlation"] + shift, r[key], r[f"{key}_low"], r[f"{key}_high"], color=color, label=f"a head holds it with probability {p:g}" if i == 0 else None)
        left.set_ylabel(label)
        left.set_xticks(count.heads.astype(int))
        right.set_xticks(sorted(cells.correlation.unique()))
    axes[0][0].set_title("what k heads are worth", fontsize=10)
    axes[0][1].set_title("the same amount, spread or together", fontsize=10)
    axes[1][0].set_xlabel("KV heads that hold the fact, k [heads]")
    axes[1][1].set_xlabel("correlation of two heads' survivals")
    handles = [sum(pair, []) for pair in zip(axes[0][0].get_legend_handles_labels(), axes[0][1].get_legend_handles_labels())]
    figure.legend(*handles, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(f"Does spread or amount carry recall? (n = {int(cells.n.max())})", fontsize=11)
    plan, s = manifest["plan"], manifest["settings"]
    plotting.footer(figure, plotting.about(manifest, f"{s['policies']} eviction of everything else, K = {plan['keep']}, r = {plan['buffer']}, {s['rounds']} rounds before the value",
                                           f"marks: {s['survival_draws']} draws of the surviving heads per script, the same heads in every layer; lines: the draw's exact law"))
    return figure
