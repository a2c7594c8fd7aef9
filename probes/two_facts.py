"""Two facts in different KV heads, both needed by the question, against each alone (Random Attention sec. 5.2, Fig. 3b)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from kvprobe import conditions, head_sets, head_stories, head_tables, metrics, stats
from kvprobe.head_sets import HEADS, HeadSets, Hold
from kvprobe.head_stories import SPANS, Wording
from kvprobe.head_tables import DELETED, FULL, KEPT

if TYPE_CHECKING:
    import pandas as pd

FACT_Y = "\nLet {var}2 = {y}.\n"
QUERY = "\nWait — I need the stored constants now. ({var}, {var}2) = ("
NOWHERE = "-"


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the two-facts probe."""

    splits: str = "different,same"
    """heads of x | heads of y, e.g. 0|1,2|0+1; different: every ordered pair of single heads, same: both facts in one head"""
    apart: int = 96
    """from the start of box x to the start of box y [tokens]"""
    query: int = 32
    """room of the query, filled up with filler in front [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rounds.split(",")) > 1:
            raise ValueError(f"rounds={self.rounds!r}: this probe asks once, name one number of rounds")
        if self.apart < self.box:
            raise ValueError(f"apart={self.apart} must be at least box={self.box}")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=192, buffer=64, rounds="1", instances=2, batch_size=2, pre=8, query=72, box=24, apart=48, threads=1),
    "demo": CONFIG(splits="different,same,0+1|2,2|0+1", instances=16, threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, apart=256, rounds="15", query=40, instances=250, splits="different"),
}


def splits(text: str, geometry) -> list[tuple[str, str]]:
    """Pairs of head sets by name, e.g. ("0", "1+2"), without repeats. Raises ValueError for what the model does not have."""
    every, out = [str(h) for h in range(geometry.n_kv)], []
    for word in [w.strip() for w in text.split(",") if w.strip()]:
        if word == "different":
            out += list(permutations(every, 2))
        elif word == "same":
            out += [(h, h) for h in every]
        elif word.count("|") == 1:
            out.append(tuple("+".join(map(str, heads(part.strip(), geometry))) for part in word.split("|")))
        else:
            raise ValueError(f"split {word!r} is unknown; write heads of x | heads of y, e.g. 0|1+2, or different, or same")
    if not out:
        raise ValueError(f"splits={text!r} names no split; write heads of x | heads of y, e.g. 0|1+2, or different, or same")
    return list(dict.fromkeys(out))


def heads(text: str, geometry) -> tuple[int, ...]:
    """ "0+2" -> (0, 2). Raises ValueError naming the valid heads."""
    found = [c for c in conditions.parse(text, geometry)[0] if c.heads and c.name not in (KEPT, DELETED)] if all(p.isdigit() for p in text.split("+")) else []
    if len(found) != 1:
        raise ValueError(f"{text!r} is no set of KV heads for one fact: write numbers joined by +, not all {geometry.n_kv} heads")
    return found[0].heads


def name(x: str, y: str) -> str:
    """A case: where x is held and where y is, e.g. "x 0, y 1+2"; "-" is nowhere."""
    return f"x {x}, y {y}"


def rules(config: CONFIG, geometry) -> dict[str, tuple[Hold, Hold]]:
    """Both facts, x alone and y alone for every split; the fact that is not held is banned everywhere."""
    def hold(text: str, span: str) -> Hold:
        return Hold(head_sets.sites(geometry, () if text == NOWHERE else heads(text, geometry)), span)

    found = splits(config.splits, geometry)
    wanted = [*found, *((x, NOWHERE) for x, _ in found), *((NOWHERE, y) for _, y in found)]
    return {name(x, y): (hold(x, "x"), hold(y, "y")) for x, y in dict.fromkeys(wanted)}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    wording = Wording((head_stories.ONE.boxes[0], FACT_Y), QUERY, "{x}, {y}", config.apart)
    found = head_sets.cases(config, model, rules(config, model.geometry), SPANS)
    return Session(config, model, head_stories.stories(config, model.tokenizer, wording), found)


class Session(HeadSets):
    """Rows also give log p and retrieval of each value's own tokens (metrics "logp x", "retrieved y", ...); "retrieved" is that of both values,
    whatever the model would write between them."""

    def facts(self) -> dict:
        return super().facts() | {"splits": [list(s) for s in splits(self.config.splits, self.model.geometry)]}

    def rows_of(self, arm, story, k, log, answers) -> list[dict]:
        rows, answer = [row for row in super().rows_of(arm, story, k, log, answers) if row["metric"] != "retrieved"], answers[-1]
        first, base, both = answer.ask.at + len(answer.ask.query), dict(ask=answer.ask.name), True
        for fact in SPANS:
            a, z = (p - first for p in story.spans[f"{fact} answer"])
            got = bool(answer.top[k, a:z].all())
            rows += [base | dict(metric=f"logp {fact}", value=float(answer.logp[k, a:z].sum()), unit="nats"), base | dict(metric=f"retrieved {fact}", value=float(got), unit="fraction")]
            both = both and got
        return [*rows, base | dict(metric="retrieved", value=float(both), unit="fraction")]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        rounds = sorted({int(v) for v in rows[(rows.metric == "rounds") & (rows.case != FULL)].value})
        title = (f"two facts, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {'/'.join(map(str, rounds))} rounds before the values, "
                 f"y {self.config.apart} tokens after x, n={self.config.instances}")
        return Report(title, table, table.to_string(index=False), self.checks(rows, folder), {"title": title, "rounds_before_value": rounds})


def by_split(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per split: R of x alone, of y alone, of both, their sum, the surplus, retrieval of each, all over the whole answer "x, y".

    sum = R(x) + R(y); surplus = R(both) - R(x) - R(y) = sum_i(LP_i^both + LP_i^deleted - LP_i^x - LP_i^y) / sum_i(LP_i^kept - LP_i^deleted):
    above 0 the two facts are worth more together. Worked example: deleted (-20), x alone (-18), y alone (-17), both (-12), kept (0):
    R = .1, .15 and .4, sum .25, surplus (-12 - 20 + 18 + 17) / 20 = .15. A last row is the mean over the ordered pairs of different single heads,
    where there are two or more: sets of heads, which hold more, are not in it.
    """
    import pandas as pd

    seed, logp, got, out = manifest["settings"]["seed"], head_tables.wide(rows, "logp"), head_tables.wide(rows, "retrieved"), []
    there = metrics.recall_gain(logp[KEPT], logp[DELETED], logp[KEPT], seed).value is not None
    available = (logp[KEPT] - logp[DELETED]).to_numpy()
    single = [(x, y) for x, y in manifest["splits"] if x != y and "+" not in x + y]
    for label, some in [*((None, [s]) for s in manifest["splits"]), *([(f"mean over the {len(single)} pairs of single heads", single)] if len(single) > 1 else [])]:
        cases = {"x": [name(x, NOWHERE) for x, _ in some], "y": [name(NOWHERE, y) for _, y in some], "both": [name(x, y) for x, y in some]}
        gain = {key: logp[names].mean(axis=1) - logp[DELETED] for key, names in cases.items()}
        gain |= {"sum": gain["x"] + gain["y"], "surplus": gain["both"] - gain["x"] - gain["y"]}
        found = {key: stats.ratio(top.to_numpy(), available, seed) if there else stats.Estimate(None, None, None, len(logp)) for key, top in gain.items()}
        found |= {f"got {key}": stats.mean(got[names].mean(axis=1), seed) for key, names in cases.items()}
        out.append(dict(split=label or f"x in {some[0][0]}, y in {some[0][1]}", n=len(logp)) | head_tables.flat(found))
    return pd.DataFrame(out)


def by_case(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per case: retrieval, R and log p [nats] of the whole answer, and R of each value's own tokens ("R x", "R y")."""
    seed, names = manifest["settings"]["seed"], list(dict.fromkeys(rows.case))
    table = head_tables.summarise(rows, {n: [n] for n in names}, seed)
    for fact in SPANS:
        logp = head_tables.wide(rows, f"logp {fact}")
        found = [head_tables.flat({f"R {fact}": metrics.recall_gain(logp[n], logp[DELETED], logp[KEPT], seed)}) for n in names]
        table = table.assign(**{key: [f[key] for f in found] for key in found[0]})
    return table


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: the splits, then each case."""
    import pandas as pd

    c, s = by_case(rows, manifest), by_split(rows, manifest)
    c["what"] = c["name"].replace({KEPT: "both everywhere (kept)", DELETED: "both nowhere (deleted)", FULL: "nothing evicted (full)"})
    columns = {"what": "facts held", "n": "n", "R": "recall R [95 %]", "R x": "R of x's tokens", "R y": "R of y's tokens", "retrieval": "retrieval of both [95 %]", "logp": "log p, nats [95 %]"}
    out = [head_tables.printed(c, columns)]
    for key, text in (("sum", "{}: sum of the two alone"), ("both", "{}: together"), ("surplus", "{}: together - sum")):
        part = s if key != "both" else s[s.split.str.startswith("mean")]
        out.append(head_tables.printed(part.assign(what=[text.format(x) for x in part.split], R=part[key], R_low=part[f"{key}_low"], R_high=part[f"{key}_high"]), {k: columns[k] for k in ("what", "n", "R")}))
    return pd.concat(out, ignore_index=True).fillna("-")
