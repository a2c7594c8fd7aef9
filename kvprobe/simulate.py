"""The keep-set process of a policy that reads positions and draws only, through the same cache but without a model.

So that the papers' sizes (K=1024, r=64, 36 layers, 8 heads, 32k tokens) take seconds (Random Attention app. D; methods R1-R3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .attention_function import ATTENTION
from .eviction_cache import EvictionCache
from .keeplog import KeepLog
from .pins import PromptPin
from .types import Geometry, Plan, Policy


def keep_log(n_layers: int, heads: int, plan: Plan, policy: Policy, *, tokens: int, prompt: int = 1, protect: bool = False, layers: Sequence[int] | None = None,
             instances: Sequence[int] = (0,), seed: int = 0, tick: Callable[[int], object] = lambda tokens: None) -> KeepLog:
    """What a cache of `heads` KV heads would hold while `tokens` tokens pass, the first `prompt` in one forward.

    Every instance is a row. Raises ValueError for a policy that scores by keys, values or attention.
    """
    if policy.needs.states or policy.needs.window or policy.needs.attn_mass:
        raise ValueError(f"{policy} reads keys, values or attention: only policies that need no model can be simulated (random, recency, streaming_llm)")
    if not 1 <= prompt <= tokens:
        raise ValueError(f"prompt={prompt} must be in 1..tokens={tokens}")
    chosen = tuple(range(n_layers) if layers is None else layers)
    geometry = Geometry(n_layers, heads, heads, 0, heads, chosen, {i: "not simulated" for i in range(n_layers) if i not in chosen})
    cache = EvictionCache(_config(n_layers, heads), geometry, plan, policy, pins=(PromptPin(),) if protect else (), instances=list(instances), seed=seed)
    at = 0
    while at < tokens:
        n = prompt if at == 0 else min(cache.room or tokens, tokens - at)
        cache.pass_tokens(n, len(instances))
        tick(n)
        at += n
    return cache.keep_log


def _config(n_layers: int, heads: int):
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=n_layers, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads, head_dim=1)
    config._attn_implementation = ATTENTION
    return config


def survival_by_rounds(log: KeepLog, first: int, upto: Sequence[int]) -> list[tuple[int, float, float, int]]:
    """(n, share per head, share held by any head, count) of body positions that outlived n rounds as candidates.

    first: the first body position. Positions whose n-th round lies beyond the log are left out.
    """
    fired = torch.tensor(log.fired[0])
    positions = torch.arange(first, log.length[0])
    entered = torch.searchsorted(fired - log.buffer, positions, right=True)  # rounds before it was a candidate
    died = torch.as_tensor(log.died)[..., first : log.length[0]]
    out = []
    for n in upto:
        whole = entered + n <= len(fired)
        if bool(whole.any()):
            alive = died[..., whole] >= (entered[whole] + n)
            out.append((n, float(alive.double().mean()), float(alive.any(2).double().mean()), int(whole.sum()) * alive[..., 0].numel() // alive.shape[2]))
    return out
