"""Whether criteria order entries differently: how concentrated their scores are, top-B overlap and Spearman's rho of every two (LORE Fig. 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.suite import tables

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
MAPS = {"overlap": "top-B overlap, all entries [fraction]", "overlap_free": "top-B overlap, free slots [fraction]", "spearman": "Spearman's rho over the candidates"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "profile": cumulative share of a criterion's score by the share of candidates; part "pair": overlap and rho of two criteria under the same sampling seed."""
    import pandas as pd

    seed = manifest["settings"]["seed"]
    pairs = rows[rows.metric.isin(MAPS) & rows.layer.isna()]
    return pd.concat([tables.summary(rows[rows.metric == "share"], ["metric", "arm", "top"], seed).assign(part="profile"), tables.summary(pairs, ["metric", "arm", "other"], seed).assign(part="pair")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: profiles and three maps."""
    from kvprobe import plotting
    from kvprobe.suite import drawing

    figure, axes = plotting.grid(15.0, 12.0, 2, 2)
    profile, pairs = (table[table.part == name] for name in ("profile", "pair"))
    ax, names = axes[0][0], tables.ordered(profile.arm)
    for name in names:
        drawing.curve(ax, profile[profile.arm == name], "top", name)
    ax.set_xscale("log")
    ticks = sorted(profile.top.unique())
    ax.set_xticks(ticks, [f"{t:.0%}" for t in ticks], fontsize=8)
    ax.minorticks_off()
    ax.set(xlabel="best candidates by the criterion [share of them]", ylabel="share of the criterion's score [fraction]")
    ax.set_title("score profiles (CriticalKV has no single score)", fontsize=10)
    ax.legend(handles=_handles(names), fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    for ax, (metric, label) in zip([axes[0][1], *axes[1]], MAPS.items()):
        image = _map(ax, pairs[pairs.metric == metric])
        ax.set_title(label, fontsize=10)
    figure.colorbar(image, ax=[axes[0][1], *axes[1]], shrink=0.6, label="overlap, or rho")
    figure.suptitle(f"How criteria differ in their order of entries (B = {manifest['settings']['budget']}, n = {int(pairs.n.max())} prompts; in brackets: 95 % intervals)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, "pairs share their sampling seed; rho and overlap: per site, mean over layers and KV heads; CriticalKV ranks by its two stages at this budget; grey: shown once, below the diagonal; profiles: scores below 0 (AnDPro has them) count as 0"))
    return figure


def _handles(names) -> list:
    from matplotlib.lines import Line2D

    from kvprobe.suite.drawing import STYLES

    return [Line2D([], [], color=STYLES[n][0], ls=STYLES[n][1], label=n) for n in names]


def _map(ax, part: pd.DataFrame):
    names = tables.ordered([*part.arm, *part.other])
    grid = np.full((len(names), len(names)), np.nan)
    for r in part.itertuples():
        i, j = sorted((names.index(r.arm), names.index(r.other)), reverse=True)
        grid[i, j] = r.value
        ax.text(j, i, f"{r.value:z.2f}" + (f"\n[{r.low:z.2f}, {r.high:z.2f}]" if r.low == r.low else ""), ha="center", va="center", fontsize=6, color="white" if abs(r.value) > 0.62 else "black")
    ax.set_facecolor("0.85")  # 0 is nearly white
    image = ax.imshow(grid, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    ax.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.grid(visible=False)
    return image
