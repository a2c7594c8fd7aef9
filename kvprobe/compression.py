"""Compress a prompt once, then ask it anything: prefill, look ahead, score, evict, go on (LORE Algorithm 1)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import generation, registry, stored
from .api import rotation
from .eviction_cache import EvictionCache
from .generation_input import check_length, ids_of, instances_of
from .keeplog import KeepLog
from .lookahead import Lookahead
from .models import Model, cuda_devices, prepare
from .pins import Pin, SinkPin, SpanPin, WindowPin, check_fits
from .types import Plan
from .writing import left_padded

WINDOW = 32
"""Queries that vote at prompt end where a policy speaks of the buffer's and no window is protected [tokens]."""


@dataclass(frozen=True)
class Compressed:
    """A prompt behind a compressed cache.

    prompts: ids of each row; the cut is their end: what was scored saw nothing beyond it. logits [b vocabulary]: of the
    prompt's last token, from the full cache. future: what the policy looked ahead at (None without). seconds: by stage, prefill,
    lookahead, scoring and gather as far as they took place, decode for all that was asked. kept [l b hkv]: entries per site.
    `cache` is at the prompt's end: branch it (`ask` does) to ask several questions.
    """

    model: Model
    cache: EvictionCache
    prompts: tuple[tuple[int, ...], ...]
    mask: Tensor
    logits: Tensor
    policy: object
    future: object | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def keep_log(self) -> KeepLog:
        return self.cache.keep_log

    @property
    def kept(self) -> Tensor:
        """[l b hkv]: entries that each site holds of the prompt."""
        return (self.cache.positions >= 0).sum(-1)

    def save(self, path: str | os.PathLike) -> None:
        """Write to a file, to go on from in another process. Raises ValueError where its cache has been used since."""
        stored.save(self, path)

    @staticmethod
    def load(model, path: str | os.PathLike) -> Compressed:
        """Read what `save` wrote, with the same model. Raises ValueError for another one."""
        return stored.load(model, path)

    def ask(self, question: str | Sequence[str] = "", *, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
            seed: int = 0, stop=(), ignore_eos: bool = False) -> generation.Generation:
        """Go on from the compressed prompt: after a question (one for all rows, or one each), or at once. The cache itself stays as it is.

        Raises ValueError for questions of different lengths in tokens, and for what `kvprobe.generate` refuses.
        """
        if self.cache.seen != [len(p) for p in self.prompts]:
            raise ValueError("this cache has read on behind its prompt: work on made.cache.branch(1), and ask what compress returned")
        if not isinstance(question, (str, list, tuple)) or not all(isinstance(q, str) for q in question):
            raise ValueError(f"question={question!r} must be a text, or one per prompt")
        questions = [question] * len(self.prompts) if isinstance(question, str) else list(question)
        if len(questions) != len(self.prompts):
            raise ValueError(f"{len(questions)} questions for {len(self.prompts)} prompts: give one for all, or one each")
        asked = [[] if not q else list(self.model.tokenizer(q, add_special_tokens=False).input_ids) for q in questions]
        if len({len(a) for a in asked}) > 1:
            raise ValueError(f"the questions take {sorted({len(a) for a in asked})} tokens: questions asked together must have one length")
        clock = Stages(self.model)
        out = generation.go_on(self, asked, max_new_tokens=max_new_tokens, sampling=(temperature, top_p, top_k, seed), stop=stop, ignore_eos=ignore_eos)
        clock.end("decode")
        self.seconds["decode"] = self.seconds.get("decode", 0.0) + clock.seconds["decode"]
        return out


@dataclass(frozen=True)
class Engine:
    """What a policy's `queries(engine)` may use: the model, the held cache of the whole prompt (branch it), its last logits, a seed,
    and the ids of each row. source: the hash that a look ahead is known by."""

    model: Model
    cache: EvictionCache
    logits: Tensor
    seed: int
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def source(self) -> str:
        return source(self.model, self.prompts)


def structural(model: Model, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of a prompt's structural tokens: the tokenizer's own special and added ones (chat-template delimiters, tool-call markers,
    separators). Empty without a tokenizer."""
    if model.tokenizer is None:
        return []
    marks = set(model.tokenizer.all_special_ids) | set(getattr(model.tokenizer, "added_tokens_decoder", {}))
    at = [i for i, token in enumerate(ids) if token in marks]
    starts = [i for i in at if i - 1 not in at]
    return [(a, next(z for z in range(a, len(ids) + 1) if z not in at)) for a in starts]


@torch.no_grad()
def compress(model, prompt, *, policy="lore", keep: int | None = None, keep_ratio: float | None = None, question: str | Sequence[str] | None = None, chat: bool = False,
             protect_first: int = 1, protect_window: int = 32, protect_structural: bool = True, pins: Sequence[Pin] = (), pins_free: bool = False,
             positions: str = "original", seed: int = 0, instances: Sequence[int] | None = None, future=None, **policy_options) -> Compressed:
    """Prefill a prompt and evict once, down to `keep` entries per KV head (protected ones inside, unless pins_free).

    prompt: a text, a list of texts, ids, or a list of id lists; lengths may differ. question: text that scoring may see: it is
    put behind the prompt before the cut. Questions that it must not see are asked of the result. keep_ratio: of the longest
    prompt. protect_first, protect_window, protect_structural: first positions, newest positions and structural tokens that stay
    (protocols 5); the window's queries vote where a policy speaks of the buffer's (window=-1). future: a look ahead
    of these prompts made before, or the result's that holds it, instead of the policy's own. Raises ValueError for bad input before any work.
    """
    _check(pins, instances, seed, protect_first=protect_first, protect_window=protect_window)
    model = model if isinstance(model, Model) else prepare(model)
    given = _seen(prompt, question)
    rows = ids_of(model, given, chat)
    check_length(model, rows, 1, endless=False)
    plan = Plan(Plan.resolve_keep(keep, keep_ratio, max(map(len, rows))), 0, pins_free, "prompt_end")
    chosen = registry.make_policy(_at_prompt_end(registry.make_policy(policy, policy_options), protect_window), None, model)
    common = tuple(pins) + ((SinkPin(protect_first),) if protect_first else ()) + ((WindowPin(protect_window),) if protect_window else ())
    row_pins = [tuple(SpanPin(a, z, elsewhere="free") for a, z in structural(model, row)) if protect_structural else () for row in rows]
    for row, own in zip(rows, row_pins):
        check_fits(common + own, model.geometry, plan, len(row))
    cache = EvictionCache(model.model.config, model.geometry, plan, chosen, pins=common, row_pins=row_pins,
                          instances=instances_of(instances, len(rows)), seed=seed, rotate=rotation(model, positions))
    return _run(model, cache, chosen, rows, seed, None if future is None else _looked(chosen, future, model, rows))


def _check(pins, instances, seed, **counts) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}={value!r} must be a whole number of tokens, 0 for none")
    if not isinstance(pins, Sequence) or not all(hasattr(p, "interval") for p in pins):
        raise ValueError(f"pins={pins!r} must be a list of pins, such as kvprobe.SpanPin(40, 56)")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed={seed!r} must be a whole number")
    if instances is not None and (not isinstance(instances, Sequence) or isinstance(instances, str) or not all(isinstance(i, int) for i in instances)):
        raise ValueError(f"instances={instances!r} must be a list of whole numbers, one per prompt")


def source(model: Model, rows: Sequence[Sequence[int]]) -> str:
    """16 hex digits of the hash of a model's weights and of prompts: whose look ahead it is."""
    return hashlib.sha256(json.dumps([model.fingerprint, [list(map(int, row)) for row in rows]]).encode()).hexdigest()[:16]


def _looked(policy, future, model: Model, rows):
    """A look ahead made before, as the policy takes it. Raises ValueError for one of other prompts or another model, and for a policy that takes none."""
    name, found = type(policy).__module__.rpartition(".")[2], getattr(future, "lookahead", future)
    if not hasattr(policy, "given"):
        raise ValueError(f"policy {name} takes no look ahead made before: leave out future")
    if not isinstance(found, Lookahead):
        raise ValueError(f"future={type(future).__name__} is no look ahead: give a kvprobe.lookahead.Lookahead, or the .future of a result that has one")
    if found.source not in ("", source(model, rows)) or len(found.tokens) != len(rows) or set(found.queries) != set(model.geometry.kv_layers):
        raise ValueError("this look ahead was made from other prompts, or with another model")
    return policy.given(found)


def _at_prompt_end(policy, protect_window: int):
    """The policy with the protected window's queries in place of the buffer's, which a prompt does not have."""
    if getattr(policy.needs, "window", 0) == -1 and getattr(policy, "window", None) == -1:
        return dataclasses.replace(policy, window=protect_window or WINDOW)
    return policy


def _seen(prompt, question):
    if question is None:
        return prompt
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(question, str) and not (isinstance(question, (list, tuple)) and all(isinstance(q, str) for q in question)):
        raise ValueError(f"question={question!r} must be a text, or one per prompt")
    if not (isinstance(texts, (list, tuple)) and all(isinstance(t, str) for t in texts)):
        raise ValueError("a question is put behind texts: give the prompt as text, or the question's ids inside it")
    asked = [question] * len(texts) if isinstance(question, str) else list(question)
    if len(asked) != len(texts):
        raise ValueError(f"{len(asked)} questions for {len(texts)} prompts: give one for all, or one each")
    return [t + q for t, q in zip(texts, asked)]


def _run(model: Model, cache: EvictionCache, policy, rows, seed: int, future) -> Compressed:
    clock = Stages(model)
    ids, mask = left_padded(rows, model.device)
    cache.hold()
    padded = dict(attention_mask=mask) if not bool(mask.all()) else {}
    logits = model.model(input_ids=ids, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache, use_cache=True, logits_to_keep=1, **padded).logits[:, -1]
    clock.end("prefill")
    if future is None and callable(getattr(policy, "queries", None)) and cache.surplus_due():  # snapkv has a field of that name
        future = policy.queries(Engine(model, cache, logits, seed, tuple(map(tuple, rows))))
        clock.end("lookahead")
    cache.evict_now(future, on_stage=clock.end)
    return Compressed(model, cache, tuple(map(tuple, rows)), mask, logits, policy, future, clock.seconds)


class Stages:
    """Seconds of each stage, the device's work included."""

    def __init__(self, model: Model):
        self.cuda = cuda_devices(model)
        self.seconds: dict[str, float] = {}
        self.last = self._now()

    def _now(self) -> float:
        for device in self.cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def end(self, stage: str) -> None:
        now = self._now()
        self.seconds[stage], self.last = now - self.last, now
