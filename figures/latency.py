"""Time of a compressed prompt by stage, and its quality against the time (LORE Table 3, Fig. 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.latency import PLAIN, STAGES, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "latency"
COLORS = dict(zip(STAGES, ("#bbbbbb", "#4477aa", "#ee6677", "#ccbb44", "#88ccaa")))
QUALITY = {"logp": "log p of the true answer [nats]", "recall_free": "Recall@B, free slots [fraction]"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per arm: mean seconds by stage, ratios with intervals, quality with intervals."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: stages as stacked bars, what is added to a plain prefill, and quality over total time."""
    from kvprobe import plotting
    from kvprobe.prompting import about

    timed = table[table.total.notna()].reset_index(drop=True)
    colors = plotting.colors(a for a in timed.arm if a != PLAIN)
    figure, axes = plotting.grid(14.0, 9.0, 2, 2)
    _stages(axes[0][0], timed, STAGES, "time of a prompt and its answer [s]", "of_reference", f"total / {manifest['settings']['reference']}")
    _stages(axes[0][1], timed[timed.arm != PLAIN].reset_index(drop=True), STAGES[1:-1], "added to the prefill [s]", "of_plain", "(plain prefill + added) / plain prefill")
    for ax, (key, label) in zip(axes[1], QUALITY.items()):
        for r in timed.itertuples():
            x, y = r.of_reference, getattr(r, key)
            if y == y:
                ax.errorbar(x, y, xerr=[[max(0, x - r.of_reference_low)], [max(0, r.of_reference_high - x)]], yerr=[[max(0, y - getattr(r, f"{key}_low"))], [max(0, getattr(r, f"{key}_high") - y)]],
                            fmt="o", ms=5, lw=1, capsize=2.5, color=colors[r.arm], label=r.arm)
        ax.set_xlabel(f"total time [ratio to {manifest['settings']['reference']}]")
        ax.set_ylabel(label)
    handles, labels = axes[1][0].get_legend_handles_labels()
    axes[1][1].legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8.5, frameon=False, title="policy")
    bars, stages = axes[0][0].get_legend_handles_labels()
    axes[0][1].legend(bars, stages, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8.5, frameon=False, title="stage")
    s = manifest["settings"]
    figure.suptitle(f"What compressing a prompt costs, and what it is worth: B = {s['keeps']} (n = {int(table.n.max())} prompts)", fontsize=11)
    plotting.footer(figure, about(manifest, f"medians of {s['repeats']} repeats in turn with the others, {s['decode']} tokens decoded, {manifest['threads']} thread; times of a shared CPU "
                                            f"(plain prefills of a prompt differ by a factor of {manifest['noise']:.2f}): compare ratios, within this run only; ratios of sums over prompts"))
    return figure


def _stages(ax, table: pd.DataFrame, stages, label: str, ratio: str, says: str) -> None:
    left = [0.0] * len(table)
    for stage in stages:
        ax.barh(table.arm, table[stage], left=left, color=COLORS[stage], label=stage, height=0.7)
        left = [a + b for a, b in zip(left, table[stage])]
    for i, r in enumerate(table.itertuples()):
        ax.text(left[i], i, f" {getattr(r, ratio):.3f}", va="center", fontsize=8.5)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.16 * max(left))
    ax.set_xlabel(f"{label}; numbers: {says}")
    ax.grid(axis="y", visible=False)
