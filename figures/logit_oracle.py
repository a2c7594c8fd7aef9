"""Logits instead of outputs: KL along the full cache's future by criterion, and the true cost of deleting a token against the closed-form score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.suite import tables

if TYPE_CHECKING:
    import pandas as pd

READS = "oracle_suite"
NAMES = {"predicted_magnitude": "magnitude\n(eq. 12)", "predicted_squared": "squared\n(eq. 6)", "predicted_attention": "attention\nalone"}
SAMPLES = {"even": ("tab:blue", "even sample"), "top": ("tab:red", "highest scores"), "site, even": ("tab:blue", "even sample"), "site, top": ("tab:red", "highest scores")}
EMPTY = ("arm", "keep", "n", "sample", "predicted_magnitude", "kl_deleted")
"""Columns that a table lacks where nothing was deleted, or no token of a future is read from a compressed cache."""
COSTS = {"kl_deleted": ("tab:blue", "KL"), "logp_lost": ("tab:orange", "loss of log p")}


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Part "criterion": KL by criterion and budget; part "deletion": every single deletion; part "rho": how well a score ranks them; part "noise": KL of a batch that deletes nothing."""
    import pandas as pd

    seed = manifest["settings"]["seed"]
    parts = {"criterion": tables.summary(rows[rows.metric == "kl"], ["arm", "keep"], seed), "deletion": tables.deletions(rows), "rho": tables.predictions(rows, seed),
             "noise": tables.summary(rows[rows.metric == "kl_noise"], ["metric"], seed) if (rows.metric == "kl_noise").any() else pd.DataFrame()}
    return pd.concat([t.assign(part=name) for name, t in parts.items() if len(t)], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure of four panels."""
    from kvprobe import plotting

    figure, axes = plotting.grid(13.0, 9.0, 2, 2)
    table = table.reindex(columns=dict.fromkeys([*table.columns, *EMPTY]))
    criteria, made, rho, noise = (table[table.part == name] for name in ("criterion", "deletion", "rho", "noise"))
    _criteria(axes[0][0], criteria)
    _rho(axes[0][1], rho)
    s = manifest["settings"]
    for ax, whole in zip(axes[1], (True, False)):
        own = made[made["sample"].astype(str).str.startswith("site") != whole]
        _scatter(ax, own, noise)
        ax.set_title("deleted in all sites at once" if whole else f"deleted in one KV head of layer {s['deletion_layer']}", fontsize=10)
    figure.suptitle(f"What the logits say (n = {int(criteria.n.max()) if len(criteria) else 0} prompts; {len(made)} deletions)", fontsize=11)
    plotting.footer(figure, tables.about(manifest, "KL(full || compressed) and log p of the next token, mean over the forced future's tokens" + (" but the first, which is read from the full prompt" if s["question"] == "seen" else ""), "bars: 95 % intervals over prompts; rho over the even sample "
                                         f"(one site: all of a prompt's), within prompts; deletions: the future's first tokens, at most {s['deletion_future']}, each predicted from the one before it; closed-form costs on the same queries, summed over sites and query heads; points at 0 lie on the lower edge"))
    return figure


def _criteria(ax, part: pd.DataFrame) -> None:
    from kvprobe import plotting
    from kvprobe.suite.drawing import STYLES

    names, budgets = tables.ordered(part.arm), sorted(part["keep"].astype(int).unique())
    for k, keep in enumerate(budgets):
        for r in part[part["keep"] == keep].itertuples():
            plotting.whisker(ax, names.index(r.arm) + 0.2 * (k - (len(budgets) - 1) / 2), r.value, r.low, r.high, color=STYLES[r.arm][0], fmt="osD^v"[k % 5])
    ax.set_yscale("log")
    ax.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    ax.set_ylabel("KL(full || compressed)\n[nats per token]")
    if not len(part):
        ax.text(0.5, 0.5, "no token of a future is read from a compressed cache", ha="center", transform=ax.transAxes, fontsize=9)
    ax.set_title("criteria, B = " + ", ".join(f"{b} ({m})" for b, m in zip(budgets, ("circle", "square", "diamond", "up", "down"))), fontsize=9)


def _rho(ax, rho: pd.DataFrame) -> None:
    from kvprobe import plotting

    kinds = list(dict.fromkeys(rho.kind))
    for i, predictor in enumerate(NAMES):
        for k, kind in enumerate(kinds):
            for j, (cost, (color, label)) in enumerate(COSTS.items()):
                r = rho[(rho.predictor == predictor) & (rho.kind == kind) & (rho.cost == cost)].iloc[0]
                plotting.whisker(ax, i + 0.3 * (k - 0.5) + 0.1 * (j - 0.5), r.value, r.low, r.high, color=color, fmt="os"[k], label=None if i else f"{label}, {kind}, n = {int(r.n)}")
    if not rho.n.max():
        ax.text(0.5, 0.6, "no prompt has deletions to rank", ha="center", transform=ax.transAxes, fontsize=9)
    ax.axhline(0, color="0.3", lw=0.8)
    ax.set_xticks(range(len(NAMES)), list(NAMES.values()), fontsize=8)
    ax.set(xlabel="closed-form cost on the future's queries", ylabel="Spearman's rho with the true cost")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _scatter(ax, own: pd.DataFrame, noise: pd.DataFrame) -> None:
    for sample, (color, label) in SAMPLES.items():
        part = own[own["sample"] == sample]
        if len(part):
            ax.scatter(part.predicted_magnitude, part.kl_deleted, s=9, color=color, alpha=0.5, lw=0, label=label)
    ax.set(xscale="log", xlabel="predicted: sum of eq. 12 over the deleted sites [output norm]", ylabel="true KL(full || deleted)\n[nats per token]")
    ax.set_yscale("log", nonpositive="clip")
    ax.tick_params(which="both", labelsize=7)
    if not len(own):
        ax.text(0.5, 0.5, "nothing was deleted", ha="center", transform=ax.transAxes, fontsize=9)
        return
    for r in noise.itertuples():
        if r.value > 0:
            ax.axhline(r.value, color="0.4", ls=":", lw=1, label="noise: nothing deleted")
    ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
