"""How near the window's and the sampled continuations' queries come to the future's: a plane, coverage over M, coverage by layer (LORE Fig. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.suite import tables

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
POINTS = {"window": ("tab:orange", "o"), "continuations": ("tab:blue", "."), "future": ("tab:red", "*")}
SETS = {("continuations", "union"): ("tab:blue", "-"), ("both", "union"): ("tab:green", "-"), ("continuations", "mixture"): ("tab:blue", "--"), ("both", "mixture"): ("tab:green", "--")}
NAMES = {"continuations": "continuations", "both": "window and continuations"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "plane": points (x, y) of one prompt and the variance told (value of x, y); part "all": coverage by sets, form and M; part "layer": by layer too, at the run's M."""
    import pandas as pd

    s, own = manifest["settings"], rows[rows.metric == "coverage"]
    at = own[(own.m == 0) | (own.m == s["m"])]
    points = rows[rows.metric.isin(["component_1", "component_2"])].pivot_table(index=["sets", "point", "layer", "head"], columns="metric", values="value", sort=False).reset_index()
    told = rows[rows.metric.isin(["explained_1", "explained_2"])].set_index("metric").value
    points = points.rename(columns=dict(component_1="x", component_2="y")).assign(explained_x=told["explained_1"], explained_y=told["explained_2"])
    return pd.concat([points.assign(part="plane"), tables.summary(own, ["sets", "form", "m"], s["seed"]).assign(part="all"), tables.summary(at, ["sets", "form", "m", "layer"], s["seed"]).assign(part="layer")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure of three panels."""
    from kvprobe import plotting

    figure, axes = plotting.grid(14.0, 5.2, 1, 3)
    plane, every, layers = (table[table.part == name] for name in ("plane", "all", "layer"))
    _plane(axes[0][0], plane)
    _by_m(axes[0][1], every)
    _by_layer(axes[0][2], layers, manifest["settings"]["m"])
    _legends(figure)
    figure.suptitle(f"Coverage of the future's queries (coverage: n = {int(every.n.max())} prompts; the plane: one prompt)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, "cosines of unit-normalised queries of the same query head, mean over future queries, heads and layers; union: the best over all sets; "
                                         "mixture: eq. 13 as written, continuations weighed 1/M, the window half of both; nested prefixes of each draw; plane: all continuations of one draw"))
    return figure


def _plane(ax, plane: pd.DataFrame) -> None:
    for name, (color, marker) in POINTS.items():
        own = plane[plane.sets == name]
        ax.scatter(own.x, own.y, color=color, marker=marker, s=60 if marker == "*" else 22, alpha=0.75, lw=0)
    first = plane.iloc[0]
    ax.set(xlabel=f"first component ({first.explained_x:.0%} of variance)", ylabel=f"second component ({first.explained_y:.0%} of variance)")
    ax.set_title(f"queries of layer {int(first.layer)}, query head {int(first['head'])}", fontsize=10)


def _by_m(ax, every: pd.DataFrame) -> None:
    from kvprobe import plotting

    ms = sorted(int(m) for m in every.m.unique() if m)
    window = every[every.sets == "window"].iloc[0]
    ax.axhspan(window.low, window.high, color="tab:orange", alpha=0.15, lw=0)
    ax.axhline(window.value, color="tab:orange", lw=1.3)
    for k, ((sets, form), (color, style)) in enumerate(SETS.items()):
        own = every[(every.sets == sets) & (every.form == form)].sort_values("m")
        at = [ms.index(int(m)) + 0.05 * (k - 1.5) for m in own.m]
        ax.plot(at, own.value, color=color, ls=style, lw=1.2)
        for x, r in zip(at, own.itertuples()):
            plotting.whisker(ax, x, r.value, r.low, r.high, color=color)
    ax.set_xticks(range(len(ms)), ms)
    ax.set(xlabel="continuations M", ylabel="coverage [mean best cosine]")
    ax.set_title("all layers", fontsize=10)


def _by_layer(ax, layers: pd.DataFrame, m: int) -> None:
    from kvprobe.suite.drawing import layer_axis

    for (sets, form), (color, style) in ({("window", "union"): ("tab:orange", "-")} | SETS).items():
        own = layers[(layers.sets == sets) & (layers.form == form)].sort_values("layer")
        ax.plot(own.layer, own.value, color=color, ls=style, lw=1.2)
        ax.fill_between(own.layer.astype(float), own.low, own.high, color=color, alpha=0.12, lw=0)
    layer_axis(ax)
    ax.set(ylabel="coverage [mean best cosine]")
    ax.set_title(f"by layer, M = {m}", fontsize=10)


def _legends(figure) -> None:
    from matplotlib.lines import Line2D

    none = Line2D([], [], ls="", label="")
    dots = [Line2D([], [], color=c, marker=k, ls="", label=f"{n} (plane)") for n, (c, k) in POINTS.items()]
    lines = [Line2D([], [], color="tab:orange", label="window alone"), *(Line2D([], [], color=c, ls=s, label=f"{NAMES[n]}, {f}") for (n, f), (c, s) in SETS.items())]
    figure.legend(handles=[*dots, none, *lines], loc="outside right upper", fontsize=8, frameon=False)
