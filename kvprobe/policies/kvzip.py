"""The most attention an entry gets while the model repeats its context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe import allocation, attention, lookahead
from kvprobe.attention_function import listening
from kvprobe.types import CacheView, Needs, wide

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class POLICY:
    """The context is asked for chunk by chunk: an instruction, for later chunks with the end of the one before, then the chunk's own tokens.

    An entry scores the largest attention, over those queries and its KV head's query heads, with a softmax over the sinks, its chunk and
    what was fed so far. Sinks score 1. Nothing in it depends on a question. Costs about another prefill.
    """

    chunk: int = 2048
    """context repeated at a time [tokens]"""
    overlap: int = 8
    """last tokens of the chunk before, put behind the instruction [tokens]"""
    n_sink: int = 4
    """first positions, which every chunk's softmax sees [tokens]"""
    across: Literal["model", "layer", "head"] = "model"
    """who shares a budget: all heads of all layers (as released), the heads of a layer, or nobody"""

    looks_ahead = True
    needs = Needs()

    def __post_init__(self) -> None:
        if self.chunk < 1 or min(self.overlap, self.n_sink) < 0:
            raise ValueError(f"chunk={self.chunk} must be at least 1, overlap={self.overlap} and n_sink={self.n_sink} at least 0")

    @property
    def level(self) -> str:
        return self.across

    def bind(self, model) -> POLICY:
        """This policy. Raises ValueError for a model without a tokenizer: the instruction is words."""
        if model.tokenizer is None:
            raise ValueError(f"kvzip asks for the context in words, and {model.name} has no tokenizer")
        return self

    def check(self, plan) -> None:
        lookahead.refuse_rounds(self, plan)

    def queries(self, engine) -> dict[int, Tensor]:
        """Layer -> scores [b hkv p] of every position of the prompts; one row at a time, as chunks of unequal prompts end unevenly."""
        cache, real = engine.cache, lookahead.real_columns(engine.cache)
        layers, longest = cache.geometry.kv_layers, max(map(len, engine.prompts))
        out = {i: torch.zeros(len(engine.prompts), cache.geometry.n_kv, longest, dtype=wide(cache.layers[i].keys.dtype), device=cache.layers[i].keys.device) for i in layers}
        with lookahead.untouched(cache):
            for b, prompt in enumerate(engine.prompts):
                row = lookahead.spare(cache)
                row.batch_select_indices(torch.tensor([b]))
                for start, stop, ids in self.repeats(prompt, engine.model.tokenizer):
                    into = {layer: x[b : b + 1, :, start:stop] for layer, x in out.items()}
                    with listening(self._listener(into, longest - len(prompt), start, stop)):
                        lookahead.step(engine.model, row.branch(1), torch.tensor([ids]), real[b : b + 1])
                for x in out.values():
                    x[b, :, : min(self.n_sink, len(prompt))] = 1.0
        return out

    def repeats(self, prompt, tokenizer) -> Iterator[tuple[int, int, list[int]]]:
        """(start, stop, ids to feed) of every chunk behind the sinks."""
        for start in range(self.n_sink, len(prompt), self.chunk):
            stop, first = min(start + self.chunk, len(prompt)), start == self.n_sink
            asked = list(tokenizer(FIRST if first else LATER, add_special_tokens=False).input_ids)
            before = [] if first else prompt[max(0, start - self.overlap) : start]
            yield start, stop, [*asked, *before, *prompt[start:stop]]

    def _listener(self, into: dict[int, Tensor], pad: int, start: int, stop: int):
        """Writes into `into`, while a chunk is repeated, what each layer's attention says of positions start..stop; `pad` hidden columns come first."""

        def listen(module, q, k, v, mask, scaling, out) -> None:
            if module.layer_idx not in into:
                return
            n, sinks, chunk = q.shape[2], slice(pad, pad + self.n_sink), slice(pad + start, pad + stop)
            keys = torch.cat([k[:, :, sinks], k[:, :, chunk], k[:, :, -n:]], dim=2)
            visible = torch.ones(n, keys.shape[2], dtype=torch.bool, device=k.device).tril(keys.shape[2] - n)[None, None]
            for _, a in attention.blocks(q, keys, visible, scaling):
                best = a[..., self.n_sink : self.n_sink + stop - start].amax((2, 3))
                torch.maximum(into[module.layer_idx], best, out=into[module.layer_idx])

        return listen

    def score(self, view: CacheView) -> Tensor:
        found = lookahead.needed(self, view)[view.layer].to(view.keys.device)
        return found.gather(-1, view.positions.long().clamp(min=0)).masked_fill(~view.real, 0.0)

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """How many of the best free entries of all who share a budget each KV head has, and its pins."""
        if self.across == "head":
            return keep
        held, free = held.sum(-1), real & ~held
        l, b, h, c = score.shape
        shape = (b, l * h) if self.across == "model" else (b * l, h)
        joint = [x.transpose(0, 1).reshape(*shape, *x.shape[3:]) for x in (score, free, keep - held)]
        got = allocation.flattened(joint[0], joint[2].sum(-1), joint[1])
        return held + got.view(b, l, h).transpose(0, 1)
