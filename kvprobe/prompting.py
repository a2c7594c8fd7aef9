"""What probes of prompt-time eviction share: the settings, and a session whose batches are one prompt under all arms.

A prompt is read once. Every arm is a branch of that full cache, evicted once and measured against what the full cache goes on
to write and against the true answer (LORE app. F, protocols 5 and 6). Arms of one sampling seed share one draw of continuations,
whose nested prefixes are the smaller draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from . import arms as arm_module
from . import registry, tasks
from .metrics import fidelity
from .comparing import Gather, eviction_seed
from .types import Needs, Plan

METRICS = {"recall": "fraction", "recall_free": "fraction", "error": "1 - cosine", "logp": "nats", "retrieved": "fraction"}
"""What is measured of every arm, with its unit."""
CHANCE = "random, closed form"
"""Name of the rows that say what recall a uniform draw has on average."""
TOGETHER = 16
"""Arms that are measured in one batch: each takes a copy of the prompt's cache for a moment."""


@dataclass(frozen=True)
class COMMON:
    """Settings that every probe of prompt-time eviction has."""

    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    kinds: str = "needles,variables"
    """kinds of prompts, taken in turn (kvprobe.tasks): needles, variables, passages"""
    length: int = 600
    """of a prompt, up to the answer [tokens]"""
    instances: int = 12
    """prompts in all, each with its own names, values and filler"""
    question: Literal["seen", "unseen"] = "seen"
    """whether the prompt that is compressed ends behind the question, or before it"""
    keeps: str = "128"
    """budgets: entries kept per KV head, the protected ones inside (B), e.g. 64,128"""
    sampling_seeds: int = 3
    """fresh seeds under which every arm that samples or draws is repeated"""
    window: int = 32
    """newest prompt tokens: protected, and their queries score (w) [tokens]"""
    future: int = 32
    """most tokens of the greedy continuation that arms are measured against [tokens]"""
    form: Literal["magnitude", "squared"] = "magnitude"
    """cost of deletion, of the oracle and the arms: its magnitude (eq. 12, analyses) or the square (eq. 6, deployed)"""
    filler: str = "builtin"
    """text around the facts: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    seed: int = 0
    """seed of prompts, draws and bootstrap"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""

    def __post_init__(self) -> None:
        for name in ("instances", "sampling_seeds", "window", "future", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.threads, self.seed) < 0:
            raise ValueError("threads and seed must not be negative")
        for name, known in (("question", ("seen", "unseen")), ("form", ("magnitude", "squared"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        unknown = [k for k in names(self.kinds) if k not in tasks.KINDS]
        if unknown or not names(self.kinds):
            raise ValueError(f"kinds={self.kinds!r}: known are {', '.join(tasks.KINDS)}")
        self.budgets

    @property
    def budgets(self) -> list[int]:
        return numbers("keeps", self.keeps)


def names(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str) -> list[int]:
    """ "1,2" -> [1, 2]. Raises ValueError for anything but different whole numbers from 1 on."""
    parts = names(text)
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{name}={text!r} must be different whole numbers from 1 on, e.g. 64,128")
    return [int(p) for p in parts]


@dataclass(frozen=True)
class Arm:
    """One way to compress a prompt: policy (None evicts nothing) to `keep` entries per KV head under sampling seed number `draw`.

    columns: what its rows say besides, the same keys in all arms of a probe.
    """

    name: str
    policy: object | None
    keep: int = 0
    draw: int = 0
    columns: Mapping[str, object] = field(default_factory=dict)

    @property
    def ahead(self) -> bool:
        """Whether it scores by the prompt's shared continuations."""
        return getattr(self.policy, "looks_ahead", False) and hasattr(self.policy, "weigh")


def arm(name: str, policy, keep: int, config: COMMON, model, columns: Mapping | None = None) -> list[Arm]:
    """The arms of one policy, once per sampling seed where it samples or draws. policy: a policy, or text like "lore(m=4,chunk=1)"."""
    from .compression import _at_prompt_end

    made = arm_module.policy_of(policy) if isinstance(policy, str) else policy
    bound = registry.make_policy(_at_prompt_end(made, config.window), None, model)
    seeds = config.sampling_seeds if bound.needs.draws or getattr(bound, "looks_ahead", False) else 1
    return [Arm(name, bound, keep, draw, columns or {}) for draw in range(seeds)]


def build_tasks(config: COMMON, model) -> list[tasks.Task]:
    """The prompts, kinds in turn. Raises ValueError for a model without a tokenizer or whose context is too short."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: prompts of text need one")
    kinds, out = names(config.kinds), {}
    for k, kind in enumerate(kinds):
        mine = range(k, config.instances, len(kinds))
        out |= dict(zip(mine, tasks.build(model.tokenizer, kind, mine, length=config.length, seed=config.seed, filler=config.filler, context=model.context)))
    return [out[i] for i in range(config.instances)]


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read: its full cache (held), logits [1 vocabulary] of its last token, the oracle of its future.

    number: which prompt of the run; ids: what was compressed; tail: what is fed after the eviction, before the answer (the
    question, where it is unseen). draws: per sampling seed the continuations, as many and as long as any arm takes.
    """

    number: int
    task: tasks.Task
    ids: np.ndarray
    tail: np.ndarray
    cache: object
    logits: object
    truth: object
    draws: Mapping[int, object]


class Prompting:
    """Base of a session. A probe gives arms and `report`, and perhaps more measures."""

    def __init__(self, config: COMMON, model, prompts: Sequence[tasks.Task], arms: Sequence[Arm]):
        self.config, self.model, self.tasks, self.arms = config, model, list(prompts), list(arms)
        self.particles, self.horizon = (max([getattr(a.policy, name) for a in self.arms if a.ahead], default=0) for name in ("m", "t"))
        self._check()

    def _check(self) -> None:
        for task in self.tasks:
            ids, tail = self._cut(task)
            held, longest = self._protected(ids), len(ids) + len(tail) + max(len(task.answer_ids), self.config.future, self.horizon)
            if self.model.context is not None and longest > self.model.context:
                raise ValueError(f"a prompt with its continuation takes {longest} tokens, {self.model.name} has a context of {self.model.context}")
            for keep in {a.keep for a in self.arms if a.policy is not None}:
                if keep >= len(ids):
                    raise ValueError(f"nothing would be evicted: keep={keep}, and a prompt has {len(ids)} tokens")
                if keep < len(held):
                    raise ValueError(f"keep={keep} cannot hold the {len(held)} protected tokens of a prompt")
            if not task.scored[self._first(tail) :].any():
                raise ValueError(f"the answer {task.answer!r} has no token that the compressed cache predicts: its first one comes from the full prompt's logits")
        for a in self.arms:
            if hasattr(a.policy, "check"):
                a.policy.check(self._plan(a))
            if a.policy is not None and a.policy.needs.window == -1:
                raise ValueError(f"arm {a.name} scores by the buffer's queries (window=-1), and there is no buffer at prompt end: name a window")

    # -- what the runner asks ---------------------------------------------------------------------------------------

    @property
    def n_batches(self) -> int:
        return len(self.tasks)

    @property
    def bytes_needed(self) -> int:
        return len(self.tasks) * len(self.arms) * len(METRICS) * 300 + 10_000_000

    def tokens(self, batch: int) -> int:
        """Model tokens of a batch, for the progress bar."""
        task, seeds = self.tasks[batch], len({a.draw for a in self.arms if a.ahead})
        return len(task.ids) + self.config.future + seeds * self.particles * self.horizon + len(self.arms) * (len(task.ids) - task.length + len(task.answer_ids))

    def facts(self) -> dict:
        """What the manifest says about budgets, policies and prompts."""
        policies = {}
        for a in self.arms:
            if a.policy is not None and a.name not in policies:
                module = type(a.policy).__module__.rsplit(".", 1)[-1]
                given = {f.name: getattr(a.policy, f.name) for f in dataclasses.fields(a.policy)} if dataclasses.is_dataclass(a.policy) else {}
                source = {"sha256": registry.source_hash("policy", module)} if module in registry.names("policy") else {}
                policies[a.name] = {"policy": module, "fields": given, **getattr(a.policy, "facts", {}), "source": source}
        held = [len(self._protected(self._cut(t)[0])) for t in self.tasks]
        lengths = [len(self._cut(t)[0]) for t in self.tasks]
        return {"budgets": self.config.budgets, "protected": [min(held), max(held)], "prompt_tokens": [min(lengths), max(lengths)], "arms": policies,
                "draw": {"particles": self.particles, "horizon": self.horizon}, "prompts": {str(i): [t.kind, t.instance, t.sha256] for i, t in enumerate(self.tasks)}}

    def compute(self, batch: int, rows: Callable, tick: Callable[[int], object]):
        """Rows of one prompt: each arm evicts by itself, then arms that hold equal counts are measured as rows of one batch."""
        prompt = self.read(batch)
        each = len(prompt.tail) + len(prompt.task.answer_ids)
        tick(self.tokens(batch) - each * len(self.arms))
        found: dict[int, dict] = {}
        waiting: dict[int, list] = {}
        for i, a in enumerate(self.arms):
            branch = self.evicted(a, prompt)
            if a.policy is None or branch.ragged:
                found[i] = self.measured(branch, prompt, a.keep)[0]
                tick(each)
                continue
            waiting.setdefault(a.keep, []).append((i, prompt.truth.kept(branch)))
            if len(waiting[a.keep]) == TOGETHER:
                found |= self._together(a.keep, waiting.pop(a.keep), prompt, tick)
        for keep, some in waiting.items():
            found |= self._together(keep, some, prompt, tick)
        return self._chance(prompt) + [row for i, a in enumerate(self.arms) for row in self.rows_of(a, prompt, found[i])], None, []

    def _together(self, keep: int, some: list, prompt: Prompt, tick) -> dict[int, dict]:
        """Measures of arms of one budget, by their number: their kept sets as rows of one cache."""
        import torch

        from .lookahead import NEVER
        from .oracle import Given

        kept = torch.cat([mask for _, mask in some], dim=1)  # [l arms hkv n]
        with torch.no_grad():
            cache = prompt.cache.branch(len(some), plan=dataclasses.replace(NEVER, keep=keep), policy=Given())
            cache.evict_now(dict(zip(cache.geometry.kv_layers, kept.to(torch.float32))))
        if not torch.equal(prompt.truth.kept(cache), kept):
            raise RuntimeError("the arms measured together do not hold what each of them kept")
        out = self.measured(cache, prompt, keep)
        tick(len(some) * (len(prompt.tail) + len(prompt.task.answer_ids)))
        return dict(zip([i for i, _ in some], out))

    # -- one prompt -------------------------------------------------------------------------------------------------

    def _cut(self, task) -> tuple[np.ndarray, np.ndarray]:
        """(what is compressed, what is fed behind it before the answer)"""
        at = len(task.ids) if self.config.question == "seen" else task.cut
        return task.ids[:at], task.ids[at:]

    def _protected(self, ids) -> set[int]:
        from .compression import structural

        spans = [(0, 1), (max(0, len(ids) - self.config.window), len(ids)), *structural(self.model, ids.tolist())]
        return {p for a, z in spans for p in range(a, z)}

    @staticmethod
    def _first(tail) -> int:
        """The first token of the answer that is read from the compressed cache: the full prompt's logits give the first one of all."""
        return 0 if len(tail) else 1

    def _plan(self, a: Arm) -> Plan:
        return Plan(a.keep, 0, schedule="prompt_end")

    def read(self, batch: int) -> Prompt:
        """Prefill, greedy future and draws of one prompt."""
        import torch

        from . import lookahead, oracle
        from .generation_input import eos

        task = self.tasks[batch]
        ids, tail = self._cut(task)
        with torch.no_grad():
            cache, logits = self._prefilled(ids, batch, self._gather())
            ahead = oracle.future(self.model, *self._asked(cache, logits, tail), self.config.future)
            truth = oracle.of(self.model, cache, ahead, dataclasses.replace(oracle.ANALYSIS, form=self.config.form))
            draws = {d: lookahead.sample(self.model, cache, logits, self.particles, self.horizon, seed=eviction_seed(self.config.seed, d), eos=tuple(eos(self.model)))
                     for d in sorted({a.draw for a in self.arms if a.ahead})}
        return Prompt(batch, task, ids, tail, cache, logits, truth, draws)

    def _gather(self) -> Gather:
        wants = [a.policy.needs for a in self.arms if a.policy is not None and not hasattr(a.policy, "observe")]
        return Gather(Needs(window=max([n.window for n in wants], default=0), attn_mass=any(n.attn_mass for n in wants)))

    def _prefilled(self, ids, number: int, policy):
        """(held full cache, last logits)"""
        import torch

        from .compression import structural
        from .eviction_cache import EvictionCache
        from .lookahead import NEVER
        from .pins import SinkPin, SpanPin, WindowPin

        pins = (SinkPin(1), WindowPin(self.config.window), *(SpanPin(a, z, elsewhere="free") for a, z in structural(self.model, ids.tolist())))
        cache = EvictionCache(self.model.model.config, self.model.geometry, NEVER, policy, row_pins=[pins], instances=[number], seed=self.config.seed)
        cache.hold()
        text = torch.as_tensor(ids, device=self.model.device)[None]
        return cache, self.model.model(input_ids=text, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _asked(self, cache, logits, tail):
        """The full cache and its logits behind the question."""
        import torch

        if not len(tail):
            return cache, logits
        from .lookahead import NEVER
        from .policies import random

        branch, at = cache.branch(1, plan=NEVER, policy=random.POLICY()), cache.seen[0]
        branch.hold()
        text = torch.as_tensor(tail, device=self.model.device)[None]
        positions = torch.arange(at, at + len(tail), device=text.device)[None]
        return branch, self.model.model(input_ids=text, position_ids=positions, cache=branch, use_cache=True, logits_to_keep=1).logits[:, -1]

    # -- one arm ----------------------------------------------------------------------------------------------------

    def ahead_of(self, a: Arm, prompt: Prompt):
        """What the arm's policy is handed as the future."""
        from .compression import Engine
        from .oracle import Given

        if isinstance(a.policy, Given):
            return dict(zip(prompt.cache.geometry.kv_layers, prompt.truth.score))
        if a.ahead:
            return a.policy.weigh(prompt.draws[a.draw])
        if callable(getattr(a.policy, "queries", None)):
            cache = prompt.cache.branch(1, plan=self._plan(a), policy=a.policy)  # a policy may evict a copy by the arm's own plan first (LAQ)
            return a.policy.queries(Engine(self.model, cache, prompt.logits, eviction_seed(self.config.seed, a.draw), (tuple(prompt.ids.tolist()),)))
        return None

    def evicted(self, a: Arm, prompt: Prompt):
        """A branch of the prompt's cache as the arm leaves it."""
        import torch

        from .lookahead import NEVER
        from .policies import random

        with torch.no_grad():
            if a.policy is None:
                return prompt.cache.branch(1, plan=NEVER, policy=random.POLICY())
            source = self._prefilled(prompt.ids, prompt.number, a.policy)[0] if hasattr(a.policy, "observe") else prompt.cache  # watches in its own way
            return self.evict(source, a, a.policy, self.ahead_of(a, prompt))

    def evict(self, source, a: Arm, policy, ahead):
        """A branch of a held cache, evicted to the arm's budget by a policy that is handed `ahead`."""
        branch = source.branch(1, plan=self._plan(a), policy=policy, seed=eviction_seed(self.config.seed, a.draw))
        branch.evict_now(ahead)
        self._equal(a, branch)
        return branch

    def _equal(self, a: Arm, cache) -> None:
        """Every arm holds its budget at its policy's own level; an arm that does not is no part of a comparison."""
        axes = {"head": (), "layer": (2,), "model": (0, 2)}.get(getattr(a.policy, "level", "head"))
        counts = (cache.positions >= 0).sum(-1).cpu().numpy()
        if axes is None or (counts.sum(axes) != np.full_like(counts, a.keep).sum(axes)).any():
            raise ValueError(f"arm {a.name} holds {counts.min()}..{counts.max()} entries per KV head at keep={a.keep}: budgets of a comparison must be equal at the policy's own level")

    def measured(self, cache, prompt: Prompt, keep: int) -> list[dict]:
        """{metric: value} of every row of a cache that stands at the prompt's end; keep 0 evicted nothing. The answer is fed: last."""
        out = [{} for _ in range(cache.batch)]
        if keep:
            every, free = prompt.truth.recall(prompt.truth.kept(cache), keep)
            for name, x in (("recall", every), ("recall_free", free), ("error", prompt.truth.error(cache))):
                for row, value in zip(out, x.mean((0, 2)).tolist()):
                    row[name] = value
        return [row | answer for row, answer in zip(out, self.answered(cache, prompt))]

    def rows_of(self, a: Arm, prompt: Prompt, found: Mapping[str, float]) -> list[dict]:
        """Rows (metric, value, unit, ...) of one arm on one prompt."""
        base = self._base(prompt) | dict(arm=a.name, keep=a.keep, draw=a.draw) | a.columns
        return [base | dict(metric=name, value=x, unit=METRICS[name]) for name, x in found.items() if x == x]

    def _base(self, prompt: Prompt) -> dict:
        return dict(instance=prompt.number, kind=prompt.task.kind)

    def _chance(self, prompt: Prompt) -> list[dict]:
        """What recall a uniform draw has on average, by closed form."""
        held, out = len(self._protected(prompt.ids)), []
        for keep in sorted({a.keep for a in self.arms if a.policy is not None}):
            base = self._base(prompt) | dict(arm=CHANCE, keep=keep, draw=0)
            for name, x in zip(("recall", "recall_free"), fidelity.random_recall(len(prompt.ids), keep, held)):
                out += [base | dict(metric=name, value=x, unit=METRICS[name])] if x == x else []
        return out

    def answered(self, cache, prompt: Prompt) -> list[dict]:
        """Per row: log p of the true answer under forced decoding, over its tokens that count and that this cache predicts; whether all are argmax."""
        import torch

        from . import engine

        text = torch.as_tensor(np.concatenate([prompt.tail, prompt.task.answer_ids]), device=self.model.device).expand(cache.batch, -1)
        first = max(1, len(prompt.tail))
        scored = engine.force(self.model, cache, text[:, :-1], targets=text[:, first:], first=first)
        counts = torch.as_tensor(prompt.task.scored[self._first(prompt.tail) :])
        return [{"logp": float(logp[counts].sum()), "retrieved": float(top[counts].all())} for logp, top in zip(scored.logp.double(), scored.top)]


# -- from rows to numbers --------------------------------------------------------------------------------------------------


def per_prompt(rows, metric: str, **where) -> np.ndarray:
    """[prompts]: a metric of the rows that match, the mean over sampling seeds, in the order of the prompts."""
    part = rows[rows.metric == metric]
    for column, value in where.items():
        part = part[part[column] == value]
    return part.groupby("instance").value.mean().sort_index().to_numpy()


def seed_spread(rows, metric: str, **where) -> float | None:
    """Standard deviation over sampling seeds of the mean over prompts; None with one seed."""
    part = rows[rows.metric == metric]
    for column, value in where.items():
        part = part[part[column] == value]
    means = part.groupby("draw").value.mean()
    return float(means.std(ddof=1)) if len(means) > 1 else None


def about(manifest: dict, *facts: str) -> str:
    """Two lines for a figure's footer: the model, the prompts and what the arms share, then seeds, precision and version."""
    m, s, held, long = manifest["model"], manifest["settings"], manifest["protected"], manifest["prompt_tokens"]
    first = (f"{m['name']} ({m['layers']} layers, {m['query_heads']} query and {m['kv_heads']} KV heads); prompts: {s['kinds']}, {long[0]}-{long[1]} tokens, question {s['question']}; "
             f"each arm holds exactly B entries per KV head (per layer or model where its policy deals them out), {'-'.join(map(str, dict.fromkeys(held)))} of them protected; " + ", ".join(facts))
    second = (f"n = {s['instances']} prompts, 95 % bootstrap intervals over them; arms that sample or draw: mean over {s['sampling_seeds']} seeds; {s['form']} of the cost; "
              f"{manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
    return first + "\n" + second
