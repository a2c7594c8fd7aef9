"""The figure that every drawing function returns: it shows itself in notebooks and saves without a display.

matplotlib's own Figure is shown by a notebook only once pyplot has set a backend, and kvprobe sets none.
"""

from __future__ import annotations

import io
import textwrap

from matplotlib.figure import Figure

SMALL = dict(fontsize=7.5, color="0.3")
PLAIN = dict(parse_math=False)
"""Of texts that hold names: matplotlib reads a formula between two dollar signs, and fails where it is none."""


class Picture(Figure):
    """A matplotlib Figure that a notebook can show by itself; titles, which may hold names, are plain text."""

    def suptitle(self, t, **kwargs):
        return super().suptitle(t, **(PLAIN | kwargs))

    def savefig(self, fname, **kwargs) -> None:
        """As matplotlib's; the layout is settled first, so that a figure drawn twice is the same (its first pass moves what the second finds)."""
        self.draw_without_rendering()
        super().savefig(fname, **kwargs)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=100)
        return out.getvalue()


def picture(width: float, height: float, rows: int = 1, **subplots):
    """(figure, axes) in the house style, sizes in inches."""
    import seaborn as sns

    with sns.axes_style("whitegrid"):
        figure = Picture(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, 1, **subplots)
    return figure, axes


def grid(width: float, height: float, rows: int, columns: int, **subplots):
    """(figure, axes [rows][columns]) in the house style, sizes in inches."""
    import seaborn as sns

    with sns.axes_style("whitegrid"):
        figure = Picture(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes


def about(manifest: dict, *facts: str) -> str:
    """Two lines for the footer: the model and the run's own facts, then budgets' seeds, precision and version."""
    m, s = manifest["model"], manifest["settings"]
    first = f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads), " + ", ".join(facts)
    second = (f"n = {s['instances']} scripts, 95 % bootstrap intervals over them; policies that draw: mean over {s['eviction_seeds']} eviction seeds; "
              f"{s['positions']} positions, {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
    return first + "\n" + second


def colors(names) -> dict:
    """One colour per name, in order; the full cache is grey."""
    import seaborn as sns

    names = list(dict.fromkeys(names))
    return dict(zip(names, sns.color_palette("husl", len(names)))) | {"full": "0.45"}


def whisker(ax, x, value, low, high, **style) -> None:
    """A point with its interval; nothing where there is no value."""
    if value is not None and value == value:
        ax.errorbar(x, value, yerr=[[max(0, value - low)], [max(0, high - value)]], **(dict(fmt="o", ms=4, capsize=2.5, lw=1) | style))


def plain(legend) -> None:
    """Draw a legend's names as they are (PLAIN); a legend takes no such setting itself."""
    for text in legend.get_texts():
        text.set(**PLAIN)


def footer(figure: Figure, text: str) -> None:
    """Small print under the axes: what a reader needs who sees the figure alone."""
    room_for = int(figure.get_figwidth() / 0.058)  # characters of this size on one line
    text = "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, room_for, break_on_hyphens=False))
    lines = text.count("\n") + 1
    room = (0.05 + 0.13 * lines) / figure.get_figheight()
    figure.text(0.5, 0.01, text, ha="center", va="bottom", **SMALL, **PLAIN)
    figure.get_layout_engine().set(rect=(0, room, 1, 1 - room))
