"""Planted-fact recall by the KV heads that hold the fact (Random Attention sec. 5.2, app. B, Fig. 3a)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import conditions, head_checks, metrics, needles, registry, stats
from kvprobe.types import POSITIONS, Plan

if TYPE_CHECKING:
    import pandas as pd

CHECK = "check"  # stage of the rows that test the instrument itself


@dataclass(frozen=True)
class CONFIG:
    """Settings of the planted-fact probe."""

    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    policy: str = "random"
    """eviction policy: a name of `kvprobe list`, or the path of a .py file"""
    policy_options: dict = field(default_factory=dict)
    """options of the policy"""
    keep: int | None = 256
    """entries per KV head that survive a round, pins included (K)"""
    keep_ratio: float | None = None
    """the same as a fraction of the tokens before the value; instead of keep"""
    buffer: int = 16
    """newest entries, never scored; a round fires at keep + 2 * buffer entries (r) [tokens]"""
    buffer_in_keep: bool = False
    """keep counts the buffer (as in Random Attention's accuracy runs)"""
    pins_free: bool = False
    """the pinned box comes on top of keep instead of counting inside it"""
    positions: str = "original"
    """positions after a round: original, or renumbered (survivors re-rotated to stand right before the next token)"""
    conditions: str = "subsets,natural"
    """sets of KV heads that hold the fact: numbers joined by + (0,1+2), all, natural, singles, pairs, triples, subsets, best-pairs, best-triples; kept, deleted and full always run"""
    layers: str = "all"
    """layers of those heads, e.g. 0-9 or 3,5; in the others the fact is banned"""
    instances: int = 24
    """planted facts, each with its own filler, variable and value"""
    rank_instances: int = 0
    """other instances on which best-pairs and best-triples are ranked"""
    best: int = 3
    """how many of the ranked pairs and triples are evaluated"""
    pre: int = 112
    """filler between stub and box [tokens]"""
    age: int = 256
    """from the start of the box to the start of the value [tokens]"""
    query: int = 40
    """room for the query, filled up with filler in front [tokens]"""
    second_box: bool = False
    """plant a second, inert fact 256 tokens after the first"""
    filler: str = "builtin"
    """reasoning text: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    seed: int = 0
    """seed of scripts, draws and bootstrap"""
    batch_size: int = 8
    """instances per batch; each brings its conditions along as rows"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""
    check_instances: int = 1
    """instances on which forcing in chunks, token by token and in one prefill are compared"""
    check_forcing: float = 1e-3
    """largest difference in log p allowed between them [nats]"""
    check_kept: float = 0.5
    """how far the fact kept everywhere under eviction may fall below the full cache, in mean log p [nats]"""
    check_endpoints: float = 3.0
    """least distance between kept and deleted, in mean log p [nats]"""

    def __post_init__(self) -> None:
        for name in ("instances", "batch_size", "best", "check_instances"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.rank_instances, self.threads, self.seed) < 0:
            raise ValueError("rank_instances, threads and seed must not be negative")
        if "best-" in self.conditions and not self.rank_instances:
            raise ValueError("best-pairs and best-triples need --rank-instances, other instances to rank them on")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is unknown; known: {', '.join(POSITIONS)}")
        layout = self.layout
        before = layout.pre + layout.age  # without the stub, which the tokenizer decides
        plan = Plan(Plan.resolve_keep(self.keep, self.keep_ratio, before, self.buffer * self.buffer_in_keep), self.buffer, self.pins_free)
        if plan.keep < layout.box and not self.pins_free:
            raise ValueError(f"keep={plan.keep} cannot hold the pinned box of {layout.box} tokens")
        policy = registry.make_policy(self.policy, self.policy_options)
        if getattr(policy, "block", 1) > plan.keep:
            raise ValueError(f"block={policy.block} is larger than keep={plan.keep}: no head could hold one block")

    @property
    def layout(self) -> needles.Layout:
        return needles.Layout(pre=self.pre, age=self.age, query=self.query, second_box=self.second_box)


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=64, buffer=8, instances=4, batch_size=2, pre=40, age=128, query=60, threads=1),
    "demo": CONFIG(threads=1),  # a second thread wins little on a busy machine and loses much: idle threads spin
    "paper": CONFIG(keep=1024, buffer=64, pre=448, age=1536, second_box=True, instances=250, rank_instances=50,
                    conditions="singles,best-pairs,best-triples,natural"),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    return Session(config, model)


class Session:
    """One run of the probe on one model."""

    def __init__(self, config: CONFIG, model):
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
        from kvprobe import api

        self.config, self.model = config, model
        self.conditions, self.best = conditions.parse(config.conditions, model.geometry, config.layers)
        filler = needles.Filler(config.filler, model.tokenizer)
        count = config.instances + (config.rank_instances if self.best else 0)
        self.scripts = needles.build(model.tokenizer, filler, config.layout, range(count), config.seed)
        self.filler_hash = filler.sha256
        length = len(self.scripts[0].ids)
        if model.context is not None and length > model.context:
            raise ValueError(f"the script takes {length} tokens, {model.name} has a context of {model.context}")
        self.before = self.scripts[0].answer[0]  # tokens before the value
        self.plan = Plan(Plan.resolve_keep(config.keep, config.keep_ratio, self.before, config.buffer * config.buffer_in_keep), config.buffer, config.pins_free)
        if self.plan.fires_at >= self.before:
            raise ValueError(f"nothing would be evicted: {self.before} tokens precede the value, a round needs keep + 2 * buffer = {self.plan.fires_at}")
        self.policy = registry.make_policy(config.policy, config.policy_options, model)
        self.rotate = api.rotation(model, config.positions)
        evaluated = _cut(range(config.instances), config.batch_size)
        ranked = _cut(range(config.instances, count), config.batch_size)
        self.batches = [("rank", b) for b in ranked] + [("eval", b) for b in evaluated] + [(CHECK, range(min(config.check_instances, config.instances)))]

    @property
    def n_batches(self) -> int:
        return len(self.batches)

    @property
    def bytes_needed(self) -> int:
        """Rough size of the folder: 200 bytes a row, one byte per site, position and log row."""
        rows = sum(len(b) * len(self._conditions(stage)) for stage, b in self.batches)
        g = self.model.geometry
        return rows * (2000 + len(g.kv_layers) * g.n_kv * self.before) + 10_000_000

    def _conditions(self, stage: str, rows: Callable[[], pd.DataFrame] | None = None) -> list[conditions.Condition]:
        """What is run in a stage; the sets that a ranking chooses are known only once its rows are there."""
        if stage == CHECK:
            return []
        inside = conditions.parse_layers(self.config.layers, self.model.geometry)
        if stage == "rank":
            ends = [c for c in self.conditions if c.name in ("kept", "deleted")]
            return conditions.unique(ends + [c for size in self.best.values() for c in conditions.choose(size, self.model.geometry, inside)])
        if not self.best or rows is None:
            return self.conditions
        return conditions.unique(self.conditions + [c for size in self.best.values() for c in self._ranked(rows(), size, inside)])

    def _ranked(self, rows: pd.DataFrame, size: int, inside: tuple[int, ...]) -> list[conditions.Condition]:
        logp = _wide(rows[rows.stage == "rank"], "logp")
        sets = conditions.choose(size, self.model.geometry, inside)
        return sorted(sets, key=lambda c: -logp[c.name].mean())[: self.config.best]

    def tokens(self, batch: int) -> int:
        """Model tokens of a batch, for the progress bar."""
        stage, members = self.batches[batch]
        n, shared = self.before + 3, self.plan.fires_at - 1
        if stage == CHECK:
            return 3 * len(members) * n
        return len(members) * (shared + (n - shared) * len(self._conditions(stage)))

    def facts(self) -> dict:
        """What the manifest says about the scripts."""
        s = self.scripts[0]
        return {
            "plan": {"keep": self.plan.keep, "buffer": self.plan.buffer, "fires_at": self.plan.fires_at, "pins_free": self.plan.pins_free},
            "policy": {"name": self.config.policy, "sha256": registry.source_hash("policy", self.config.policy), "fields": {k: getattr(self.policy, k) for k in getattr(self.policy, "__dataclass_fields__", {})}},
            "script": {"tokens": len(s.ids), "stub": s.stub, "box": s.box, "value_in_box": s.value_in_box, "answer": s.answer,
                       "age": s.answer[0] - s.box[0], "filler_sha256": self.filler_hash, "hashes": {str(x.instance): x.sha256 for x in self.scripts},
                       "facts": {str(x.instance): f"{x.variable} = {x.value}" for x in self.scripts}},
        }

    # -- computing --------------------------------------------------------------------------------------------------

    def compute(self, batch: int, rows: Callable[[], pd.DataFrame], tick: Callable[[int], object]):
        """Rows, keep log and the log's members of one batch."""
        stage, members = self.batches[batch]
        scripts = [self.scripts[i] for i in members]
        if stage == CHECK:
            return self._forcing(scripts, tick), None, []
        chosen = self._conditions(stage, rows)
        evicting, full = [c for c in chosen if c.evicts], [c for c in chosen if not c.evicts]
        prefix, ids = self._shared_prefix(scripts, tick)
        pins = [c.pins(s.box) for s in scripts for c in evicting]
        cache = prefix.branch(len(evicting), row_pins=pins)
        scored = self._finish(cache, ids.repeat_interleave(len(evicting), 0), tick)
        log = cache.keep_log
        names = [(s, c) for s in scripts for c in evicting]
        out = [row for k, (s, c) in enumerate(names) for row in self._rows(stage, s, c, scored, k, log)]
        if full:
            untouched = self._finish(prefix.branch(1, plan=Plan(10**9, 1)), ids, tick)
            out += [row for k, s in enumerate(scripts) for row in self._rows(stage, s, full[0], untouched, k, None)]
        return out, log, [[s.instance, c.name] for s, c in names]

    def _shared_prefix(self, scripts: list[needles.Script], tick):
        """Everything up to the step before the first round is the same under all conditions: run it once."""
        import torch

        from kvprobe import engine
        from kvprobe.eviction_cache import EvictionCache

        ids = torch.as_tensor(np.stack([s.ids for s in scripts]), device=self.model.device)
        cache = EvictionCache(self.model.model.config, self.model.geometry, self.plan, self.policy,
                              instances=[s.instance for s in scripts], seed=self.config.seed, rotate=self.rotate)
        engine.force(self.model, cache, ids[:, : self.plan.fires_at - 1], tick=tick)
        return cache, ids

    def _finish(self, cache, ids, tick):
        from kvprobe import engine

        at = cache.get_seq_length()
        return engine.force(self.model, cache, ids[:, at:-1], tick=tick, targets=ids[:, self.before :], first=self.before - at)

    def _rows(self, stage: str, script: needles.Script, condition: conditions.Condition, scored, k: int, log) -> list[dict]:
        base = dict(stage=stage, instance=script.instance, condition=condition.name, n_heads=None if condition.heads is None else len(condition.heads))

        def row(metric: str, value: float, unit: str, token: int | None = None) -> dict:
            return base | dict(metric=metric, token=token, value=value, unit=unit)

        logp, top = scored.logp[k].double(), scored.top[k]
        out = [row("logp", float(logp.sum()), "nats"), row("retrieved", float(top.all()), "fraction")]
        out += [row("logp_token", float(x), "nats", t) for t, x in enumerate(logp)]
        rounds = 0 if log is None else log.rounds(k, before=self.before - 1)
        out.append(row("rounds", float(rounds), "rounds"))
        a, z = script.box
        held = len(self.model.geometry.kv_layers) * self.model.geometry.n_kv if log is None else int((log.died[:, k, :, a:z] >= rounds).all(-1).sum())
        out.append(row("sites_holding_box", float(held), "sites"))
        return out

    def _forcing(self, scripts: list[needles.Script], tick) -> list[dict]:
        """Log p of the value under the full cache, forced in three ways: rows of the first check."""
        import torch
        from transformers import DynamicCache

        from kvprobe import engine

        ids = torch.as_tensor(np.stack([s.ids for s in scripts]), device=self.model.device)
        rows = []
        for name, longest in (("prefill", ids.shape[1]), ("chunks", self.config.buffer), ("tokens", 1)):
            cache = DynamicCache(config=self.model.model.config)
            scored = engine.force(self.model, cache, ids[:, :-1], longest=longest, tick=tick, targets=ids[:, self.before :], first=self.before)
            for k, s in enumerate(scripts):
                rows += [dict(stage=CHECK, instance=s.instance, condition=name, n_heads=None, metric="logp_token", token=t, value=float(x), unit="nats")
                         for t, x in enumerate(scored.logp[k])]
        return rows

    # -- reporting --------------------------------------------------------------------------------------------------

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        rounds = sorted({int(x) for x in rows[(rows.stage == "eval") & (rows.metric == "rounds") & (rows.condition != "full")].value})
        s = self.scripts[0]
        title = (f"planted fact, {self.model.name}, policy {self.config.policy}, K={self.plan.keep}, r={self.plan.buffer}, "
                 f"{'/'.join(map(str, rounds))} rounds before the value, age {s.answer[0] - s.box[0]} tokens")
        checks = [self._check_forcing(rows), self._check_audit(folder), *self._check_ends(rows)]
        return Report(title, table, table.to_string(index=False), checks, {"rounds_before_value": rounds, "title": title})

    def _check_forcing(self, rows):
        from kvprobe.runner import Check

        wide = rows[rows.stage == CHECK].pivot_table(index=["instance", "token"], columns="condition", values="value")
        worst = float((wide.max(axis=1) - wide.min(axis=1)).max())
        limit = self.config.check_forcing
        exact = self.model.model.dtype.itemsize >= 4  # half precision differs by shape: measured, not judged
        return Check("forcing in chunks, token by token and in one prefill agree", worst <= limit if exact else None,
                     f"largest difference in log p {worst:.1e} nats over {len(wide)} tokens", f"<= {limit:g} nats")

    def _check_audit(self, folder):
        by_name = {c.name: c for c in self._conditions("eval", folder.rows) + self._conditions("rank")}
        logged = ((log, k, by_name[name].pins(self.scripts[instance].box)) for _, log, members in folder.logs() for k, (instance, name) in enumerate(members))
        return head_checks.audit_check(logged, self.before - 1)

    def _check_ends(self, rows):
        logp = _wide(rows[rows.stage == "eval"], "logp")
        applies = self.config.model != "tiny"  # a random model recalls nothing
        full, gone = (stats.difference(logp["kept"].to_numpy(), logp[end].to_numpy(), self.config.seed) for end in ("full", "deleted"))
        return [head_checks.near_check(full.value, f"kept - full = {full.text()}", full.n, applies, self.config.check_kept),
                head_checks.far_check(gone.value, f"kept - deleted = {gone.text()}", gone.n, applies, self.config.check_endpoints)]


def _cut(members: range, size: int) -> list[range]:
    return [members[i : i + size] for i in range(0, len(members), size)]


def _wide(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One row per instance, one column per condition."""
    return rows[rows.metric == metric].pivot(index="instance", columns="condition", values="value").sort_index()


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per condition: heads, n, retrieval, recall R and mean log p [nats], each with its 95 % interval as columns."""
    import pandas as pd

    rows = rows[rows.stage == "eval"]
    seed = manifest["settings"]["seed"]
    logp, retrieved = _wide(rows, "logp"), _wide(rows, "retrieved")
    heads = rows.drop_duplicates("condition").set_index("condition").n_heads
    out = []
    for name in heads.index:
        found = {"retrieval": stats.mean(retrieved[name], seed), "R": metrics.recall_gain(logp[name], logp["deleted"], logp["kept"], seed),
                 "logp": stats.mean(logp[name], seed)}
        flat = {f"{k}_{part}": getattr(e, part) for k, e in found.items() for part in ("value", "low", "high")}
        out.append({"condition": name, "n_heads": heads[name], "n": len(logp)} | flat)
    return pd.DataFrame(out).sort_values(["n_heads", "condition"], na_position="last", ignore_index=True)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: one line per condition, values with their intervals as text."""
    import pandas as pd

    def text(row, key: str) -> str:
        parts = [None if pd.isna(row[f"{key}_{p}"]) else float(row[f"{key}_{p}"]) for p in ("value", "low", "high")]
        return stats.Estimate(*parts, n=row["n"]).text()

    s = summary(rows, manifest)
    return pd.DataFrame({
        "condition": s.condition, "heads": ["-" if pd.isna(h) else int(h) for h in s.n_heads], "n": s.n,
        "retrieval [95 %]": [text(r, "retrieval") for _, r in s.iterrows()],
        "recall R [95 %]": [text(r, "R") for _, r in s.iterrows()],
        "mean log p, nats [95 %]": [text(r, "logp") for _, r in s.iterrows()]})
