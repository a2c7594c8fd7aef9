"""The named types that every part shares: geometry, plan, needs, and what a policy sees.

Axes are always in this order: l layer, b batch row, hq/hkv query or KV head, g query heads per KV head,
n query, s slot, c candidate, k kept, p absolute position, d head size. Words: `slot` is an index in a cache now,
`position` a token's index for ever, `round` one eviction event, `site` a (layer, KV head).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor


POSITIONS = ("original", "renumbered")
"""After a round: every key stays at its token's own position, or survivors are re-rotated to stand right before the next token."""


@dataclass(frozen=True)
class Geometry:
    """What a model's attention looks like.

    kv_layers: the layers, in the model's own numbering, whose cache grows with the text and can be evicted.
    skipped: every other layer with the reason it is left to transformers.
    """

    n_layers: int
    n_q: int
    n_kv: int
    d_head: int
    d_model: int
    kv_layers: tuple[int, ...]
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_q // self.n_kv

    def check_site(self, layer: int, head: int) -> None:
        """Raise ValueError unless (layer, head) is a site whose cache can be evicted; the message names the valid range."""
        if not 0 <= head < self.n_kv:
            raise ValueError(f"KV head {head} is out of range: this model has KV heads 0..{self.n_kv - 1}")
        if layer in self.skipped:
            raise ValueError(f"layer {layer} keeps no growing cache ({self.skipped[layer]}); layers that do: {list(self.kv_layers)}")
        if layer not in self.kv_layers:
            raise ValueError(f"layer {layer} is out of range: this model has layers 0..{self.n_layers - 1}")


@dataclass(frozen=True)
class Plan:
    """How much is kept, and when.

    keep: entries per KV head that survive a round, pins included, the buffer not (K; at prompt end B).
    buffer: the newest entries, never scored (r). A round fires after the step at which a row holds keep + 2 * buffer entries.
    pins_free: pinned entries come on top of `keep` instead of counting inside it.
    schedule: "rounds" (decode time, Random Attention sec. 3 and app. F) or "prompt_end" (one round after the first forward).
    """

    keep: int
    buffer: int = 64
    pins_free: bool = False
    schedule: Literal["rounds", "prompt_end"] = "rounds"

    def __post_init__(self) -> None:
        if self.schedule not in ("rounds", "prompt_end"):
            raise ValueError(f"schedule {self.schedule!r} is unknown; known: 'rounds', 'prompt_end'")
        for name in ("keep", "buffer"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number of entries")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} must be at least 1 entry per KV head")
        if self.schedule == "rounds" and self.buffer < 1:
            raise ValueError(f"buffer={self.buffer} must be at least 1 token: the newest token has no score yet")
        if self.schedule == "prompt_end" and self.buffer != 0:
            raise ValueError(f"buffer={self.buffer} has no meaning at prompt end, use buffer=0 and a WindowPin")

    @property
    def fires_at(self) -> int:
        """Entries of a row at which a round is due (K + 2r)."""
        return self.keep + 2 * self.buffer

    @staticmethod
    def resolve_keep(keep: int | None, keep_ratio: float | None, length: int | None, inside: int = 0) -> int:
        """One absolute budget from either form.

        keep_ratio is a fraction of `length` [tokens]; exactly one of keep and keep_ratio must be given. inside: entries
        that the given budget counts and `keep` does not (the buffer, where a paper's K includes it).
        """
        if keep is None and keep_ratio is None:
            raise ValueError("give keep (entries per KV head) or keep_ratio (a fraction of the text's length)")
        if keep is not None and keep_ratio is not None:
            raise ValueError(f"give keep={keep} or keep_ratio={keep_ratio}, not both")
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool)):
            raise ValueError(f"keep={keep!r} must be a whole number of entries")
        if keep is not None:
            if keep - inside < 1:
                raise ValueError(f"keep={keep} leaves nothing beside the buffer of {inside} that it counts")
            return keep - inside
        if not isinstance(keep_ratio, (int, float)) or isinstance(keep_ratio, bool) or not 0 < keep_ratio <= 1:
            raise ValueError(f"keep_ratio={keep_ratio} must be in (0, 1]")
        if length is None:
            raise ValueError("keep_ratio needs the text's length in tokens")
        return max(1, round(keep_ratio * length) - inside)


@dataclass(frozen=True)
class Needs:
    """What the engine must hand to a policy's `score`.

    window: post-RoPE queries of the newest tokens, this many [tokens]; -1 means as many as the buffer holds.
    attn_mass: attention each entry received since it came, as `view.columns["attn_mass"]`.
    states: False for a policy that reads positions and draws only, so that its keep-sets do not depend on the model.
    draws: True for a policy that draws: probes repeat it under fresh eviction seeds.
    """

    window: int = 0
    attn_mass: bool = False
    states: bool = True
    draws: bool = False


@dataclass(frozen=True)
class CacheView:
    """What a policy may read about one layer at one round. Read-only; c counts candidates, oldest first.

    positions [b hkv c] is -1 where a row holds fewer entries than the widest one; such slots are never counted, and
    whatever a policy scores them is ignored. keys and values are post-RoPE, as attention sees them.
    queries [b hq w d] with query_positions [b w] (negative: padding) when the policy needs a window.
    now [b]: tokens each row has seen; round [b]: rounds each row has had before this one.
    banned(start, stop) [b hkv c] counts the positions of start..stop that a pin bans at each site.
    state: what the policy's `watch` made of the layer's queries so far. pins_free: pins come on top of `keep`.
    future: what the policy's `queries` returned, where a prompt is compressed with a look ahead.
    pinned [b hkv c] is True where a pin holds the entry, whatever its score; None without pins.
    """

    layer: int
    positions: Tensor
    keys: Tensor
    values: Tensor
    now: Tensor
    round: Tensor
    keep: int
    buffer: int
    scaling: float
    queries: Tensor | None
    query_positions: Tensor | None
    columns: Mapping[str, Tensor]
    rand: Callable[..., Tensor]
    banned: Callable[[Tensor, Tensor], Tensor]
    pinned: Tensor | None = None
    future: object | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    pins_free: bool = False

    @property
    def room(self) -> Tensor:
        """[b hkv]: entries that no pin holds and that the plan lets each KV head keep, before budgets are shared out."""
        held = torch.zeros_like(self.real) if self.pinned is None or self.pins_free else self.pinned & self.real
        return torch.minimum((self.keep - held.sum(-1)).clamp(min=0), self.free.sum(-1))

    @property
    def free(self) -> Tensor:
        """[b hkv c] True where a slot holds an entry that no pin holds."""
        return self.real if self.pinned is None else self.real & ~self.pinned

    @property
    def real(self) -> Tensor:
        """[b hkv c] True where a slot holds an entry."""
        return self.positions >= 0


@runtime_checkable
class Policy(Protocol):
    """A frozen dataclass whose fields are its hyper-parameters; exported by its file as POLICY.

    More methods, where a policy has them, are called:
    check(plan), before any work: raises ValueError for a plan that the policy cannot follow;
    bind(model) -> Policy, when a cache is made: with what the policy needs to know of the model (weights, calibration);
    observe(attention [b hkv g n s], query_positions [b n], key_positions [b hkv s], columns) -> columns, after each
    forward, a block of queries at a time: state per entry [b hkv s ...] that moves with it (a query or key of
    position -1 is padding, a column shorter than s ends before this forward's entries);
    watch(layer, queries [b hq n d], query_positions [b n], state) -> state, with each forward's post-RoPE queries: tensors [b ...]
    that the policy gets back as `view.state` and must not write in place;
    across_layers(score [l b hkv c], positions [l b hkv c]) -> score, after all layers of a round were scored;
    allocate(score [l b hkv c], keep [l b hkv], held [l b hkv c], real [l b hkv c], positions [l b hkv c]) -> keep [l b hkv]:
    candidates that each site keeps, pins (`held`) inside; totals stay exact at the policy's `level`: "head", "layer" (default), "model", or "own" for a
    policy that sets its own budget;
    select(view, score [b hkv c], keep [b hkv]) -> score whose largest `keep` entries are kept, per layer (`keep` counts pins,
    `view.pinned`, and they stay whatever it returns);
    queries(engine) -> object, before a prompt is compressed: what `view.future` hands to `score`.
    """

    needs: Needs

    def score(self, view: CacheView) -> Tensor:
        """[b hkv c], finite, higher is kept. Pins are none of a policy's business."""
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of scores: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def watches(policy) -> bool:
    """Whether the policy follows every forward in a way of its own (`observe`, `watch`): what another one gathered is none of its use."""
    return hasattr(policy, "observe") or hasattr(policy, "watch")


def check_window(policy) -> None:
    """Raise ValueError for fields `window`, `kernel` and `lam` of a policy that cannot be, where it has them."""
    kernel, window, lam = (getattr(policy, name, default) for name, default in (("kernel", 1), ("window", 1), ("lam", 0.5)))
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel} must be odd and at least 1")
    if window == 0 or window < -1:
        raise ValueError(f"window={window} must be at least 1 query, or -1 for the buffer")
    if not 0 <= lam <= 1:
        raise ValueError(f"lam={lam} must be in [0, 1]")
