"""What each variant of LORE-KV changes against the core: recall of the oracle's entries, output error and log p, by budget (after LORE Table 14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.ablations import CORE, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "ablations"
PANELS = (("recall_free", "recall of the oracle's\nfree entries [fraction]"), ("error", "output error\n[1 - cosine]"), ("logp", "log p of the true answer\n[nats]"))
FLOOR = "random"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per budget and arm: metrics and paired differences to the core, with intervals over prompts."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a column per metric, a line per variant, its difference to the core by budget."""
    from kvprobe import plotting

    shown = table[~table.arm.isin((CORE, "oracle", FLOOR)) & (table.axis != "")]
    variants = list(dict.fromkeys(zip(shown.axis, shown.arm)))
    figure, axes = plotting.grid(10.8, 1.9 + 0.31 * len(variants), 1, len(PANELS), sharey=True)
    budgets = sorted(table.keep.unique())
    hues = dict(zip(budgets, ("tab:blue", "tab:red", "tab:green", "tab:purple", "tab:brown")))
    for ax, (metric, label) in zip(axes[0], PANELS):
        ax.axvline(0, color="0.3", lw=0.9)
        for k, keep in enumerate(budgets):
            for y, (_, name) in enumerate(variants):
                r = shown[(shown.keep == keep) & (shown.arm == name)].iloc[0]
                v, low, high = (r[f"{metric}_gain{x}"] for x in ("", "_low", "_high"))
                ax.errorbar(v, y + 0.18 * (k - (len(budgets) - 1) / 2), xerr=[[max(0, v - low)], [max(0, high - v)]], fmt="o", ms=3.5, lw=1, capsize=2, color=hues[keep], label=f"B = {keep}" if not y else None)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel(f"{label},\ndifference to {CORE}")
        ax.set_title("  ".join(f"B={k}: {_value(table, k, CORE, metric)}" for k in budgets) + f"\n(random {', '.join(_value(table, k, FLOOR, metric) for k in budgets)}; "
                     f"oracle {', '.join(_value(table, k, 'oracle', metric) for k in budgets)})", fontsize=7.5)
    first = axes[0][0]
    first.set_yticks(range(len(variants)), [name for _, name in variants], fontsize=8)
    first.invert_yaxis()
    for y in (i for i in range(1, len(variants)) if variants[i][0] != variants[i - 1][0]):
        for ax in axes[0]:
            ax.axhline(y - 0.5, color="0.6", lw=0.7)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"What a part of LORE-KV is worth (n = {int(table.n.max())} prompts; titles: the core's own values)", fontsize=11)
    plotting.footer(figure, _footer(manifest))
    return figure


def _value(table: pd.DataFrame, keep: int, arm: str, metric: str) -> str:
    from kvprobe.probes.ablations import DIGITS

    return f"{table[(table.keep == keep) & (table.arm == arm)][metric].iloc[0]:.{min(3, DIGITS[metric])}f}"


def _footer(manifest: dict) -> str:
    from kvprobe import prompting

    s = manifest["settings"]
    return prompting.about(manifest, f"core: M = 4, T = {s['t']}, w = {s['window']}, lambda_L = 1, chunk 1, (beta, gamma, lambda_D) = (1, 1.3, 0)", f"future: greedy, {s['future']} tokens at most",
                           "log p: answer tokens that the compressed cache predicts; differences paired by prompt")
