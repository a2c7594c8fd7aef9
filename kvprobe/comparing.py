"""What probes that compare policies share: the settings, and a session whose batches are one arm on one cut of the instances.

An instance is a story: a prompt, a body, and questions asked of branches of the cache at given points, so that one run
answers them all. Arms share everything before their first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import arms as arm_module
from . import registry
from .arms import Arm
from .pins import PromptPin, check_fits
from .types import POSITIONS, Needs, Plan, watches

NEVER = Plan(10**9, 1)
"""The plan of the full cache."""


@dataclass(frozen=True)
class COMMON:
    """Settings that every comparison of policies has."""

    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    policies: str = "all"
    """policies compared: names, with options in brackets, e.g. random,random(shared=True),rkv(lam=0.1); all means every installed one"""
    protection: str = "without"
    """whether the prompt is pinned: with, without, or both"""
    keep: int = 256
    """entries per KV head that survive a round, pins included, the buffer not (K)"""
    buffer: int = 16
    """newest entries, never scored; a round fires at keep + 2 * buffer entries (r) [tokens]"""
    positions: str = "original"
    """positions after a round: original, or renumbered (survivors re-rotated to stand right before the next token)"""
    instances: int = 8
    """scripts, each with its own filler, names and values"""
    eviction_seeds: int = 3
    """fresh eviction seeds under which every policy that draws is repeated"""
    filler: str = "builtin"
    """reasoning text: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    seed: int = 0
    """seed of scripts, draws and bootstrap"""
    batch_size: int = 8
    """instances per batch"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""

    def __post_init__(self) -> None:
        for name in ("instances", "batch_size", "eviction_seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.threads, self.seed) < 0:
            raise ValueError("threads and seed must not be negative")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is unknown; known: {', '.join(POSITIONS)}")
        Plan(self.keep, self.buffer)
        arm_module.make(arm_module.split(self.policies), self.protection, self.eviction_seeds)

    @property
    def plan(self) -> Plan:
        return Plan(self.keep, self.buffer)


@dataclass(frozen=True)
class Ask:
    """A question put to a branch of the cache after `at` tokens: query [q] and the value's tokens [v] that are scored."""

    name: str
    at: int
    query: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Story:
    """One instance. ids [n]: prompt (the first `prompt` tokens, the only prefilled part) and body. spans: named half-open
    intervals of positions. pins: per condition, see `Comparing.pins`. facts: what was planted, for the manifest."""

    instance: int
    ids: np.ndarray
    prompt: int
    asks: tuple[Ask, ...] = ()
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    facts: str = ""


@dataclass(frozen=True)
class Answer:
    """An ask's outcome for all rows: log p [b v] and argmax hits [b v] of the value's tokens; rounds [b] before the value; log
    up to it."""

    ask: Ask
    logp: object
    top: object
    rounds: list[int]
    log: object


@dataclass(frozen=True)
class Gather:
    """Stands for the policies of several arms before any round: gathers what the greediest of them needs."""

    needs: Needs

    def score(self, view):
        raise RuntimeError("the shared prefix must not reach a round")


def eviction_seed(seed: int, draw: int) -> int:
    """The seed of a fresh eviction draw."""
    return seed + 1_000_003 * draw


def _quiet(tokens: int) -> None:
    """What arms share is in no batch's count."""


class Comparing:
    """Base of a session. A probe gives stories and rows_of(arm, story, k, log, answers) -> [{metric, value, unit, ...}] of row k of the batch, or a
    `compute` of its own, as fork does; and perhaps more arms, pins and `report`."""

    def __init__(self, config: COMMON, model, stories: Sequence[Story], arms: Sequence[Arm] | None = None):
        from kvprobe import api

        if not hasattr(self, "rows_of") and type(self).compute is Comparing.compute:
            raise ValueError(f"{type(self).__module__} gives no rows: its session needs rows_of, or a compute of its own")
        self.config, self.model, self.stories, self.plan = config, model, list(stories), config.plan
        names = arm_module.split(config.policies)
        self.arms = list(arms) if arms is not None else arm_module.make(names, config.protection, config.eviction_seeds, model)
        self.rotate = api.rotation(model, config.positions)
        for arm in self.arms:
            if hasattr(arm.policy, "check"):
                arm.policy.check(self.plan)
        self._check()
        cuts = [range(i, min(i + config.batch_size, len(self.stories))) for i in range(0, len(self.stories), config.batch_size)]
        self.batches = [(arm, cut) for cut in cuts for arm in self.arms]
        self._prefix: tuple[range, object] | None = None

    def _check(self) -> None:
        shapes = {(len(s.ids), s.prompt, tuple((a.name, a.at, len(a.query), len(a.value)) for a in s.asks), tuple(sorted(s.spans))) for s in self.stories}
        if len(shapes) > 1:
            raise ValueError("the stories differ in length, prompt or questions: instances could not be compared")
        story = self.stories[0]
        longest = max([len(story.ids), *(a.at + len(a.query) + len(a.value) for a in story.asks)])
        if self.model.context is not None and longest > self.model.context:
            raise ValueError(f"the script takes {longest} tokens, {self.model.name} has a context of {self.model.context}")
        decides = max((a.at + len(a.query) - 1 for a in story.asks), default=len(story.ids))  # tokens before the one that predicts the last value
        if self.plan.fires_at > decides:
            raise ValueError(f"nothing would be evicted: the script has {decides} tokens before it is asked, a round needs keep + 2 * buffer = {self.plan.fires_at}")
        if story.prompt >= self.plan.fires_at:
            raise ValueError(f"the prompt of {story.prompt} tokens alone reaches a round, which needs keep + 2 * buffer = {self.plan.fires_at}: arms must begin alike")
        if any(a.protect for a in self.arms) and story.prompt >= self.plan.keep:
            raise ValueError(f"keep={self.plan.keep} cannot hold the protected prompt of {story.prompt} tokens")
        if len(story.ids) <= story.prompt:
            raise ValueError("a story needs a body after its prompt")
        for pins in {self.pins(arm, story) for arm in self.arms}:
            check_fits(pins, self.model.geometry, self.plan)

    # -- what the runner asks ---------------------------------------------------------------------------------------

    @property
    def n_batches(self) -> int:
        return len(self.batches)

    @property
    def bytes_needed(self) -> int:
        """Rough size of the folder: one byte per site, position and log row, and the rows."""
        g, n = self.model.geometry, len(self.stories[0].ids)
        return sum(len(cut) for _, cut in self.batches) * (len(g.kv_layers) * g.n_kv * n + 20_000) + 10_000_000

    def tokens(self, batch: int) -> int:
        """Model tokens of a batch, for the progress bar; what arms share is not counted."""
        arm, cut = self.batches[batch]
        shared = 0 if watches(arm.policy) else self._shared_length(self.stories[0])
        return 0 if self.simulates(arm) else len(cut) * (len(self.stories[0].ids) - shared + sum(len(a.query) + len(a.value) for a in self.stories[0].asks))

    def facts(self) -> dict:
        """What the manifest says about plan, policies and scripts."""
        import dataclasses

        policies = {}
        for arm in self.arms:
            if arm.evicts and arm.name not in policies:
                fields = {f.name: getattr(arm.policy, f.name) for f in dataclasses.fields(arm.policy)}
                policies[arm.name] = {"fields": fields, "sha256": registry.source_hash("policy", arm.name.split("(")[0].strip()), **getattr(arm.policy, "facts", {})}
        return {"plan": {"keep": self.plan.keep, "buffer": self.plan.buffer, "fires_at": self.plan.fires_at}, "policies": policies,
                "eviction_seeds_used": sorted({eviction_seed(self.config.seed, arm.draw) for arm in self.arms}), "script": script_facts(self.stories)}

    def compute(self, batch: int, rows: Callable, tick: Callable[[int], object]):
        """Rows, keep log and the log's members of one batch."""
        arm, cut = self.batches[batch]
        stories = [self.stories[i] for i in cut]
        log, answers = self.simulate(arm, stories) if self.simulates(arm) else self.run(arm, cut, stories, tick)
        if arm.evicts:
            self._equal(arm, log)
        out = [self.base(arm, s) | row for k, s in enumerate(stories) for row in self.rows_of(arm, s, k, log, answers)]
        return out, log if arm.evicts else None, [[s.instance, arm.label, arm.draw] for s in stories]

    def _equal(self, arm: Arm, log) -> None:
        """Every arm holds the same number of entries at its policy's own level; an arm that does not is no part of a comparison."""
        axes = {"head": (), "layer": (1,), "model": (0, 1)}.get(getattr(arm.policy, "level", "head"))
        for k in range(len(log.length)):
            for n in {log.rounds(k) - 1} - {-1}:
                counts = log.held(k, n).sum(-1)
                want = np.full_like(counts, self.plan.keep + self.plan.buffer)
                if axes is None or (counts.sum(axes) != want.sum(axes)).any():
                    raise ValueError(f"arm {arm.label} holds {counts.min()}..{counts.max()} entries per head after its last round, the others {want.flat[0]}: budgets of a comparison must be equal")

    def base(self, arm: Arm, story: Story) -> dict:
        return dict(policy=arm.name, protect=arm.protect, draw=arm.draw, instance=story.instance)

    # -- running one arm --------------------------------------------------------------------------------------------

    def simulates(self, arm: Arm) -> bool:
        """Whether the arm's keep-sets are all that is asked, and do not depend on the model."""
        return False

    def simulate(self, arm: Arm, stories: Sequence[Story]):
        from .simulate import keep_log

        g, s = self.model.geometry, stories[0]
        log = keep_log(g.n_layers, g.n_kv, self.plan, arm.policy, tokens=len(s.ids), prompt=s.prompt, protect=arm.protect, layers=g.kv_layers,
                       instances=[x.instance for x in stories], seed=eviction_seed(self.config.seed, arm.draw))
        return log, []

    def pins(self, arm: Arm, story: Story) -> tuple:
        """Pins of one row."""
        return (PromptPin(),) if arm.protect else ()

    def run(self, arm: Arm, cut: range, stories: Sequence[Story], tick):
        """The arm's keep log and its answers."""
        import torch

        ids = torch.as_tensor(np.stack([s.ids for s in stories]), device=self.model.device)
        cache = self._start(arm, cut, stories, ids, tick)
        answers = []
        for k, ask in sorted(enumerate(stories[0].asks), key=lambda x: x[1].at):
            self._feed(cache, ids, ask.at, tick)
            answers.append(self._ask(cache, [s.asks[k] for s in stories], tick))
        self._feed(cache, ids, ids.shape[1], tick)
        return cache.keep_log, answers

    def _start(self, arm: Arm, cut: range, stories, ids, tick):
        """A cache of the arm, fed as far as all arms are the same."""
        row_pins = [self.pins(arm, s) for s in stories]
        seed = eviction_seed(self.config.seed, arm.draw)
        if watches(arm.policy):  # watches every query in its own way: shares nothing
            cache = self._empty(arm.policy, stories, seed, row_pins)
            self._feed(cache, ids, stories[0].prompt, tick)
            return cache
        if self._prefix is None or self._prefix[0] != cut:
            self._prefix = None  # frees the old one first
            self._prefix = cut, self._shared(stories, ids)
        plain = arm.policy if arm.evicts else registry.make_policy("random")
        return self._prefix[1].branch(1, row_pins=row_pins, plan=None if arm.evicts else NEVER, policy=plain, seed=seed)

    def _empty(self, policy, stories, seed: int, row_pins):
        from .eviction_cache import EvictionCache

        return EvictionCache(self.model.model.config, self.model.geometry, self.plan, policy, row_pins=row_pins,
                             instances=[s.instance for s in stories], seed=seed, rotate=self.rotate)

    def _shared_length(self, story: Story) -> int:
        return min([self.plan.fires_at - 1, *(a.at for a in story.asks)])

    def _shared(self, stories, ids):
        wants = [arm.policy.needs for arm in self.arms if arm.evicts and not watches(arm.policy)]
        window = max([self.plan.buffer if n.window == -1 else n.window for n in wants], default=0)
        cache = self._empty(Gather(Needs(window=window, attn_mass=any(n.attn_mass for n in wants))), stories, 0, None)
        self._feed(cache, ids, stories[0].prompt, _quiet)
        self._feed(cache, ids, self._shared_length(stories[0]), _quiet)
        return cache

    def _feed(self, cache, ids, stop: int, tick) -> None:
        """The prompt is a forward of its own: what the first forward held is the prompt."""
        from . import engine

        at = cache.get_seq_length()
        if stop > at:
            engine.force(self.model, cache, ids[:, at:stop], tick=tick)

    def _ask(self, cache, asks: Sequence[Ask], tick) -> Answer:
        import torch

        from . import engine

        branch, first = cache.branch(1), asks[0]
        text = torch.as_tensor(np.stack([np.concatenate([a.query, a.value]) for a in asks]), device=self.model.device)
        q = len(first.query)
        scored = engine.force(self.model, branch, text[:, :-1], targets=text[:, q:], first=q, tick=tick)
        log = branch.keep_log
        return Answer(first, scored.logp.double(), scored.top, [log.rounds(k, before=first.at + q - 1) for k in range(len(asks))], log)


def answer_rows(story: Story, k: int, answer: Answer) -> list[dict]:
    """Retrieval, log p and rounds of one ask."""
    logp, top = answer.logp[k], answer.top[k]
    base = dict(ask=answer.ask.name)
    return [base | dict(metric="logp", value=float(logp.sum()), unit="nats"), base | dict(metric="retrieved", value=float(top.all()), unit="fraction"),
            base | dict(metric="rounds", value=float(answer.rounds[k]), unit="rounds")]


def script_facts(stories: Sequence[Story]) -> dict:
    """What the manifest says about some stories."""
    s = stories[0]
    return {"tokens": len(s.ids), "prompt": s.prompt, "spans": {k: list(v) for k, v in s.spans.items()}, "asks": {a.name: a.at for a in s.asks},
            "hashes": {str(x.instance): _hash(x) for x in stories}, "facts": {str(x.instance): x.facts for x in stories}}


def _hash(story: Story) -> str:
    import hashlib

    text = np.concatenate([story.ids, *(np.concatenate([a.query, a.value]) for a in story.asks)])
    return hashlib.sha256(text.astype("<i8").tobytes()).hexdigest()[:16]
