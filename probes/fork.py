"""Where greedy text under eviction leaves the full cache's, and whether an evicted range, kept, would have mended it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import needles, stats
from kvprobe.arms import Arm
from kvprobe.comparing import COMMON, Comparing, Story, eviction_seed

if TYPE_CHECKING:
    import pandas as pd

SPAN = 16
"""Length of the ranges that are pinned [tokens]."""
WRITE, FORK = "write", "fork"


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the fork probe."""

    policies: str = "random,snapkv"
    """policies whose text is compared with the full cache's"""
    instances: int = 8
    """prompts that are written on from"""
    prompt: int = 280
    """tokens of each prompt: the stub and reasoning text"""
    new: int = 300
    """greedy tokens of the full cache"""
    ranges: int = 6
    """evicted ranges, and as many random ones, pinned one at a time in every site from the start"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.ranges, self.new) < 1:
            raise ValueError(f"ranges={self.ranges} and new={self.new} must be at least 1")
        if self.protection == "both":
            raise ValueError("protection=both: run this probe once with and once without")
        if self.keep < SPAN:
            raise ValueError(f"keep={self.keep} cannot hold a pinned range of {SPAN} tokens")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=40, buffer=8, instances=2, batch_size=2, prompt=48, new=40, ranges=2, policies="random", eviction_seeds=2, threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(keep=960, buffer=64, prompt=1000, new=2000, instances=50, ranges=16, policies="random,snapkv,rkv,vase,triattention"),
}


def start(config: CONFIG, model) -> Session:
    """Build the prompts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: prompts need one")
    filler, head = needles.Filler(config.filler, model.tokenizer), needles.stub(model.tokenizer)
    if config.prompt <= len(head):
        raise ValueError(f"prompt={config.prompt} must be longer than the stub of {len(head)} tokens")
    if config.protection == "with" and config.keep < len(head) + SPAN:
        raise ValueError(f"keep={config.keep} cannot hold the protected stub of {len(head)} tokens and a pinned range of {SPAN}")
    texts = [filler.passage(config.prompt - len(head), (), np.random.default_rng([config.seed, 11, i])) for i in range(config.instances)]
    blank = np.zeros(config.new, dtype=np.int64)  # written by the first stage
    return Session(config, model, [Story(i, np.concatenate([head, text, blank]), len(head)) for i, text in enumerate(texts)])


class Session(Comparing):
    """Stage `write`: the full cache's greedy text. Stage `fork`: each arm is forced along it, then along it up to the fork with one range pinned."""

    def __init__(self, config: CONFIG, model, stories):
        from kvprobe import arms

        made = arms.make(arms.split(config.policies), config.protection, config.eviction_seeds, model, full=False)
        super().__init__(config, model, stories, made)
        cuts = list(dict.fromkeys(cut for _, cut in self.batches))
        self.batches = [(None, cut) for cut in cuts] + self.batches

    def tokens(self, batch: int) -> int:
        arm, cut = self.batches[batch]
        return len(cut) * (self.config.prompt + self.config.new) * (1 if arm is None else 1 + self.config.ranges)

    def compute(self, batch: int, rows, tick):
        arm, cut = self.batches[batch]
        stories = [self.stories[i] for i in cut]
        if arm is None:
            return self._write(stories, tick), None, []
        ids, full = self._written(stories, rows())
        out = []
        scored, log = self._forced(arm, stories, ids, tick)
        for k, story in enumerate(stories):
            wrong = (~scored.top[k]).nonzero().flatten()
            fork = int(wrong[0]) if len(wrong) else None
            base = self.base(arm, story) | dict(stage=FORK)
            out.append(base | dict(metric="forked", kind=None, start=None, value=float(fork is not None), unit="fraction"))
            if fork is None:
                continue
            out += [base | dict(metric=m, kind=None, start=None, value=v, unit=u) for m, v, u in
                    (("fork", float(fork), "tokens"), ("logp", float(scored.logp[k, fork]), "nats"), ("logp_full", float(full[k][fork]), "nats"))]
            out += [base | row for row in self._mend(arm, story, ids[k], fork, log, k, float(scored.logp[k, fork]), tick)]
        return out, log, [[s.instance, arm.label, arm.draw] for s in stories]

    # -- the full cache's text --------------------------------------------------------------------------------------

    def _write(self, stories, tick) -> list[dict]:
        import torch

        from kvprobe import generate

        n = self.config.prompt
        prompts = torch.as_tensor(np.stack([s.ids[:n] for s in stories]))
        made = generate(self.model, prompts, policy=None, max_new_tokens=self.config.new, ignore_eos=True)
        tick(len(stories) * len(stories[0].ids))
        base = dict(policy="full", protect=False, draw=0, stage=WRITE, kind=None)
        return [base | dict(instance=s.instance, metric=metric, start=t, value=float(x), unit=unit) for k, s in enumerate(stories)
                for metric, unit, some in (("token", "id", made.tokens[k]), ("logp", "nats", made.logp[k])) for t, x in enumerate(some)]

    def _written(self, stories, rows: pd.DataFrame):
        """(ids [b n] with the full cache's text, its log p per token [b new])."""
        import torch

        part = rows[rows.stage == WRITE].sort_values(["instance", "start"])
        token, logp = ({i: g.value.to_numpy() for i, g in part[part.metric == m].groupby("instance")} for m in ("token", "logp"))
        ids = [np.concatenate([s.ids[: self.config.prompt], token[s.instance].astype(np.int64)]) for s in stories]
        return torch.as_tensor(np.stack(ids), device=self.model.device), [logp[s.instance] for s in stories]

    # -- eviction along it ------------------------------------------------------------------------------------------

    def _forced(self, arm: Arm, stories, ids, tick):
        from kvprobe import engine

        cache = self._empty(arm.policy, stories, eviction_seed(self.config.seed, arm.draw), [self.pins(arm, s) for s in stories])
        self._feed(cache, ids, stories[0].prompt, tick)
        at, n = cache.get_seq_length(), self.config.prompt
        scored = engine.force(self.model, cache, ids[:, at:-1], targets=ids[:, n:], first=n - at, tick=tick)
        return scored, cache.keep_log

    def _mend(self, arm: Arm, story: Story, ids, fork: int, log, k: int, before: float, tick) -> list[dict]:
        """Pin one range at a time, in every site and inside K, and force the text up to the fork again."""
        from kvprobe import engine
        from kvprobe.pins import SpanPin

        stop = self.config.prompt + fork  # the token at this position is where the texts part
        found = self._ranges(arm, story, log, k, stop)
        if not found:
            return []
        pins = [self.pins(arm, story) + (SpanPin(a, a + SPAN),) for _, a, _ in found]
        cache = self._empty(arm.policy, [story] * len(found), eviction_seed(self.config.seed, arm.draw), pins)
        many = ids[None].expand(len(found), -1)
        self._feed(cache, many, story.prompt, tick)
        at = cache.get_seq_length()
        scored = engine.force(self.model, cache, many[:, at:stop], targets=many[:, stop : stop + 1], first=stop - at, tick=tick)
        out = []
        for (kind, a, lost), logp, top in zip(found, scored.logp[:, 0].double().tolist(), scored.top[:, 0].tolist()):
            out += [dict(metric=m, kind=kind, start=a, value=v, unit=u) for m, v, u in
                    (("gain", logp - before, "nats"), ("mended", float(top), "fraction"), ("lost", lost, "fraction"))]
        return out

    def _ranges(self, arm: Arm, story: Story, log, k: int, stop: int) -> list[tuple[str, int, float]]:
        """(kind, start, share of its entries that were gone at the fork): the most evicted whole ranges, and random ones."""
        rounds = log.rounds(k, before=stop - 1)
        gone = (log.died[:, k, :, : stop - self.plan.buffer] < rounds).mean((0, 1))  # per position, over sites
        first = story.prompt if arm.protect else 0
        last = len(gone) - SPAN
        if not rounds or last < first or not gone[first:].any():
            return []
        starts = np.arange(first, last + 1, SPAN)
        lost = np.array([gone[a : a + SPAN].mean() for a in starts])
        worst = [int(a) for a in starts[np.argsort(-lost, kind="stable")][: self.config.ranges] if gone[a : a + SPAN].any()]
        drawn = np.random.default_rng([self.config.seed, 12, story.instance, arm.draw]).integers(first, last + 1, len(worst))
        return [(kind, int(a), float(gone[a : a + SPAN].mean())) for kind, some in (("evicted", worst), ("random", drawn)) for a in some]

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Check, Report

        table = report_table(rows, folder.manifest)
        title = f"fork, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, prompt {self.config.prompt}, {self.config.new} greedy tokens, n={len(self.stories)}"
        wrong = rows[(rows.stage == FORK) & (rows.metric == "logp")].merge(rows[(rows.stage == FORK) & (rows.metric == "logp_full")], on=["policy", "draw", "instance"])
        told = float((wrong.value_y - wrong.value_x).min()) if len(wrong) else 0.0
        early = rows[(rows.metric == "fork")].value.min()
        check = Check("nothing forks before a round can matter", bool(np.isnan(early) or self.config.prompt + early > self.plan.fires_at), f"earliest fork {early:.0f} tokens after the prompt of {self.config.prompt}",
                      f"prompt + fork > {self.plan.fires_at}")
        return Report(title, table, table.to_string(index=False), [check], {"title": title, "least_drop_at_fork": told})


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per policy: share that forked, fork position, log p of the full cache's token at the fork, and the gain of a pinned range by kind."""
    import pandas as pd

    seed, out = manifest["settings"]["seed"], []
    rows = rows[rows.stage == FORK]
    for policy, part in rows.groupby("policy", sort=False):
        def of(metric, kind=None):
            some = part[(part.metric == metric) & (part.kind.isna() if kind is None else part.kind == kind)]
            return some.groupby("instance").value.mean()

        gain = {kind: of("gain", kind) for kind in ("evicted", "random")}
        paired = stats.difference(*(gain[k].reindex(gain["evicted"].index).to_numpy() for k in ("evicted", "random")), seed) if len(gain["evicted"]) else None
        found = dict(forked=of("forked"), fork=of("fork"), logp=of("logp"), logp_full=of("logp_full"), evicted=gain["evicted"], random=gain["random"],
                     mended_evicted=of("mended", "evicted"), mended_random=of("mended", "random"), lost_evicted=of("lost", "evicted"), lost_random=of("lost", "random"))
        forks = part[part.metric == "fork"]
        same = forks.groupby("draw").instance.apply(frozenset).nunique() == 1  # means over other texts are no spread over seeds
        line = dict(policy=policy, n=part.instance.nunique(), n_forked=forks.instance.nunique(), seed_sd=_sd(forks.groupby("draw").value.mean()) if same else None)
        for name, values in found.items():
            e = stats.mean(values.to_numpy(), seed) if len(values) else stats.Estimate(None, None, None, 0)
            line |= {name: e.value, f"{name}_low": e.low, f"{name}_high": e.high}
        line |= dict(zip(("contrast", "contrast_low", "contrast_high"), (paired.value, paired.low, paired.high) if paired else (None,) * 3))
        out.append(line)
    return pd.DataFrame(out)


def _sd(by_draw) -> float | None:
    return float(by_draw.std(ddof=1)) if len(by_draw) > 1 else None


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, key, digits=2):
        return stats.Estimate(*(None if pd.isna(v) else float(v) for v in (r[key], r[f"{key}_low"], r[f"{key}_high"])), r.n).text(digits)

    s = summary(rows, manifest)
    return pd.DataFrame([{"policy": r.policy, "n": r.n, "forked": text(r, "forked"), "texts that forked": r.n_forked, "of those: fork at [tokens]": text(r, "fork", 0), "seed sd": "-" if pd.isna(r.seed_sd) else f"{r.seed_sd:.0f}",
                          "log p there [nats]": text(r, "logp"), "full cache": text(r, "logp_full"), "gain, evicted range": text(r, "evicted"), "gain, random range": text(r, "random"),
                          "difference": text(r, "contrast"), "mended, evicted": text(r, "mended_evicted"), "random": text(r, "mended_random")} for _, r in s.iterrows()])
