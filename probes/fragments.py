"""Fragments against whole spans: a fact dealt out token by token over KV heads, at the same retained mass (Random Attention sec. 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING


from kvprobe import head_sets, head_stories, head_tables, stats
from kvprobe.head_sets import HEADS, HeadSets, Hold
from kvprobe.head_tables import DELETED, FULL, KEPT
from kvprobe.keeplog import ALIVE

if TYPE_CHECKING:
    import pandas as pd

WHOLE, DEALT = "whole", "dealt"


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the fragments probe."""

    heads: str = "all"
    """the set of H KV heads over which the fact is dealt, e.g. 0+2; elsewhere it is banned"""
    copies: str = "all"
    """copies of each token, c: all (1..H-1) or numbers, e.g. 1,2"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rounds.split(",")) > 1:
            raise ValueError(f"rounds={self.rounds!r}: this probe asks once, name one number of rounds")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=96, buffer=48, rounds="1", instances=3, batch_size=3, pre=8, query=64, box=24, threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, rounds="15", query=40, instances=250),
}


def deal(heads: Sequence[int], copies: int, tokens: int, shift: int = 0) -> list[tuple[int, ...]]:
    """The heads that hold each token: token i goes to the `copies` heads from place shift + i c on, round the ring of the H heads.

    Two neighbours share max(0, 2c - H) heads, the least that is possible. So with c <= H/2 no head holds two neighbours, and
    with c >= H/2 none misses two: with 2 of 3 heads every head holds two tokens, misses one, and so on, and neighbours share
    one head. Over the H shifts every head holds every token equally often, as it does over all whole spans in c heads.
    Worked example: heads 0, 1, 2, c = 1: 0, 1, 2, 0, ...; c = 2: 0+1, 0+2, 1+2, 0+1, ...
    """
    if not 0 < copies < len(heads):
        raise ValueError(f"copies={copies} of each token over {len(heads)} heads: allowed are 1..{len(heads) - 1}")
    return [tuple(sorted(heads[(shift + i * copies + j) % len(heads)] for j in range(copies))) for i in range(tokens)]


def numbers(config: CONFIG, geometry) -> tuple[tuple[int, ...], list[int]]:
    """The set of heads and the numbers of copies. Raises ValueError for what the model does not have."""
    parts = config.heads.split("+")
    if config.heads != "all" and not all(p.strip().isdigit() for p in parts):
        raise ValueError(f"heads={config.heads!r} is no set of KV heads: write all, or numbers joined by +")
    heads = tuple(range(geometry.n_kv)) if config.heads == "all" else tuple(sorted({int(p) for p in parts}))
    head_sets.sites(geometry, heads)
    if len(heads) < 2:
        raise ValueError(f"heads={config.heads!r}: a fact is dealt over at least 2 heads")
    every = range(1, len(heads))
    parts = [p.strip() for p in config.copies.split(",")]
    if config.copies != "all" and not all(p.isdigit() and int(p) in every for p in parts):
        raise ValueError(f"copies={config.copies!r}: allowed are all, or numbers in 1..{len(heads) - 1} for {len(heads)} heads")
    return heads, list(every) if config.copies == "all" else sorted({int(p) for p in parts})


def rules(config: CONFIG, geometry) -> dict[str, tuple[Hold, ...]]:
    """Every whole span in c heads and every shift of the deal, by name, e.g. "whole c=2 0+1", "dealt c=2 shift 0"."""
    heads, copies = numbers(config, geometry)
    out = {}
    for c in copies:
        out |= {f"{WHOLE} c={c} {'+'.join(map(str, some))}": (Hold(head_sets.sites(geometry, some)),) for some in combinations(heads, c)}
        for shift in range(len(heads)):
            dealt = deal(heads, c, config.box, shift)
            out[f"{DEALT} c={c} shift {shift}"] = tuple(Hold(head_sets.sites(geometry, some), start=i, stop=i + 1) for i, some in enumerate(dealt))
    return out


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model, head_stories.stories(config, model.tokenizer), head_sets.cases(config, model, rules(config, model.geometry)))


class Session(HeadSets):
    """Rows also say what the keep log shows of the box: entries and neighbouring pairs per layer, and whether all layers are alike."""

    def facts(self) -> dict:
        heads, copies = numbers(self.config, self.model.geometry)
        return super().facts() | {"heads": list(heads), "copies": copies}

    def rows_of(self, arm, story, k, log, answers) -> list[dict]:
        rows = super().rows_of(arm, story, k, log, answers)
        if not arm.evicts:
            return rows
        a, z = story.spans["x"]
        held = log.died[:, k, :, a:z] == ALIVE  # [l hkv p]
        base = dict(ask=rows[0]["ask"])
        pairs = (held[..., 1:] & held[..., :-1]).sum((1, 2)).mean()
        return rows + [base | dict(metric="entries", value=float(held.sum((1, 2)).mean()), unit="entries per layer"),
                       base | dict(metric="neighbours", value=float(pairs), unit="pairs per layer"),
                       base | dict(metric="layers_alike", value=float((held == held[:1]).all()), unit="fraction")]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"fragments, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {self.config.rounds} rounds before the value, n={self.config.instances}"
        return Report(title, table, table.to_string(index=False), [*self.checks(rows, folder), *self._shapes(rows)], {"title": title})

    def _shapes(self, rows) -> list:
        from kvprobe.runner import Check

        heads, copies = numbers(self.config, self.model.geometry)
        shape = rows.pivot_table(index="case", columns="metric", values="value", aggfunc=["min", "max"])
        least, most, box = shape["min"], shape["max"], self.config.box
        out = []
        for c in copies:
            dealt, mine = [n for n in least.index if n.startswith(f"{DEALT} c={c} ")], [n for n in least.index if f" c={c} " in n]
            mass = sorted({*least.entries[mine], *most.entries[mine]})
            pairs, want = sorted({*least.neighbours[dealt], *most.neighbours[dealt]}), max(0, 2 * c - len(heads)) * (box - 1)
            rule = "no head holds two neighbours" if not want else f"neighbours share {2 * c - len(heads)} heads, the least possible"
            out += [Check(f"c={c}: dealt and whole spans hold the same entries per layer", mass == [c * box], f"{mass}", f"{c * box}"),
                    Check(f"c={c}: {rule}, the same in every layer", pairs == [want] and bool((least.layers_alike[dealt] == 1).all()), f"{pairs} pairs per layer", f"{want}")]
        return out


def groups(manifest: dict) -> dict[tuple[int, str], list[str]]:
    """(c, whole or dealt) -> names of its cases."""
    heads, out = manifest["heads"], {}
    for c in manifest["copies"]:
        out[c, WHOLE] = [f"{WHOLE} c={c} {'+'.join(map(str, some))}" for some in combinations(heads, c)]
        out[c, DEALT] = [f"{DEALT} c={c} shift {s}" for s in range(len(heads))]
    return out


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per number of copies, dealt or whole: retrieval, R, log p [nats]; single cases (kind "one ...") behind their mean; the ends."""
    import pandas as pd

    seed, named, out = manifest["settings"]["seed"], groups(manifest), []
    for (c, kind), members in named.items():
        out.append(head_tables.summarise(rows, {"mean": members}, seed).assign(copies=c, kind=kind))
        out.append(head_tables.summarise(rows, {m.split(f" c={c} ")[1]: [m] for m in members}, seed).assign(copies=c, kind=f"one {kind}"))
    heads = len(manifest["heads"])
    ends = {DELETED: 0, KEPT: heads, FULL: heads}
    out.append(head_tables.summarise(rows, {n: [n] for n in ends}, seed).assign(copies=list(ends.values()), kind="end"))
    return pd.concat(out, ignore_index=True)


def contrast(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per number of copies, dealt minus whole on the same instances: in R, in retrieval and in log p [nats], with the sign test's p of the last.

    The difference in R is sum_i(LP_i^dealt - LP_i^whole) / sum_i(LP_i^kept - LP_i^deleted), where LP_i^dealt is the mean over the
    shifts and LP_i^whole the mean over the subsets: R of one minus R of the other, with an interval of its own.
    Worked example: dealt (-4, -6), whole (-3, -5), kept (0, 0), deleted (-10, -10): (-1 - 1) / (10 + 10) = -0.1.
    """
    import pandas as pd

    seed, logp, got, named = manifest["settings"]["seed"], head_tables.wide(rows, "logp"), head_tables.wide(rows, "retrieved"), groups(manifest)
    out = []
    for c in manifest["copies"]:
        a, b = (logp[named[c, kind]].mean(axis=1).to_numpy() for kind in (DEALT, WHOLE))
        x, y = (got[named[c, kind]].mean(axis=1).to_numpy() for kind in (DEALT, WHOLE))
        found = dict(R=stats.ratio(a - b, (logp[KEPT] - logp[DELETED]).to_numpy(), seed), retrieval=stats.difference(x, y, seed), logp=stats.difference(a, b, seed))
        out.append(dict(copies=c, n=len(a), p=stats.sign_test(a, b).p) | head_tables.flat(found))
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: the means of both kinds with their difference, single cases, the ends."""
    import pandas as pd

    s = summary(rows, manifest)
    s["fact"] = [{"end": r["name"]}.get(r.kind, f"{r.kind}, c={r.copies}" + ("" if r["name"] == "mean" else f": {r['name']}")) for _, r in s.iterrows()]
    d = contrast(rows, manifest)
    d["fact"] = [f"dealt - whole, c={r.copies} (sign test on log p: p={r.p:.2g})" for r in d.itertuples()]
    columns = {"fact": "fact", "n": "n", "retrieval": "retrieval [95 %]", "R": "recall R [95 %]", "logp": "mean log p, nats [95 %]"}
    return pd.concat([head_tables.printed(s, columns), head_tables.printed(d, columns)], ignore_index=True)
