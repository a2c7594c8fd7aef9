"""Recall of a planted fact against the number of contiguous blocks that a head can hold (after Random Attention Fig. 3c)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.blocks import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "blocks"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per K and block size: blocks per head, recall R and retrieval with intervals."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: recall left, retrieval right, a line per K."""
    import seaborn as sns

    from kvprobe import plotting

    figure, axes = plotting.grid(9.6, 4.4, 1, 2, sharex=True)
    keeps = list(dict.fromkeys(table.keep))
    colors = dict(zip(keeps, sns.color_palette("viridis", len(keeps) + 1)))
    for ax, (key, label) in zip(axes[0], (("R", "recall R\n[share of the available log p]"), ("retrieval", "retrieval\n[fraction of facts]"))):
        for k, keep in enumerate(keeps):
            part = table[table.keep == keep].sort_values("blocks_per_head")
            x = part.blocks_per_head * 1.04 ** (k - (len(keeps) - 1) / 2)
            ax.plot(x, part[key], color=colors[keep], lw=1.2, label=f"K = {keep}")
            for at, r in zip(x, part.itertuples()):
                plotting.whisker(ax, at, getattr(r, key), getattr(r, f"{key}_low"), getattr(r, f"{key}_high"), color=colors[keep])
                if getattr(r, key) == getattr(r, key):
                    ax.annotate(f"{int(r.block)}", (at, getattr(r, f"{key}_high")), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=7, color=colors[keep])
        ax.set_xscale("log", base=2)
        ticks = sorted(table.blocks_per_head.unique())
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_xlabel("blocks per head (at each mark: block size)")
        ax.set_ylabel(label)
        ax.set_ylim(min(-0.05, ax.get_ylim()[0]), max(1.05, ax.get_ylim()[1]))
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Does it matter that history goes in blocks?", fontsize=11)
    rounds = ", ".join(f"K = {k}: {'/'.join(map(str, v))} rounds before the value" for k, v in manifest.get("rounds_before_value", {}).items())
    plotting.footer(figure, plotting.about(manifest, f"r = {manifest['plan']['buffer']}", rounds))
    return figure
