"""What a linear probe reads of a fact's digits, by layer, head and tokens, above what pinning says the model uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.linear_readout import GROUPS, STATES, pinned, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "linear_readout"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Readout and pinning in one table: part is readout or pinned."""
    import pandas as pd

    return pd.concat([summary(rows, manifest).assign(part="readout"), pinned(rows, manifest).assign(part="pinned")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: accuracy by layer (one row for keys, one for values; one column per group of tokens), then recall R by pinning."""
    from kvprobe import plotting

    figure, axes = plotting.grid(18, 9.2, 3, len(GROUPS))
    heads = sorted(table["head"].astype(int).unique())
    colors = dict(zip(heads, ["#4477aa", "#ee9944", "#aa3377", "#228833", "#66ccee", "#ccbb44", "#bbbbbb", "#000000"] * 8))
    read = table[table.part == "readout"]
    for row, state in zip(axes, STATES):
        for ax, group in zip(row, GROUPS):
            _accuracy(ax, read[(read.state == state) & (read.group == group)], colors)
            ax.set_title(f"{state}, {GROUPS[group]}", fontsize=9.5)
        row[0].set_ylabel("digits read right\n[fraction, mean over digits]")
    _by_head(axes[2][0], table[(table.part == "pinned") & (table.kind == "head")], colors)
    _by_band(axes[2][1], table[(table.part == "pinned") & (table.kind == "band")], colors)
    for ax in axes[2][2:]:
        ax.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    axes[2][2].legend(handles, labels, fontsize=8.5, loc="center left")
    figure.suptitle(f"What can be read and what is used (readout: n = {int(read.n.max())} texts; pinning: n = {int(table[table.part == 'pinned'].n.max())} facts)", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _accuracy(ax, part: pd.DataFrame, colors: dict) -> None:
    from kvprobe import plotting

    for head, color in colors.items():
        mine = part[(part.method == "ridge") & (part.labels == "true") & (part["head"] == head)].sort_values("layer")
        ax.plot(mine.layer, mine.accuracy, color=color, lw=1.3, label=f"KV head {head}")
        ax.fill_between(mine.layer, mine.low, mine.high, color=color, alpha=0.2, lw=0)
        for k, r in enumerate(part[(part.method == "logistic") & (part["head"] == head)].itertuples()):
            plotting.whisker(ax, r.layer + 0.25 * (head - (len(colors) - 1) / 2), r.accuracy, r.low, r.high, color=color, fmt="x", label=None if k or head else "logistic regression, group's last token")
    mixed = part[(part.method == "ridge") & (part.labels == "shuffled")].groupby("layer").accuracy.mean()
    ax.plot(mixed.index, mixed, color="0.5", lw=1, ls=":", label="shuffled labels, mean over heads")
    ax.axhline(part.chance.mean(), color="0.2", lw=0.9, ls="--", label="chance: always the commonest digit")
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("layer")


def _by_head(ax, part: pd.DataFrame, colors: dict) -> None:
    from kvprobe import plotting

    for r in part.itertuples():
        plotting.whisker(ax, r.head - 0.12, r.gained, r.gained_low, r.gained_high, color=colors[r.head], fmt="o")
        plotting.whisker(ax, r.head + 0.12, r.lost, r.lost_low, r.lost_high, color=colors[r.head], fmt="v")
    ax.axhline(0, color="0.3", lw=0.8)
    ax.set_xticks(list(colors))
    ax.set_xlabel("KV head, in every layer")
    ax.set_ylabel("recall R\n[share of the available log p]")
    ax.set_title("pinning: o kept in it alone, v lost without it", fontsize=9.5)


def _by_band(ax, part: pd.DataFrame, colors: dict) -> None:
    from kvprobe import plotting

    for r in part.itertuples():
        plotting.whisker(ax, (r.first + r.last) / 2 + 0.5 * (r.head - (len(colors) - 1) / 2), r.lost, r.lost_low, r.lost_high, color=colors[r.head], fmt="v")
    for edge in part["first"].unique()[1:]:
        ax.axvline(edge - 0.5, color="0.8", lw=0.8)
    ax.axhline(0, color="0.3", lw=0.8)
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("layer (bands between the lines)")
    ax.set_ylabel("recall R")
    ax.set_title("pinning: R lost without one head of a band", fontsize=9.5)


def footer(manifest: dict) -> str:
    """Everything a reader needs to know about the run."""
    s, m, r = manifest["settings"], manifest["model"], manifest["readings"]
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads); readout: {r['tokens']} tokens before the answer, full cache, ridge classifier (penalty {s['ridge']:g}) per token, {s['folds']}-fold, "
            f"mean over a group's tokens; bands: 95 % bootstrap intervals over texts\n"
            f"pinning: policy {s['policies']}, K = {s['keep']}, r = {s['buffer']}, {s['rounds']} rounds before the value, 95 % intervals over facts; {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
