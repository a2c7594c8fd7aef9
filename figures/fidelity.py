"""Fidelity of attention outputs on the future's queries by layer, and what looking ahead adds to it (LORE Fig. 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.suite import tables
from kvprobe.suite.orders import LORE_E, WINDOW_ONLY

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "fidelity" by criterion and layer, part "mean" by criterion over layers, part "gain" of /E over the window only by layer, paired by prompt."""
    import pandas as pd

    s = manifest["settings"]
    own = rows[(rows.metric == "error") & (rows.keep == s["budget"])]
    own = own.assign(value=1 - own.value, metric="fidelity")
    by_layer = own[own.layer.notna()]
    wide = tables.matrix(by_layer, ["arm", "layer"])
    parts = {"fidelity": tables.summary(by_layer, ["arm", "layer"], s["seed"]), "mean": tables.summary(own[own.layer.isna()], ["arm"], s["seed"]),
             "gain": tables.estimates(wide[LORE_E] - wide[WINDOW_ONLY], s["seed"])}
    return pd.concat([table.assign(part=name) for name, table in parts.items()], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: fidelity above, the gain below."""
    from kvprobe import plotting
    from kvprobe.suite import drawing

    figure, (above, below) = plotting.picture(10.6, 7.6, 2, sharex=True, gridspec_kw=dict(height_ratios=(1.7, 1)))
    layers, mean, gain = (table[table.part == name] for name in ("fidelity", "mean", "gain"))
    names = tables.ordered(layers.arm)
    for name in names:
        drawing.curve(above, layers[layers.arm == name], "layer", name)
    for r in gain.itertuples():
        plotting.whisker(below, r.layer, r.value, r.low, r.high, color="tab:blue")
    below.axhline(0, color="0.3", lw=0.8)
    above.set_ylabel("fidelity on the future's queries\n[mean cosine of attention outputs]")
    drawing.layer_axis(below)
    below.set(ylabel=f"{LORE_E} - {WINDOW_ONLY}\n[cosine]")
    value = mean.set_index("arm")
    drawing.legend(figure, names)
    figure.suptitle(f"Fidelity by layer at B = {manifest['settings']['budget']} (n = {int(layers.n.max())} prompts)\nmean over layers: "
                    + ", ".join(f"{n} {value.value[n]:.3f} [{value.low[n]:.3f}, {value.high[n]:.3f}]" for n in (WINDOW_ONLY, LORE_E)), fontsize=11)
    plotting.footer(figure, tables.about(manifest, "mean over query heads; bands and bars: 95 % intervals, the lower panel paired by prompt"))
    return figure
