"""Whether looking ahead gains more where the window is farther from the future: gains against mismatch and added coverage, over prompts and over layers (LORE Fig. 6).

Futures differ in length, and a short one (the answer alone) is nearer to the window and to what was sampled than a long one, so that the correlation
over prompts is also given with the length of the future held (a partial Spearman's rho).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe import stats
from kvprobe.suite import tables
from kvprobe.suite.orders import LORE_E, WINDOW_ONLY

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
GAINS = {"recall": "gain in Recall@B, all entries [fraction]", "recall_free": "gain in Recall@B, free slots [fraction]", "fidelity": "gain in fidelity [cosine]"}
AGAINST = {"mismatch": "mismatch: 1 - coverage by the window [1 - cosine]", "added": "coverage that the continuations add [cosine]"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "prompt": a row per prompt; part "rho": Spearman over prompts, with p; part "held": the same with the length of the future held; part "layers":
    Spearman over the layers of a prompt, mean over prompts, p by the sign test over prompts."""
    import pandas as pd

    s = manifest["settings"]
    layers = _by_layer(rows, s)
    prompts = layers.groupby(level="instance").mean()
    prompts["future"] = rows[rows.metric == "future"].set_index("instance").value
    found = [dict(part="prompt", instance=i) | r for i, r in prompts.to_dict("index").items()]
    for x in AGAINST:
        for y in GAINS:
            for part, given in (("rho", None), ("held", prompts.future.to_numpy())):
                rho = stats.spearman(prompts[x].to_numpy(), prompts[y].to_numpy(), seed=s["seed"], given=given)
                found.append(dict(part=part, x=x, y=y, n=rho.n, value=rho.value, low=rho.low, high=rho.high, p=rho.p))
            each = np.array([own[x].corr(own[y], method="spearman") if own[[x, y]].nunique().min() > 1 else np.nan for _, own in layers.groupby(level="instance")])
            each = each[~np.isnan(each)]
            e = stats.mean(each, s["seed"]) if len(each) else stats.Estimate(None, None, None, 0)
            found.append(dict(part="layers", x=x, y=y, n=e.n, value=e.value, low=e.low, high=e.high, p=stats.sign_test(each, 0 * each).p if len(each) else np.nan))
    return pd.DataFrame(found).astype(dict.fromkeys(("value", "low", "high", "p"), float))


def _by_layer(rows: pd.DataFrame, s: dict) -> pd.DataFrame:
    """[(prompt, layer)]: mismatch, added coverage and the gains of /E over the window only at the main budget, means over seeds and heads."""
    import pandas as pd

    covered = rows[rows.metric == "coverage"]

    def over(part):
        return part.groupby(["instance", "layer"]).value.mean()

    window = over(covered[covered.sets == "window"])
    out = {"mismatch": 1 - window, "added": over(covered[(covered.sets == "both") & (covered.form == "union") & (covered.m == s["m"])]) - window}
    own = rows[(rows.keep == s["budget"]) & rows.layer.notna()]
    for name in GAINS:
        part = own[own.metric == ("error" if name == "fidelity" else name)]
        mine, control = (over(part[part.arm == arm]) for arm in (LORE_E, WINDOW_ONLY))
        out[name] = control - mine if name == "fidelity" else mine - control
    return pd.DataFrame(out)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: scatters over prompts, and the correlations over layers."""
    from kvprobe import plotting

    figure, axes = plotting.grid(15.0, 8.2, 2, 3)
    prompts, rho, held, layers = (table[table.part == name] for name in ("prompt", "rho", "held", "layers"))
    shown = ("recall_free", "fidelity")
    for line, x in zip(axes, AGAINST):
        for ax, y in zip(line, shown):
            points = ax.scatter(prompts[x], prompts[y], s=26, c=prompts.future, cmap="viridis_r", lw=0)
            ax.axhline(0, color="0.4", lw=0.8)
            ax.set(xlabel=AGAINST[x], ylabel=GAINS[y])
            at, fixed = (part[(part.x == x) & (part.y == y)].iloc[0] for part in (rho, held))
            ax.set_title(f"rho {_text(at)}\nlength of the future held: {_text(fixed, n=False)}", fontsize=8.5)
        ax = line[2]
        for k, y in enumerate(GAINS):
            for part, shift, color in ((rho, -0.18, "tab:blue"), (held, 0, "tab:cyan"), (layers, 0.18, "tab:red")):
                r = part[(part.x == x) & (part.y == y)].iloc[0]
                plotting.whisker(ax, k + shift, r.value, r.low, r.high, color=color)
        ax.axhline(0, color="0.4", lw=0.8)
        ax.set_xticks(range(len(GAINS)), ["recall,\nall entries", "recall,\nfree slots", "fidelity"], fontsize=8)
        ax.set(ylim=(-1.05, 1.05), ylabel="Spearman's rho of gain and\n" + ("mismatch" if x == "mismatch" else "added coverage"))
        ax.set_title("within prompts, over layers (recall, free slots):\n" + _text(layers[(layers.x == x) & (layers.y == "recall_free")].iloc[0]), fontsize=8.5)
    from matplotlib.lines import Line2D

    figure.legend(handles=[Line2D([], [], marker="o", ls="", color=c, label=n) for c, n in (("tab:blue", "over prompts"), ("tab:cyan", "over prompts, length\nof the future held"), ("tab:red", "within prompts,\nover layers"))], loc="outside right upper", fontsize=8, frameon=False)
    figure.colorbar(points, ax=list(axes[:, 2]), shrink=0.55, pad=0.06).set_label("length of the future [tokens]", fontsize=8)
    figure.suptitle(f"Gain of {LORE_E} over {WINDOW_ONLY} at B = {manifest['settings']['budget']} (n = {len(prompts)} prompts)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, f"coverage: union, mean over layers and query heads; added: window and {manifest['settings']['m']} continuations over the window; each point one prompt, mean over seeds; "
                                         "p: t approximation, over layers the sign test over prompts; held: partial rho; intervals over prompts"))
    return figure


def _text(r, n: bool = True) -> str:
    e = stats.Estimate(*(None if v != v else float(v) for v in (r.value, r.low, r.high)), int(r.n))
    return e.text() + (f", p = {r.p:.2g}" if r.p == r.p else "") + (f", n = {int(r.n)}" if n else "")
