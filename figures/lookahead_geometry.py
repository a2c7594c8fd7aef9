"""Recall of the oracle's entries, output error and log p by the number and length of continuations, and at a matched lookahead budget (after LORE Table 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.lookahead_geometry import CRITERIA, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "lookahead_geometry"
PANELS = (("recall_free", "Recall@B\n[share of the oracle's\nfree entries]"), ("error", "output error\n[1 - cosine]"), ("logp", "log p of the true answer\n[nats]"))
MARKS = {"random": ("0.35", ":"), "oracle": ("0.35", "--"), "full": ("0.6", "-"), "LORE, window only": ("tab:orange", "-."), "AnDPro, window only": ("tab:green", "-.")}
"""Arms drawn as level lines."""


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per arm: every metric with its interval over prompts."""
    return summary(rows, manifest)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a row per metric; left LORE by T, a line per M, right both criteria by M x T."""
    import seaborn as sns

    from kvprobe import plotting

    figure, axes = plotting.grid(10.6, 9.2, len(PANELS), 2, sharex="col", sharey="row")
    grid = table[table.m > 0]
    ms, ts, budgets = (sorted(x.unique()) for x in (grid.m, grid.t, grid.m * grid.t))
    blues = dict(zip(ms, sns.color_palette("flare", len(ms))))
    shapes = dict(zip(ts, "ovs^D*"))
    hues = dict(zip(CRITERIA, ("tab:blue", "tab:red")))
    for (metric, label), (left, right) in zip(PANELS, axes):
        for k, m in enumerate(ms):
            part = grid[(grid.m == m) & (grid.criterion == "LORE")].sort_values("t")
            at = [ts.index(t) + 0.08 * (k - (len(ms) - 1) / 2) for t in part.t]
            left.plot(at, part[metric], color=blues[m], lw=1.2)
            _points(left, at, part, metric, color=blues[m])
        for criterion, hue in hues.items():
            part = grid[grid.criterion == criterion]
            for t in ts:
                some = part[part.t == t].sort_values("m")
                at = [budgets.index(m * t) + 0.1 * (ts.index(t) - 1) + (0.04 if criterion == "AnDPro" else -0.04) for m in some.m]
                _points(right, at, some, metric, color=hue, fmt=shapes[t])
        for ax in (left, right):
            for name, (color, style) in MARKS.items():
                if ax is left and name.startswith("AnDPro"):
                    continue
                for y in table[table.arm == name][metric].dropna():
                    ax.axhline(y, color=color, ls=style, lw=1)
        left.set_ylabel(label)
    axes[-1][0].set_xticks(range(len(ts)), ts)
    axes[-1][0].set_xlabel("steps of each continuation T [tokens]")
    axes[-1][1].set_xticks(range(len(budgets)), budgets)
    axes[-1][1].set_xlabel("queries looked ahead M x T [tokens]")
    axes[0][0].set_title("LORE, by length and number", fontsize=10)
    axes[0][1].set_title("both criteria on the same queries", fontsize=10)
    _legends(figure, blues, hues, shapes)
    figure.suptitle(f"How many continuations, and how long (B = {manifest['budgets'][0]}, n = {int(table.n.max())} prompts)", fontsize=11)
    plotting.footer(figure, _footer(manifest))
    return figure


def _points(ax, at, part, metric: str, **style) -> None:
    from kvprobe import plotting

    for x, r in zip(at, part.itertuples()):
        plotting.whisker(ax, x, getattr(r, metric), getattr(r, f"{metric}_low"), getattr(r, f"{metric}_high"), **(dict(ms=4) | style))


def _legends(figure, blues: dict, hues: dict, shapes: dict) -> None:
    from matplotlib.lines import Line2D

    def dot(label, color="0.4", marker="o"):
        return Line2D([], [], color=color, marker=marker, ls="", ms=5, label=label)

    none = Line2D([], [], ls="", label="")
    handles = [*(dot(f"M = {m}", c) for m, c in blues.items()), none, *(dot("LORE" if n == "LORE" else f"{n}'s criterion", c) for n, c in hues.items()),
               *(dot(f"T = {t}", marker=s) for t, s in shapes.items()), none,
               *(Line2D([], [], color=c, ls=s, label={"random": "random eviction", "full": "full cache (log p)"}.get(n, n)) for n, (c, s) in MARKS.items())]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)


def _footer(manifest: dict) -> str:
    from kvprobe import prompting

    return prompting.about(manifest, f"B = {manifest['budgets'][0]}, chunk 1, /E weights, nested prefixes of one draw of {manifest['draw']['particles']} x {manifest['draw']['horizon']}",
                           f"future: greedy, {manifest['settings']['future']} tokens at most", "log p: answer tokens that the compressed cache predicts; marks shifted sideways to be told apart")
