"""What a compressed prompt costs by stage, and what it is worth, as ratios to AnDPro and to a plain prefill (LORE Table 3, Fig. 7, App. C.4).

Every policy compresses every prompt by the public call, several times in turn with the others, so that what slows the machine
down meets all of them; the median counts. Times of a CPU that others use are what they are: only ratios within a run compare.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvprobe import arms as arm_module
from kvprobe import stats
from kvprobe.comparing import eviction_seed
from kvprobe.policies import lore
from kvprobe.prompt_reading import Prompt
from kvprobe.prompt_settings import COMMON, build_tasks
from kvprobe.prompt_tables import per_prompt
from kvprobe.prompting import CHANCE, METRICS, Arm, Prompting, arm

if TYPE_CHECKING:
    import pandas as pd

STAGES = ("prefill", "lookahead", "scoring", "gather", "decode")
PLAIN = "full"
"""The plain prefill, and decoding from all of it."""


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the latency probe."""

    policies: str = "random,keydiff,snapkv,window_only(chunk=1),criticalkv,andpro(chunk=1),laq,lore(chunk=1)"
    """policies timed: names, with options in brackets; a policy's own window is the setting `window`"""
    reference: str = "andpro(chunk=1)"
    """which of them ratios are to"""
    instances: int = 6
    """prompts in all, each with its own names, values and filler"""
    form: Literal["magnitude", "squared"] = "squared"
    """cost of deletion, of the oracle and of LORE-KV's arms: the square (eq. 6, deployed) or its magnitude (eq. 12)"""
    repeats: int = 3
    """times that everything is timed, in turn; the median counts"""
    decode: int = 16
    """tokens decoded from the compressed cache [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 1 or self.decode < 1:
            raise ValueError(f"repeats={self.repeats} and decode={self.decode} must be at least 1")
        if len(self.budgets) > 1:
            raise ValueError(f"keeps={self.keeps!r}: this probe times one budget")
        timed = arm_module.split(self.policies)
        if self.reference not in timed or PLAIN in timed:
            raise ValueError(f"reference={self.reference!r} must be one of the policies ({', '.join(timed)}), and {PLAIN!r} is timed without being named")

    @property
    def keep(self) -> int:
        return self.budgets[0]


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=2, length=480, keeps="96", window=8, future=4, sampling_seeds=2, kinds="needles", repeats=2, decode=2, threads=1,
                    policies="random,snapkv,andpro(chunk=1),laq(t=2),lore(chunk=1,m=2,t=2)"),
    "demo": CONFIG(instances=5, length=500, decode=8, threads=1),
    "paper": CONFIG(instances=50, length=900, repeats=5, decode=64),
}


def start(config: CONFIG, model) -> Session:
    """Build prompts and arms, and refuse what cannot work, before anything is computed."""
    return Session(config, model, build_tasks(config, model), arms(config, model))


def arms(config: CONFIG, model) -> list[Arm]:
    """The full cache, the oracle as a mark of quality, and every policy; those that sample once per seed, of which the first is timed."""
    from kvprobe.oracle import Given

    out = [Arm(PLAIN, None), Arm("oracle", Given(), config.keep)]
    for name in arm_module.split(config.policies):
        policy = arm_module.policy_of(name)
        common = dict(window=config.window) | (dict(form=config.form) if isinstance(policy, lore.POLICY) else {})
        mine = dataclasses.replace(policy, **{k: v for k, v in common.items() if k in {f.name for f in dataclasses.fields(policy)}})
        made = arm(name, mine, config.keep, config, model)
        out += made if mine.needs.draws or hasattr(mine, "weigh") else made[:1]  # a greedy look ahead is the same under every seed
    return out


class Session(Prompting):
    """Quality as in every probe of prompts; then time, in turns."""

    def __init__(self, *args):
        super().__init__(*args)
        self.timed = [a for a in self.arms if not a.draw and a.name != "oracle"]
        self._prompt: Prompt | None = None
        self._kept: dict[str, object] = {}

    def tokens(self, batch: int) -> int:
        return super().tokens(batch) + self.config.repeats * len(self.timed) * (len(self._cut(self.tasks[batch])[0]) + self.config.decode)

    def read(self, batch: int) -> Prompt:
        self._prompt, self._kept = super().read(batch), {}
        return self._prompt

    def evicted(self, a: Arm, prompt: Prompt):
        branch = super().evicted(a, prompt)
        if not a.draw:
            self._kept[a.name] = branch.positions.clone()
        return branch

    def compute(self, batch, rows, tick):
        out, log, members = super().compute(batch, rows, lambda n: None)
        tick(super().tokens(batch))
        ids = self._prompt.ids.tolist()
        for repeat in range(self.config.repeats):
            for a in self._turn(batch, repeat):
                seconds, same = self._time(a, ids, batch)
                base = self._base(self._prompt) | dict(arm=a.name, keep=a.keep, draw=0, repeat=repeat)
                out += [base | dict(metric=stage, value=s, unit="s") for stage, s in seconds.items()]
                out += [base | dict(metric="same", value=float(same), unit="fraction")] if a.policy is not None else []
                tick(len(ids) + self.config.decode)
        return out, log, members

    def _turn(self, batch: int, repeat: int) -> list[Arm]:
        """The arms in another order each time: rotated by prompt and repeat, every other time backwards."""
        at = (batch + repeat * len(self.timed) // self.config.repeats) % len(self.timed)
        order = self.timed[at:] + self.timed[:at]
        return order if (batch + repeat) % 2 == 0 else order[::-1]

    def _time(self, a: Arm, ids: list[int], batch: int) -> tuple[dict[str, float], bool]:
        """({stage: seconds}, whether it keeps what the arm kept)"""
        import torch

        from kvprobe import compression, generation

        steps = dict(max_new_tokens=self.config.decode + 1, ignore_eos=True)  # the first token comes from the prompt's logits
        if a.policy is None:
            found = generation.generate(self.model, [ids], policy=None, **steps)
            return {"prefill": found.prefill_s, "decode": found.decode_s}, True
        made = compression.compress(self.model, [ids], policy=a.policy, keep=a.keep, protect_window=self.config.window, seed=eviction_seed(self.config.seed, a.draw), instances=[batch])
        return made.seconds | {"decode": made.ask("", **steps).decode_s}, torch.equal(made.cache.positions, self._kept[a.name])

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        title = f"latency, {self.model.name}, B={self.config.keep}, n={self.config.instances}, median of {self.config.repeats}"
        same, ceiling = rows[rows.metric == "same"].value, rows[(rows.metric == "recall") & (rows.arm == "oracle")].value
        noise = plain_spread(rows)
        checks = [Check("what was timed keeps the very entries whose quality was measured", bool((same == 1).all()), f"{int(same.sum())} of {len(same)}", "all"),
                  Check("the oracle keeps its own set", bool((ceiling == 1).all()), f"recall {ceiling.min():.3f} at least", "1"),
                  Check("the machine was quiet: plain prefills of a prompt, longest over shortest, median over prompts", None if self.config.model == "tiny" else noise <= 1.25, f"{noise:.2f}", "<= 1.25")]
        return Report(title, table, table.to_string(index=False), checks, {"title": title, "noise": noise})


def plain_spread(rows: pd.DataFrame) -> float:
    """Longest over shortest plain prefill of a prompt, the median over prompts: what the machine's other work does to a time."""
    part = rows[(rows.arm == PLAIN) & (rows.metric == "prefill")].groupby("instance").value
    return float((part.max() / part.min()).median())


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Per arm and prompt [s]: the median over repeats of every stage, of what comes between prefill and decoding (`added`) and of all (`total`)."""
    part = rows[rows.metric.isin(STAGES)]
    each = part.pivot_table(index=["arm", "instance", "repeat"], columns="metric", values="value", sort=False).reindex(columns=STAGES).fillna(0.0)
    each["added"] = each[list(STAGES[1:-1])].sum(axis=1)
    each["total"] = each["prefill"] + each["added"] + each["decode"]
    return each.groupby(level=["arm", "instance"], sort=False).median()


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per arm: mean seconds by stage, ratios of sums over prompts with intervals over them (`of_plain`: plain prefill and
    what is added, over the plain prefill; `of_reference`: all over the reference's), and quality."""
    import pandas as pd

    seed, reference, t, out = manifest["settings"]["seed"], manifest["settings"]["reference"], times(rows), []
    plain, other = t.loc[PLAIN]["prefill"].sort_index().to_numpy(), t.loc[reference]["total"].sort_index().to_numpy()
    for name in [a for a in dict.fromkeys(rows.arm) if a != CHANCE]:
        line = dict(arm=name, n=manifest["settings"]["instances"])
        if name in t.index:
            own = t.loc[name].sort_index()
            line |= {stage: float(own[stage].mean()) for stage in (*STAGES, "added", "total")}
            for key, e in (("of_plain", stats.ratio(plain + own["added"].to_numpy(), plain, seed)), ("of_reference", stats.ratio(own["total"].to_numpy(), other, seed))):
                line |= {key: e.value, f"{key}_low": e.low, f"{key}_high": e.high}
        for metric in METRICS:
            if len(found := per_prompt(rows, metric, arm=name)):
                e = stats.mean(found, seed)
                line |= {metric: e.value, f"{metric}_low": e.low, f"{metric}_high": e.high}
        out.append(line)
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, key, digits):
        v = [getattr(r, key), getattr(r, f"{key}_low"), getattr(r, f"{key}_high")]
        return "-" if pd.isna(v[0]) else stats.Estimate(*map(float, v), r.n).text(digits)

    heads = {"of_plain": ("(plain prefill + added) / plain prefill", 3), "of_reference": (f"total / {manifest['settings']['reference']}", 3), "logp": ("log p [nats]", 2), "recall": ("Recall@B", 3), "recall_free": ("free slots", 3)}
    return pd.DataFrame([{"arm": r.arm, "n": r.n} | {f"{s} [ms]": "-" if pd.isna(getattr(r, s)) else f"{1e3 * getattr(r, s):.1f}" for s in STAGES} | {head: text(r, key, digits) for key, (head, digits) in heads.items()}
                         for r in summary(rows, manifest).itertuples()])
