"""What figures of the oracle suite share: a colour and a line per criterion, curves with bands, the legend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .orders import ANDPRO, ATTENTION, CRITICAL, LORE_D, LORE_E, ORACLE, RANDOM, SINGLE, WINDOW_ONLY

if TYPE_CHECKING:
    import pandas as pd

STYLES = {RANDOM: ("0.55", ":"), ATTENTION: ("tab:green", "--"), CRITICAL: ("tab:olive", "--"), ANDPRO: ("tab:brown", "--"), WINDOW_ONLY: ("tab:orange", "-"), SINGLE: ("tab:purple", "-"),
          LORE_E: ("tab:blue", "-"), LORE_D: ("tab:cyan", "-."), ORACLE: ("0.1", "-")}
"""Colour and line: dashed sees the prompt alone in its own way, solid shares LORE's cost."""


def curve(ax, part: pd.DataFrame, x: str, name: str) -> None:
    """One criterion's line over column x with its 95 % band."""
    color, style = STYLES[name]
    part = part.sort_values(x)
    ax.plot(part[x], part.value, color=color, ls=style, lw=1.4, marker=".", ms=4)
    ax.fill_between(part[x].astype(float), part.low, part.high, color=color, alpha=0.13, lw=0)


def legend(figure, names, **more) -> None:
    """Criteria outside the axes, `more`: label -> (colour, line)."""
    from matplotlib.lines import Line2D

    styles = {n: STYLES[n] for n in names} | more
    figure.legend(handles=[Line2D([], [], color=c, ls=s, label=n) for n, (c, s) in styles.items()], loc="outside right upper", fontsize=8, frameon=False)


def budget_axis(ax, budgets) -> None:
    """Logarithmic, with the budgets as ticks."""
    ax.set_xscale("log")
    shown = list(budgets) if len(budgets) <= 7 else [b for i, b in enumerate(budgets) if i % 2 == len(budgets) % 2]
    ax.set_xticks(shown, [str(b) for b in shown])
    ax.minorticks_off()
    ax.set_xlabel("budget B [entries kept per KV head]")


def layer_axis(ax) -> None:
    """Whole numbers."""
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("layer")
