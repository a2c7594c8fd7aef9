"""Two facts held in different KV heads: each alone, both, and the sum of the two alone (after Random Attention Fig. 3b)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.head_tables import told
from kvprobe.probes.two_facts import by_split

if TYPE_CHECKING:
    import pandas as pd

READS = "two_facts"
BARS = (("x", "x alone", "#8fb3d9"), ("y", "y alone", "#3b6ea5"), ("both", "both", "#c8553d"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per split: R of x alone, of y alone, of both, their sum and the surplus, and retrieval of each, with intervals."""
    return by_split(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: R above with the sum of the two alone as a dashed line, retrieval of the whole answer below."""
    from kvprobe import plotting

    figure, axes = plotting.picture(max(7.0, 1.05 * len(table) + 2.6), 7.0, rows=2, sharex=True)
    for ax, prefix in zip(axes, ("", "got ")):
        for j, (key, label, color) in enumerate(BARS):
            for i, r in enumerate(table.to_dict("records")):
                x, value = i + 0.26 * (j - 1), r[f"{prefix}{key}"]
                if value != value:  # R does not exist where nothing was there to be recalled
                    ax.text(x, 0, "n/a", ha="center", va="bottom", fontsize=6.5, color="0.4")
                    continue
                ax.bar(x, value, width=0.24, color=color, label=label if i == 0 else None)
                plotting.whisker(ax, x, value, r[f"{prefix}{key}_low"], r[f"{prefix}{key}_high"], color="0.15", fmt="none")
        ax.axhline(0, color="0.2", lw=0.8)
        ax.grid(axis="x", visible=False)
    for i, r in enumerate(table.to_dict("records")):
        if r["sum"] == r["sum"]:
            axes[0].plot([i - 0.42, i + 0.42], [r["sum"]] * 2, color="0.1", ls="--", lw=1.2, label="sum of the two alone" if i == 0 else None)
            axes[0].text(i, 1.01, f"both − sum\n{told(r, 'surplus')}", transform=axes[0].get_xaxis_transform(), ha="center", va="bottom", fontsize=6.5)
    axes[0].set_ylabel("recall R of the answer\n[share of the available log p]")
    axes[1].set_ylabel("retrieval of both values\n[fraction of pairs of facts]")
    axes[1].set_ylim(-0.02, 1.02)
    axes[1].set_xticks(range(len(table)), [_tick(s) for s in table.split], fontsize=8)
    axes[1].set_xlabel("KV heads that hold the facts, in every layer; others lose them first of all")
    named = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(f"What two facts are worth together (n = {int(table.n.max())})", fontsize=11)
    plan, s = manifest["plan"], manifest["settings"]
    rounds = "/".join(map(str, manifest.get("rounds_before_value", ["?"])))
    plotting.footer(figure, plotting.about(manifest, f"{s['policies']} eviction of everything else, K = {plan['keep']}, r = {plan['buffer']}", f"{rounds} rounds before the values (keep log)", f"box y {s['apart']} tokens after box x",
                                           "R: 0 both deleted, 1 both kept everywhere", "paper (Qwen3-4B, 8 KV heads): R .31 both, .10 and .16 alone"))
    return figure


def _tick(split: str) -> str:
    return split.replace(", ", ",\n").replace("pairs of", "pairs of\n")
