"""What protecting the prompt gains each policy, against how much of the prompt its score lost (Random Attention sec. 5.1, Tables 2 and 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe import stats
from kvprobe.probes.protection import gains

if TYPE_CHECKING:
    import pandas as pd

READS = "protection"


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per policy: log p without and with, gain, survival deficit, each with its interval."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for policy, part in gains(rows).groupby("policy", sort=False):
        line = dict(policy=policy, n=len(part))
        for key in ("retrieved", "retrieved_with", "logp", "logp_with", "gain", "deficit"):
            e = stats.mean(part[key].to_numpy(), seed)
            line |= {key: e.value, f"{key}_low": e.low, f"{key}_high": e.high}
        out.append(line)
    return pd.DataFrame(out)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: left log p without and with protection, right the gain against the deficit."""
    from kvprobe import plotting

    figure, axes = plotting.grid(10.4, 4.8, 1, 2, width_ratios=[1.15, 1])
    left, right = axes[0]
    order = table.sort_values("logp").reset_index(drop=True)
    colors = plotting.colors(table.policy)
    for y, r in enumerate(order.itertuples()):
        left.annotate("", (r.logp_with, y), (r.logp, y), arrowprops=dict(arrowstyle="->", color=colors[r.policy], lw=1.2))
        for key, face in (("logp", "white"), ("logp_with", colors[r.policy])):
            left.errorbar(getattr(r, key), y + (0.12 if key == "logp" else -0.12), xerr=[[getattr(r, key) - getattr(r, f"{key}_low")], [getattr(r, f"{key}_high") - getattr(r, key)]],
                          fmt="o", ms=5, mfc=face, color=colors[r.policy], capsize=2, lw=0.8)
        right.errorbar(r.deficit, r.gain, xerr=[[r.deficit - r.deficit_low], [r.deficit_high - r.deficit]], yerr=[[r.gain - r.gain_low], [r.gain_high - r.gain]],
                       fmt="o", color=colors[r.policy], capsize=2, lw=0.8, ms=5, label=r.policy)
    left.set_yticks(range(len(order)), order.policy)
    left.set_xlabel("log p of the stated values [nats]\n(hollow: without, filled: with the prompt protected)")
    right.axhline(0, color="0.3", lw=0.8)
    right.set_xlabel("share of prompt entries lost without protection")
    right.set_ylabel("gain in log p from protection [nats]")
    right.legend(fontsize=8)
    right.set_title(f"Spearman over policies x scripts: {manifest.get('spearman_pooled', 'n/a')}\nover policies' means: {manifest.get('spearman_across_policies', 'n/a')}", fontsize=8)
    figure.suptitle("What protecting the prompt gains a policy, by what its score lost of the prompt", fontsize=11)
    plan, s = manifest["plan"], manifest["script"]
    rounds = "/".join(map(str, manifest.get("rounds_before_value", ["?"])))
    plotting.footer(figure, plotting.about(manifest, f"K = {plan['keep']} per KV head in every arm, the prompt of {s['prompt']} tokens included, r = {plan['buffer']}", f"{rounds} rounds before the values, 4 per script"))
    return figure
