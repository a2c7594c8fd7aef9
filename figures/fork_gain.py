"""Where evicted greedy text leaves the full cache's, and what one pinned range gives back at the fork."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.fork import FORK

if TYPE_CHECKING:
    import pandas as pd

READS = "fork"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Rows of the fork stage: fork positions and gains."""
    return rows[(rows.stage == FORK) & rows.metric.isin(["fork", "forked", "gain"])]


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: left fork positions, right gains of pinned ranges with their means over texts."""
    import numpy as np

    from kvprobe import plotting, stats

    figure, axes = plotting.grid(10.0, 4.6, 1, 2)
    left, right = axes[0]
    policies, rng = list(dict.fromkeys(table.policy)), np.random.default_rng(0)
    colors, seed = plotting.colors(policies), manifest["settings"]["seed"]
    for x, policy in enumerate(policies):
        part = table[table.policy == policy]
        forks = part[part.metric == "fork"]
        left.plot(x + rng.uniform(-0.15, 0.15, len(forks)), forks.value, "o", ms=4, alpha=0.6, color=colors[policy])
        if len(forks):
            e = stats.mean(forks.groupby("instance").value.mean().to_numpy(), seed)
            plotting.whisker(left, x + 0.3, e.value, e.low, e.high, color="0.1")
        for j, kind in enumerate(("evicted", "random")):
            gains = part[(part.metric == "gain") & (part.kind == kind)]
            right.plot(2 * x + 0.8 * j + rng.uniform(-0.15, 0.15, len(gains)), gains.value, "o", ms=3, alpha=0.35, color=colors[policy], mfc=colors[policy] if j == 0 else "white")
            if len(gains):
                e = stats.mean(gains.groupby("instance").value.mean().to_numpy(), seed)
                plotting.whisker(right, 2 * x + 0.8 * j + 0.28, e.value, e.low, e.high, color="0.1")
    share = table[table.metric == "forked"].groupby("policy", sort=False).value.mean()
    left.set_xticks(range(len(policies)), [f"{p}\n{share[p]:.0%} forked" for p in policies])
    left.set_ylabel("fork [tokens after the prompt]")
    right.set_xticks([2 * x + 0.8 * j for x in range(len(policies)) for j in (0, 1)], [f"{p}\n{kind} range" for p in policies for kind in ("evicted", "random")], fontsize=8)
    right.axhline(0, color="0.3", lw=0.8)
    right.set_ylabel("gain in log p of the full cache's token at the fork\n[nats]")
    figure.suptitle("Where greedy text under eviction parts from the full cache's, and what a pinned range of 16 tokens gives back", fontsize=11)
    plan, s = manifest["plan"], manifest["settings"]
    plotting.footer(figure, plotting.about(manifest, f"K = {plan['keep']} per KV head, pinned ranges inside it, r = {plan['buffer']}, prompts of {s['prompt']} and {s['new']} greedy tokens", "dots: single texts (ranges), black: means over texts"))
    return figure
