"""What weighting sampled futures is worth: arms against uniform weights, signals against utility, the plane (LORE App. F.4, G)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.weighing_tables import REFERENCE, SIGNALS, UTILITY, correlations, plane, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "reliability_plane"
METRICS = {"recall_free": "Recall@B, free slots\n[less that of uniform weights]", "logp": "log p of the true answer\n[nats, less that of uniform weights]", "effective": "effective number of continuations\n[1 / sum of squared weights]"}
COLORS = {"recall_free": "#4477aa", "coverage_mixture": "#cc7722"}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Three parts in one table, column `part`: arms (gap from uniform weights, or value), signals (rho), plane (gap)."""
    import pandas as pd

    arms, signals, points = summary(rows, manifest), correlations(rows, manifest), plane(rows, manifest)
    arms = arms[arms.metric.isin(METRICS) & ~arms.arm.isin(["full", "oracle", "random"])]
    parts = dict(arms=arms, signals=signals.rename(columns=dict(rho="value")), plane=points)
    return pd.concat([part.assign(part=name) for name, part in parts.items()], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: arms and signals above, the plane below, one heat map per lambda_D."""
    from kvprobe import plotting
    from kvprobe.prompting import about

    arms, signals, points = (table[table.part == name] for name in ("arms", "signals", "plane"))
    levels = sorted(points.lam_d.unique())
    figure = plotting.Picture(figsize=(14.0, 9.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    axes = above.subplots(1, len(METRICS) + 1, gridspec_kw=dict(width_ratios=(1, 1, 1, 1.1)))
    for ax, metric in zip(axes, METRICS):
        _arms(ax, arms[arms.metric == metric], list(dict.fromkeys(arms.arm)), metric)
    for ax in axes[1 : len(METRICS)]:
        ax.set_yticklabels([])
    _signals(axes[-1], signals)
    _plane(below, points, levels)
    n = int(arms.n.max())
    figure.suptitle(f"Weights of sampled futures: M = {manifest['settings']['m']}, T = {manifest['settings']['t']}, B = {manifest['settings']['keeps']} (n = {n} prompts)", fontsize=11)
    plotting.footer(figure, about(manifest, f"chunk 1, uniform budgets; signals: the {manifest['settings']['particles']} continuations of each seed's draw, rho within a prompt, mean over prompts; "
                                            "coverage: mean cosine of a future query with the continuation's nearest one"))
    return figure


def _arms(ax, part: pd.DataFrame, names: list[str], metric: str) -> None:
    gap = metric != "effective"
    for r in part.itertuples():
        x, low, high = (r.gap, r.gap_low, r.gap_high) if gap else (r.value, r.low, r.high)
        if r.arm != REFERENCE or not gap:
            ax.errorbar(x, names.index(r.arm), xerr=[[max(0, x - low)], [max(0, high - x)]], fmt="o", ms=4, lw=1, capsize=2.5, color="#4477aa")
    if gap:
        ax.axvline(0, color="0.3", lw=0.8)
        _near(ax, part, names)
    ax.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel(METRICS[metric], fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.4)


FAR = "window only"


def _near(ax, part: pd.DataFrame, names: list[str]) -> None:
    """The axis spans the weightings; what no look ahead costs lies far off and is said in words."""
    near = part[part.arm != FAR]
    low, high = min(0.0, near.gap_low.min()), max(0.0, near.gap_high.max())
    room = 0.08 * (high - low) or 1.0
    for r in part[part.arm == FAR].itertuples():
        if r.gap_low < low - room or r.gap_high > high + room:
            ax.text(low - room, names.index(r.arm), f" off the axis: {r.gap:.3g} [{r.gap_low:.3g}, {r.gap_high:.3g}]", va="center", fontsize=8)
    ax.set_xlim(low - room, high + room)


def _signals(ax, part: pd.DataFrame) -> None:
    names = list(SIGNALS)
    for k, (utility, label) in enumerate(UTILITY.items()):
        for i, r in enumerate(part[(part.utility == utility) & part.value.notna()].itertuples()):
            ax.errorbar(r.value, names.index(r.signal) + 0.24 * (k - 0.5), xerr=[[max(0, r.value - r.low)], [max(0, r.high - r.value)]], fmt="o", ms=4, lw=1, capsize=2.5,
                        color=COLORS[utility], label=None if i else label)
    ax.axvline(0, color="0.3", lw=0.8)
    ax.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=[SIGNALS[s] for s in names])
    ax.yaxis.tick_right()
    ax.set_xlabel("Spearman's rho of a continuation's signal\nand its utility, within prompts", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.4)
    ax.legend(title="utility", fontsize=8, title_fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _plane(figure, points: pd.DataFrame, levels: list[float]) -> None:
    import numpy as np

    axes = figure.subplots(1, len(levels), squeeze=False)[0]
    most = max(1e-6, float(points.gap.abs().max()))
    betas, gammas = (sorted(points[c].unique()) for c in ("beta", "gamma"))
    for ax, level in zip(axes, levels):
        own = points[points.lam_d == level]
        grid = np.array([[own[(own.beta == b) & (own.gamma == g)].gap.iloc[0] for g in gammas] for b in betas])
        image = ax.imshow(grid, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", origin="lower")
        for r in own.itertuples():
            told = r.gap_low > 0 or r.gap_high < 0
            dark = abs(r.gap) > 0.6 * most
            ax.text(gammas.index(r.gamma), betas.index(r.beta), f"{r.gap:+.4f}{'*' if told else ''}\n({r.effective:.1f})", ha="center", va="center", fontsize=8, color="white" if dark else "black")
        ax.set(xticks=range(len(gammas)), xticklabels=[f"{g:g}" for g in gammas], yticks=range(len(betas)), yticklabels=[f"{b:g}" for b in betas],
               xlabel="gamma (against entropy) [1 / nat]", ylabel="beta (typicality) [1 / nat]")
        ax.set_title(f"lambda_D = {level:g}", fontsize=10)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.9)
    bar.set_label("Recall@B, free slots\n[less that of uniform weights]", fontsize=9)
    figure.suptitle("The plane: gain in recall (effective number of continuations); * where the 95 % interval excludes 0", fontsize=10)
