"""What each part of LORE-KV is worth: look ahead, weights, cost, aggregation, budgets, selection, paired with the core (LORE Table 14, App. D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe import stats
from kvprobe.prompt_settings import COMMON, build_tasks, names
from kvprobe.prompt_tables import per_prompt, seed_spread
from kvprobe.prompting import CHANCE, METRICS, Arm, arm
from kvprobe.walking import Walking

if TYPE_CHECKING:
    import pandas as pd

CORE = "LORE /E"
VARIANTS = {
    "core": {CORE: {}, "LORE /D": dict(gamma=1.0, lam_d=0.3)},
    "look ahead": {"M=0, the window only": dict(m=0), "M=1": dict(m=1), "M=2": dict(m=2), "M=8": dict(m=8), "half the weight": dict(lam_l=0.5), "twice the weight": dict(lam_l=2.0)},
    "reliability": {"log probability only": dict(gamma=1.0), "entropy and disagreement": dict(lam_d=0.3), "uniform": dict(beta=0.0, gamma=0.0), "typicality only": dict(gamma=0.0),
                    "typicality over its error": dict(normalised=True), "the worst of 4 left out": dict(drop_worst=1)},
    "cost of deletion": {"attention mass": dict(objective="attention"), "unprojected norm": dict(objective="unprojected"), "AnDPro's criterion": dict(objective="anchor"), "squared norm": dict(form="squared")},
    "plug-ins": {"adaptive head budgets": dict(tau=1.0), "adaptive budgets, diversity": dict(tau=1.0, lam_k=0.1, lam_v=0.1), "robust aggregation": dict(alpha=0.5)},
    "other": {"chunks of 4": dict(chunk=4), "a quarter of the window": {}},
}
"""Axis -> variant -> what differs from the core. The first five are Table 14's; the paper leaves kappa of the robust aggregation open, here .1."""
DIGITS = {"recall": 3, "recall_free": 3, "error": 4, "logp": 2, "retrieved": 2}


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the ablations probe."""

    keeps: str = "64,128"
    """budgets: entries kept per KV head, the protected ones inside (B)"""
    axes: str = "all"
    """axes of the ablation: look ahead, reliability, cost of deletion, plug-ins, other; all means every one"""
    t: int = 8
    """steps of each continuation (T) [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [a for a in self.chosen if a not in VARIANTS]
        if unknown or not names(self.axes):
            raise ValueError(f"axes={self.axes!r}: known are all, {', '.join(a for a in VARIANTS if a != 'core')}")
        if self.t < 1:
            raise ValueError(f"t={self.t} must be at least 1")

    @property
    def chosen(self) -> list[str]:
        return list(VARIANTS) if names(self.axes) == ["all"] else ["core", *(a for a in names(self.axes) if a != "core")]


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=2, length=480, keeps="48,96", window=8, future=5, t=2, sampling_seeds=2, kinds="needles", threads=1),
    "demo": CONFIG(sampling_seeds=2, threads=1),  # a third seed would take it towards a quarter of an hour
    "paper": CONFIG(keeps="128,256,512", instances=100, length=900),
}


def start(config: CONFIG, model) -> Walking:
    """Build prompts and arms, and refuse what cannot work, before anything is computed."""
    return Session(config, model, build_tasks(config, model), arms(config, model))


def arms(config: CONFIG, model) -> list[Arm]:
    """The full cache; per budget the oracle, chance, and every variant."""
    from kvprobe import registry
    from kvprobe.oracle import Given

    out = [Arm("full", None, columns=dict(axis=""))]
    for keep in config.budgets:
        out += [Arm("oracle", Given(), keep, columns=dict(axis="")), *arm("random", "random", keep, config, model, dict(axis=""))]
        for axis in config.chosen:
            for name, changes in VARIANTS[axis].items():
                changes = dict(window=max(1, config.window // 4)) if name == "a quarter of the window" else changes
                policy = registry.make_policy("lore", dict(window=config.window, t=config.t, form=config.form, chunk=1) | changes)
                out += arm(name, policy, keep, config, model, dict(axis=axis))
    return out


class Session(Walking):
    """Variants that look at the same costs share a walk."""

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        title = f"ablations of LORE-KV, {self.model.name}, B={self.config.keeps}, n={self.config.instances}"
        small, seed = self.config.model == "tiny", self.config.seed
        off = {keep: stats.difference(*(per_prompt(rows, "recall", arm=name, keep=keep) for name in ("random", CHANCE)), seed) for keep in self.config.budgets}
        ceiling = rows[(rows.metric == "recall") & (rows.arm == "oracle")].value
        errors = rows[rows.metric == "error"].groupby(["arm", "keep"]).value.mean()
        checks = [Check("random eviction meets the oracle's set as often as the closed form says", None if small else all(abs(e.value) <= 0.01 for e in off.values()), ", ".join(f"B={k}: off by {e.text(4)}" for k, e in off.items()), "within .01"),
                  Check("the oracle keeps its own set", bool((ceiling == 1).all()), f"recall {ceiling.min():.3f} at least", "1"),
                  Check("the oracle's output error is below the core's, the core's below chance's", None if small else all(errors["oracle", k] < errors[CORE, k] < errors["random", k] for k in self.config.budgets),
                        "; ".join(f"B={k}: {errors['oracle', k]:.4f}, {errors[CORE, k]:.4f}, {errors['random', k]:.4f}" for k in self.config.budgets), "rising")]
        return Report(title, table, table.to_string(index=False), checks, {"title": title})


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per budget and arm: every metric over seeds and prompts, and its paired difference to the core, each with its interval over prompts."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    for (keep, name), part in rows[rows.keep > 0].groupby(["keep", "arm"], sort=False):
        line = dict(keep=int(keep), axis=part.axis.iloc[0] if name != CHANCE else "", arm=name)
        for metric in METRICS:
            if (part.metric == metric).any():
                mine, core = per_prompt(part, metric), per_prompt(rows, metric, arm=CORE, keep=keep)
                e, d = stats.mean(mine, seed), stats.difference(mine, core, seed)
                line |= {"n": e.n, metric: e.value, f"{metric}_low": e.low, f"{metric}_high": e.high, f"{metric}_sd": seed_spread(part, metric),
                         f"{metric}_gain": d.value, f"{metric}_gain_low": d.low, f"{metric}_gain_high": d.high}
        out.append(line)
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: the value, and in brackets the interval of its difference to the core."""
    import pandas as pd

    def text(r, metric):
        v = [getattr(r, f"{metric}_gain{x}") for x in ("", "_low", "_high")]
        if pd.isna(v[0]):
            return "-"
        value = f"{getattr(r, metric):.{DIGITS[metric]}f}"
        return value if r.arm == CORE else f"{value} ({v[0]:+.{DIGITS[metric]}f} [{v[1]:+.{DIGITS[metric]}f}, {v[2]:+.{DIGITS[metric]}f}])"

    heads = {"recall_free": "recall, free slots", "error": "output error", "logp": "log p [nats]", "retrieved": "retrieval"}
    return pd.DataFrame([{"B": r.keep, "axis": r.axis, "variant": r.arm, "n": r.n, "Recall@B": f"{r.recall:.3f}"} | {head: text(r, m) for m, head in heads.items()} for r in summary(rows, manifest).itertuples()])
