"""Capture of post-RoPE queries, keys and values of all layers, against a plain forward of the same tokens."""

from __future__ import annotations

from functools import partial

import torch
from forcing import script
from measure import Result, ratio, rounds, spend
from stock import stock_cache

import kvprobe
from kvprobe.models import Model

BACKENDS = {"nnsight": 1.06, "attention_function": 1.02}


@torch.no_grad()
def _plain(stock, ids, past: int) -> float:
    cache = stock_cache(stock) if past else None
    if past:
        stock(input_ids=ids[:, :past], cache=cache, use_cache=True, logits_to_keep=1)
    return spend(partial(stock, input_ids=ids[:, past:], cache=cache, use_cache=bool(past), logits_to_keep=1))


def _ours(model: Model, ids, past: int, backend: str) -> float:
    cache = stock_cache(model.model) if past else None
    if past:
        kvprobe.prefill(model, cache, ids[:, :past])
    return spend(partial(kvprobe.capture, model, ids[:, past:], cache=cache, backend=backend))


def _lens(model: Model, ids) -> float:
    from kvprobe.inside.with_lens import bridge

    own = bridge(model)
    wanted = ("hook_rot_q", "hook_rot_k", "attn.hook_v")
    with torch.no_grad():
        return spend(lambda: own.run_with_cache(ids, names_filter=lambda name: name.endswith(wanted)))


def speed(model: Model, stock, say, n: int, length: int = 1000, chunk: int = 64) -> list[Result]:
    results = []
    for past, what in ((0, f"{length}-token prefill"), (length, f"{chunk}-token chunk on {length}")):
        ids = script(model, 1, past + (chunk if past else length))
        variants = [("plain", partial(_plain, stock, ids, past)), ("itself", partial(_plain, stock, ids, past))]
        variants += [(b, partial(_ours, model, ids, past, b)) for b in BACKENDS]
        if not past:
            variants.append(("transformer_lens", partial(_lens, model, ids)))
        for _, run in variants:
            run()  # first uses install sources and bridges
        seconds = rounds(n, variants, say)
        for b, goal in BACKENDS.items():
            results.append(Result(f"capture: q, k, v of all layers, {b} / plain, {what}", ratio(seconds[b], seconds["plain"]), 1.06 if past else goal, form=".3f"))
        results.append(Result(f"capture: plain / plain (the noise), {what}", ratio(seconds["itself"], seconds["plain"]), form=".3f"))
        if not past:
            results.append(Result("capture: TransformerLens run_with_cache q, k, v / plain", ratio(seconds["transformer_lens"], seconds["plain"]), form=".2f",
                                  note="eager attention, which is its own"))
    return results
