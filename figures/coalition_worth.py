"""What each head or layer band adds to recalling a fact, how pairs interact, and how worth grows with the number of holders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.probes.coalitions import replay, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "coalitions"
KINDS = {"alone": ("alone", "#4477aa", -0.22), "Shapley value": ("Shapley value", "#222222", 0), "last": ("lost without it", "#ee7733", 0.22)}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The summary, with the number of holders of each coalition."""
    table = summary(rows, manifest)
    table["size"] = [len([p for p in players.split("+") if p]) for players in table.players]
    return table


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure, one row of three panels per game; whiskers are 95 % intervals over instances."""
    from kvprobe import plotting

    played = replay(manifest)
    figure, axes = plotting.grid(13.5, 3.6 * len(played) + 1.1, len(played), 3, width_ratios=[1.35, 1.05, 1.1])
    for row, (game, names) in zip(axes, played):
        part = table[table.game == game.name]
        short = [_short(n) for n in names]
        _players(row[0], part, short)
        _pairs(row[1], part, short)
        _sizes(row[2], part, len(names), manifest["settings"]["enough"])
        how = "exact" if game.order is None else f"{len(game.order)} sampled orders"
        row[0].set_title(f"{game.name}: what each adds ({how})", fontsize=9.5)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title="R of a player")
    figure.suptitle(f"Who carries a planted fact, as a game (n = {int(table.n.max())} facts; worth of a coalition: recall R)", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _short(name: str) -> str:
    return name.replace("layers ", "").replace(", head ", "/h").replace("head ", "h")


def _players(ax, part: pd.DataFrame, names: list[str]) -> None:
    from kvprobe import plotting

    for kind, (label, color, shift) in KINDS.items():
        for k, r in enumerate(part[part.quantity == kind].itertuples()):
            plotting.whisker(ax, int(r.players) + shift, r.value, r.low, r.high, color=color, label=None if k else label)
    ax.axhline(0, color="0.3", lw=0.8)
    ax.set_xticks(range(len(names)), names, fontsize=8, rotation=0 if len(names) < 9 else 90)
    ax.set_xlabel("layers held by all heads" if "-" in names[0] and "/" not in names[0] else "layers/KV head" if "/" in names[0] else "KV head, in every layer")
    ax.set_ylabel("recall R\n[share of the available log p]")
    ax.grid(axis="x", visible=False)


def _pairs(ax, part: pd.DataFrame, names: list[str]) -> None:
    p = len(names)
    values = np.full((p, p), np.nan)
    for r in part[part.quantity == "interaction"].itertuples():
        i, j = map(int, r.players.split("+"))
        values[i, j] = values[j, i] = r.value
    top = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 1.0
    image = ax.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top)
    told = {tuple(map(int, r.players.split("+"))): r for r in part[part.quantity == "interaction"].itertuples()}
    for (i, j), r in told.items() if p < 9 else ():
        sure = "*" if (r.low > 0 or r.high < 0) and abs(r.value) >= 0.005 else ""
        for a, b in ((i, j), (j, i)):
            ax.text(b, a, f"{r.value:.2f}{sure}", ha="center", va="center", fontsize=7.5, color="white" if abs(r.value) > 0.6 * top else "black")
    ax.set_xticks(range(p), names, fontsize=8, rotation=0 if p < 5 else 90)
    ax.set_yticks(range(p), names, fontsize=8)
    ax.grid(visible=False)
    ax.set_xlabel("two players")
    ax.set_title("interaction index (*: interval excludes 0)", fontsize=9.5)
    ax.figure.colorbar(image, ax=ax, shrink=0.8).set_label("R: > 0 together, < 0 instead of each other", fontsize=7.5)


def _sizes(ax, part: pd.DataFrame, p: int, enough: float) -> None:
    worth = part[part.quantity == "worth"]
    spots = np.random.default_rng(0).uniform(-0.16, 0.16, len(worth))
    ax.plot(worth["size"] + spots, worth.value, "o", ms=3.5, color="#4477aa", alpha=0.6, label="a coalition")
    means = worth.groupby("size").value.mean()
    ax.plot(means.index, means, color="#222222", lw=1.4, label="mean")
    ax.axhline(enough, color="0.4", ls="--", lw=0.9, label=f"enough ({enough:g})")
    best = part[part.quantity == "sufficient"]
    told = "; ".join(_short(n) for n in best.names[:3]) + ("; ..." if len(best) > 3 else "")
    ax.set_title(f"smallest enough: {told}" if len(best) else "no set is enough", fontsize=8.5)
    ax.set_xticks(range(p + 1))
    ax.set_xlabel("players that hold the fact")
    ax.set_ylabel("recall R")
    ax.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=3, frameon=False)


def footer(manifest: dict) -> str:
    """Everything a reader needs to know about the run."""
    s, m, plan = manifest["settings"], manifest["model"], manifest["plan"]
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads), policy {s['policies']}, K = {plan['keep']}, r = {plan['buffer']}, {s['rounds']} rounds before the value; "
            f"players outside the coalition lose the fact at the first round\n"
            f"n = {s['instances']} facts, ratios of sums with 95 % bootstrap intervals over them, {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
