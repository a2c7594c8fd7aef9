"""Retrieval and recall R by the set of KV heads that hold a planted fact (after Random Attention Fig. 3a)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.planted_fact import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "planted_fact"
PANELS = (("retrieval", "retrieval\n[fraction of facts]"), ("R", "recall R\n[share of the available log p]"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per condition in drawing order, with a group label: how many heads hold the fact."""
    table = summary(rows, manifest)
    table["group"] = [_group(r.condition, r.n_heads) for r in table.itertuples()]
    return table


def _group(condition: str, n_heads: float) -> str:
    if condition in ("natural", "full"):
        return {"natural": "no pins", "full": "no eviction"}[condition]
    return f"{int(n_heads)} head" + ("" if n_heads == 1 else "s")


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure with the two panels; bars are values, whiskers 95 % intervals over instances."""
    import seaborn as sns

    from kvprobe import plotting

    figure, axes = plotting.picture(max(6.4, 0.75 * len(table) + 1.6), 6.2, rows=2, sharex=True)
    groups = list(dict.fromkeys(table.group))
    colors = dict(zip(groups, sns.color_palette("viridis", len(groups))))
    for ax, (key, label) in zip(axes, PANELS):
        _bars(ax, table, key, colors)
        ax.set_ylabel(label)
    _label(axes, table)
    figure.suptitle(f"What a planted fact is worth by the KV heads that hold it (n = {int(table.n.max())})", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _bars(ax, table: pd.DataFrame, key: str, colors: dict) -> None:
    import pandas as pd

    for x, row in enumerate(table.itertuples()):
        value = getattr(row, f"{key}_value")
        if pd.isna(value):  # R does not exist where nothing was there to be recalled
            ax.text(x, 0, "n/a", ha="center", va="bottom", fontsize=8, color="0.4")
            continue
        low, high = getattr(row, f"{key}_low"), getattr(row, f"{key}_high")
        ax.bar(x, value, color=colors[row.group], width=0.7)
        ax.errorbar(x, value, yerr=[[max(0, value - low)], [max(0, high - value)]], color="0.15", capsize=3, lw=1)
        ax.annotate(f"{value:.2f}", (x, max(value, high, 0)), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    ax.axhline(0, color="0.2", lw=0.8)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.12)


def _label(axes, table: pd.DataFrame) -> None:
    axes[-1].set_xticks(range(len(table)), [_tick(c) for c in table.condition])
    axes[-1].set_xlabel("KV heads that hold the fact (in every layer, unless named); others lose it first of all")
    edges = [i for i in range(1, len(table)) if table.group[i] != table.group[i - 1]]
    for ax in axes:
        for edge in edges:
            ax.axvline(edge - 0.5, color="0.75", lw=0.8)
    for a, z in zip([0, *edges], [*edges, len(table)]):
        axes[0].text((a + z - 1) / 2, 1.01, table.group[a], transform=axes[0].get_xaxis_transform(), ha="center", va="bottom", fontsize=8.5)


def _tick(condition: str) -> str:
    return {"kept": "all\n(kept)", "deleted": "none\n(deleted)", "natural": "natural\n(no pins)", "full": "full\ncache"}.get(condition, condition)


def footer(manifest: dict) -> str:
    """Everything a reader needs to know about the run, in two lines."""
    s, m, plan = manifest["settings"], manifest["model"], manifest["plan"]
    rounds = "/".join(map(str, manifest.get("rounds_before_value", ["?"])))
    layers = "" if s["layers"] == "all" else f", heads of layers {s['layers']}"
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads{layers}), policy {s['policy']}, K = {plan['keep']}, r = {plan['buffer']}, "
            f"{rounds} rounds before the value, age {manifest['script']['age']} tokens, {s['positions']} positions\n"
            f"{s['instances']} instances, 95 % bootstrap intervals over instances, {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
