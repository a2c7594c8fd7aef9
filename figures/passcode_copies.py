"""Where copies of a passcode's value are left when it is asked for: layers by KV heads, one map per policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

READS = "passcode"
ACROSS = 6


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Mean over instances and eviction seeds of the share of the value's tokens that a site holds, at the last question."""
    held = rows[rows.metric == "value_held"]
    last = list(dict.fromkeys(held.ask))[-1]
    held = held[held.ask == last].assign(arm=lambda d: [p + (" + prompt" if q else "") for p, q in zip(d.policy, d.protect)])
    return held.groupby(["arm", "layer", "head"], sort=False).value.mean().reset_index().assign(ask=last)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: small multiples, one colour scale from 0 to 1."""
    from kvprobe import plotting

    arms = list(dict.fromkeys(table.arm))
    columns = min(ACROSS, len(arms))
    lines = -(-len(arms) // columns)
    figure, axes = plotting.grid(1.5 * columns + 1.4, 3.1 * lines + 1.0, lines, columns, sharex=True, sharey=True)
    cells = [ax for row in axes for ax in row]
    for ax, arm in zip(cells, arms):
        grid = table[table.arm == arm].pivot(index="layer", columns="head", values="value")
        image = ax.imshow(grid.to_numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower", extent=(-0.5, grid.shape[1] - 0.5, -0.5, grid.shape[0] - 0.5))
        ax.set_title(f"{arm}\n{grid.to_numpy().mean():.2f}", fontsize=7.5)
        ax.grid(False)
        ax.set_xticks(range(grid.shape[1]), [int(h) for h in grid.columns])
        shown = range(0, grid.shape[0], max(1, grid.shape[0] // 6))
        ax.set_yticks(list(shown), [int(grid.index[i]) for i in shown])
    for ax in cells[len(arms):]:
        ax.set_visible(False)
    for row in axes:
        row[0].set_ylabel("layer")
    for ax in axes[-1]:
        ax.set_xlabel("KV head")
    figure.colorbar(image, ax=cells, shrink=0.6, label="share of the value's tokens held")
    figure.suptitle(f"Copies of the passcode left after {table.ask.iloc[0]} (mean over all sites above each map)", fontsize=11)
    plan = manifest["plan"]
    plotting.footer(figure, plotting.about(manifest, f"K = {plan['keep']} per KV head in every arm, r = {plan['buffer']}").replace(", 95 % bootstrap intervals over them", ", means over them"))
    return figure
