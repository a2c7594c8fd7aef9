"""Heat map of the recall gained where one place alone keeps a fact and lost where it alone does not, over layers and KV heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.probes.site_map import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "site_map"
PANELS = {"gained": "gained, kept there alone", "lost": "lost, ablated there"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per place: band or site, layers, head, gained and lost with interval and spread."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: bands left, single sites right; each cell tells the value and its spread over instances."""
    from kvprobe import plotting

    kinds = [k for k in ("band", "site") if k in set(table.kind)]
    tallest = max(len(table[table.kind == k].groupby("first")) for k in kinds)
    heads = table["head"].max() + 1
    figure, axes = plotting.grid(max(9.0, (0.75 * heads + 1.4) * 2 * len(kinds)), max(4.2, 0.42 * tallest + 2.2), 1, 2 * len(kinds))
    for k, kind in enumerate(kinds):
        part = table[table.kind == kind]
        top = np.nanmax(np.abs(part[list(PANELS)].to_numpy())) if part[list(PANELS)].notna().any(axis=None) else 1.0
        for ax, (key, label) in zip(axes[0][2 * k : 2 * k + 2], PANELS.items()):
            image = _map(ax, part, key, top)
            ax.set_title(f"{'layer bands' if kind == 'band' else 'single sites'}:\n{label}", fontsize=9)
        figure.colorbar(image, ax=list(axes[0][2 * k : 2 * k + 2]), shrink=0.8, label="recall R [share of the available log p]")
        axes[0][2 * k].set_ylabel("layers" if kind == "band" else "layer")
    figure.suptitle(f"Where a fact is kept (n = {int(table.n.max())} facts; in brackets: standard deviation over facts; bold: interval excludes 0)", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _map(ax, part: pd.DataFrame, key: str, top: float):
    first, heads = sorted(part["first"].unique()), sorted(part["head"].unique())
    values = np.full((len(first), len(heads)), np.nan)
    for r in part.itertuples():
        i, j, value = first.index(r.first), heads.index(r.head), getattr(r, key)
        values[i, j] = value
        if len(first) <= 40 and not np.isnan(value):
            sure = abs(value) >= 0.005 and (getattr(r, f"{key}_low") > 0 or getattr(r, f"{key}_high") < 0)
            ax.text(j, i, f"{value:.2f} ({getattr(r, f'{key}_sd'):.2f})", ha="center", va="center", fontsize=7, weight="bold" if sure else "normal",
                    color="white" if abs(value) > 0.6 * top else "black")
    image = ax.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    last = part.groupby("first")["last"].first()
    ax.set_yticks(range(len(first)), [f"{a}-{last[a]}" if last[a] > a else str(a) for a in first], fontsize=8)
    ax.set_xticks(range(len(heads)), heads)
    ax.set_xlabel("KV head")
    ax.grid(visible=False)
    return image


def footer(manifest: dict) -> str:
    """Everything a reader needs to know about the run."""
    s, m, plan = manifest["settings"], manifest["model"], manifest["plan"]
    searched = "every site" if s["strongest"] >= s["bands"] else f"single sites inside the {s['strongest']} bands whose heads gain and lose most"
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads), policy {s['policies']}, K = {plan['keep']}, r = {plan['buffer']}, {s['rounds']} rounds before the value; "
            f"outside its places the fact is lost at the first round; {searched}\n"
            f"n = {s['instances']} facts, ratios of sums, 95 % bootstrap intervals over them, {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
