"""Short futures of a prompt: M continuations of T tokens, sampled in one batch on a copy of the cache (LORE sec. 3.2, Algorithm 1)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    of the distribution that each token was sampled from [nats, nats, nats^2]. source: a hash of model and prompts, empty where nobody said.
    """

    tokens: Tensor
    valid: Tensor
    queries: dict[int, Tensor]
    logq: Tensor
    entropy: Tensor
    variance: Tensor
    source: str = ""

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
        save_file(tensors, part, metadata={"kvprobe": json.dumps({"what": "lookahead", "source": self.source})})
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike, device: torch.device | str = "cpu") -> Lookahead:
        """Read what `save` wrote. Raises ValueError for another kind of file."""
        from safetensors import safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                facts = json.loads((file.metadata() or {})["kvprobe"])
                if facts.get("what") != "lookahead":
                    raise ValueError("it holds something else")
                found = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"{path} holds no lookahead of kvprobe: {error}") from error
        queries = {int(name.split(".")[1]): found.pop(name) for name in list(found) if name.startswith("queries.")}
        return Lookahead(queries=queries, **found, source=facts.get("source", ""))


@torch.no_grad()
def sample(model: Model, cache, logits: Tensor, m: int, t: int, *, seed: int = 0, temperature: float = 1.0, block: int | None = None,
           eos: tuple[int, ...] = (), source: str = "") -> Lookahead:
    """Sample m continuations of t tokens from the prompt behind `cache` (held, nothing evicted) whose last logits are [b vocabulary].

    Plain sampling, no truncation; temperature 0 decodes greedily. The draw of a token depends on (seed, instance, m, step) only,
    so that a prefix of the continuations is the draw of a smaller m. block: continuations at a time, all by default.
    Raises ValueError for sizes below 1.
    """
    if m < 1 or t < 1 or temperature < 0 or (block is not None and block < 1):
        raise ValueError(f"lookahead takes m and t of at least 1, temperature of at least 0 and a block of at least 1, not m={m}, t={t}, temperature={temperature}, block={block}")
    with untouched(cache):
        parts = [_block(model, cache, logits, range(i, min(m, i + (block or m))), t, seed, temperature, eos) for i in range(0, m, block or m)]
    joined = {name: torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("tokens", "valid", "logq", "entropy", "variance")}
    return Lookahead(queries={layer: torch.cat([p.queries[layer] for p in parts], dim=1) for layer in parts[0].queries}, **joined, source=source)


def greedy(model: Model, copy, logits: Tensor, t: int, *, columns: Tensor, eos: tuple[int, ...] = (), source: str = "") -> Lookahead:
    """The likeliest continuation of each row, t tokens on `copy`, a branch that is used up and may have evicted: the first token from logits [b vocabulary].

    columns: `real_columns` of the prompt's cache. Raises ValueError for t below 1.
    """
    if t < 1:
        raise ValueError(f"t={t} must be at least 1 token")
    return replace(_walk(model, copy, logits, range(1), t, 0, 0.0, eos, columns), source=source)


@contextmanager
def untouched(cache) -> Iterator[None]:
    """What runs in this context works on copies; raises RuntimeError where it changed the prompt's cache."""
    before = _mark(cache)
    yield
    if _mark(cache) != before:
        raise RuntimeError("the look ahead has changed the prompt's cache")


def _mark(cache) -> tuple:
    """What must not change while a copy is used: lengths and the very tensors."""
    return tuple(cache.seen), tuple((cache.layers[i].keys.data_ptr(), cache.layers[i].keys.shape, cache.layers[i].keys._version) for i in cache.geometry.kv_layers)


def spare(cache, repeats: int = 1):
    """A branch of a prompt's held cache to be used up: no round fires in it, and no policy gathers."""
    from .policies import random

    copy = cache.branch(repeats, plan=NEVER, policy=random.POLICY())
    copy.hold()
    return copy


def real_columns(cache) -> Tensor:
    """bool [b n]: which columns fed to a cache without rounds so far are no padding. Layers that are left to transformers have to be told."""
    return torch.cat(cache.tail, dim=1) >= 0


def step(model: Model, copy, ids: Tensor, columns: Tensor) -> Tensor:
    """Logits [b vocabulary] behind ids [b n], fed to `copy` at the next positions of its rows. columns: real ones before [b s]."""
    at = torch.tensor(copy.seen, device=model.device)[:, None] + torch.arange(ids.shape[1], device=model.device)
    padded = {} if bool(columns.all()) else dict(attention_mask=torch.cat([columns.to(model.device), columns.new_ones(ids.shape).to(model.device)], dim=1).long())
    return model.model(input_ids=ids.to(model.device), position_ids=at, cache=copy, use_cache=True, logits_to_keep=1, **padded).logits[:, -1]


@contextmanager
def hearing(layers) -> Iterator[dict[int, list[Tensor]]]:
    """Layer -> post-RoPE queries [b hq n d] of every forward in this context."""
    heard: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def listen(module, q, k, v, mask, scaling, out) -> None:
        if module.layer_idx in heard:
            heard[module.layer_idx].append(q.clone())

    with listening(listen):
        yield heard


def refuse_rounds(policy, plan: Plan) -> None:
    """Raise ValueError, naming the policy, where one that needs a whole prompt is to evict while text is written."""
    if policy.looks_ahead and plan.schedule == "rounds":
        raise ValueError(f"{_named(policy)} looks ahead from the end of a whole prompt: it is none for rounds while text is written, use kvprobe.compress")


def needed(policy, view):
    """What the policy looked ahead at. Raises ValueError, naming the policy, where nobody did."""
    if view.future is None:
        raise ValueError(f"{_named(policy)} looks ahead from the whole prompt, which only kvprobe.compress lets it do")
    return view.future


def _named(policy) -> str:
    return type(policy).__module__.rpartition(".")[2]


def _block(model: Model, cache, logits: Tensor, which: range, t: int, seed: int, temperature: float, eos) -> Lookahead:
    """Some of the continuations, as batch rows: every prompt's rows stand together."""
    m = len(which)
    return _walk(model, spare(cache, m), logits.repeat_interleave(m, 0), which, t, seed, temperature, eos, real_columns(cache).repeat_interleave(m, 0))


def _walk(model: Model, copy, logits: Tensor, which: range, t: int, seed: int, temperature: float, eos, columns: Tensor) -> Lookahead:
    """t tokens on every row of a copy whose rows are the continuations `which` of each prompt."""
    m = len(which)
    b = logits.shape[0] // m
    instances = torch.tensor(copy.instances, device=logits.device)
    particles = torch.tensor(list(which), device=logits.device).repeat(b)
    open_ = torch.ones(b * m, dtype=torch.bool, device=logits.device)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "valid", "logq", "entropy", "variance")}
    with hearing(copy.geometry.kv_layers) as heard:
        for u in range(t):
            token, found = _draw(logits, temperature, seed, instances, particles, u)
            for name, x in (found | {"tokens": token, "valid": open_}).items():
                seen[name].append(x.view(b, m))
            open_ = open_ & ~torch.isin(token, torch.tensor(eos, device=token.device, dtype=token.dtype))
            logits = step(model, copy, token[:, None], columns)
            columns = torch.cat([columns, columns.new_ones(b * m, 1)], dim=1)
    queries = {layer: torch.cat(q, dim=2).unflatten(0, (b, m)) for layer, q in heard.items()}
    return Lookahead(queries=queries, **{name: torch.stack(x, dim=-1) for name, x in seen.items()})


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
