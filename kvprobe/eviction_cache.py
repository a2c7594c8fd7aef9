"""A transformers cache that evicts per KV head.

The schedule belongs to the cache: whoever steps the model (a plain forward, a chunk, `model.generate`, a trace), a round
fires after the step in which it came due, once the last layer's attention has been computed. So eviction never changes
the logits of the forward that triggered it, and nothing but `cache=` has to be passed.

Logical and physical length are different things: `get_seq_length` is the number of columns ever seen, which feeds
position ids and generate's slicing; the tensors hold what survived.

The cache's parts: rounds.py evicts, seeing.py reads and makes masks, branching.py copies rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import attention as att
from .attention_function import ATTENTION
from .branching import Branching
from .eviction_layer import EvictionLayer
from .keeplog import KeepLog, Recorder
from .pins import Pin, PinTable, check_fits
from .rounds import Rounds
from .seeing import Seeing, Step
from .types import Geometry, Plan, Policy


def _quiet(stage: str) -> None:
    """Nobody asks."""


class EvictionCache(Branching, Seeing, Rounds, DynamicCache):
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
        self.step: Step | None = None
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
        self.step = Step(n, padded=False)

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

    def _pin_table(self) -> PinTable:
        device = self.recorder.died.device
        return PinTable([self.common_pins + tuple(p) for p in self.row_pins], self.geometry, device)

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
