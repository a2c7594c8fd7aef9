"""What a forward brings to a cache: which of its tokens are real, where they stand, and which slots each query sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .pins import PromptPin


@dataclass
class Step:
    """One forward in progress."""

    n: int
    padded: bool
    positions: Tensor | None = None  # [b n], -1 for hidden columns
    visible: Tensor | None = None  # [1|b 1 n s] where all layers share it
    folded: Tensor | None = None  # the same as att.attend hands it on
    done: bool = False


class Seeing:
    """The part of EvictionCache that reads masks and makes them; it reads and writes the cache's own state and is used by nothing else."""

    def _note_tokens(self, mask: Tensor | None, device: torch.device) -> None:
        """Append the step's positions. A position is an index into the row's own text: padding, which only the model's
        mask tells of, has none (-1) and moves nothing.
        """
        step, first = self.step, self.kept is None and not self.tail
        shown = None if mask is None else self._shown(mask, first)
        start = torch.tensor(self.seen, dtype=torch.int32, device=device)[:, None]
        if shown is None:
            real = [step.n] * self.batch
            step.positions = start + torch.arange(step.n, dtype=torch.int32, device=device)
        else:
            step.padded, self.ragged, real = True, True, shown.sum(1).tolist()
            step.positions = (start + shown.cumsum(1, dtype=torch.int32) - 1).masked_fill(~shown, -1)
        self.tail.append(step.positions)
        self.seen, self.most = ([x + r for x, r in zip(old, real)] for old in (self.seen, self.most))
        self.count += np.asarray(real)[None, :, None]
        if self.window:
            old = [] if self.window_positions is None else [self.window_positions]
            self.window_positions = torch.cat([*old, step.positions], dim=1)[:, -self.window :]
        if first:
            self.prompt = list(self.seen)
            if not self.plan.pins_free and max(self.prompt) > self.plan.keep and any(isinstance(p, PromptPin) for row in [self.common_pins, *self.row_pins] for p in row):
                raise ValueError(f"keep={self.plan.keep} cannot hold the protected prompt of {max(self.prompt)} tokens")
            self.pins = self._pin_table()

    def _shown(self, mask: Tensor, first: bool) -> Tensor | None:
        """bool [b n]: the step's columns that are no padding, read off the last query's row; None if all are real."""
        n = self.step.n
        mask = mask if mask.dtype == torch.bool else mask == 0
        shown = mask[:, 0, -1, -n:].expand(self.batch, n)
        if first:
            plain = shown[:, None, None, :] & torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
            if mask.shape[1] != 1 or bool(((mask != plain) & shown[:, None, :, None]).any()):
                raise ValueError("the attention mask hides more than padding and the future: kvprobe takes causal attention over a 2D padding mask")
        elif self.kept is None and mask.shape[-1] == self.physical + n:
            before = (torch.cat(self.tail, dim=1) >= 0).to(mask.device)
            if bool((mask[:, 0, -1, :-n].expand_as(before) != before).any()):
                raise ValueError("the attention mask hides or shows a token that the cache already holds the other way: masks may only grow")
        if bool(shown.all()):
            return None
        if not bool(shown[:, -1].all()):
            raise ValueError("the last column of a row is padding: kvprobe takes left padding, with every row ending at the same column")
        return shown

    def _visible(self, row: int, device: torch.device) -> Tensor | None:
        """bool [1|b 1|hkv n s]: which slots each query sees, or None when it is all of them."""
        step = self.step
        if not self.ragged:
            if step.n > 1 and step.visible is None:
                step.visible = torch.ones(step.n, self.physical, dtype=torch.bool, device=device).tril(self.physical - step.n)[None, None]
            return None if step.n == 1 else step.visible.to(device)
        tail = torch.cat(self.tail, dim=1)[:, None, None, :]
        shown = tail >= 0
        if self.kept is not None:
            kept = self.kept[row][:, :, None, :] >= 0
            shown = torch.cat([kept, shown.expand(-1, kept.shape[1], -1, -1)], dim=-1)
        causal = torch.ones(step.n, self.physical, dtype=torch.bool, device=shown.device).tril(self.physical - step.n)
        shown = shown & causal
        if step.padded:  # a padding query sees itself, so that no row of the softmax is empty; its output is zeroed
            own = torch.eye(step.n, dtype=torch.bool, device=shown.device)
            shown = torch.cat([shown[..., : -step.n], shown[..., -step.n :] | own], dim=-1)
        return shown.to(device)
