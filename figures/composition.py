"""What kinds of tokens each criterion keeps: share retained and enrichment by class, protected ones, evidence and answer apart (LORE Fig. 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.suite import tables
from kvprobe.metrics.composition import CLASSES, MATCHES

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
PANELS = {"fraction": "retained [share of the class's tokens]", "enrichment": "enrichment [P(class | kept) / P(class | prompt)]"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per metric, class and criterion; tokens: the class's mean number in a prompt, over the n prompts that have any."""
    own, seed = rows[rows.metric.isin(PANELS)], manifest["settings"]["seed"]
    sizes = own[own.tokens > 0].groupby(["cls", "instance"]).tokens.first().groupby("cls").mean()
    found = tables.summary(own, ["metric", "cls", "arm"], seed)
    return found.assign(tokens=found.cls.map(sizes))


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a panel per metric, classes along x, a colour per criterion."""
    from kvprobe import plotting
    from kvprobe.suite import drawing

    figure, axes = plotting.picture(13.4, 8.6, 2)
    names, shown = tables.ordered(table.arm), [c for c in (*CLASSES, MATCHES) if c in set(table.cls)]
    for ax, (metric, label) in zip(axes, PANELS.items()):
        own = table[table.metric == metric]
        for k, name in enumerate(names):
            for r in own[own.arm == name].itertuples():
                plotting.whisker(ax, shown.index(r.cls) + 0.085 * (k - (len(names) - 1) / 2), r.value, r.low, r.high, color=drawing.STYLES[name][0], ms=4.5)
        ax.set_ylabel(label, fontsize=9)
        ticks = [(c, own[own.cls == c].iloc[0]) for c in shown]
        ax.set_xticks(range(len(shown)), [f"{c}\n{r.tokens:.1f} tokens, n = {int(r.n)}" for c, r in ticks], fontsize=9)
        ax.set_xlim(-0.5, len(shown) - 0.5)
        ax.set_xlabel(f"class of tokens, disjoint in this order; beside them, across all of them, the paper's {MATCHES!r}" if metric == "enrichment" else "")
        ax.axvline(len(shown) - 1.5, color="0.3", lw=0.8, ls=":")
    axes[1].axhline(1, color="0.3", lw=0.8)
    from matplotlib.lines import Line2D

    figure.legend(handles=[Line2D([], [], color=drawing.STYLES[n][0], marker="o", ls="", ms=5, label=n) for n in names], loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"Which tokens are kept at B = {manifest['settings']['budget']} (n = prompts that have the class)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, "sink, recent and structural tokens are protected; evidence: the generator's statements; answer: other tokens with an id of the answer's; "
                                         f"{MATCHES}: every token with such an id, the paper's class of answer and evidence; "
                                         "bars: 95 % intervals"))
    return figure
