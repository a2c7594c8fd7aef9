"""What protecting the prompt gains each policy, beside how much of the prompt its score loses (Random Attention sec. 5.1, Tables 2 and 6, app. C)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import needles, planting, retention, stats
from kvprobe.arms import FULL, Arm
from kvprobe.comparing import COMMON, Ask, Comparing, Story, answer_rows

if TYPE_CHECKING:
    import pandas as pd

FACTS = 4
"""Constants that a prompt states; each is asked for."""
STATED = "Let {var} = {value}. "
TURN = "Some constants first. {facts}Keep them in mind, they are needed at the end. " + needles.TASK


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the protection probe."""

    policies: str = "random,h2o,snapkv,rkv,vase,triattention,keydiff"
    """policies compared: names, with options in brackets, e.g. random,random(shared=True),rkv(lam=0.1); all means every installed one"""
    protection: str = "both"
    """whether the prompt is pinned; this probe needs both"""
    instances: int = 16
    """scripts, each with its own filler and values"""
    rounds: int = 24
    """rounds before the values are asked for"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protection != "both":
            raise ValueError(f"protection={self.protection!r}: this probe compares with and without, it needs both")
        planting.rounds_of(str(self.rounds))


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=280, buffer=80, rounds=2, instances=3, batch_size=3, policies="random,recency,h2o", eviction_seeds=2, threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=960, buffer=64, rounds=57, instances=100, policies="random,h2o,snapkv,rkv,rkv_engine,rkv_released,vase,triattention,keydiff,recency"),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model, stories(config, model.tokenizer))


def stories(config: CONFIG, tokenizer) -> list[Story]:
    """A prompt that states the constants, reasoning text, and a question for each constant."""
    filler, variables, out = needles.Filler(config.filler, tokenizer), needles.VARIABLES[:FACTS], []
    values = np.array(planting.values(config.seed, 9, FACTS * config.instances)).reshape(config.instances, FACTS)
    for i, mine in enumerate(values):
        rng = np.random.default_rng([config.seed, 10, i])
        facts = [(variables[j], str(mine[j])) for j in rng.permutation(FACTS)]
        prompt = head(tokenizer, facts)
        asked = [needles.locate(tokenizer, needles.QUERY.format(var=var) + value, value) for var, value in facts]
        room = max(answer[0] for _, answer in asked)
        forbidden = [*variables, *map(str, mine)]
        at = planting.asked_after(config.plan, config.rounds, room)
        if at <= len(prompt):
            raise ValueError(f"{config.rounds} rounds leave no room after the prompt of {len(prompt)} tokens: more rounds or a larger keep")
        asks = []
        for k, ((var, _), (ids, answer)) in enumerate(zip(facts, asked)):
            pad = filler.passage(room - answer[0], forbidden, rng)
            asks.append(Ask(f"fact {k}", at, np.concatenate([pad, ids[: answer[0]]]), ids[answer[0] :]))
        body = filler.passage(at - len(prompt), forbidden, rng)
        out.append(Story(i, np.concatenate([prompt, body]), len(prompt), tuple(asks), {}, ", ".join(f"{v} = {x}" for v, x in facts)))
    return out


def head(tokenizer, facts) -> np.ndarray:
    """The prompt: the chat template around the turn, if there is one, and the opener. Raises ValueError outside 60-150 tokens where there is a template."""
    text = TURN.format(facts="".join(STATED.format(var=var, value=value) for var, value in facts))
    opener = needles.encode(tokenizer, needles.OPENER)
    if not getattr(tokenizer, "chat_template", None):
        return np.concatenate([needles.encode(tokenizer, text + "\n"), opener])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True)
    ids = np.concatenate([np.asarray(ids["input_ids"] if hasattr(ids, "keys") else ids, dtype=np.int64), opener])
    if not 60 <= len(ids) <= 150:
        raise ValueError(f"the prompt takes {len(ids)} tokens with this tokenizer; the probe is defined for 60-150")
    return ids


class Session(Comparing):
    """Every policy runs with and without the prompt pinned."""

    def rows_of(self, arm: Arm, story: Story, k: int, log, answers) -> list[dict]:
        rows = [row for answer in answers for row in answer_rows(story, k, answer)]
        if arm.evicts:
            last = answers[0].rounds[k] - 1
            union, one = retention.prompt_survival(answers[0].log, k, story.prompt)
            rows += [dict(ask="", metric="prompt_union", value=float(union[last]), unit="fraction"), dict(ask="", metric="prompt_head", value=float(one[last]), unit="fraction")]
        return rows

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        told = sorted({int(x) for x in rows[(rows.metric == "rounds") & (rows.policy != FULL)].value})
        title = f"prompt protection, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {'/'.join(map(str, told))} rounds, prompt of {self.stories[0].prompt} tokens, n={len(self.stories)} x {FACTS} facts"
        pooled, across = correlation(rows, folder.manifest)
        full = stats.mean(per_instance(rows)[lambda d: d.policy == FULL].retrieved.to_numpy(), self.config.seed)
        pinned = rows[rows.protect & (rows.metric == "prompt_head")].value
        checks = [Check("a protected prompt is held in full", bool((pinned == 1).all()), f"least share {pinned.min():.3f}", "1"),
                  Check("the full cache retrieves the facts", full.value >= 0.5 if self.config.model != "tiny" else None, f"{full.text()} of n={full.n}", ">= 0.50")]
        title += f"\nSpearman of gain and survival deficit: {pooled.text()} over policies x instances, {across.text()} over policies' means"
        said = {"title": title, "rounds_before_value": told, "spearman_pooled": pooled.text(), "spearman_across_policies": across.text(), "spearman_n": [pooled.n, across.n]}
        return Report(title, table, table.to_string(index=False), checks, said)


def per_instance(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per policy, protection, draw and instance: retrieved and logp (means over the facts), prompt_head, prompt_union."""
    keys = ["policy", "protect", "draw", "instance"]
    wide = rows.pivot_table(index=keys, columns="metric", values="value", aggfunc="mean", sort=False)
    return wide.reset_index()


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Per policy and instance, means over draws: without and with protection, gain in log p and retrieval, and the share of the prompt lost without."""
    d = per_instance(rows).query("policy != @FULL").groupby(["policy", "protect", "instance"], sort=False)[["retrieved", "logp", "prompt_head", "prompt_union"]].mean().reset_index()
    pair = d[~d.protect].merge(d[d.protect], on=["policy", "instance"], suffixes=("", "_with"))
    return pair.assign(gain=pair.logp_with - pair.logp, gain_retrieved=pair.retrieved_with - pair.retrieved, deficit=1 - pair.prompt_head)


def correlation(rows: pd.DataFrame, manifest: dict):
    """Spearman of the gain in log p with the survival deficit: over policies x instances (clustered by instance), and over policies' means."""
    g, seed = gains(rows), manifest["settings"]["seed"]
    means = g.groupby("policy")[["deficit", "gain"]].mean()
    return stats.spearman(g.deficit.to_numpy(), g.gain.to_numpy(), clusters=g.instance.to_numpy(), seed=seed), stats.spearman(means.deficit.to_numpy(), means.gain.to_numpy(), seed=seed)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: one line per policy."""
    import pandas as pd

    g, d, seed, lines = gains(rows), per_instance(rows), manifest["settings"]["seed"], []
    for policy, part in g.groupby("policy", sort=False):
        def text(x):
            return stats.mean(part[x].to_numpy(), seed).text()

        spread = d[(d.policy == policy) & ~d.protect].groupby("draw").logp.mean()
        lines.append({"policy": policy, "n": len(part), "retrieval without": text("retrieved"), "with": text("retrieved_with"), "log p without [nats]": text("logp"), "gain [nats]": text("gain"),
                      "prompt survival, head": f"{part.prompt_head.mean():.3f}", "any head": f"{part.prompt_union.mean():.3f}", "seed sd": f"{spread.std(ddof=1):.2f}" if len(spread) > 1 else "-"})
    full = d[d.policy == FULL]
    lines.append({"policy": FULL, "n": len(full), "retrieval without": stats.mean(full.retrieved.to_numpy(), seed).text(), "log p without [nats]": stats.mean(full.logp.to_numpy(), seed).text()})
    return pd.DataFrame(lines).fillna("-")
