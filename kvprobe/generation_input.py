"""What is asked of free generation, checked before any work: prompts, instances, lengths, streams, and what a config would bend."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .eviction_cache import EvictionCache
from .models import Model
from .pins import PromptPin, SpanPin, check_fits
from .streams import TextStream


def ids_of(model: Model, prompt, chat: bool) -> list[list[int]]:
    """Token ids of each row of a prompt in any of its forms (`generate`)."""
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
    size = vocabulary(model)
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {b} has no tokens")
        bad = [x for x in row if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < size]
        if bad:
            raise ValueError(f"prompt {b} holds {bad[0]!r}, which is no token id: this model has ids 0..{size - 1}")
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


def instances_of(instances, rows: int) -> list[int]:
    """An integer per row, default 0, 1, ..."""
    numbers = list(range(rows)) if instances is None else list(instances)
    if len(numbers) != rows or not all(isinstance(i, int) for i in numbers):
        raise ValueError(f"instances={instances!r} must be a whole number for each of the {rows} prompts")
    return numbers


def vocabulary(model: Model) -> int:
    """How many token ids the model takes."""
    return model.model.get_input_embeddings().weight.shape[0]


def eos(model: Model) -> list[int]:
    """The ids that end a text by the model's generation config."""
    ids = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def text_stream(model: Model) -> TextStream | None:
    """A row's text as it grows, None without a tokenizer."""
    if model.tokenizer is None:
        return None
    return TextStream(functools.partial(model.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def listener(stream, rows: int, model: Model) -> Callable[[int, str], object]:
    """What is called with (row, piece of text), whatever `stream` was given as."""
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


def full_cache(model: Model, keep, pins, options: dict):
    """The cache that evicts nothing, which takes no options."""
    from transformers import DynamicCache

    given = [name for name, value in dict(keep=keep, pins=pins or None, **options).items() if value is not None]
    if given:
        raise ValueError(f"the full cache evicts nothing: leave out {', '.join(given)}, or name a policy")
    return DynamicCache(config=model.model.config)


def check_held(cache: EvictionCache, prompts: list[list[int]]) -> None:
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


def warn_of_processors(model: Model) -> None:
    """Text here is the model's own distribution: a config that transformers would bend it by is named."""
    config = getattr(model.model, "generation_config", None)
    bent = [f"{name}={getattr(config, name)!r}" for name, neutral in PROCESSORS.items() if getattr(config, name, None) not in (None, neutral)]
    if bent:
        warnings.warn(f"the model's generation config asks for {', '.join(bent)}, which kvprobe.generate does not apply: transformers' generate would write another text", stacklevel=3)


TINY = 16
"""Entries per KV head below which a model without its first tokens tends to write nonsense, which is not forgetting."""


def warn_of_collapse(cache: EvictionCache) -> None:
    if cache.plan.keep + cache.plan.buffer < TINY and not cache.common_pins:
        warnings.warn(f"keep={cache.plan.keep} and buffer={cache.plan.buffer} with nothing protected: the model may collapse rather than forget; "
                      "protect_prompt=True or pins=[kvprobe.SinkPin(4)] tells the two apart", stacklevel=3)


def check_length(model: Model, prompts: list[list[int]], new: int, endless: bool) -> None:
    """Refuse what does not fit the model's context; endless: positions are renumbered, so that only the prompts must."""
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise ValueError(f"max_new_tokens={new!r} must be a whole number of at least 1")
    longest, context = max(map(len, prompts)), model.context
    if context is not None and longest + (0 if endless else new) > context:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens={new} do not fit the model's context of {context} tokens"
                         + ("" if endless else f": at most {max(0, context - longest)} new ones do"))
