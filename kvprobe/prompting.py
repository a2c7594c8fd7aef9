"""What probes of prompt-time eviction share: a session whose batches are one prompt under all arms (settings: prompt_settings.py).

A prompt is read once. Every arm is a branch of that full cache, evicted once and measured against what the full cache goes on
to write and against the true answer (LORE app. F, protocols 5 and 6). Arms of one sampling seed share one draw of continuations,
whose nested prefixes are the smaller draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import arms as arm_module
from . import registry, tasks
from .comparing import eviction_seed
from .metrics import fidelity
from .prompt_reading import Prompt, Reading
from .prompt_settings import COMMON
from .results import digest
from .types import Plan

METRICS = {"recall": "fraction", "recall_free": "fraction", "error": "1 - cosine", "logp": "nats", "retrieved": "fraction"}
"""What is measured of every arm, with its unit."""
CHANCE = "random, closed form"
"""Name of the rows that say what recall a uniform draw has on average."""
TOGETHER = 16
"""Arms that are measured in one batch: each takes a copy of the prompt's cache for a moment."""


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


class Prompting(Reading):
    """Base of a session. A probe gives arms and `report`, and perhaps more measures."""

    def __init__(self, config: COMMON, model, prompts: Sequence[tasks.Task], arms: Sequence[Arm]):
        super().__init__(config, model, prompts, arms)
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
        template = getattr(self.model.tokenizer, "chat_template", None)
        held = [len(self._protected(self._cut(t)[0])) for t in self.tasks]
        lengths = [len(self._cut(t)[0]) for t in self.tasks]
        return {"budgets": self.config.budgets, "protected": [min(held), max(held)], "prompt_tokens": [min(lengths), max(lengths)], "arms": policies,
                "draw": {"particles": self.particles, "horizon": self.horizon}, "template_sha256": None if template is None else digest(str(template)),
                "prompts": {str(i): [t.kind, t.instance, t.sha256] for i, t in enumerate(self.tasks)}}

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

        out = self.measured(prompt.holding(torch.cat([mask for _, mask in some], dim=1), keep), prompt, keep)
        tick(len(some) * (len(prompt.tail) + len(prompt.task.answer_ids)))
        return dict(zip([i for i, _ in some], out))

    # -- one arm ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _first(tail) -> int:
        """The first token of the answer that is read from the compressed cache: the full prompt's logits give the first one of all."""
        return 0 if len(tail) else 1

    def _plan(self, a: Arm) -> Plan:
        return Plan(a.keep, 0, schedule="prompt_end")

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

    def _keeps(self) -> list[int]:
        """Budgets at which kept sets are compared."""
        return sorted({a.keep for a in self.arms if a.policy is not None})

    def _chance(self, prompt: Prompt) -> list[dict]:
        """What recall a uniform draw has on average, by closed form."""
        held, out = len(self._protected(prompt.ids)), []
        for keep in self._keeps():
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


def about(manifest: dict, *facts: str) -> str:
    """Two lines for a figure's footer: the model, the prompts and what the arms share, then seeds, precision and version."""
    m, s, held, long = manifest["model"], manifest["settings"], manifest["protected"], manifest["prompt_tokens"]
    first = (f"{m['name']} ({m['layers']} layers, {m['query_heads']} query and {m['kv_heads']} KV heads); prompts: {s['kinds']}, {long[0]}-{long[1]} tokens, question {s['question']}; "
             f"each arm holds exactly B entries per KV head (per layer or model where its policy deals them out), {'-'.join(map(str, dict.fromkeys(held)))} of them protected; " + ", ".join(facts))
    second = (f"n = {s['instances']} prompts, 95 % bootstrap intervals over them; arms that sample or draw: mean over {s['sampling_seeds']} seeds; {s['form']} of the cost; "
              f"{manifest['dtype']}, seed {s['seed']}, kvprobe {manifest['versions']['kvprobe']}")
    return first + "\n" + second
