"""Share of the log-odds that moves when another text's keys, values or both of the fact are put in, by heads and by layer bands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.transplant import MODES, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "transplant"
COLORS = {"keys": "#4477aa", "values": "#ee9944", "both": "#333333"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per mode, states, and place, in drawing order; in at_query also the tokens after the box."""
    table = summary(rows, manifest)
    table = table[(table["mode"] != "") & table.tokens.isin(["box", "after", "text"])].copy()
    names = {"after": "all,\nafter\nthe box", "text": "all,\nbox and\nafter"}
    table["label"] = [names.get(t, p.replace(", ", "\n").replace("layers ", "layers\n")) for t, p in zip(table.tokens, table.place)]
    return table.reset_index(drop=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure, one panel per mode; points are shares with 95 % intervals over pairs."""
    from kvprobe import plotting

    modes = list(dict.fromkeys(table["mode"]))
    width = max(len(table[table["mode"] == m].label.unique()) for m in modes)
    figure, axes = plotting.picture(max(7.0, 0.72 * width + 2.2), 2.9 * len(modes) + 1.0, rows=len(modes), squeeze=False)
    for ax, mode in zip(axes[:, 0], modes):
        _panel(ax, table[table["mode"] == mode])
        ax.set_title(f"{mode}: {MODES[mode]}", fontsize=9.5)
        ax.set_ylabel("share of the log-odds moved\n(0 host, 1 donor)")
        ax.set_xlabel("where the donor's states of the fact's box (unless named) replace the host's")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8.5, title="states")
    figure.suptitle(f"What carries a fact: transplanted keys and values (n = {int(table.n.max())} pairs of texts)", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _panel(ax, table: pd.DataFrame) -> None:
    from kvprobe import plotting

    labels = list(dict.fromkeys(table.label))
    whats = [w for w in COLORS if w in set(table.what)]
    for k, what in enumerate(whats):
        for i, r in enumerate(table[table.what == what].itertuples()):
            plotting.whisker(ax, labels.index(r.label) + 0.22 * (k - (len(whats) - 1) / 2), r.share, r.share_low, r.share_high, color=COLORS[what], label=None if i else what)
    for level in (0, 1):
        ax.axhline(level, color="0.4", lw=0.8, ls=":")
    ax.set_xticks(range(len(labels)), labels, fontsize=8)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    ax.grid(axis="x", visible=False)


def footer(manifest: dict) -> str:
    """Everything a reader needs to know about the run."""
    s, m = manifest["settings"], manifest["model"]
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads), no eviction, value asked for {manifest['script']['age']} tokens after the start of the 16-token box; host and donor differ in every digit; "
            f"log-odds: log p of the donor's value - log p of the host's, each under its own digits, summed\n"
            f"n = {s['instances']} pairs, ratios of sums with 95 % bootstrap intervals over them, {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
