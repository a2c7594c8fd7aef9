"""Figures of captures: functions that take a capture and return a matplotlib Figure. No backend is ever set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvprobe import plotting

from .capture import Capture


def queries_in_plane(capture: Capture, layer: int, q_head: int, stretches: Mapping[str, range], row: int = 0):
    """Post-RoPE queries of stretches of text in their two first principal components (after LORE-KV Fig. 1a).

    stretches: name -> positions. Raises ValueError for positions or heads that were not captured.
    """
    import seaborn as sns
    from sklearn.decomposition import PCA

    points = {name: _queries(capture, layer, q_head, positions, row) for name, positions in stretches.items()}
    plane = PCA(n_components=2, svd_solver="full").fit(np.concatenate(list(points.values())))
    figure, ax = plotting.picture(6.4, 4.8)
    for (name, x), color, marker in zip(points.items(), sns.color_palette("colorblind", len(points)), "osD^vP"):
        at = plane.transform(x)
        ax.scatter(at[:, 0], at[:, 1], s=22, color=color, marker=marker, alpha=0.8, label=f"{name} (n = {len(x)})")
    share = plane.explained_variance_ratio_ * 100
    ax.set(xlabel=f"first principal component ({share[0]:.0f} % of variance)", ylabel=f"second principal component ({share[1]:.0f} %)",
           title=f"Post-RoPE queries, layer {layer}, query head {q_head}")
    plotting.plain(figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper"))
    plotting.footer(figure, f"{capture.model}, {capture.backend}, one text of {capture.tokens.shape[1]} tokens")
    return figure


def _queries(capture: Capture, layer: int, q_head: int, positions: Sequence[int], row: int) -> np.ndarray:
    if layer not in capture.q or q_head not in capture.q_heads:
        raise ValueError(f"layer {layer}, query head {q_head} was not captured: layers {list(capture.q)}, query heads {list(capture.q_heads)}")
    have = {p: n for n, p in enumerate(capture.q_positions[row].tolist()) if p >= 0}
    missing = [p for p in positions if p not in have]
    if missing:
        raise ValueError(f"position {missing[0]} was not captured; captured: {min(have)}..{max(have)}")
    x = capture.q[layer][row, capture.q_heads.index(q_head)]
    return x[[have[p] for p in positions]].float().cpu().numpy()


def head_map(values: np.ndarray, label: str, title: str, footer: str = "", low: float | None = None, high: float | None = None, heads: str = "KV head",
             layers: Sequence[int] | None = None):
    """Heat map [layers, heads] of bounded size with one colour scale; missing cells (nan) have a colour of their own and are named.

    layers: the model's numbers of the rows, where they are not all layers from 0 on (a keep log's `layers`).
    """
    import seaborn as sns
    from matplotlib.patches import Patch

    values = np.asarray(values, dtype=float)
    if values.ndim != 2:
        raise ValueError(f"a head map is [layers, heads], got an array of {values.ndim} axes")
    rows, columns = values.shape
    if layers is not None and len(layers) != rows:
        raise ValueError(f"layers must number the {rows} rows of the map, got {len(layers)}")
    figure, ax = plotting.picture(min(12, 2.6 + 0.5 * columns), min(10, 1.6 + 0.22 * rows))
    ax.set_facecolor("0.75")
    sns.heatmap(values, ax=ax, vmin=low, vmax=high, cmap="viridis", mask=np.isnan(values), yticklabels="auto" if layers is None else list(layers))
    figure.axes[-1].set_ylabel(label, **plotting.PLAIN)
    ax.set(ylabel="layer")
    ax.set_xlabel(heads, **plotting.PLAIN)
    ax.set_title(title, **plotting.PLAIN)
    if np.isnan(values).any():
        ax.legend(handles=[Patch(color="0.75", label=f"not measured ({int(np.isnan(values).sum())})")], loc="upper left", bbox_to_anchor=(0, -0.08), frameon=False, fontsize=8)
    if footer:
        plotting.footer(figure, footer)
    return figure


def bars(values: Mapping[str, float], label: str, title: str, footer: str = ""):
    """One bar per named value, with the number written on it."""
    import seaborn as sns

    figure, ax = plotting.picture(max(5, 1.15 * len(values) + 1.5), 4)
    drawn = ax.bar(range(len(values)), list(values.values()), color=sns.color_palette("viridis", len(values)), width=0.7)
    ax.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    ax.axhline(0, color="0.2", lw=0.8)
    ax.grid(axis="x", visible=False)
    ax.set_xticks(range(len(values)), list(values), **plotting.PLAIN)
    ax.set_ylabel(label, **plotting.PLAIN)
    ax.set_title(title, **plotting.PLAIN)
    ax.margins(y=0.12)
    if footer:
        plotting.footer(figure, footer)
    return figure
