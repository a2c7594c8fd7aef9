"""Retrieval and log p of a passcode by policy and by rounds since it was stated (after Random Attention Table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe import stats
from kvprobe.probes.passcode import frame

if TYPE_CHECKING:
    import pandas as pd

READS = "passcode"
PANELS = (("retrieved", "retrieval\n[fraction of passcodes]"), ("logp", "log p of the passcode\n[nats]"), ("copies", "copies left\n[share of sites x tokens]"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per arm, question and panel: mean over instances (and eviction seeds) with its interval."""
    import pandas as pd

    out = []
    for (arm, ask), part in frame(rows, manifest).groupby(["arm", "ask"], sort=False):
        by = part.groupby("instance")[[key for key, _ in PANELS]].mean()
        for key, _ in PANELS:
            if by[key].notna().all():
                e = stats.mean(by[key].to_numpy(), manifest["settings"]["seed"])
                out.append(dict(arm=arm, ask=ask, panel=key, value=e.value, low=e.low, high=e.high, n=e.n))
    return pd.DataFrame(out)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a panel per number, arms side by side, one mark per question; arms in order of retrieval, then log p."""
    import seaborn as sns

    from kvprobe import plotting

    last = table.ask.iloc[-1]
    order = table[table.ask == last].pivot(index="arm", columns="panel", values="value").sort_values(["retrieved", "logp"], ascending=False).index
    figure, axes = plotting.picture(max(6.4, 0.52 * len(order) + 1.8), 8.0, rows=3, sharex=True)
    asks = list(dict.fromkeys(table.ask))
    looks = dict(zip(asks, zip(sns.color_palette("viridis", len(asks) + 1), "os^vD")))
    for ax, (key, label) in zip(axes, PANELS):
        for j, ask in enumerate(asks):
            part = table[(table.panel == key) & (table.ask == ask)].set_index("arm")
            for x, arm in enumerate(order):
                if arm in part.index:
                    r = part.loc[arm]
                    plotting.whisker(ax, x + 0.22 * (j - (len(asks) - 1) / 2), r.value, r.low, r.high, color=looks[ask][0], fmt=looks[ask][1], label=ask if x == 0 else None)
        ax.set_ylabel(label)
    axes[0].set_ylim(-0.05, 1.05)
    handles = [axes[0].plot([], [], looks[a][1], color=looks[a][0], label=f"asked after {a}")[0] for a in asks]
    axes[0].legend(handles=handles, fontsize=8, loc="upper right")
    axes[-1].set_xticks(range(len(order)), order, rotation=35, ha="right", fontsize=8.5)
    figure.suptitle("Which policy finds a passcode that was stated once", fontsize=11)
    s, plan = manifest["script"], manifest["plan"]
    plotting.footer(figure, plotting.about(manifest, f"K = {plan['keep']} per KV head in every arm, r = {plan['buffer']}", f"passcode at position {s['spans']['value'][0]}, asked after up to {s['tokens']} tokens"))
    return figure
