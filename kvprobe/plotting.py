"""The figure that every drawing function returns: it shows itself in notebooks and saves without a display.

matplotlib's own Figure is shown by a notebook only once pyplot has set a backend, and kvprobe sets none.
"""

from __future__ import annotations

import io

from matplotlib.figure import Figure

SMALL = dict(fontsize=7.5, color="0.3")


class Picture(Figure):
    """A matplotlib Figure that a notebook can show by itself."""

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


def footer(figure: Figure, text: str) -> None:
    """Small print under the axes: what a reader needs who sees the figure alone."""
    lines = text.count("\n") + 1
    room = (0.05 + 0.13 * lines) / figure.get_figheight()
    figure.text(0.5, 0.01, text, ha="center", va="bottom", **SMALL)
    figure.get_layout_engine().set(rect=(0, room, 1, 1 - room))
