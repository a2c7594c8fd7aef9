"""Recall of a fact by rounds since it was stated, stated once or restated, by policy (after Random Attention sec. 5.2 and 5.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.distance import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "distance"
TITLES = {"once": "stated once", "verbatim": "restated verbatim", "derived": "restated as another variable's value"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per factor, policy and distance: recall R and retrieval with intervals."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a column per way of stating, recall above, retrieval below."""
    from kvprobe import plotting

    factors, policies = (list(dict.fromkeys(table[c])) for c in ("factor", "policy"))
    figure, axes = plotting.grid(3.5 * len(factors) + 2.2, 6.6, 2, len(factors), sharex=True, sharey="row")
    colors = plotting.colors(policies)
    for j, factor in enumerate(factors):
        for i, key in enumerate(("R", "retrieval")):
            ax = axes[i][j]
            for k, policy in enumerate(policies):
                part = table[(table.factor == factor) & (table.policy == policy)].sort_values("rounds")
                x = part.rounds + 0.5 * (k - (len(policies) - 1) / 2)
                ax.plot(x, part[key], color=colors[policy], lw=1.2, label=policy)
                for at, r in zip(x, part.itertuples()):
                    plotting.whisker(ax, at, getattr(r, key), getattr(r, f"{key}_low"), getattr(r, f"{key}_high"), color=colors[policy], ms=3.5)
            ax.axhline(0, color="0.3", lw=0.8)
            ax.axhline(1, color="0.3", lw=0.8, ls=":")
        axes[0][j].set_title(TITLES.get(factor, factor), fontsize=10)
        axes[1][j].set_xlabel("rounds before the value")
        axes[1][j].set_xticks(sorted(table["rounds"].unique()))
    axes[0][0].set_ylabel("recall R\n[share of the available log p]")
    axes[1][0].set_ylabel("retrieval\n[fraction of facts]")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"What a fact is worth by its distance (n = {int(table.n.max())})", fontsize=11)
    plan = manifest["plan"]
    plotting.footer(figure, plotting.about(manifest, f"K = {plan['keep']} per KV head in every arm, r = {plan['buffer']}", "R: 0 where all statements are deleted, 1 where all are kept in every head under random eviction; marks shifted sideways to be told apart"))
    return figure
