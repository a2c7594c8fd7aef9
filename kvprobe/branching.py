"""Rows of a cache: taken, repeated, reordered, and branched off under other pins, plans and policies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .pins import Pin
from .types import Plan, Policy, watches

if TYPE_CHECKING:
    from .eviction_cache import EvictionCache


class Branching:
    """The part of EvictionCache that copies rows; it reads and writes the cache's own state and is used by nothing else."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take, repeat or reorder rows, with their pins, instances and logs."""
        indices = indices.to(torch.int64).cpu()
        for i, layer in enumerate(self.layers):
            if i in self._rows:
                layer.index_rows(indices)
            else:
                layer.reorder_cache(indices)  # linear layers have no batch_select_indices
        rows = indices.tolist()
        self.kept = None if self.kept is None else self.kept.index_select(1, indices.to(self.kept.device))
        self.tail = [t.index_select(0, indices.to(t.device)) for t in self.tail]
        for name in ("window_positions", "turned"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).index_select(0, indices.to(self.kept_device)))
        self.count, self.most = self.count[:, rows], [self.most[b] for b in rows]
        self.seen, self.prompt = [self.seen[b] for b in rows], [self.prompt[b] for b in rows]
        self.instances = [self.instances[b] for b in rows]
        self.row_pins = [self.row_pins[b] for b in rows]
        self.recorder.index(indices)
        self.pins = self._pin_table()

    def branch(self, repeats: int = 1, row_pins: Sequence[Sequence[Pin]] | None = None, plan: Plan | None = None,
               policy: Policy | None = None, seed: int | None = None) -> EvictionCache:
        """A copy with every row repeated `repeats` times in place, with pins per new row and perhaps another plan, policy or seed.

        Conditions share everything up to the first round this way. Tensors are shared until one side replaces them.
        Raises ValueError when pins, a policy or a seed are given after a round has fired, and for a policy that needs more
        than this cache's policy made it gather.
        """
        if self.recorder is None:
            raise ValueError("the cache is empty: no forward has used it yet")
        if (row_pins is not None or policy is not None or seed is not None) and any(self.recorder.fired):
            raise ValueError("pins, policy and seed cannot be set after a round has fired: what they should hold may be gone")
        new = copy.copy(self)
        new.layers = [copy.copy(layer) for layer in self.layers]
        for layer in new.layers:  # linear layers keep their states in dicts and write them in place
            vars(layer).update({name: dict(x) for name, x in vars(layer).items() if isinstance(x, dict)})
        new.plan, new.seed = plan or self.plan, self.seed if seed is None else seed
        if policy is not None:
            new._score_by(policy)
        new.tail, new.recorder = list(self.tail), self.recorder.copy()
        new.batch_repeat_interleave(repeats)
        if row_pins is not None:
            new.row_pins = [tuple(pins) for pins in row_pins]
            new.pins = new._pin_table()
        new._given = new.row_pins, new.instances
        return new

    def _score_by(self, policy: Policy) -> None:
        """Take another policy over from what this cache's own made it gather."""
        if hasattr(policy, "check"):
            policy.check(self.plan)
        has, wants = self.policy, policy.needs
        window = self.plan.buffer if wants.window == -1 else wants.window
        own = watches(policy) or None
        if window > self.window or wants.attn_mass and not has.needs.attn_mass or own is not None and policy != has:
            raise ValueError(f"{policy} needs what a cache of {has} did not gather: the prefix must run under a policy that needs as much")
        self.policy, self.window = policy, window
        self.window_positions = self.window_positions[:, -window:] if window else None
        for i in self._rows:
            layer = self.layers[i]
            layer.queries = layer.queries[:, :, -window:] if window else None
            if not wants.attn_mass and own is None:
                layer.columns, layer.state = {}, {}
