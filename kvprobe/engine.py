"""Steps a model behind a cache: prefill, force a script, transformers' own generate (free generation, row by row, is generation.py).

Nothing is evicted between two rounds, so the tokens between them are one forward with a causal mask, and that is exact
(protocols 2). Only the logits that are asked for are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .models import Model

MAX_CHUNK = 384
"""Longest forward when nothing else bounds it [tokens]: long enough for full matrix speed, short enough to bound memory."""


@dataclass(frozen=True)
class Scored:
    """Teacher-forced scores of chosen tokens.

    logp [b k]: log probability of the forced token given everything before it [nats], float32 log-softmax or float64.
    top [b k]: whether the forced token is the argmax (the lowest id in a tie).
    """

    logp: Tensor
    top: Tensor


@torch.no_grad()
def force(model: Model, cache, ids: Tensor, *, targets: Tensor | None = None, first: int = 1, longest: int = MAX_CHUNK,
          tick: Callable[[int], object] = lambda tokens: None) -> Scored:
    """Feed ids [b n] to the model behind `cache`, a round at a time, and score tokens by the logits before them.

    targets [b k] are the tokens expected at columns first..first+k-1 of `ids` (the last may lie just behind them: it is
    scored without being fed). The ids hold no padding; a padded prefill before is fine. `longest` = 1 steps token by token;
    rounds that are due bound each forward by themselves. `tick` is told the tokens fed. Raises ValueError for columns out of
    range and FloatingPointError for logits that are not finite.
    """
    n, k = ids.shape[1], 0 if targets is None else targets.shape[1]
    if k and not (1 <= first and first + k - 1 <= n):
        raise ValueError(f"scored columns {first}..{first + k - 1} must be in 1..{n}")
    found: list[tuple[Tensor, Tensor]] = []
    seen = getattr(cache, "seen", None) or [cache.get_seq_length()]  # per row: columns would count a prompt's padding
    start, at = torch.tensor(seen if len(set(seen)) > 1 else seen[:1], device=ids.device)[:, None], 0
    while at < n:
        room = getattr(cache, "room", None)
        stop = min(n, at + longest, n if room is None else at + room)
        here = [j for j in range(k) if at <= first + j - 1 < stop]  # the column before gives the logits
        rows = torch.tensor([first + j - 1 - at for j in here], dtype=torch.int64, device=ids.device)
        position_ids = start + torch.arange(at, stop, device=ids.device)
        out = model.model(input_ids=ids[:, at:stop], position_ids=position_ids, cache=cache, use_cache=True, logits_to_keep=rows)
        found += [_score(out.logits[:, i], targets[:, j].to(out.logits.device)) for i, j in enumerate(here)]
        tick(ids.shape[0] * (stop - at))
        at = stop
    if not found:
        return Scored(torch.zeros(ids.shape[0], 0), torch.zeros(ids.shape[0], 0, dtype=torch.bool))
    return Scored(*(torch.stack([f[i] for f in found], dim=1).cpu() for i in (0, 1)))


def _score(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    if not bool(torch.isfinite(logits).all()):
        bad = (~torch.isfinite(logits)).any(-1).nonzero().flatten().tolist()
        raise FloatingPointError(f"the model's logits are not finite in batch rows {bad}: a wider dtype, or a model whose states overflow this one")
    logp = torch.log_softmax(logits, dim=-1).gather(-1, target[:, None]).squeeze(-1)
    return logp, logits.argmax(-1) == target


@torch.no_grad()
def prefill(model: Model, cache, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """One forward over the prompt ids [b n], left padding allowed; returns the logits of the last column [b vocabulary]."""
    extra = {}
    if attention_mask is not None:
        extra = dict(attention_mask=attention_mask, position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0))
    return model.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **extra).logits[:, -1]


@torch.no_grad()
def generate(model: Model, cache, ids: Tensor, *, max_new_tokens: int, attention_mask: Tensor | None = None, **options) -> Tensor:
    """`transformers` generate over an evicting cache; greedy unless options say otherwise. Returns prompt + new ids [b n].

    Pass all ids ever seen: what the cache has seen is cut off by its logical length.
    """
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    seen, room = cache.get_seq_length(), getattr(cache, "room", None)
    if seen and room is not None and ids.shape[1] - seen > room and bool(mask.all()):
        force(model, cache, ids[:, seen:-1])  # a long turn on a cache that has rounds ahead; padded rows are refused by the cache
    options = dict(do_sample=False) | options
    return model.model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=max_new_tokens, **options)
