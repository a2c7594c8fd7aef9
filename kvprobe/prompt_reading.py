"""Reading a prompt once, for all arms that compress it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import tasks
from .comparing import Gather, eviction_seed
from .prompt_settings import COMMON
from .types import Needs


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

    def holding(self, kept, keep: int):
        """A cache of this prompt whose rows hold the kept sets [l a hkv n], `keep` entries per site in each: what arms leave, measured together."""
        import torch

        from .lookahead import NEVER
        from .oracle import Given

        with torch.no_grad():
            cache = self.cache.branch(kept.shape[1], plan=dataclasses.replace(NEVER, keep=keep), policy=Given())
            cache.evict_now(dict(zip(cache.geometry.kv_layers, kept.to(torch.float32))))
        if not torch.equal(self.truth.kept(cache), kept):
            raise RuntimeError("a cache does not hold the sets it was given")
        return cache


class Reading:
    """Reads the prompts of a session: what is compressed, its full cache, what that goes on to write, and the draws of continuations."""

    def __init__(self, config: COMMON, model, prompts: Sequence[tasks.Task], arms: Sequence):
        self.config, self.model, self.tasks, self.arms = config, model, list(prompts), list(arms)
        self.particles, self.horizon = (max([getattr(a.policy, name) for a in self.arms if a.ahead], default=0) for name in ("m", "t"))

    def _cut(self, task) -> tuple[np.ndarray, np.ndarray]:
        """(what is compressed, what is fed behind it before the answer)"""
        at = len(task.ids) if self.config.question == "seen" else task.cut
        return task.ids[:at], task.ids[at:]

    def _protected(self, ids) -> set[int]:
        from .compression import structural

        spans = [(0, 1), (max(0, len(ids) - self.config.window), len(ids)), *structural(self.model, ids.tolist())]
        return {p for a, z in spans for p in range(a, z)}

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
