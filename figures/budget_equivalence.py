"""Fidelity over budgets, and the budget that each baseline needs to match LORE /E, with lower bounds where it never does (LORE Fig. 13, Table 16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe import stats
from kvprobe.metrics import equivalence
from kvprobe.suite import tables
from kvprobe.suite.orders import BASELINES, LORE_E, RANDOM

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
AGAINST = (RANDOM, *BASELINES)
BOUNDS = {0: "o", 1: "^", -1: "v"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "fidelity" by criterion and budget; part "match": per baseline and budget of /E the budget needed (needed, bound as in equivalence.Match) and the saving, from means over prompts."""
    import pandas as pd

    seed, means = manifest["settings"]["seed"], tables.means_of(rows)
    own = means[(means.metric == "error") & means.instance.isin(tables.long_enough(rows, max(manifest["budgets"])).instance)]
    wide = tables.matrix(own.assign(value=1 - own.value), ["arm", "keep"])
    budgets = sorted(int(b) for b in own["keep"].unique())
    drawn = stats.draw_counts(len(wide), seed, stats.REPLICATES)
    curves = {name: (wide[name][budgets].mean().to_numpy(), drawn @ wide[name][budgets].to_numpy() / len(wide)) for name in (LORE_E, *AGAINST)}
    found = []
    for name in AGAINST:
        match, each = (equivalence.equivalence(budgets, curves[LORE_E][i], curves[name][i]) for i in (0, 1))
        ends = stats.percentiles(each.saving) if len(wide) > 1 else np.full((2, len(budgets)), np.nan)  # one prompt has no interval
        found += [dict(arm=name, keep=b, n=len(wide), needed=match.needed[k], bound=int(match.bound[k]), value=match.saving[k], low=ends[0, k], high=ends[1, k],
                       bounded=float((each.bound[:, k] == 1).mean())) for k, b in enumerate(budgets)]
    return pd.concat([tables.estimates(wide, seed).assign(part="fidelity"), pd.DataFrame(found).assign(part="match")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: fidelity left, savings right."""
    from matplotlib.lines import Line2D

    from kvprobe import plotting
    from kvprobe.suite import drawing

    figure, axes = plotting.grid(13.8, 5.6, 1, 2)
    (left, right), curves, match = axes[0], table[table.part == "fidelity"], table[table.part == "match"]
    budgets, names = sorted(match["keep"].astype(int).unique()), tables.ordered(curves.arm)
    for name in names:
        drawing.curve(left, curves[curves.arm == name], "keep", name)
    left.set_ylabel("fidelity on the future's queries\n[mean cosine of attention outputs]")
    for k, name in enumerate(AGAINST):
        own = match[match.arm == name].sort_values("keep")
        at = own["keep"] * 1.012 ** (k - 2)
        right.plot(at, own.value, color=drawing.STYLES[name][0], lw=0.9)
        for x, r in zip(at, own.itertuples()):
            plotting.whisker(right, x, r.value, r.low, r.high, color=drawing.STYLES[name][0], fmt=BOUNDS[int(r.bound)], ms=5)
    right.axhline(0, color="0.3", lw=0.8)
    right.set_ylabel(f"saving of {LORE_E} [1 - B / budget that the baseline needs]")
    for ax in (left, right):
        drawing.budget_axis(ax, budgets)
    right.set_xlabel(f"budget B of {LORE_E} [entries kept per KV head]")
    handles = [Line2D([], [], color="0.3", marker=m, ls="", label=t) for m, t in (("o", "matched"), ("^", f"never up to {budgets[-1]}: a lower bound"), ("v", f"already at {budgets[0]}: an upper bound"))]
    lines = [Line2D([], [], color=drawing.STYLES[n][0], ls=drawing.STYLES[n][1], label=n) for n in names]
    figure.legend(handles=[*lines, Line2D([], [], ls="", label=""), *handles], loc="outside right upper", fontsize=8, frameon=False)
    at = match[match["keep"] == manifest["settings"]["budget"]].set_index("arm")
    figure.suptitle(f"Budget equivalence (n = {int(match.n.max())} prompts of 2 x {budgets[-1]} tokens or more)\nto match {LORE_E} at B = {manifest['settings']['budget']}: "
                    + ", ".join(f"{n} {'> ' if at.bound[n] == 1 else '< ' if at.bound[n] == -1 else ''}{at.needed[n]:.0f}" for n in AGAINST), fontsize=10)
    plotting.footer(figure, tables.about(manifest, "between budgets a curve is linear in log B; needed budgets from means over prompts; bands and bars: 95 % intervals over prompts, where replicates that never match count with their bound"))
    return figure
