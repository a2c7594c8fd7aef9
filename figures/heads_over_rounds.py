"""Recall of a planted fact by its distance in rounds, a line per set of KV heads that hold it (after Random Attention sec. 5.2, app. B)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.distance_by_heads import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "distance_by_heads"
PANELS = (("R", "recall R\n[share of the available log p]"), ("retrieval", "retrieval\n[fraction of facts]"), ("logp", "log p of the value\n[nats]"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per set of heads and distance: recall R, retrieval and log p with intervals, spread of R over eviction seeds."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: recall above, then retrieval and log p; distances stand at equal steps."""
    from kvprobe import plotting

    figure, axes = plotting.picture(7.8, 8.6, rows=3, sharex=True)
    names, steps = list(dict.fromkeys(table.heads)), {n: i for i, n in enumerate(sorted(table["rounds"].unique()))}
    colors = plotting.colors(names) | {"all (kept)": "0.2", "none (deleted)": "0.55"}
    for ax, (key, label) in zip(axes, PANELS):
        for j, name in enumerate(names):
            part = table[table.heads == name].sort_values("rounds")
            xs = [steps[n] + 0.06 * (j - (len(names) - 1) / 2) for n in part["rounds"]]
            ax.plot(xs, part[key], color=colors[name], lw=1.3, ls="--" if name in ("all (kept)", "none (deleted)") else "-", label=name)
            for x, r in zip(xs, part.to_dict("records")):
                plotting.whisker(ax, x, r[key], r[f"{key}_low"], r[f"{key}_high"], color=colors[name], ms=4)
        ax.set_ylabel(label)
        ax.grid(axis="x", visible=False)
    axes[-1].set_xticks(range(len(steps)), [str(n) for n in steps])
    axes[-1].set_xlabel("rounds before the value, counted from the keep log [rounds]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False, title="KV heads that hold it", title_fontsize=8)
    figure.suptitle(f"Does a held copy age? Recall by heads and distance (n = {int(table.n.max())})", fontsize=11)
    plan, s = manifest["plan"], manifest["settings"]
    spread = table.seed_sd.max()
    plotting.footer(figure, plotting.about(manifest, f"{s['policies']} eviction of everything else, K = {plan['keep']}, r = {plan['buffer']}", "R between the endpoints of the same distance; marks shifted sideways to be told apart"
                                           + (f"; spread of R over eviction seeds: sd at most {spread:.2f}" if spread == spread else "")))
    return figure
