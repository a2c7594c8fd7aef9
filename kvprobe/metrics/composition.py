"""What kind of tokens a policy keeps: share retained and enrichment by token class (LORE app. F.5, Fig. 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..tasks import Span, Task

CLASSES = ("sink", "recent", "structural", "evidence", "answer", "other")
"""In the order in which a token is claimed: the first class that fits has it, so that classes are disjoint and fill the prompt."""
MATCHES = "answer ids"
"""The paper's class "answer/evidence" (app. F.1), which lies across these."""


def classes(task: Task, n: int | None = None, structural: Iterable[Span] = (), sink: int = 1, window: int = 32) -> dict[str, Tensor]:
    """{class: bool [n]} of the first n tokens of a task's prompt (None: all of it; `task.cut` where the question is not in it).

    sink: the first `sink` tokens; recent: the last `window` of the n; structural: spans (`compression.structural`); evidence: the
    statements that lead to the answer, known from the generator; answer: any other token that `matches` the answer; other: the
    rest, in this order. Raises ValueError for n outside the prompt.

    >>> from types import SimpleNamespace as Made
    >>> task = Made(ids=np.array([5, 8, 1, 7, 8, 9]), answer_ids=np.array([8, 1]), scored=np.array([True, False]), spans={"evidence": ((3, 5),)})
    >>> {name: mask.nonzero().flatten().tolist() for name, mask in classes(task, window=1).items()}
    {'sink': [0], 'recent': [5], 'structural': [], 'evidence': [3, 4], 'answer': [1], 'other': [2]}
    """
    n = len(task.ids) if n is None else n
    if not 1 <= n <= len(task.ids) or min(sink, window) < 0:
        raise ValueError(f"n={n}, sink={sink}, window={window}: n must be in 1..{len(task.ids)}, the prompt's tokens, the others not negative")
    spans = {"sink": [(0, sink)], "recent": [(max(0, n - window), n)], "structural": structural, "evidence": task.spans["evidence"]}
    claims = {name: _mask(n, own) for name, own in spans.items()}
    claims["answer"] = matches(task, n)
    free, out = torch.ones(n, dtype=torch.bool), {}
    for name in CLASSES:
        out[name] = free & claims.get(name, free)
        free = free & ~out[name]
    return out


def matches(task: Task, n: int | None = None) -> Tensor:
    """bool [n]: tokens of a prompt whose id is among those of the answer's tokens that count, wherever they stand: the paper's answer and
    evidence tokens ("exact token-id match to the gold answer", app. F.1).

    >>> from types import SimpleNamespace as Made
    >>> matches(Made(ids=np.array([5, 8, 1, 7, 8, 9]), answer_ids=np.array([8, 1]), scored=np.array([True, False])))
    tensor([False,  True, False, False,  True, False])
    """
    return torch.from_numpy(np.isin(task.ids[:n], task.answer_ids[task.scored]))


class Retained(NamedTuple):
    """Of a class and kept sets: fraction [..] of its tokens that are kept, nan for a class without tokens; enrichment [..] =
    P(class | kept) / P(class | prompt), nan for such a class and for a set that keeps nothing."""

    fraction: Tensor
    enrichment: Tensor


def composition(kept: Tensor, classes: Mapping[str, Tensor]) -> dict[str, Retained]:
    """{class: Retained} of kept sets bool [.. n], e.g. [l hkv n], per site; classes bool [n].

    Weighted by the classes' shares of the prompt, enrichments of classes that fill it average to 1. The mean over sites that keep
    equally many is that of all sites pooled. Raises ValueError for masks of another length.

    >>> made = composition(torch.tensor([True, True, False, False, True, False, False, False]), {"evidence": torch.arange(8) < 3})
    >>> [round(float(x), 3) for x in made["evidence"]]  # 2 of 3 are kept; 2 / 3 of the kept against 3 / 8 of the prompt
    [0.667, 1.778]
    """
    n, held = kept.shape[-1], kept.sum(-1).double()
    out = {}
    for name, mask in classes.items():
        if mask.shape != (n,):
            raise ValueError(f"class {name!r} marks {list(mask.shape)} tokens, the kept sets are of {n}")
        both, size = (kept & mask.to(kept.device)).sum(-1).double(), float(mask.sum()) or torch.nan
        out[name] = Retained(both / size, both / held / (size / n))
    return out


def _mask(n: int, spans: Iterable[Span]) -> Tensor:
    out = torch.zeros(n, dtype=torch.bool)
    for start, stop in spans:
        out[start:stop] = True
    return out
