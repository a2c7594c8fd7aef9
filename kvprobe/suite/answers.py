"""What a compressed cache makes of the text that follows: log p of the true answer, and how far its next-token distributions are from the full cache's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..metrics.divergence import kl_by_token
from ..prompting import TOGETHER, Prompt
from .orders import FULL, Ranked
from .rows import of_arm, row


COPIED_BYTES = 2**30
"""What copies of a prompt's cache may take together."""


def rows_at_once(cache, most: int) -> int:
    """Rows of a batch, each with a copy of the prompt's cache for a moment: `most`, or as many as COPIED_BYTES hold, at least one."""
    held = [cache.layers[layer] for layer in cache.geometry.kv_layers]
    return max(1, min(most, COPIED_BYTES // sum(x.keys.nbytes + x.values.nbytes for x in held)))


def follow(model, cache, prompt: Prompt) -> Tensor:
    """Logits [b k vocabulary] of the future's tokens under forced decoding, those that the cache predicts: of a seen question all but the first.

    The cache is used up; it reads the future to its last token.
    """
    ahead = prompt.truth.ahead
    tokens = ahead.tokens[0][ahead.valid[0]]
    text = torch.cat([torch.as_tensor(prompt.tail, dtype=tokens.dtype, device=tokens.device), tokens]).to(model.device)
    first, at = max(0, len(prompt.tail) - 1), cache.seen[0]
    rows = torch.arange(first, len(text) - 1, device=text.device)
    if not len(rows):
        rows = rows.new_zeros(1)  # 0 would mean all
    out = model.model(input_ids=text.expand(cache.batch, -1), position_ids=torch.arange(at, at + len(text), device=text.device)[None], cache=cache, use_cache=True, logits_to_keep=rows).logits
    return out[:, : max(0, len(text) - 1 - first)]


def targets(prompt: Prompt) -> Tensor:
    """[k]: the tokens whose logits `follow` gives."""
    ahead = prompt.truth.ahead
    return ahead.tokens[0][ahead.valid[0]][0 if len(prompt.tail) else 1 :]


@dataclasses.dataclass(frozen=True)
class Full:
    """What the full cache says along its own future: logits [k vocabulary], and the cache that has read it."""

    logits: Tensor
    cache: object


def full(model, prompt: Prompt) -> Full:
    """The full cache, fed its own greedy continuation."""
    from ..lookahead import spare

    cache = spare(prompt.cache)
    return Full(follow(model, cache, prompt)[0], cache)


def uncompressed(session, prompt: Prompt, keeps: list[int]) -> Iterator[dict]:
    """log p and retrieval of the true answer from the full cache, as rows of every budget at which the others answer."""
    from ..lookahead import spare

    found = session.answered(spare(prompt.cache), prompt)[0]
    yield from (row(metric, value, arm=FULL, keep=keep, draw=0) for keep in keeps for metric, value in found.items() if value == value)


def answers(session, prompt: Prompt, ranked: Ranked, keep: int, said: Full) -> Iterator[dict]:
    """log p and retrieval of the true answer, and KL(full || compressed) along the full cache's future, of every arm."""
    kept, together = ranked.kept(keep), rows_at_once(prompt.cache, TOGETHER)
    for start in range(0, len(ranked.arms), together):
        part = slice(start, start + together)
        cache = prompt.holding(kept[:, part], keep)
        logits = follow(session.model, cache.branch(1), prompt)
        kl = kl_by_token(said.logits.expand_as(logits), logits).mean(-1).tolist() if logits.shape[1] else [np.nan] * len(logits)
        for a, found, far in zip(ranked.arms[part], session.answered(cache, prompt), kl):
            for metric, value in (found | {"kl": far}).items():
                if value == value:
                    yield row(metric, value, keep=keep, **of_arm(a))
