"""Which policy finds a passcode that was stated once, many rounds ago (Random Attention sec. 5.3, Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import needles, planting, stats
from kvprobe.arms import FULL, Arm
from kvprobe.comparing import COMMON, Ask, Comparing, Story, answer_rows

if TYPE_CHECKING:
    import pandas as pd

FACT = "\nIMPORTANT: the passcode is {value}. Remember it.\n"
QUERY = "\nWhat was the passcode again? The passcode is "
CONTROL = "\nLet {var} = {value}.\nWait — I need the stored constant now. {var} = "
CONTROLLED = ", control"
"""Ending of the asks whose fact is stated right before it is asked for: a policy that fails there has broken the model, not forgotten."""


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the passcode probe."""

    rounds: str = "15,57"
    """rounds between the passcode's first and the question; one run answers all"""
    pre: int = 112
    """filler before the passcode [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        planting.rounds_of(self.rounds)
        if self.pre < 0:
            raise ValueError(f"pre={self.pre} must not be negative")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=96, buffer=48, rounds="1,2", instances=4, batch_size=2, pre=20, policies="random,recency,h2o,rkv,vase,triattention", threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, rounds="57", instances=250),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model, stories(config, model.tokenizer))


def stories(config: CONFIG, tokenizer) -> list[Story]:
    """Stub, filler, the passcode, filler up to the last question."""
    filler, head = needles.Filler(config.filler, tokenizer), needles.stub(tokenizer)
    out = []
    values = planting.values(config.seed, 3, 2 * config.instances)
    others = values[config.instances :]
    for i, value in enumerate(values[: config.instances]):
        fact, inside = needles.locate(tokenizer, FACT.format(value=value), value)
        asked, answer = needles.locate(tokenizer, QUERY + value, value)
        query, target, begin = asked[: answer[0]], asked[answer[0] :], len(head) + config.pre
        if begin + len(fact) > planting.first_candidates(config.plan):
            raise ValueError(f"the passcode ends at position {begin + len(fact)}: only positions below {planting.first_candidates(config.plan)} are candidates from the first round on")
        asks = tuple(Ask(f"{n} rounds", planting.asked_after(config.plan, n, len(query)), query, target) for n in planting.rounds_of(config.rounds))
        fresh, begins = needles.locate(tokenizer, CONTROL.format(var=needles.VARIABLES[0], value=others[i]) + others[i], others[i])
        controls = tuple(Ask(f"{a.name}{CONTROLLED}", a.at, fresh[: begins[0]], fresh[begins[0] :]) for a in asks)
        if asks[0].at < begin + len(fact):
            raise ValueError(f"the first question comes after {asks[0].at} tokens, before the passcode has ended at {begin + len(fact)}: ask later, or plant earlier")
        rng = np.random.default_rng([config.seed, 4, i])
        ids, spans = planting.write(filler, head, [planting.Mark("fact", begin, fact)], asks[-1].at, [value, "passcode", needles.VARIABLES[0], others[i]], rng)
        spans["value"] = begin + inside[0], begin + inside[1]
        out.append(Story(i, ids, len(head), asks + controls, spans, f"passcode {value}, control {others[i]}"))
    return out


class Session(Comparing):
    """Every policy keeps what it likes: no pins but a protected prompt where asked."""

    def rows_of(self, arm: Arm, story: Story, k: int, log, answers) -> list[dict]:
        out = []
        for answer in answers:
            if answer.ask.name.endswith(CONTROLLED):
                out.append(dict(ask=answer.ask.name.removesuffix(CONTROLLED), metric="control_retrieved", value=float(answer.top[k].all()), unit="fraction"))
            else:
                out += answer_rows(story, k, answer) + self._copies(arm, story, k, answer)
        return out

    def _copies(self, arm: Arm, story: Story, k: int, answer) -> list[dict]:
        """Share of the value's tokens that each site still holds when the value is asked for."""
        if not arm.evicts:
            return []
        a, z = story.spans["value"]
        held = (answer.log.died[:, k, :, a:z] >= answer.rounds[k]).mean(-1)
        return [dict(ask=answer.ask.name, metric="value_held", layer=layer, head=h, value=float(held[i, h]), unit="fraction")
                for i, layer in enumerate(answer.log.layers) for h in range(held.shape[1])]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        s, names = self.stories[0], {a.name: a for a in self.stories[0].asks if not a.name.endswith(CONTROLLED)}
        last = list(names.values())[-1]
        got = rows[(rows.metric == "rounds") & (rows.policy != FULL)].groupby("ask").value.unique()
        told = {name: sorted(int(x) for x in got[name]) for name in names}
        title = f"passcode, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, asked {last.at + len(last.query) - s.spans['value'][0]} tokens after it at last, n={len(self.stories)}"
        full = stats.mean(_cell(rows, FULL, "retrieved", last.name), self.config.seed)
        checks = [Check("rounds before the value, counted from the keep log, are those asked for", all(told[n] == [int(n.split()[0])] for n in names), str(told), ", ".join(names)),
                  Check("the full cache retrieves the passcode", full.value >= 0.8 if self.config.model != "tiny" else None, f"{full.text()} of n={full.n}", ">= 0.80")]
        return Report(title, table, table.to_string(index=False), checks, {"title": title, "rounds_before_value": told})


def _cell(rows: pd.DataFrame, policy: str, metric: str, ask: str) -> np.ndarray:
    part = rows[(rows.policy == policy) & (rows.metric == metric) & (rows.ask == ask)]
    return part.groupby("instance").value.mean().to_numpy()


def frame(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """One row per arm, instance, draw and ask, with columns retrieved, logp, control_retrieved and copies (mean over sites of value_held)."""
    keys = ["arm", "policy", "protect", "instance", "draw", "ask"]
    rows = rows.assign(arm=[p + (" + prompt" if q else "") for p, q in zip(rows.policy, rows.protect)])
    wide = rows[rows.metric.isin(["retrieved", "logp", "control_retrieved"])].pivot_table(index=keys, columns="metric", values="value", sort=False)
    held = rows[rows.metric == "value_held"].groupby(keys, sort=False).value.mean()
    return wide.assign(copies=held.reindex(wide.index)).reset_index()


def comparison(rows: pd.DataFrame, manifest: dict) -> stats.Comparison:
    """Arms against the random policy, by question: retrieval and mean log p."""
    found = frame(rows, manifest)
    reference = next((a for a in found.arm if a.startswith("random")), found.arm.iloc[0])
    return stats.compare(found, value=["retrieved", "logp"], arm="arm", cluster="instance", column="ask", reference=reference,
                         unranked=[FULL] if FULL in set(found.arm) else [], seed=manifest["settings"]["seed"])


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: per arm and question retrieval, log p and the share of sites x tokens that still hold the value."""
    import pandas as pd

    found, seed, lines = frame(rows, manifest), manifest["settings"]["seed"], []
    for (arm, ask), part in found.groupby(["arm", "ask"], sort=False):
        by = part.groupby("instance")[["retrieved", "logp", "copies", "control_retrieved"]].mean()
        spread = part.groupby("draw").logp.mean()
        lines.append({"policy": arm, "asked after": ask, "n": len(by), "retrieval [95 %]": stats.mean(by.retrieved.to_numpy(), seed).text(),
                      "mean log p, nats [95 %]": stats.mean(by.logp.to_numpy(), seed).text(), "copies of the value": "-" if by.copies.isna().all() else f"{by.copies.mean():.3f}",
                      "control": f"{by.control_retrieved.mean():.2f}", "seed sd of log p": f"{spread.std(ddof=1):.2f}" if len(spread) > 1 else "-"})
    return pd.DataFrame(lines)
