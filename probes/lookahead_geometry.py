"""How many continuations, how long: recall of the oracle's entries, output error and log p over M and T (LORE Table 13, App. E.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe import stats
from kvprobe.prompt_settings import COMMON, build_tasks, numbers
from kvprobe.prompt_tables import per_prompt, seed_spread
from kvprobe.prompting import CHANCE, METRICS, Arm, arm
from kvprobe.walking import Walking

if TYPE_CHECKING:
    import pandas as pd

CRITERIA = {"LORE": "projected", "AnDPro": "anchor"}
"""What is done with the same queries: LORE's cost of deletion, or AnDPro's criterion (the matched lookahead budget of Table 13b)."""
DIGITS = {"recall": 3, "recall_free": 3, "error": 4, "logp": 2, "retrieved": 2}


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the lookahead geometry probe."""

    ms: str = "1,2,4,8"
    """numbers of continuations (M), nested prefixes of one draw"""
    ts: str = "2,8,16"
    """their lengths (T), prefixes of the same draw [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ms", "ts"):
            numbers(name, getattr(self, name))
        if len(self.budgets) > 1:
            raise ValueError(f"keeps={self.keeps!r}: this probe sweeps the continuations at one budget")

    @property
    def keep(self) -> int:
        return self.budgets[0]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(M, T)"""
        return [(m, t) for m in numbers("ms", self.ms) for t in numbers("ts", self.ts)]


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=2, length=480, keeps="96", window=8, future=5, ms="1,2", ts="2,3", sampling_seeds=2, kinds="needles", threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(ts="2,4,8,16,32", instances=100, length=900),
}


def start(config: CONFIG, model) -> Session:
    """Build prompts and arms, and refuse what cannot work, before anything is computed."""
    return Session(config, model, build_tasks(config, model), arms(config, model))


def arms(config: CONFIG, model) -> list[Arm]:
    """The full cache, the oracle and chance as marks; then every (M, T), and none, under both criteria."""
    from kvprobe.oracle import Given

    none = dict(criterion="", m=0, t=0)
    out = [Arm("full", None, columns=none), Arm("oracle", Given(), config.keep, columns=none), *arm("random", "random", config.keep, config, model, none)]
    for criterion, objective in CRITERIA.items():
        for m, t in [(0, 0), *config.sizes]:
            policy = f"lore(window={config.window},m={m},t={max(1, t)},objective='{objective}',form='{config.form}',chunk=1)"
            out += arm(f"{criterion}, M={m} T={t}" if m else f"{criterion}, window only", policy, config.keep, config, model, dict(criterion=criterion, m=m, t=t))
    return out


class Session(Walking):
    """All sizes of a draw are scored from one walk over the keys per criterion."""

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        title = f"lookahead geometry, {self.model.name}, B={self.config.keep}, n={self.config.instances}"
        found = contrasts(rows, folder.manifest)
        chance = stats.difference(*(per_prompt(rows, "recall", arm=name) for name in ("random", CHANCE)), self.config.seed)
        ceiling, best = (rows[(rows.metric == m) & (rows.arm == "oracle")].value for m in ("recall", "error"))
        others = rows[(rows.metric == "error") & (rows.arm != "oracle")].groupby("arm").value.mean()
        small = self.config.model == "tiny"
        checks = [Check("random eviction meets the oracle's set as often as the closed form says", None if small else abs(chance.value) <= 0.01, f"off by {chance.text(4)}", "within .01"),
                  Check("the oracle keeps its own set", bool((ceiling == 1).all()), f"recall {ceiling.min():.3f} at least", "1"),
                  Check("no arm of equal budgets has a lower output error than the oracle", None if small else bool(best.mean() <= others.min()), f"{best.mean():.4f} against {others.min():.4f} ({others.idxmin()})", "the oracle's is lowest")]
        text = table.to_string(index=False) + "\n\n" + "\n".join(f"  {name}: {', '.join(f'{m} {e.text(DIGITS[m])}' for m, e in by.items())}" for name, by in found.items())
        return Report(title, table, text, checks, {"title": title, "contrasts": {name: {m: [e.value, e.low, e.high, e.n] for m, e in by.items()} for name, by in found.items()}})


def contrasts(rows: pd.DataFrame, manifest: dict) -> dict[str, dict[str, stats.Estimate]]:
    """What is asked of the grid, each the mean difference over prompts: more steps, more continuations, any at all, and the criterion."""
    settings = manifest["settings"]
    ms, ts = numbers("ms", settings["ms"]), numbers("ts", settings["ts"])
    m, t, seed = ms[len(ms) // 2], ts[len(ts) // 2], settings["seed"]

    def of(criterion, m, t):
        return f"{criterion}, M={m} T={t}" if m else f"{criterion}, window only"

    pairs = {f"T {ts[0]} -> {ts[-1]} at M={m}": (of("LORE", m, ts[-1]), of("LORE", m, ts[0])),
             f"M {ms[0]} -> {ms[-1]} at T={t}": (of("LORE", ms[-1], t), of("LORE", ms[0], t)),
             f"a single continuation of {t} over the window only": (of("LORE", ms[0], t), of("LORE", 0, 0)),
             f"M={m} T={t} over the window only": (of("LORE", m, t), of("LORE", 0, 0)),
             f"LORE over AnDPro's criterion, the same {m} x {t} queries": (of("LORE", m, t), of("AnDPro", m, t))}
    return {name: {metric: stats.difference(per_prompt(rows, metric, arm=a), per_prompt(rows, metric, arm=b), seed) for metric in METRICS} for name, (a, b) in pairs.items()}


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per arm: every metric, the mean over seeds and then prompts, with its interval over prompts and its spread over sampling seeds."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for name, part in rows.groupby("arm", sort=False):
        line = dict(arm=name) | {c: part[c].iloc[0] for c in ("criterion", "m", "t") if name != CHANCE}
        for metric in METRICS:
            if (part.metric == metric).any():
                e = stats.mean(per_prompt(part, metric), seed)
                line |= {"n": e.n, metric: e.value, f"{metric}_low": e.low, f"{metric}_high": e.high, f"{metric}_sd": seed_spread(part, metric)}
        out.append(line)
    table = pd.DataFrame(out)
    return table.assign(criterion=table.criterion.fillna(""), m=table.m.fillna(0).astype(int), t=table.t.fillna(0).astype(int))


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, metric):
        v = [getattr(r, metric), getattr(r, f"{metric}_low"), getattr(r, f"{metric}_high")]
        return "-" if pd.isna(v[0]) else stats.Estimate(*map(float, v), r.n).text(DIGITS[metric])

    heads = {"recall": "Recall@B", "recall_free": "free slots", "error": "output error", "logp": "log p [nats]", "retrieved": "retrieval"}
    return pd.DataFrame([{"arm": r.arm, "n": r.n} | {head: text(r, m) for m, head in heads.items()} | {"seed sd of recall": "-" if pd.isna(r.recall_sd) else f"{r.recall_sd:.4f}"}
                         for r in summary(rows, manifest).itertuples()])
