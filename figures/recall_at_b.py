"""Criteria against the future's oracle: Recall@B, output error, layer-wise Spearman, with random as floor and the oracle as ceiling (LORE Fig. 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.suite import tables
from kvprobe.suite.orders import ORACLE

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
PANELS = {"recall": "Recall@B, all entries\n[share of the oracle's B]", "recall_free": "Recall@B, free slots\n[share of the oracle's free entries]", "error": "output error on the future's queries\n[1 - cosine]"}
CHANCE = "random, closed form"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "budget": each metric by criterion and budget, of prompts at least twice the largest B long; part "layer": Spearman's rho with the oracle by criterion and layer."""
    import pandas as pd

    seed, means = manifest["settings"]["seed"], tables.means_of(rows)
    curves = tables.long_enough(rows, max(manifest["budgets"]))
    by_budget = tables.summary(means[means.metric.isin(PANELS) & means.instance.isin(curves.instance)], ["metric", "arm", "keep"], seed)
    layers = rows[(rows.metric == "spearman") & (rows.other == ORACLE) & rows.layer.notna()]
    return pd.concat([by_budget.assign(part="budget"), tables.summary(layers, ["metric", "arm", "layer"], seed).assign(part="layer")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure of four panels."""
    from kvprobe import plotting
    from kvprobe.suite import drawing

    figure, axes = plotting.grid(13.2, 8.2, 2, 2)
    axes, curves, layers = [*axes[0], *axes[1]], table[table.part == "budget"], table[table.part == "layer"]
    names = [n for n in tables.ordered(curves.arm) if n != CHANCE]
    for ax, (metric, label) in zip(axes, PANELS.items()):
        for name in names:
            drawing.curve(ax, curves[(curves.metric == metric) & (curves.arm == name)], "keep", name)
        closed = curves[(curves.metric == metric) & (curves.arm == CHANCE)].sort_values("keep")
        ax.plot(closed["keep"], closed.value, color="tab:red", ls=":", lw=1)
        drawing.budget_axis(ax, sorted(curves["keep"].astype(int).unique()))
        ax.set_ylabel(label)
    for name in tables.ordered(layers.arm):
        drawing.curve(axes[3], layers[layers.arm == name], "layer", name)
    axes[3].axhline(0, color="0.4", lw=0.8)
    drawing.layer_axis(axes[3])
    axes[3].set(ylabel="Spearman's rho with the oracle\nover the candidates, mean over KV heads")
    drawing.legend(figure, names, **{"random, closed form": ("tab:red", ":")})
    figure.suptitle(f"Criteria against the oracle of the future (curves over B: n = {int(curves.n.max())} prompts of 2 x {max(manifest['budgets'])} tokens or more; layers: n = {int(layers.n.max())})", fontsize=11)
    plotting.footer(figure, tables.about(manifest, f"rho at B = {manifest['settings']['budget']} (matters for CriticalKV alone); bands: 95 % intervals"))
    return figure
