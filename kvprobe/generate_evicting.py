"""A user's own `model.generate` under eviction: within `evicting`, every call gets an evicting cache of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import api
from .eviction_cache import EvictionCache
from .keeplog import KeepLog
from .models import Model, prepare


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
