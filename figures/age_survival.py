"""Share of positions of a given age that a head still holds, by policy, on a log scale (after Random Attention Fig. 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.keep_log import summary

if TYPE_CHECKING:
    import pandas as pd

READS = "keep_log"
FLOOR = 1e-3
"""Shares below are drawn here: a log axis has no zero."""


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per policy, protection and age band: share per head and by any head, with intervals, and the uniform draw's closed form."""
    s = summary(rows, manifest)
    return s[s.metric.isin(["age_head", "age_union", "age_uniform"])]


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: a column per protection, per head above, by any head below."""
    import seaborn as sns

    from kvprobe import plotting

    columns = sorted(table.protect.unique())
    policies = list(dict.fromkeys(table.policy))
    figure, axes = plotting.grid(4.9 * len(columns) + 2.2, 7.6, 2, len(columns), sharex=True, sharey=True)
    looks = dict(zip(policies, zip(sns.color_palette("husl", len(policies)), ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*", "h") * 3)))
    for j, protect in enumerate(columns):
        part = table[table.protect == protect]
        for i, (metric, label) in enumerate((("age_head", "held by a head"), ("age_union", "held by any head"))):
            ax = axes[i][j]
            for policy in policies:
                _line(ax, part[(part.policy == policy) & (part.metric == metric)], policy, looks[policy])
            _closed(ax, part, metric, manifest["model"]["kv_heads"])
            ax.set_yscale("log")
            ax.set_ylim(FLOOR * 0.8, 1.3)
            ax.set_ylabel(f"{label}\n[fraction of positions]" if j == 0 else "")
        axes[0][j].set_title("prompt protected" if protect else "prompt not protected", fontsize=10)
        axes[1][j].set_xlabel("age [tokens]")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"What is still held of a text's past (n = {int(table.n.max())} scripts)", fontsize=11)
    plotting.footer(figure, footer(manifest))
    return figure


def _line(ax, part: pd.DataFrame, policy: str, look) -> None:
    part = part.sort_values("low")
    x, color = (part.low + part.high) / 2, look[0]
    ax.plot(x, part.value.clip(lower=FLOOR), color=color, marker=look[1], ms=3.5, lw=1.2, label=policy)
    ax.fill_between(x, part.ci_low.clip(lower=FLOOR), part.ci_high.clip(lower=FLOOR), color=color, alpha=0.15, lw=0)


def _closed(ax, part: pd.DataFrame, metric: str, heads: int) -> None:
    """The uniform draw's expectation: ((K - l) / (K + r - l))^n per head; by any head drawn from the band's mean share."""
    part = part[(part.metric == "age_uniform") & (part.policy == part.policy.iloc[0])].sort_values("low")
    p = part.value if metric == "age_head" else 1 - (1 - part.value) ** heads
    ax.plot((part.low + part.high) / 2, p.clip(lower=FLOOR), color="0.1", lw=1.4, ls="--", label="uniform draw, closed form", zorder=5)


def footer(manifest: dict) -> str:
    """What a reader needs to know about the run."""
    m, plan, s = manifest["model"], manifest["plan"], manifest["settings"]
    return (f"{m['name']} ({m['layers']} layers, {m['kv_heads']} KV heads), K = {plan['keep']} per KV head in every arm, r = {plan['buffer']}, {'/'.join(map(str, manifest.get('rounds', ['?'])))} rounds, "
            f"{manifest['script']['tokens']} tokens, prompt of {manifest['script']['prompt']} tokens, which is in no age band\n"
            f"means over rounds, layers, {s['instances']} scripts and {s['eviction_seeds']} eviction seeds of policies that draw; bands: 95 % bootstrap over scripts; "
            f"shares under {FLOOR:g} drawn at {FLOOR:g}; {manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
