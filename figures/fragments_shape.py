"""Recall of a fact dealt out token by token over KV heads against whole spans of the same retained mass (after Random Attention sec. 5.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.head_tables import told
from kvprobe.probes.fragments import DEALT, WHOLE, contrast, summary

if TYPE_CHECKING:
    import pandas as pd

READS = "fragments"
COLORS = {WHOLE: "#3b6ea5", DEALT: "#c8553d"}
SIDE = {WHOLE: -0.16, DEALT: 0.16}
PANELS = (("retrieval", "retrieval\n[fraction of facts]"), ("R", "recall R\n[share of the available log p]"))


def reduce(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per number of copies and kind of case retrieval and R with intervals; kind "difference" is dealt minus whole."""
    import pandas as pd

    return pd.concat([summary(rows, manifest), contrast(rows, manifest).assign(kind="difference", name="dealt - whole")], ignore_index=True)


def draw(table: pd.DataFrame, manifest: dict):
    """A matplotlib Figure: retrieval above, R below; large marks with intervals are means over single cases, which are the small ones."""
    from kvprobe import plotting

    copies = manifest["copies"]
    figure, axes = plotting.picture(1.8 * len(copies) + 6.0, 6.8, rows=2, sharex=True)
    for ax, (key, label) in zip(axes, PANELS):
        _ends(ax, table, key)
        for kind in (WHOLE, DEALT):
            _means(ax, table[table.kind == kind], key, kind)
            _singles(ax, table[table.kind == f"one {kind}"], key, kind)
        for r in table[table.kind == "difference"].to_dict("records"):
            ax.text(r["copies"], 1.02, f"dealt − whole\n{told(r, key)}", transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
        ax.set_ylabel(label)
        ax.grid(axis="x", visible=False)
    axes[-1].set_xticks(copies)
    axes[-1].set_xlim(copies[0] - 0.5, copies[-1] + 0.5)
    axes[-1].set_xlabel(f"copies of each token, c [of H = {len(manifest['heads'])} KV heads]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(f"Does it matter in what shape a fact survives? (n = {int(table.n.max())})", fontsize=11)
    plotting.footer(figure, _about(manifest))
    return figure


def _means(ax, part, key: str, kind: str) -> None:
    from kvprobe import plotting

    name = {WHOLE: "whole spans in c heads:\nmean over all c-subsets", DEALT: "dealt out token by token:\nmean over the H shifts"}[kind]
    for i, r in enumerate(part.to_dict("records")):
        plotting.whisker(ax, r["copies"] + SIDE[kind], r[key], r[f"{key}_low"], r[f"{key}_high"], color=COLORS[kind], ms=7, label=name if i == 0 else None)


def _singles(ax, part, key: str, kind: str) -> None:
    for c, some in part.groupby("copies"):
        xs = [c + SIDE[kind] * (1.6 + 0.5 * i) for i in range(len(some))] if len(some) <= 4 else [c + SIDE[kind] * (1.6 + 1.2 * i / len(some)) for i in range(len(some))]
        ax.plot(xs, some[key], "o", ms=3.5, mfc="none", color=COLORS[kind], label=None if c > part["copies"].min() else {WHOLE: "single subset", DEALT: "single shift"}[kind])
        if kind == WHOLE and len(some) <= 4:
            for x, y, name in zip(xs, some[key], some["name"]):
                if y == y:
                    ax.annotate(name, (x, y), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=6.5, color=COLORS[kind])


def _ends(ax, table, key: str) -> None:
    for name, style in (("kept", "-"), ("full", ":"), ("deleted", "--")):
        value = table.loc[(table.kind == "end") & (table["name"] == name), key].iloc[0]
        if value == value:
            text = {"kept": "whole in every head (kept)", "full": "nothing evicted", "deleted": "in no head (deleted)"}[name]
            ax.axhline(value, color="0.35", lw=0.9, ls=style, label=text)


def _about(manifest: dict) -> str:
    from kvprobe import plotting

    h, plan, s = len(manifest["heads"]), manifest["plan"], manifest["settings"]
    shared = [f"c = {c}: neighbours share {max(0, 2 * c - h)} head{'' if 2 * c - h == 1 else 's'}" for c in manifest["copies"]]
    return plotting.about(manifest, f"{s['policies']} eviction of everything else, K = {plan['keep']}, r = {plan['buffer']}, {s['rounds']} rounds before the value",
                          f"box of {s['box']} tokens", "deal of the least overlap (" + ", ".join(shared) + ")", "paper (Qwen3-4B, 8 KV heads): dealt .33, whole .39 retrieval, R .75 and .76")
