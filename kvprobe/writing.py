"""The loop of free generation: rows step together until each has stopped, and leave the batch as they do.

Padding is a matter of the mask, so that a tokenizer needs no padding token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from .eviction_cache import EvictionCache
from .keeplog import ALIVE, KeepLog
from .models import Model
from .sampling import Sampler
from .streams import Stops, TextStream


@dataclass
class Row:
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


@dataclass(frozen=True)
class Begun:
    """A cache that already holds text: mask [b columns], tokens of each row, and the logits of its last ones [b vocabulary]."""

    mask: Tensor
    length: tuple[int, ...]
    logits: Tensor


@torch.no_grad()
def write(model: Model, cache, rows: list[Row], sampler: Sampler, stops: Stops, steps: int, progress: bool, begun: Begun | None = None) -> tuple[KeepLog | None, float, float]:
    """Step all rows to their ends; returns the keep log of all, and the seconds of the prefill and of the rest."""
    from tqdm.auto import tqdm

    live, device = list(rows), model.device
    ids, mask = left_padded([row.prompt for row in rows], device)
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


def left_padded(rows: Sequence[Sequence[int]], device) -> tuple[Tensor, Tensor]:
    """ids and mask [b n]; any id serves as padding, as nothing sees it."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows], device=device)
    return ids, torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)


def _note_sizes(cache, live: list[Row]) -> None:
    for j, row in enumerate(live):
        if isinstance(cache, EvictionCache):
            row.sizes.append(int(cache.count[:, j].max()))
            row.smallest.append(int(cache.count[:, j].min()))
        else:
            row.sizes.append(len(row.prompt) + len(row.sizes))
            row.smallest.append(row.sizes[-1])


def _note_log(cache, live: list[Row]) -> KeepLog | None:
    """Take the log of rows that stop, before they leave the cache; returns the cache's own."""
    if not isinstance(cache, EvictionCache):
        return None
    log = cache.keep_log
    for j, row in enumerate(live):
        if row.stopped:
            row.died, row.fired = log.died[:, j, :, : log.length[j]], log.fired[j]
    return log


def _joined(rows: list[Row], log: KeepLog) -> KeepLog:
    """The log of all rows, in their order; whatever else it says is that of `log`."""
    length = tuple(row.died.shape[-1] for row in rows)
    died = np.full((log.died.shape[0], len(rows), log.died.shape[2], max(length)), ALIVE, dtype=log.died.dtype)
    for b, row in enumerate(rows):
        died[:, b, :, : length[b]] = row.died
    return replace(log, died=died, fired=tuple(row.fired for row in rows), length=length)
