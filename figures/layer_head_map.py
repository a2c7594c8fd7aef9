"""Where in the model the future shows: perturbation energy by layer and query head, recall gained by looking ahead by layer and KV head (LORE Fig. 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.suite import tables
from kvprobe.suite.orders import LORE_D, LORE_E, SINGLE, WINDOW_ONLY

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
GAINING = (SINGLE, LORE_E, LORE_D)


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Parts "energy" by layer and query head and "energy, layer" (a share of the model's, summed over heads), "gain" over the window only by criterion, layer and KV head, "gain, layer"."""
    import pandas as pd

    s = manifest["settings"]
    wide = tables.matrix(rows[rows.metric == "energy"], ["layer", "head"])
    wide = wide.div(wide.sum(axis=1), axis=0)
    parts = {"energy": tables.estimates(wide, s["seed"]), "energy, layer": tables.estimates(wide.T.groupby(level="layer").sum().T, s["seed"])}
    recall = tables.matrix(rows[(rows.metric == "recall_free") & (rows.keep == s["budget"]) & rows["head"].notna()], ["arm", "layer", "head"])
    for name in GAINING:
        gain = recall[name] - recall[WINDOW_ONLY]
        parts |= {f"gain {name}": tables.estimates(gain, s["seed"]).assign(arm=name), f"gain, layer {name}": tables.estimates(gain.T.groupby(level="layer").mean().T, s["seed"]).assign(arm=name)}
    return pd.concat([t.assign(part=k.replace(f" {t.arm.iloc[0]}", "") if "arm" in t else k) for k, t in parts.items()], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: energy by layer and as a map, gain by layer and as maps on one colour scale; missing cells are hatched."""
    from kvprobe import plotting
    from kvprobe.suite import drawing

    tall = max(6.0, 0.19 * table.layer.nunique() + 3.4)
    figure, axes = plotting.grid(16.5, tall, 1, 6, gridspec_kw=dict(width_ratios=(1.3, 1.7, 1.3, 1, 1, 1)))
    axes, gains = axes[0], table[table.part == "gain"]
    _line(axes[0], table[table.part == "energy, layer"], "tab:red")
    axes[0].set_xlabel("perturbation energy\n[share of the model's]")
    image = _map(axes[1], table[table.part == "energy"], "Reds", 0, float(table[table.part == "energy"].value.max()), False)
    figure.colorbar(image, ax=axes[1], location="top", shrink=0.9).set_label("energy [share of the model's]", fontsize=8)
    axes[1].set_xlabel("query head")
    for name in GAINING:
        _line(axes[2], table[(table.part == "gain, layer") & (table.arm == name)], drawing.STYLES[name][0], name)
    axes[2].axvline(0, color="0.3", lw=0.8)
    axes[2].set_xlabel(f"gain in Recall@B, free slots\nover {WINDOW_ONLY} [fraction]")
    axes[2].legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    most = float(np.nanmax(np.abs(gains.value))) or 1e-9
    for ax, name in zip(axes[3:], GAINING):
        image = _map(ax, gains[gains.arm == name], "RdBu_r", -most, most, True)
        ax.set_xlabel("KV head")
        ax.set_title(name, fontsize=9)
    figure.colorbar(image, ax=list(axes[3:]), location="top", shrink=0.9).set_label(f"gain in Recall@B, free slots, over {WINDOW_ONLY} [fraction]; * where the 95 % interval excludes 0", fontsize=8)
    for ax in axes:
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(table.layer.max() + 0.5, table.layer.min() - 0.5)
        ax.set_ylabel("layer", fontsize=9)
    figure.suptitle(f"The future's signal across layers and heads (B = {manifest['settings']['budget']}, n = {int(table.n.max())} prompts)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, "energy: eq. 12's magnitudes on the future's queries, summed over all positions; bands: 95 % intervals; hatched cells: no value"))
    return figure


def _line(ax, part: pd.DataFrame, color, label: str | None = None) -> None:
    part = part.sort_values("layer")
    ax.plot(part.value, part.layer, color=color, lw=1.3, marker=".", ms=4, label=label)
    ax.fill_betweenx(part.layer.astype(float), part.low, part.high, color=color, alpha=0.18, lw=0)


def _map(ax, part: pd.DataFrame, colours: str, low: float, high: float, marked: bool):
    layers, heads = int(part.layer.max()) + 1, int(part["head"].max()) + 1
    grid = np.full((layers, heads), np.nan)
    for r in part.itertuples():
        grid[int(r.layer), int(r.head)] = r.value
        if marked and (r.low > 0 or r.high < 0):
            ax.text(r.head, r.layer, "*", ha="center", va="center", fontsize=8)
    ax.set_facecolor("0.85")
    ax.patch.set(hatch="///", edgecolor="0.5")
    image = ax.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=low, vmax=high, aspect="auto")
    ax.set_xticks(range(heads), range(heads), fontsize=8)
    ax.grid(visible=False)
    return image
