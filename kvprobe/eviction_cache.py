"""A transformers cache that evicts per KV head.

The schedule belongs to the cache: whoever steps the model (a plain forward, a chunk, `model.generate`, a trace), a round
fires after the step in which it came due, once the last layer's attention has been computed. So eviction never changes
the logits of the forward that triggered it, and nothing but `cache=` has to be passed.

Logical and physical length are different things: `get_seq_length` is the number of columns ever seen, which feeds
position ids and generate's slicing; the tensors hold what survived.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import attention as att
from .attention_function import ATTENTION
from .keeplog import KeepLog, Recorder
from .pins import Pin, PinTable, PromptPin, check_fits
from .rounds import Rounds
from .types import Geometry, Plan, Policy, watches


def _quiet(stage: str) -> None:
    """Nobody asks."""


class EvictionLayer(DynamicLayer):
    """Keys and values [b hkv s d] of one layer; what they are of is known by the cache."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.queries: Tensor | None = None  # post-RoPE queries of the newest tokens [b hq w d]
        self.columns: dict[str, Tensor] = {}  # per-entry state that moves with its entry [b hkv s ...]
        self.state: dict[str, Tensor] = {}  # what a policy's `watch` made of every query so far [b ...]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # the offset lines new keys up with new queries, so that stock masks are right for uniform counts
        physical = 0 if self.keys is None else self.keys.shape[-2]
        return physical + query_length, self.seen - physical

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("an evicting cache cannot be cropped: what a round took cannot come back")

    def reset(self) -> None:
        super().reset()
        self.seen, self.queries, self.columns, self.state = 0, None, {}, {}

    def index_rows(self, rows: Tensor) -> None:
        def pick(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        self.keys, self.values = pick(self.keys), pick(self.values)
        self.queries = None if self.queries is None else pick(self.queries)
        self.columns, self.state = ({name: pick(x) for name, x in some.items()} for some in (self.columns, self.state))


@dataclass
class _Step:
    """One forward in progress."""

    n: int
    padded: bool
    positions: Tensor | None = None  # [b n], -1 for hidden columns
    visible: Tensor | None = None  # [1|b 1 n s] where all layers share it
    folded: Tensor | None = None  # the same as att.attend hands it on
    done: bool = False


class EvictionCache(Rounds, DynamicCache):
    """The cache of a model whose growing layers are evicted by `policy` under `plan`.

    rotate(layer, keys [b hkv k d], by [b hkv k]): given, positions are renumbered after each round and keys re-rotated
    (as StreamingLLM does); None keeps every key at its token's own position.
    pins: pins common to all rows. row_pins: pins of each row on top. instances: an integer per row that its random
    draws depend on (default 0, 1, ...). Raises ValueError for a pin at a site that does not exist.
    """

    def __init__(self, config, geometry: Geometry, plan: Plan, policy: Policy, *, pins: Sequence[Pin] = (),
                 row_pins: Sequence[Sequence[Pin]] | None = None, instances: Sequence[int] | None = None, seed: int = 0,
                 rotate: Callable[[int, Tensor, Tensor], Tensor] | None = None):
        super().__init__(config=config)
        self.rotate = rotate
        self.config, self.geometry, self.plan, self.policy, self.seed = config, geometry, plan, policy, seed
        self._rows = {layer: i for i, layer in enumerate(geometry.kv_layers)}
        self._first, self._last = geometry.kv_layers[0], geometry.kv_layers[-1]
        for layer in geometry.kv_layers:
            self.layers[layer] = EvictionLayer()
        self._stock_full = next((i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer), None)
        self.common_pins, self._given = tuple(pins), (row_pins, instances)
        PinTable([self.common_pins, *(row_pins or ())], geometry, torch.device("cpu"))  # refuse bad sites now
        for row in row_pins or [()]:
            check_fits(self.common_pins + tuple(row), geometry, plan)
        if hasattr(policy, "check"):
            policy.check(plan)
        self.window = plan.buffer if policy.needs.window == -1 else policy.needs.window
        if policy.needs.window == -1 and not plan.buffer:
            raise ValueError(f"{policy} scores by the buffer's queries (window=-1), and there is no buffer at prompt end: name a window, e.g. window=32")
        self._clear()

    def _clear(self) -> None:
        self.row_pins, self.instances = self._given  # rows may have been selected or repeated since
        self.kept: Tensor | None = None  # positions [l b hkv k] of the entries the last round left, -1 for none
        self.tail: list[Tensor] = []  # positions [b n] of the steps since
        self.turned: Tensor | None = None  # [b k] where RoPE says that those entries stand, when positions are renumbered
        self.window_positions: Tensor | None = None  # positions [b w] of the newest tokens, when the policy scores by their queries
        self.ragged = False  # some slot is empty or hidden, so that masks are needed
        self.step: _Step | None = None
        self.seen: list[int] = []  # real tokens of each row
        self.prompt: list[int] = []
        self.count: np.ndarray | None = None  # real entries [l b hkv]
        self.most: list[int] = []  # real entries of each row's fullest KV head: all that a step outside rounds looks at
        self.recorder: Recorder | None = None
        self.pins: PinTable | None = None
        self.closed = False  # prompt-time eviction is over
        self.holding = False  # rounds wait for `evict_now`
        self.future = None  # what the policy looked ahead at, for its score
        self.on_stage: Callable[[str], object] = _quiet  # told when a part of a round has ended

    # -- what transformers calls ------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx not in self._rows:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        extra = kwargs.get("kwargs")
        if extra is None:
            raise RuntimeError("this model's attention does not hand its arguments to cache.update: kvprobe's attention function would not find its cache")
        if layer_idx == self._first:
            self._enter(key_states)
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        extra["kvprobe_cache"] = self
        return keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self._first > 0:  # asked before any layer runs: later, layers below the first evicted one have taken the chunk
            self._check_room(query_length)
        # one mask serves all full layers: it must fit those left to transformers, evicted ones make their own
        return super().get_mask_sizes(query_length, layer_idx if self._stock_full is None or layer_idx not in self._rows else self._stock_full)

    def reset(self) -> None:
        super().reset()
        self._clear()

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

    @property
    def kept_device(self) -> torch.device:
        """Where positions and the log live: the device of the first evicted layer."""
        return self.recorder.died.device

    # -- what users read --------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self.seen)

    @property
    def physical(self) -> int:
        """Slots per KV head now."""
        return sum(t.shape[1] for t in self.tail) + (0 if self.kept is None else self.kept.shape[-1])

    @property
    def positions(self) -> Tensor:
        """[l b hkv s]: the position of every slot of the evicted layers, -1 where a slot holds no entry."""
        if self.recorder is None:
            raise ValueError("the cache is empty: no forward has used it yet")
        return self._positions(slice(0, len(self._rows)))

    def _positions(self, rows: slice) -> Tensor:
        shape = (rows.stop - rows.start, self.batch, self.geometry.n_kv, -1)
        kept = [] if self.kept is None else [self.kept[rows]]
        return torch.cat([*kept, *(t[None, :, None, :].expand(shape) for t in self.tail)], dim=-1)

    @property
    def room(self) -> int | None:
        """Tokens that may be fed before the next round of some row; None if no round is ahead."""
        if self.plan.schedule != "rounds":
            return None
        if self.count is None:
            return self.plan.fires_at
        return max(1, self.plan.fires_at - max(self._charged()))

    @property
    def keep_log(self) -> KeepLog:
        """Which position died in which round, for all rows so far."""
        if self.recorder is None:
            raise ValueError("the cache is empty: no forward has used it yet")
        return self.recorder.log(self.seen, self.plan.keep, self.plan.buffer)

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

    # -- one step ---------------------------------------------------------------------------------------------------

    def _enter(self, key_states: Tensor) -> None:
        """The first evicted layer of a forward: refuse what cannot be right."""
        b, n = key_states.shape[0], key_states.shape[-2]
        if self.config.get_text_config(decoder=True)._attn_implementation != ATTENTION:
            raise ValueError("the model's attention function was changed: call kvprobe.cache(model, ...) again to put kvprobe's back")
        if self.step is not None and not self.step.done:
            raise RuntimeError("the forward before this one did not finish, so that the cache is in two minds: start with a new one")
        first = self.count is None
        if first:
            self._start(b, key_states.device)
        elif b != self.batch:
            raise ValueError(f"the cache holds {self.batch} rows, the forward has {b}")
        else:
            self._check_room(n)
        self.step = _Step(n, padded=False)

    def hold(self) -> None:
        """Let no round fire until `evict_now`: a policy may want to look ahead from the whole prompt first."""
        self.holding = True

    def surplus_due(self) -> bool:
        """Whether the round that `hold` keeps back will take anything."""
        return any(charged > self.plan.keep for charged in self._charged()) if self.plan.schedule == "prompt_end" else any(c >= self.plan.fires_at for c in self._charged())

    def evict_now(self, future=None, on_stage: Callable[[str], object] | None = None) -> None:
        """Fire what has come due since `hold`. future: handed to the policy as `view.future`. on_stage: told "scoring" and "gather" as each ends."""
        if self.step is None or not self.step.done:
            raise RuntimeError("nothing to evict from: no forward has finished on this cache")
        self.holding, self.future, self.on_stage = False, future, on_stage or _quiet
        try:
            self._fire()
        finally:
            self.future, self.on_stage = None, _quiet

    def pass_tokens(self, n: int, batch: int) -> None:
        """n tokens pass without a model: entries of head size 0, no attention. For policies that need neither."""
        nothing = torch.empty(batch, self.geometry.n_kv, n, 0)
        for i in self._rows:
            self.update(nothing, nothing, i, kwargs={})
            self.layers[i].scaling = 1.0
        self._note_tokens(None, nothing.device)
        self._leave()

    def _check_room(self, n: int) -> None:
        room = None if self.count is None else self.room
        if room is not None and n > room:
            raise ValueError(f"a chunk of {n} tokens would cross a round: feed at most {room} now (kvprobe's engine splits for you)")

    def _start(self, batch: int, device: torch.device) -> None:
        self.instances = list(range(batch)) if self.instances is None else list(self.instances)
        self.row_pins = [()] * batch if self.row_pins is None else [tuple(p) for p in self.row_pins]
        if len(self.instances) != batch or len(self.row_pins) != batch:
            raise ValueError(f"{len(self.instances)} instances and {len(self.row_pins)} lists of pins for a batch of {batch} rows")
        self.count = np.zeros((len(self._rows), batch, self.geometry.n_kv), dtype=np.int64)
        self.seen, self.most = [0] * batch, [0] * batch
        self.recorder = Recorder(self.geometry.kv_layers, batch, self.geometry.n_kv, device)

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

    def _pin_table(self) -> PinTable:
        device = self.recorder.died.device
        return PinTable([self.common_pins + tuple(p) for p in self.row_pins], self.geometry, device)

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

    def attend(self, module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, dropout: float):
        """Attention of one evicted layer, then whatever the policy needs from it, then the round if this was the last layer."""
        layer_idx = module.layer_idx
        row, layer = self._rows[layer_idx], self.layers[layer_idx]
        if layer_idx == self._first:
            self._note_tokens(mask, query.device)
        step, needs = self.step, self.policy.needs
        # nothing evicted yet, or one new token: the stock path, bit for bit
        stock = not self.ragged and (step.n == 1 or keys.shape[-2] == step.n)
        mass = needs.attn_mass or hasattr(self.policy, "observe")
        visible = None if stock and not mass else self._visible(row, query.device)
        if stock:
            out = sdpa_attention_forward(module, query, keys, values, None, dropout=dropout, scaling=scaling)[0]
        elif self.ragged:
            out = att.attend(query, keys, values, visible, scaling, dropout)
        else:
            if step.folded is None:
                step.folded = att.folded(visible, step.n, self.geometry.group, query.dtype)
            out = att.attend(query, keys, values, step.folded.to(query.device), scaling, dropout)
        if step.padded:
            out = out.masked_fill((step.positions < 0)[:, :, None, None].to(out.device), 0.0)
        layer.scaling = scaling
        if hasattr(self.policy, "watch"):
            layer.state = self.policy.watch(layer_idx, query, step.positions.to(query.device), layer.state)
        if self.window or mass:
            self._observe(row, layer, query, keys, visible, scaling)
        if layer_idx == self._last:
            self._leave()
        return out, None

    def _observe(self, row: int, layer: EvictionLayer, query: Tensor, keys: Tensor, visible: Tensor | None, scaling: float) -> None:
        if self.window:
            new = query[:, :, -self.window :]
            old = layer.queries
            if old is not None and new.shape[2] < self.window:
                new = torch.cat([old[:, :, -(self.window - new.shape[2]) :], new], dim=2)
            layer.queries = new.clone()  # a slice would keep the whole forward's queries alive
        observe = getattr(self.policy, "observe", None)
        if not self.policy.needs.attn_mass and observe is None:
            return
        every = visible if visible is not None else torch.ones(1, 1, 1, keys.shape[-2], dtype=torch.bool, device=keys.device)
        real_query = (self.step.positions >= 0)[:, None, :, None].to(keys.device)
        every = every.expand(self.batch, -1, self.step.n, -1) & real_query
        if self.policy.needs.attn_mass:
            mass = att.attention_mass(query, keys, every, scaling)
            old = layer.columns.get("attn_mass")
            if old is not None:
                mass[..., : old.shape[-1]] += old
            layer.columns["attn_mass"] = mass
        if observe is not None:
            asked, held = self.step.positions.to(keys.device), self._positions(slice(row, row + 1))[0].to(keys.device)
            for i, weights in att.blocks(query, keys, every, scaling):
                layer.columns = observe(weights, asked[:, i : i + weights.shape[3]], held, layer.columns)
