"""Free generation under eviction, row by row its own: `generate`.

A row's text, keep-sets and sizes are those of a run of its own: it counts its own tokens, draws by its own instance, and
leaves the batch when it stops (up to rounding: kernels sum a batch in another order).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import api
from .eviction_cache import EvictionCache
from .generation_input import check_held, check_length, eos, full_cache, ids_of, instances_of, listener, text_stream, vocabulary, warn_of_collapse, warn_of_processors
from .keeplog import KeepLog
from .models import Model, cuda_devices, prepare
from .sampling import Sampler
from .streams import Stops
from .types import wide
from .writing import Begun, Row, write


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
    prompts = ids_of(model, prompt, chat)
    numbers = instances_of(instances, len(prompts))
    if eviction_seed is not None and (not isinstance(eviction_seed, int) or isinstance(eviction_seed, bool)):
        raise ValueError(f"eviction_seed={eviction_seed!r} must be a whole number")
    warn_of_processors(model)
    stops = _stops(model, stop, ignore_eos)
    hear = listener(stream, len(prompts), model)
    if policy is None or policy == "full":
        cache = full_cache(model, keep, pins, options)
    else:
        given = dict(protect_prompt=protect_prompt, pins=pins, positions=positions) | options
        cache = api.cache(model, policy=policy, keep=keep, buffer=buffer, instances=numbers, seed=seed if eviction_seed is None else eviction_seed, **given)
        check_held(cache, prompts)
        warn_of_collapse(cache)
    check_length(model, prompts, max_new_tokens, endless=positions == "renumbered" and isinstance(cache, EvictionCache))
    rows = [Row(p, i, text_stream(model), functools.partial(hear, b)) for b, (p, i) in enumerate(zip(prompts, numbers))]
    cuda = cuda_devices(model)
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    log, prefill_s, decode_s = write(model, cache, rows, sampler, stops, max_new_tokens, progress)
    if stream is True:
        print()
    memory = sum(torch.cuda.max_memory_allocated(device) for device in cuda) if cuda else None
    return _made(model, rows, log, prefill_s, decode_s, memory)


def go_on(compressed, questions: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: tuple, stop, ignore_eos: bool) -> Generation:
    """Write on from a compressed prompt, after a question's ids per row (all of one length, perhaps none), on a branch of its cache."""
    model, cache = compressed.model, compressed.cache.branch(1)
    sampler, stops = Sampler(*sampling), _stops(model, stop, ignore_eos)
    check_length(model, [[*p, *q] for p, q in zip(compressed.prompts, questions)], max_new_tokens, endless=False)
    rows = [Row(list(q), i, text_stream(model), lambda piece: None) for q, i in zip(questions, cache.instances)]
    begun = Begun(compressed.mask, tuple(map(len, compressed.prompts)), compressed.logits)
    log, prefill_s, decode_s = write(model, cache, rows, sampler, stops, max_new_tokens, False, begun)
    return _made(model, rows, log, prefill_s, decode_s)


def _stops(model: Model, stop, ignore_eos: bool) -> Stops:
    return Stops(stop, () if ignore_eos else eos(model), vocabulary(model), model.tokenizer is not None)


def _made(model: Model, rows: Sequence[Row], log: KeepLog | None, prefill_s: float, decode_s: float, memory: int | None = None) -> Generation:
    """What ended rows wrote."""
    texts = None if model.tokenizer is None else tuple(row.stream.text for row in rows)
    return Generation(
        tuple(torch.tensor(row.tokens) for row in rows), texts, tuple(torch.tensor(row.prompt) for row in rows),
        tuple(torch.tensor(row.logp, dtype=wide(model.model.dtype)) for row in rows), tuple(row.stopped for row in rows), log,
        tuple(row.sizes for row in rows), tuple(row.smallest for row in rows), prefill_s, decode_s, memory)
