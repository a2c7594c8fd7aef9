"""Free generation under eviction, row by row its own: `generate`, and `evicting` for a user's own `model.generate`.

A row's text, keep-sets and sizes are those of a run of its own: it counts its own tokens, draws by its own instance, and
leaves the batch when it stops (up to rounding: kernels sum a batch in another order). Padding is a matter of the mask, so
that a tokenizer needs no padding token.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from . import api
from .eviction_cache import EvictionCache
from .keeplog import ALIVE, KeepLog
from .models import Model, prepare
from .pins import PromptPin, SpanPin, check_fits
from .sampling import Sampler
from .streams import Stops, TextStream
from .types import wide


@dataclass(frozen=True, repr=False)
class Generation:
    """What `generate` wrote, a tuple entry per row.

    tokens: new ids [m], the one that stopped the row included. texts: what they say, special tokens left out; None without
    a tokenizer. prompts: ids [n]. logp: log probability of each new token before temperature, top_k and top_p [m nats].
    stopped: "eos", "stop token ID", "stop string 'S'" or "length". keep_log: of all rows, None for the full cache.
    sizes: entries of the fullest KV head right after the forward that gave each token [m]; smallest: of the emptiest.
    prefill_s, decode_s: wall time of the first forward and of all others [s]. peak_memory: on CUDA devices [bytes], else None.
    """

    tokens: tuple[Tensor, ...]
    texts: tuple[str, ...] | None
    prompts: tuple[Tensor, ...]
    logp: tuple[Tensor, ...]
    stopped: tuple[str, ...]
    keep_log: KeepLog | None
    sizes: tuple[list[int], ...]
    smallest: tuple[list[int], ...]
    prefill_s: float
    decode_s: float
    peak_memory: int | None = None

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds each row has had."""
        return (0,) * len(self.tokens) if self.keep_log is None else tuple(map(len, self.keep_log.fired))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over decode time; the first of each row belongs to the prefill. nan if there was no decoding."""
        decoded = sum(len(t) - 1 for t in self.tokens)
        return decoded / self.decode_s if decoded else math.nan

    def __repr__(self) -> str:
        lines = [f"row {b}: {len(p)} + {len(t)} tokens, {why}, {r} round{'' if r == 1 else 's'}, at most {max(s)} entries per KV head"
                 for b, (p, t, why, r, s) in enumerate(zip(self.prompts, self.tokens, self.stopped, self.rounds, self.sizes))]
        memory = "" if self.peak_memory is None else f", {self.peak_memory / 2**30:.2f} GiB at most"
        return "\n".join([*lines, f"prefill {self.prefill_s:.2f} s, then {self.tokens_per_second:.1f} tokens/s{memory}"])


@dataclass
class _Row:
    """One text in progress."""

    prompt: list[int]
    instance: int
    stream: TextStream | None
    say: Callable[[str], object]
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    smallest: list[int] = field(default_factory=list)
    stopped: str = ""
    died: np.ndarray | None = None  # [l hkv p]
    fired: tuple[int, ...] = ()

    def take(self, token: int, logp: float, stops: Stops, last: bool) -> None:
        """Note a new token, hand out its text, and see whether it is the last."""
        self.tokens.append(token)
        self.logp.append(logp)
        read, piece = 0, ""
        if self.stream is not None:
            read, piece = len(self.stream.text), self.stream.push(token)
        self.stopped = stops.reason(token, self.stream, read) or ("length" if last else "")
        if self.stopped and self.stream is not None:
            piece += self.stream.flush()
        if piece:
            self.say(piece)


def generate(model, prompt, *, policy="random", keep: int | None = None, buffer: int = 64, protect_prompt: bool = True, pins=(),
             positions: str = "original", temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0,
             eviction_seed: int | None = None, instances: Sequence[int] | None = None, max_new_tokens: int = 256,
             stop: str | int | Sequence[str | int] = (), ignore_eos: bool = False, stream: Callable[[int, str], object] | bool | None = None,
             progress: bool = False, chat: bool = False, **options) -> Generation:
    """Let a model write on from each prompt while its cache evicts.

    prompt: a text, a list of texts, ids [n] or [b n], or a list of id lists; lengths may differ. chat: put each text into
    the chat template. policy, keep, buffer, protect_prompt, pins, positions and `options` are those of `kvprobe.cache`;
    policy None or "full" evicts nothing. temperature 0 is greedy; otherwise transformers' warpers, and a draw per (seed,
    instance, step), so that a row's text does not depend on its neighbours (instances: an integer per row, default 0, 1, ...).
    eviction_seed: of the policy's draws, default `seed`. A row ends with an end-of-text id of the model's generation config
    (unless ignore_eos), at a string or id of `stop`, which its text and tokens include, or after max_new_tokens.
    stream: called with (row, piece of text) as it is written, in whole characters; True prints the text of a single row.
    model: loaded, in memory, or what `kvprobe.compress` returned: then the prompt is the question, and what the cache was
    made with is not said again. Raises ValueError for bad input before any work.
    """
    if hasattr(model, "ask"):
        if (policy, keep, buffer, protect_prompt, tuple(pins), positions, eviction_seed, instances, stream, progress, chat, options) != ("random", None, 64, True, (), "original", None, None, None, False, False, {}):
            raise ValueError("this prompt is compressed already: policy, budgets, pins, positions and instances belong to kvprobe.compress; it goes on without stream, progress and chat")
        return model.ask(prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, ignore_eos=ignore_eos)
    model = model if isinstance(model, Model) else prepare(model)
    sampler = Sampler(temperature, top_p, top_k, seed)
    prompts = _prompts(model, prompt, chat)
    numbers = _instances(instances, len(prompts))
    if eviction_seed is not None and (not isinstance(eviction_seed, int) or isinstance(eviction_seed, bool)):
        raise ValueError(f"eviction_seed={eviction_seed!r} must be a whole number")
    _warn_of_processors(model)
    stops = Stops(stop, () if ignore_eos else _eos(model), _vocabulary(model), model.tokenizer is not None)
    hear = _hearing(stream, len(prompts), model)
    if policy is None or policy == "full":
        cache = _full(model, keep, pins, options)
    else:
        given = dict(protect_prompt=protect_prompt, pins=pins, positions=positions) | options
        cache = api.cache(model, policy=policy, keep=keep, buffer=buffer, instances=numbers, seed=seed if eviction_seed is None else eviction_seed, **given)
        _check_held(cache, prompts)
        _warn_of_collapse(cache)
    _check_length(model, prompts, max_new_tokens, endless=positions == "renumbered" and isinstance(cache, EvictionCache))
    rows = [_Row(p, i, _stream(model), functools.partial(hear, b)) for b, (p, i) in enumerate(zip(prompts, numbers))]
    cuda = _cuda(model)
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    log, prefill_s, decode_s = _write(model, cache, rows, sampler, stops, max_new_tokens, progress)
    if stream is True:
        print()
    memory = sum(torch.cuda.max_memory_allocated(device) for device in cuda) if cuda else None
    texts = None if model.tokenizer is None else tuple(row.stream.text for row in rows)
    return Generation(
        tuple(torch.tensor(row.tokens) for row in rows), texts, tuple(torch.tensor(row.prompt) for row in rows),
        tuple(torch.tensor(row.logp, dtype=wide(model.model.dtype)) for row in rows), tuple(row.stopped for row in rows), log,
        tuple(row.sizes for row in rows), tuple(row.smallest for row in rows), prefill_s, decode_s, memory)


@torch.no_grad()
def _write(model: Model, cache, rows: list[_Row], sampler: Sampler, stops: Stops, steps: int, progress: bool, begun: Begun | None = None) -> tuple[KeepLog | None, float, float]:
    """Step all rows to their ends; returns the keep log of all, and the seconds of the prefill and of the rest."""
    from tqdm.auto import tqdm

    live, device = list(rows), model.device
    ids, mask = _left_padded([row.prompt for row in rows], device)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    if begun is not None:
        position_ids = position_ids + torch.tensor(begun.length, device=device)[:, None]
        mask = torch.cat([begun.mask, mask], dim=1)
    plan_log, prefill_s, start = None, 0.0, time.perf_counter()
    with tqdm(total=steps, unit="step", disable=not progress) as bar:
        for step in range(steps):
            padded = dict(attention_mask=mask) if not bool(mask.all()) else {}
            if step == 0 and begun is not None and not ids.shape[1]:
                logits, position_ids = begun.logits, torch.tensor(begun.length, device=device)[:, None] - 1
            else:
                logits = model.model(input_ids=ids, position_ids=position_ids, cache=cache, use_cache=True, logits_to_keep=1, **padded).logits[:, -1]
            tokens, logp = sampler.pick(logits, torch.tensor([row.instance for row in live]), step)
            _note_sizes(cache, live)
            for row, token, score in zip(live, tokens.tolist(), logp.tolist()):
                row.take(token, score, stops, last=step == steps - 1)
            bar.update()
            if step == 0:
                prefill_s, start = time.perf_counter() - start, time.perf_counter()
            stay = [j for j, row in enumerate(live) if not row.stopped]
            if len(stay) < len(live):
                plan_log = _note_log(cache, live)
                live = [live[j] for j in stay]
                if not live:
                    break
                left = torch.tensor(stay, device=device)
                cache.reorder_cache(left)
                mask, position_ids, tokens = mask[left], position_ids[left], tokens[left.to(tokens.device)]
            ids, position_ids = tokens[:, None].to(device), position_ids[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
    return None if plan_log is None else _joined(rows, plan_log), prefill_s, time.perf_counter() - start


@dataclass(frozen=True)
class Begun:
    """A cache that already holds text: mask [b columns], tokens of each row, and the logits of its last ones [b vocabulary]."""

    mask: Tensor
    length: tuple[int, ...]
    logits: Tensor


def go_on(compressed, questions: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: tuple, stop, ignore_eos: bool) -> Generation:
    """Write on from a compressed prompt, after a question's ids per row (all of one length, perhaps none), on a branch of its cache."""
    model, cache = compressed.model, compressed.cache.branch(1)
    sampler, stops = Sampler(*sampling), Stops(stop, () if ignore_eos else _eos(model), _vocabulary(model), model.tokenizer is not None)
    _check_length(model, [[*p, *q] for p, q in zip(compressed.prompts, questions)], max_new_tokens, endless=False)
    rows = [_Row(list(q), i, _stream(model), lambda piece: None) for q, i in zip(questions, cache.instances)]
    begun = Begun(compressed.mask, tuple(map(len, compressed.prompts)), compressed.logits)
    log, prefill_s, decode_s = _write(model, cache, rows, sampler, stops, max_new_tokens, False, begun)
    texts = None if model.tokenizer is None else tuple(row.stream.text for row in rows)
    return Generation(
        tuple(torch.tensor(row.tokens) for row in rows), texts, tuple(torch.tensor(row.prompt) for row in rows),
        tuple(torch.tensor(row.logp, dtype=wide(model.model.dtype)) for row in rows), tuple(row.stopped for row in rows), log,
        tuple(row.sizes for row in rows), tuple(row.smallest for row in rows), prefill_s, decode_s, None)


def _left_padded(rows: Sequence[Sequence[int]], device) -> tuple[Tensor, Tensor]:
    """ids and mask [b n]; any id serves as padding, as nothing sees it."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows], device=device)
    return ids, torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)


def _note_sizes(cache, live: list[_Row]) -> None:
    for j, row in enumerate(live):
        if isinstance(cache, EvictionCache):
            row.sizes.append(int(cache.count[:, j].max()))
            row.smallest.append(int(cache.count[:, j].min()))
        else:
            row.sizes.append(len(row.prompt) + len(row.sizes))
            row.smallest.append(row.sizes[-1])


def _note_log(cache, live: list[_Row]) -> KeepLog | None:
    """Take the log of rows that stop, before they leave the cache; returns the cache's own."""
    if not isinstance(cache, EvictionCache):
        return None
    log = cache.keep_log
    for j, row in enumerate(live):
        if row.stopped:
            row.died, row.fired = log.died[:, j, :, : log.length[j]], log.fired[j]
    return log


def _joined(rows: list[_Row], log: KeepLog) -> KeepLog:
    """The log of all rows, in their order; whatever else it says is that of `log`."""
    length = tuple(row.died.shape[-1] for row in rows)
    died = np.full((log.died.shape[0], len(rows), log.died.shape[2], max(length)), ALIVE, dtype=log.died.dtype)
    for b, row in enumerate(rows):
        died[:, b, :, : length[b]] = row.died
    return replace(log, died=died, fired=tuple(row.fired for row in rows), length=length)


# -- what is asked for, checked before any work ---------------------------------------------------------------------


def _prompts(model: Model, prompt, chat: bool) -> list[list[int]]:
    if isinstance(prompt, Tensor):
        if prompt.ndim not in (1, 2) or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise ValueError(f"a prompt of ids must be whole numbers [n] or [b n], not {prompt.dtype} {list(prompt.shape)}")
        prompt = (prompt[None] if prompt.ndim == 1 else prompt).tolist()
    given = [prompt] if isinstance(prompt, str) else list(prompt) if isinstance(prompt, (list, tuple)) else None
    if given and all(isinstance(x, int) for x in given):
        given = [given]
    if given is None or not (all(isinstance(p, str) for p in given) or all(isinstance(p, (list, tuple, Tensor)) for p in given)):
        raise ValueError(f"the prompt must be a text, a list of texts, ids [n] or [b n], or a list of id lists, not {type(prompt).__name__}")
    if not given:
        raise ValueError("no prompt was given")
    if isinstance(given[0], str):
        rows = _encoded(model, given, chat)
    elif chat:
        raise ValueError("chat=True puts a text into the chat template, and ids were given: give texts")
    else:
        rows = [p.tolist() if isinstance(p, Tensor) else list(p) for p in given]
    vocabulary = _vocabulary(model)
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {b} has no tokens")
        bad = [x for x in row if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < vocabulary]
        if bad:
            raise ValueError(f"prompt {b} holds {bad[0]!r}, which is no token id: this model has ids 0..{vocabulary - 1}")
    return rows


def _encoded(model: Model, texts: list[str], chat: bool) -> list[list[int]]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: give token ids")
    if not chat:
        return [list(tokenizer(t).input_ids) for t in texts]
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {model.name!r} has no chat template: leave chat=True out")
    turns = [tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True) for t in texts]
    return [list(tokenizer(t, add_special_tokens=False).input_ids) for t in turns]  # the template wrote the special tokens


def _instances(instances, rows: int) -> list[int]:
    numbers = list(range(rows)) if instances is None else list(instances)
    if len(numbers) != rows or not all(isinstance(i, int) for i in numbers):
        raise ValueError(f"instances={instances!r} must be a whole number for each of the {rows} prompts")
    return numbers


def _vocabulary(model: Model) -> int:
    return model.model.get_input_embeddings().weight.shape[0]


def _eos(model: Model) -> list[int]:
    """The ids that end a text by the model's generation config."""
    eos = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _stream(model: Model) -> TextStream | None:
    if model.tokenizer is None:
        return None
    return TextStream(functools.partial(model.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _hearing(stream, rows: int, model: Model) -> Callable[[int, str], object]:
    if stream is None or stream is False:
        return lambda row, piece: None
    if stream is not True and not callable(stream):
        raise ValueError(f"stream={stream!r} must be True or something to call with (row, piece of text)")
    if model.tokenizer is None:
        raise ValueError(f"stream needs text, and model {model.name!r} came without a tokenizer")
    if stream is not True:
        return stream
    if rows > 1:
        raise ValueError(f"stream=True prints one row and there are {rows}: give something to call with (row, piece of text)")
    return lambda row, piece: print(piece, end="", flush=True)


def _full(model: Model, keep, pins, options: dict):
    from transformers import DynamicCache

    given = [name for name, value in dict(keep=keep, pins=pins or None, **options).items() if value is not None]
    if given:
        raise ValueError(f"the full cache evicts nothing: leave out {', '.join(given)}, or name a policy")
    return DynamicCache(config=model.model.config)


def _check_held(cache: EvictionCache, prompts: list[list[int]]) -> None:
    """Refuse protected prompts that do not fit `keep`, alone or with the row's other pins."""
    plan, rows = cache.plan, cache.row_pins or [()] * len(prompts)
    if len(rows) != len(prompts):
        raise ValueError(f"{len(rows)} lists of row_pins for {len(prompts)} prompts")
    for b, row in enumerate(rows):
        pins, n = (*cache.common_pins, *row), len(prompts[b])
        if not any(isinstance(p, PromptPin) for p in pins):
            continue
        if n > plan.keep and not plan.pins_free:
            raise ValueError(f"keep={plan.keep} cannot hold the protected prompt {b} of {n} tokens: give keep={n} or more, or protect_prompt=False")
        check_fits((*pins, SpanPin(0, n)), cache.geometry, plan)


PROCESSORS = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "min_length": 0, "min_new_tokens": 0, "bad_words_ids": None,
              "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None}
"""Fields of a generation config that change logits in transformers' generate, with what leaves them alone."""


def _warn_of_processors(model: Model) -> None:
    """Text here is the model's own distribution: a config that transformers would bend it by is named."""
    config = getattr(model.model, "generation_config", None)
    bent = [f"{name}={getattr(config, name)!r}" for name, neutral in PROCESSORS.items() if getattr(config, name, None) not in (None, neutral)]
    if bent:
        warnings.warn(f"the model's generation config asks for {', '.join(bent)}, which kvprobe.generate does not apply: transformers' generate would write another text", stacklevel=3)


TINY = 16
"""Entries per KV head below which a model without its first tokens tends to write nonsense, which is not forgetting."""


def _warn_of_collapse(cache: EvictionCache) -> None:
    if cache.plan.keep + cache.plan.buffer < TINY and not cache.common_pins:
        warnings.warn(f"keep={cache.plan.keep} and buffer={cache.plan.buffer} with nothing protected: the model may collapse rather than forget; "
                      "protect_prompt=True or pins=[kvprobe.SinkPin(4)] tells the two apart", stacklevel=3)


def _check_length(model: Model, prompts: list[list[int]], new: int, endless: bool) -> None:
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise ValueError(f"max_new_tokens={new!r} must be a whole number of at least 1")
    longest, context = max(map(len, prompts)), model.context
    if context is not None and longest + (0 if endless else new) > context:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens={new} do not fit the model's context of {context} tokens"
                         + ("" if endless else f": at most {max(0, context - longest)} new ones do"))


def _cuda(model: Model) -> list[torch.device]:
    return sorted({p.device for p in model.model.parameters() if p.device.type == "cuda"}, key=str)


# -- a user's own model.generate --------------------------------------------------------------------------------------


@dataclass
class Evicted:
    """What `evicting` saw: the cache of every call of `model.generate` that was given none, oldest first."""

    caches: list[EvictionCache] = field(default_factory=list)

    @property
    def keep_log(self) -> KeepLog:
        """Of the last call. After a beam search its rows are the beams that were still running, not the texts returned."""
        if not self.caches:
            raise ValueError("model.generate was not called in this context, or was given a cache each time")
        return self.caches[-1].keep_log


@contextmanager
def evicting(model, **options) -> Iterator[Evicted]:
    """Within this context every `model.generate(...)` of the transformers model gets an evicting cache of its own.

    model: what `kvprobe.load` returned (call its `.model.generate`), or a transformers model. options: those of
    `kvprobe.cache`. A call that is given a cache uses that one. Sampling, batches with left padding and beam search
    work; calls that need no cache or a croppable one are refused. What `generate` was before comes back at the end,
    also after an exception. Raises ValueError for bad options at once, RuntimeError for a context within a context.
    """
    model = model if isinstance(model, Model) else prepare(model)
    inner, seen = model.model, Evicted()
    before = vars(inner).get("generate")
    if hasattr(before, "kvprobe_evicting"):
        raise RuntimeError("this model is in a kvprobe.evicting context already: leave it first")
    api.cache(model, **options)  # refuse bad options now
    inner.generate = _generate_evicting(model, inner.generate, options, seen)
    try:
        yield seen
    finally:
        if before is None:
            del inner.generate
        else:
            inner.generate = before


def _generate_evicting(model: Model, plain: Callable, options: dict, seen: Evicted) -> Callable:
    @functools.wraps(plain)
    def generate(*args, **kwargs):
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            return plain(*args, **kwargs)
        _check_call(model, args, kwargs)
        kwargs.pop("past_key_values", None)
        cache = kwargs["cache"] = api.cache(model, **options)
        out = plain(*args, **kwargs)
        if cache.recorder is None:
            raise RuntimeError("this call of model.generate did not use the cache it was given, so that nothing was evicted")
        seen.caches.append(cache)
        return out

    generate.kvprobe_evicting = True
    return generate


def _check_call(model: Model, args: tuple, kwargs: dict) -> None:
    """Refuse calls of transformers' generate that would run without the cache or crop it."""
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or getattr(model.model, "generation_config", None)

    def asked(name: str):
        return kwargs.get(name) if kwargs.get(name) is not None else getattr(config, name, None)

    if asked("use_cache") is False:
        raise ValueError("use_cache=False leaves nothing to evict: drop it, or call model.generate outside kvprobe.evicting")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if asked(name) is not None:
            raise ValueError(f"{name} takes tokens back, which an evicting cache cannot: leave it out")
    if asked("cache_implementation") is not None:
        raise ValueError(f"cache_implementation={asked('cache_implementation')!r} names a cache that does not evict: leave it out, also in the generation config")
