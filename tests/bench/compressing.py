"""What compressing a prompt of 2,000 tokens adds to its prefill, and a look ahead beside the decode steps that it takes.

(plain prefill + added) / plain prefill, added being the time between the prefill's end and the compressed cache, since a part in a
thousand cannot be told by timing two prefills. What happens inside the forward is beside it: kvprobe's prefill that gathers a window of
queries, and the one that accumulates attention (h2o) or moments (expected_attention), each against plain.
"""

from __future__ import annotations

from functools import partial

import torch
from forcing import script
from measure import Result, spend
from stock import stock_cache

from kvprobe import lookahead, registry
from kvprobe.comparing import Gather
from kvprobe.compression import Engine
from kvprobe.eviction_cache import EvictionCache
from kvprobe.models import Model
from kvprobe.pins import SinkPin, WindowPin
from kvprobe.types import Needs, Plan

LENGTH, KEEP, WINDOW, M, T = 2000, 512, 32, 4, 8
ARMS = {  # name: (policy, options, the most that (prefill + added) / prefill may be)
    "random": ("random", {}, 1.003),
    "knorm": ("knorm", {}, 1.006),
    "keydiff": ("keydiff", {}, 1.006),
    "window attention (snapkv)": ("snapkv", dict(window=WINDOW), 1.015),
    "caote": ("caote", dict(window=WINDOW), None),
    "andpro": ("andpro", dict(window=WINDOW), None),
    "adakv": ("adakv", dict(window=WINDOW), None),
    "projected, L1 (criticalkv)": ("criticalkv", dict(window=WINDOW), 1.05),
    "projected, deletion cost of the window (window_only)": ("window_only", {}, 1.05),
    f"whole LORE, M={M}, T={T}": ("lore", dict(m=M, t=T), 1.6),
}
PLAN = Plan(KEEP, 0, schedule="prompt_end")


def _held(model: Model, policy) -> EvictionCache:
    cache = EvictionCache(model.model.config, model.geometry, PLAN, policy, pins=(SinkPin(1), WindowPin(WINDOW)))
    cache.hold()
    return cache


def _compress(model: Model, branch: EvictionCache, policy, logits: torch.Tensor) -> None:
    future = policy.queries(Engine(model, branch, logits, 0)) if getattr(policy, "looks_ahead", False) else None
    branch.evict_now(future)


def _steps(stock, cache, ids: torch.Tensor) -> None:
    for i in range(T):
        stock(input_ids=ids[:, i : i + 1], cache=cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def speed(model: Model, stock, say, n: int) -> list[Result]:
    """Each round: plain prefill twice, kvprobe's three, then every policy on a branch of one of them, the look ahead and as many plain steps."""
    ids = script(model, 1, LENGTH)
    policies = {name: registry.make_policy(policy, options, model) for name, (policy, options, _) in ARMS.items()}
    inside = {"gathering a window": Gather(Needs(window=WINDOW)), "accumulating attention (h2o)": registry.make_policy("h2o"),
              "moments of queries (expected_attention)": registry.make_policy("expected_attention", {}, model)}
    ratios: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        ratios.setdefault(name, []).append(value)

    for i in range(n + 1):  # the first round warms up
        prefill = partial(stock, input_ids=ids, use_cache=True, logits_to_keep=1)
        plain = spend(lambda: prefill(cache=stock_cache(stock)))
        caches, found = {}, {}
        for name, policy in inside.items():
            caches[name] = _held(model, policy)
            took = spend(lambda: found.update({name: model.model(input_ids=ids, cache=caches[name], use_cache=True, logits_to_keep=1).logits[:, -1]}))
            note(f"prefill {name} / plain", took / plain)
        trunk, logits = caches["gathering a window"], found["gathering a window"]
        rival = stock_cache(stock)
        again = spend(lambda: prefill(cache=rival))
        note("plain prefill / plain prefill (the noise)", again / plain)
        plain = (plain + again) / 2
        for name, policy in policies.items():
            branch = trunk.branch(1, policy=policy)  # copies the cache, which compress itself does not: outside the clock
            note(name, 1 + spend(partial(_compress, model, branch, policy, logits)) / plain)
        rival.batch_repeat_interleave(M)
        ahead = spend(partial(lookahead.sample, model, trunk, logits, M, T))
        note("look ahead", ahead / spend(partial(_steps, stock, rival, ids[:, :T].expand(M, -1))))
        say(f"  round {i}/{n}: plain {plain:.2f} s, " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in ratios.items()))
    ratios = {name: tuple(values[1:]) for name, values in ratios.items()}
    where = f"{LENGTH} tokens to {KEEP}"
    out = [Result(f"compress: (prefill + added) / prefill, {name}", ratios.pop(name), goal, form=".4f", note=where) for name, (_, _, goal) in ARMS.items()]
    out.append(Result(f"compress: look ahead / {T} plain steps of {M} rows", ratios.pop("look ahead"), 1.3))
    return out + [Result(f"compress: {name}", values, form=".3f") for name, values in ratios.items()]
