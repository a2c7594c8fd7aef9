"""Short futures of a prompt: M continuations of T tokens, sampled in one batch on a copy of the cache (LORE sec. 3.2, Algorithm 1)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from . import draws
from .attention_function import listening
from .models import Model
from .sampling import inverse_cdf
from .types import Plan, wide

NEVER = Plan(10**9, 0, schedule="prompt_end")


@dataclass(frozen=True)
class Lookahead:
    """What sampling left behind; nothing of it is in the prompt's cache.

    tokens, valid [b m t]: sampled ids, and False behind a continuation's end (the ending token counts). queries: layer ->
    post-RoPE queries [b m hq t d] of the sampled tokens y_1..y_T at positions n..n+T-1. logq, entropy, variance [b m t]:
    of the distribution that each token was sampled from [nats, nats, nats^2].
    """

    tokens: Tensor
    valid: Tensor
    queries: dict[int, Tensor]
    logq: Tensor
    entropy: Tensor
    variance: Tensor

    @property
    def m(self) -> int:
        """Continuations."""
        return self.tokens.shape[1]

    @property
    def t(self) -> int:
        """Steps of each."""
        return self.tokens.shape[2]

    def first(self, m: int | None = None, t: int | None = None) -> Lookahead:
        """The first m continuations, cut to t steps: sweeps over M and T reuse one draw. Raises ValueError for more than there are."""
        m, t = self.m if m is None else m, self.t if t is None else t
        if not (1 <= m <= self.m and 1 <= t <= self.t):
            raise ValueError(f"m={m}, t={t} must be in 1..{self.m} and 1..{self.t}: that is what was sampled")
        cut = {name: getattr(self, name)[:, :m, :t] for name in ("tokens", "valid", "logq", "entropy", "variance")}
        return replace(self, queries={layer: q[:, :m, :, :t] for layer, q in self.queries.items()}, **cut)

    def save(self, path: str | os.PathLike) -> None:
        """Write as safetensors, whole or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {name: getattr(self, name).contiguous().cpu() for name in ("tokens", "valid", "logq", "entropy", "variance")}
        tensors |= {f"queries.{layer}": q.contiguous().cpu() for layer, q in self.queries.items()}
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        save_file(tensors, part, metadata={"kvprobe": json.dumps({"what": "lookahead"})})
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike, device: torch.device | str = "cpu") -> Lookahead:
        """Read what `save` wrote. Raises ValueError for another kind of file."""
        from safetensors import safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                if json.loads((file.metadata() or {})["kvprobe"]).get("what") != "lookahead":
                    raise ValueError("it holds something else")
                found = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"{path} holds no lookahead of kvprobe: {error}") from error
        queries = {int(name.split(".")[1]): found.pop(name) for name in list(found) if name.startswith("queries.")}
        return Lookahead(queries=queries, **found)


@torch.no_grad()
def sample(model: Model, cache, logits: Tensor, m: int, t: int, *, seed: int = 0, temperature: float = 1.0, block: int | None = None,
           eos: tuple[int, ...] = ()) -> Lookahead:
    """Sample m continuations of t tokens from the prompt behind `cache` (held, nothing evicted) whose last logits are [b vocabulary].

    Plain sampling, no truncation; temperature 0 decodes greedily. The draw of a token depends on (seed, instance, m, step) only,
    so that a prefix of the continuations is the draw of a smaller m. block: continuations at a time, all by default.
    Raises ValueError for sizes below 1.
    """
    if m < 1 or t < 1 or temperature < 0 or (block is not None and block < 1):
        raise ValueError(f"lookahead takes m and t of at least 1, temperature of at least 0 and a block of at least 1, not m={m}, t={t}, temperature={temperature}, block={block}")
    before = _mark(cache)
    parts = [_block(model, cache, logits, range(i, min(m, i + (block or m))), t, seed, temperature, eos) for i in range(0, m, block or m)]
    if _mark(cache) != before:
        raise RuntimeError("the look ahead has changed the prompt's cache")
    joined = {name: torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("tokens", "valid", "logq", "entropy", "variance")}
    return Lookahead(queries={layer: torch.cat([p.queries[layer] for p in parts], dim=1) for layer in parts[0].queries}, **joined)


def _mark(cache) -> tuple:
    """What must not change while a copy is used: lengths and the very tensors."""
    return tuple(cache.seen), tuple((cache.layers[i].keys.data_ptr(), cache.layers[i].keys.shape, cache.layers[i].keys._version) for i in cache.geometry.kv_layers)


def _block(model: Model, cache, logits: Tensor, which: range, t: int, seed: int, temperature: float, eos) -> Lookahead:
    """Some of the continuations, as batch rows: every prompt's rows stand together."""
    from .policies import random

    b, m = logits.shape[0], len(which)
    copy = cache.branch(m, plan=NEVER, policy=random.POLICY())
    copy.hold()
    instances = torch.tensor(cache.instances, device=logits.device).repeat_interleave(m)
    particles = torch.tensor(list(which), device=logits.device).repeat(b)
    start = torch.tensor(copy.seen, device=model.device)[:, None]
    logits, open_ = logits.repeat_interleave(m, 0), torch.ones(b * m, dtype=torch.bool, device=logits.device)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "valid", "logq", "entropy", "variance")}
    queries: dict[int, list[Tensor]] = {layer: [] for layer in cache.geometry.kv_layers}

    def listen(module, q, k, v, mask, scaling, out) -> None:
        if module.layer_idx in queries:
            queries[module.layer_idx].append(q.unflatten(0, (b, m)).clone())

    with listening(listen):
        for u in range(t):
            token, found = _draw(logits, temperature, seed, instances, particles, u)
            for name, x in (found | {"tokens": token, "valid": open_}).items():
                seen[name].append(x.view(b, m))
            open_ = open_ & ~torch.isin(token, torch.tensor(eos, device=token.device, dtype=token.dtype))
            logits = model.model(input_ids=token[:, None].to(model.device), position_ids=start + u, cache=copy, use_cache=True, logits_to_keep=1).logits[:, -1]
    return Lookahead(queries={layer: torch.cat(q, dim=3) for layer, q in queries.items()}, **{name: torch.stack(x, dim=-1) for name, x in seen.items()})


def _draw(logits: Tensor, temperature: float, seed: int, instances: Tensor, particles: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The next token of every row, and log q, entropy and variance of log q under the distribution it was drawn from."""
    scaled = logits.to(wide(logits.dtype)) / (temperature or 1.0)
    logp = torch.log_softmax(scaled, -1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        token = inverse_cdf(scaled, draws.uniform(draws.key(seed, instances, particles), torch.full_like(particles, step)))
    p = logp.exp()
    safe = logp.masked_fill(p == 0, 0.0)
    entropy = -(p * safe).sum(-1)
    variance = (p * (safe + entropy[:, None]).square()).sum(-1)
    return token, {"logq": logp.gather(-1, token[:, None]).squeeze(-1), "entropy": entropy, "variance": variance}
