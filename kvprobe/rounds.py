"""One round of a cache: who is due, what each layer shows the policy, who goes, and the move of the survivors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import draws, evict
from .types import CacheView


class Rounds:
    """The part of EvictionCache that fires rounds; it reads and writes the cache's own state and is used by nothing else."""

    def _charged(self) -> list[int]:
        """Per row the entries that count against the plan (see `_fullest`); pins on top of the budget do not."""
        if not self.plan.pins_free:
            return self.most
        return self._fullest(self.count - self._held())

    @property
    def level(self) -> str:
        """At which level the policy's budgets are exact: "head", "layer", "model", or "own"."""
        return getattr(self.policy, "level", "layer") if hasattr(self.policy, "allocate") else "head"

    def _fullest(self, count: np.ndarray) -> list[int]:
        """Of counts [l b hkv] per row what a plan's `keep` speaks of: the fullest KV head, or the mean over the heads (and layers) that share a budget."""
        if self.level == "head":
            return count.max(axis=(0, 2)).tolist()
        mean = count.mean(2).max(0) if self.level == "layer" else count.mean((0, 2))
        return np.ceil(mean - 1e-9).astype(int).tolist()

    def _held(self):
        boundary = [s - self.plan.buffer for s in self.seen]
        return self.pins.held_before(boundary, self.prompt, self.seen)

    def _leave(self) -> None:
        """The last evicted layer's attention is done: close the step and fire what is due."""
        self.step.done = True
        if not self.holding:
            self._fire()

    def _fire(self) -> None:
        if self.plan.schedule == "rounds":
            due = [charged >= self.plan.fires_at for charged in self._charged()]
        else:
            due = [charged > self.plan.keep and not self.closed for charged in self._charged()]
            self.closed = True
        if any(due):
            self._round(np.array(due))

    def _score(self, view: CacheView) -> Tensor:
        """The policy's scores of one layer; what a user's file gets wrong is named."""
        return self._hook("score", view.positions.shape, view, where=f" at layer {view.layer}")

    def _surplus(self, due: np.ndarray) -> np.ndarray:
        """How many candidates go, [l b hkv]."""
        target = self.plan.keep + (self._held() if self.plan.pins_free else 0)
        surplus = np.maximum(self.count - self.plan.buffer - target, 0)
        return np.where(due[None, :, None], surplus, 0)

    def _round(self, due: np.ndarray) -> None:
        positions = self.positions
        candidates = positions.shape[-1] - self.plan.buffer
        if self.ragged and bool((positions[..., candidates:] < 0).any()):
            self._compact(positions, torch.zeros_like(positions, dtype=torch.bool), np.zeros_like(self.count), np.zeros_like(due))
            positions = self.positions  # hidden columns among the newest are dropped first: the buffer holds entries
            candidates = positions.shape[-1] - self.plan.buffer
        surplus = self._surplus(due)
        real = positions[..., :candidates] >= 0 if self.ragged else None
        bias = self.pins.bias(positions[..., :candidates], self.prompt, self.seen)
        views = list(self._views(positions, candidates, bias))
        score = torch.stack([self._score(view).to(positions.device) for view in views])
        if hasattr(self.policy, "across_layers"):
            score = self.policy.across_layers(score, positions[..., :candidates])
        score = score if score.dtype == torch.float64 else score.to(torch.float32)
        every = torch.ones((), dtype=torch.bool, device=score.device) if real is None else real
        if hasattr(self.policy, "allocate") or hasattr(self.policy, "select"):
            surplus, score = self._chosen(views, score, bias, every.expand_as(score), surplus, due, positions[..., :candidates])
        on_device = torch.as_tensor(surplus, device=score.device)
        if bias is not None or not bool(torch.isfinite(score.sum())):  # a sum that overflows only leads to the careful look
            not_due = torch.as_tensor(~due, device=score.device)[None, :, None, None]
            score = evict.biased(score.masked_fill(not_due, 0.0), None if bias is None else bias.masked_fill(not_due, 0.0),
                                 on_device, every.expand_as(score), sites=self._sites)
        same = int(surplus.flat[0]) if (surplus == surplus.flat[0]).all() else on_device
        gone = evict.evicted(score, same, real)
        self.on_stage("scoring")
        self._compact(positions, gone, surplus, due)
        self.on_stage("gather")

    def _offered(self, have: np.ndarray) -> np.ndarray:
        """[l b hkv]: candidates that each site is to keep before the policy shares them out; no more at its level than there are."""
        target = np.broadcast_to(self.plan.keep + (self._held() if self.plan.pins_free else 0), have.shape)
        axes = {"head": (), "layer": (2,)}.get(self.level, (0, 2))
        return np.where(target.sum(axes, keepdims=True) > have.sum(axes, keepdims=True), have, target) if axes else np.minimum(have, target)

    def _chosen(self, views, score: Tensor, bias: Tensor | None, real: Tensor, surplus: np.ndarray, due: np.ndarray,
                positions: Tensor) -> tuple[np.ndarray, Tensor]:
        """Budgets per site and scores as the policy's own `allocate` and `select` make them; totals at the policy's level stay exact."""
        evict.check_finite(score, real, self._sites)
        have = real.sum(-1).cpu().numpy()
        keep = have - surplus
        if hasattr(self.policy, "allocate"):
            keep = np.where(due[None, :, None], self._offered(have), have)
            held = torch.zeros_like(real) if bias is None else (bias == torch.inf) & real
            offered = self._unbanned(real, bias, keep)
            got = self._hook("allocate", keep.shape, score, torch.as_tensor(keep, device=score.device), held, offered, positions).cpu().numpy()
            axes = {"head": (), "layer": (2,), "model": (0, 2)}.get(self.level)
            if axes is not None and (got.sum(axes) != keep.sum(axes)).any():
                raise ValueError(f"policy {self.policy} handed out {got.sum()} entries of {keep.sum()}: totals per {self.level} must stay exact")
            if (got > have).any() or (got < held.sum(-1).cpu().numpy()).any():
                raise ValueError(f"policy {self.policy} gave a head more entries than it has, or fewer than its pins hold")
            keep = np.where(due[None, :, None], got, keep)  # rows that are not due keep what they have
        if hasattr(self.policy, "select"):
            score = torch.stack([self._hook("select", s.shape, view, s, torch.as_tensor(k, device=s.device)).to(s.dtype) for view, s, k in zip(views, score, keep)])
        return have - keep, score

    def _unbanned(self, real: Tensor, bias: Tensor | None, keep: np.ndarray) -> Tensor:
        """What budgets are shared out over: entries that no pin bans, where the heads that share a budget have enough of them."""
        if bias is None or not bool((bias == -torch.inf).any()):
            return real
        left, axes = real & (bias != -torch.inf), {"head": (), "layer": (2,)}.get(self.level, (0, 2))
        short = (left.sum(-1).cpu().numpy().sum(axes, keepdims=True) < keep.sum(axes, keepdims=True)) if axes else left.sum(-1).cpu().numpy() < keep
        return left | (real & torch.as_tensor(short, device=real.device)[..., None])

    def _hook(self, name: str, shape, *given, where: str = "") -> Tensor:
        """What `score`, `allocate` or `select` of the policy returns; what a user's file gets wrong is named."""
        try:
            got = getattr(self.policy, name)(*given)
        except ValueError:
            raise  # a policy's own refusal
        except Exception as error:
            raise RuntimeError(f"policy {self.policy} failed in {name}{where}: {type(error).__name__}: {error}") from error
        if not isinstance(got, Tensor) or got.is_complex() or tuple(got.shape) != tuple(shape):
            said = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"policy {self.policy}: {name} returned {said}{where}, it must be a real tensor {list(shape)}")
        return got

    @property
    def _sites(self) -> str:
        return f" (layers {list(self._rows)}, policy {self.policy})"

    def _views(self, positions: Tensor, candidates: int, bias: Tensor | None):
        """One read-only view per evicted layer."""
        device = positions.device
        now, rounds = (torch.tensor(x, device=device) for x in (self.seen, [len(f) for f in self.recorder.fired]))
        rand = self._draws(positions[..., :candidates], rounds)
        for i, number in enumerate(self._rows):
            layer = self.layers[number]
            at = layer.keys.device
            here = (lambda x: x) if at == device else (lambda x, _at=at: x.to(_at))
            yield CacheView(
                layer=number, positions=here(positions[i, ..., :candidates]), keys=layer.keys[:, :, :candidates],
                values=layer.values[:, :, :candidates], now=here(now), round=here(rounds), keep=self.plan.keep,
                buffer=self.plan.buffer, scaling=layer.scaling, queries=layer.queries,
                query_positions=here(self.window_positions) if self.window else None,
                columns={name: column[:, :, :candidates] for name, column in layer.columns.items()},
                rand=lambda *a, _i=i, _here=here, **k: _here(rand(_i, *a, **k)),
                banned=lambda start, stop, _i=i: self.pins.banned(_i, start.to(device), stop.to(device)).to(start.device),
                pinned=None if bias is None else here(bias[i] == torch.inf), pins_free=self.plan.pins_free, future=self.future, state=layer.state)

    def _draws(self, positions: Tensor, rounds: Tensor):
        """view.rand(): float64 [b hkv c] in [0, 1), a hash of (seed, instance, layer, KV head, round, position).

        `shared` leaves the KV head out (one draw for all heads of a layer); `counters` [b hkv c] replaces positions.
        """
        device = positions.device
        instance = torch.tensor(self.instances, device=device)[None, :, None]
        layers = torch.tensor(list(self._rows), device=device)[:, None, None]
        heads = torch.arange(self.geometry.n_kv, device=device)[None, None, :]
        made: dict = {}

        def rand(i: int, shared: bool = False, counters: Tensor | None = None) -> Tensor:
            if shared not in made:
                made[shared] = draws.key(self.seed, instance, layers, heads * 0 - 1 if shared else heads, rounds[None, :, None])[..., None]
            if counters is not None:
                return draws.uniform(made[shared][i], counters.to(device))
            if (shared, "all") not in made:  # all layers at once: a call per layer costs more than the arithmetic
                made[shared, "all"] = draws.uniform(made[shared], positions)
            return made[shared, "all"][i]

        return rand

    def _compact(self, positions: Tensor, gone: Tensor, surplus: np.ndarray, due: np.ndarray) -> None:
        """Log the evicted, then move the survivors of each layer together; a layer's old tensors go as they are replaced."""
        n_buffer = positions.shape[-1] - gone.shape[-1]
        self.recorder.reserve(max(self.seen))
        rounds = torch.tensor([len(f) for f in self.recorder.fired], device=gone.device)
        self.recorder.record(gone, positions[..., : gone.shape[-1]], rounds)
        for b in np.flatnonzero(due):
            self.recorder.fired[b].append(self.seen[b])
        keep = torch.cat([~gone, gone.new_ones(*gone.shape[:-1], n_buffer)], dim=-1)
        if self.ragged:
            keep &= positions >= 0
        self.count = self.count - surplus
        self.most = self._fullest(self.count)
        width = int(self.count.max())
        if (self.count == width).all():
            slots, self.ragged = evict.slots_kept(keep, width), False
            kept = positions.reshape(-1).index_select(0, slots).view(*keep.shape[:-1], width)
        else:
            self.ragged = True
            slots, real = evict.slots_padded(keep, width)
            kept = positions.reshape(-1).index_select(0, slots).view(real.shape).masked_fill(~real, -1)
        turns = None if self.rotate is None else self._turns(slots, kept, width)
        self.kept, self.tail = kept, []
        slots = slots.view(len(self._rows), -1)
        slots -= torch.arange(len(self._rows), device=slots.device)[:, None] * keep[0].numel()  # each layer's own
        for i, number in enumerate(self._rows):
            layer, own = self.layers[number], slots[i]
            layer.keys = evict.take(layer.keys, own, width)
            if turns is not None:
                layer.keys = self.rotate(number, layer.keys, turns[i].to(layer.keys.device))
            layer.values = evict.take(layer.values, own, width)
            layer.columns = {name: evict.take(column, own, width) for name, column in layer.columns.items()}

    def _turns(self, slots: Tensor, kept: Tensor, width: int) -> Tensor:
        """[l b hkv k]: by how many positions each survivor moves so that all of them stand right before the next token.

        Attention depends on distances only, so that this is the same as renumbering everything from 0, and the model may
        go on counting tokens.
        """
        device, shape = kept.device, (len(self._rows), self.batch, self.geometry.n_kv, self.physical)
        tail = [t.to(torch.int32) for t in self.tail]
        stand = torch.cat([*([] if self.turned is None else [self.turned]), *tail], dim=1)[None, :, None, :].expand(shape)
        before = stand.reshape(-1).index_select(0, slots.reshape(-1)).view(kept.shape)
        now = torch.tensor(self.seen, dtype=torch.int32, device=device)[:, None]
        self.turned = now - width + torch.arange(width, dtype=torch.int32, device=device)
        return (self.turned[None, :, None, :] - before).masked_fill(kept < 0, 0)
