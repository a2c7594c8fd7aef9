"""Run a text with edits of what chosen heads see, through nnsight.

An edit changes one forward's attention and nothing that is stored, so that the same cache can be asked again. Attention
of an edited layer is computed anew from the edited keys, values and visibility; unedited layers are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import attention as att
from kvprobe.models import Model
from kvprobe.types import Geometry

from . import backends, sites
from .edits import Edit, LogMask, Seen
from .look import Walk, as_model, tokens_of
from .read import Pass, visible


@dataclass(frozen=True)
class Outcome:
    """logits [b n vocabulary] of the text (of its last column only, unless all were asked for), ids with generated steps,
    where rows ended, and which query heads the edits touched: {layer: {KV head: (query heads)}}."""

    logits: Tensor
    tokens: Tensor
    steps: int
    stopped: tuple[int | None, ...]
    touched: Mapping[int, Mapping[int, tuple[int, ...]]]
    padding: Tensor | None = None  # [b n] columns of the text that are none

    def logp(self, first: int) -> Tensor:
        """Log p [b k] of the text's own tokens from column `first` on, needs all_logits [nats]."""
        n = self.logits.shape[1]
        if not 1 <= first < n:
            raise ValueError(f"column {first} must be in 1..{n - 1}: run intervene(..., all_logits=True)")
        if self.padding is not None and bool(self.padding[:, first - 1 :].any()):
            needed = int((~self.padding).to(torch.int8).argmax(1).max()) + 1
            raise ValueError(f"a row is padding at column {first - 1}: in this batch the first scored column must be at least {needed}")
        wide = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        scores = torch.log_softmax(wide[:, first - 1 : n - 1], dim=-1)
        return scores.gather(-1, self.tokens[:, first:n, None].to(scores.device)).squeeze(-1)


def intervene(model, text, edits: Edit | Sequence[Edit], *, cache=None, attention_mask: Tensor | None = None, steps: int = 0,
              all_logits: bool = False) -> Outcome:
    """Run the model on `text` under edits: one forward, a chunk on a cache, or with `steps` greedy tokens behind it.

    cache: holds what came before, stock or evicting; it is fed the text but never edited. Edits apply in the order given.
    Raises ValueError for a site that the model does not have; the message names the valid range.
    """
    model = as_model(model)
    edits = [edits] if isinstance(edits, Edit) else list(edits)
    known = sites.attention_modules(model.model)
    for edit in edits:
        for layer, head in edit.sites:
            _check_site(model.geometry, known, layer, head)
    past = 0 if cache is None else cache.get_seq_length()
    ids, mask, before = tokens_of(model, text, attention_mask, past)
    walk = _EditWalk(model, edits, cache, steps, all_logits, before)
    _check_edits(edits, max(walk.row_lengths(ids, mask)) + steps, len(ids), cache)
    every, stopped, logits = walk.walk(ids, mask)
    group = model.geometry.group
    touched = {layer: {h: tuple(range(h * group, (h + 1) * group)) for h in sorted({h for e in edits for h in e.heads(layer)})}
               for layer in sorted({i for e in edits for i, _ in e.sites})}
    return Outcome(walk.logits if walk.logits is not None else logits, every, every.shape[1] - ids.shape[1], tuple(stopped), touched, None if mask is None else mask == 0)


def _check_edits(edits: Sequence[Edit], length: int, batch: int, cache) -> None:
    """Refuse edits that would do nothing, or the wrong thing, without a word."""
    for edit in edits:
        low, high = edit.extent()
        if low < 0 or high >= length:
            raise ValueError(f"{type(edit).__name__} names position {low if low < 0 else high}: the text has positions 0..{length - 1}")
        if isinstance(edit, LogMask) and len(edit.rows) != batch:
            raise ValueError(f"the keep log's {len(edit.rows)} rows do not fit a batch of {batch}: name them, head_masks(log, rows=[...])")
        if edit.turns_keys() and getattr(cache, "rotate", None) is not None:
            raise ValueError("this cache renumbers positions: keys from elsewhere would stand at the wrong ones")


def _check_site(geometry: Geometry, known: Mapping[int, str], layer: int, head: int) -> None:
    if not 0 <= head < geometry.n_kv:
        raise ValueError(f"KV head {head} is out of range: this model has KV heads 0..{geometry.n_kv - 1}")
    if layer not in known:
        raise ValueError(f"layer {layer} has no softmax attention: layers that do are {list(known)}")


def kv_head(model, query_head: int) -> int:
    """The KV head that a query head reads; raises ValueError naming the valid range."""
    geometry = as_model(model).geometry
    if not 0 <= query_head < geometry.n_q:
        raise ValueError(f"query head {query_head} is out of range: this model has query heads 0..{geometry.n_q - 1}")
    return query_head // geometry.group


class _EditWalk(Walk):
    def __init__(self, model: Model, edits: list[Edit], cache, steps: int, all_logits: bool, before: Tensor | None):
        super().__init__(model, cache, steps, before)
        self.edits, self.all_logits, self.logits = edits, all_logits, None
        self.names = sites.attention_modules(model.model)
        self.layers = sorted(set().union(*(e.layers(model.geometry) for e in edits)) & set(self.names)) if edits else []

    def forward(self, arguments: dict, at: Pass) -> Tensor:
        if self.all_logits and self.logits is None:
            arguments = arguments | {"logits_to_keep": 0}
        own = backends.owned(arguments.get("cache"))
        logits = _edited(self.model, self.names, self.layers, arguments, lambda *a: self._attend(at, own, *a))
        if self.logits is None:
            self.logits = logits
        return logits

    def _attend(self, at: Pass, own: set[int], layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
        """The layer's attention output [b n hq d] under the edits."""
        n_kv = k.shape[1]
        shown = visible(at, layer, k, mask, layer in own).expand(q.shape[0], n_kv, -1, -1).clone()
        seen = Seen(layer, k, v, at.keys_at(layer, k), shown, at)
        for edit in self.edits:
            if layer in edit.layers(self.model.geometry):
                edit.before(seen, self.model)
        w = att.weights(q, seen.keys, seen.visible, q.shape[-1] ** -0.5 if scaling is None else scaling)
        out = torch.einsum("bhgns,bhsd->bhgnd", w, seen.values.to(w.dtype)).flatten(1, 2).transpose(1, 2)
        seen.out = out.to(q.dtype).contiguous()
        for edit in self.edits:
            if layer in edit.layers(self.model.geometry):
                edit.after(seen, self.model)
        return seen.out


def _edited(model: Model, names: Mapping[int, str], layers: Sequence[int], feed: dict, attend) -> Tensor:
    """One forward whose attention outputs in `layers` come from `attend`. The trace block lives here."""
    w = sites.wrap(model.model)
    calls = [(layer, names[layer]) for layer in layers]
    with torch.no_grad(), w.trace(**feed):
        for layer, name in calls:
            call = sites.attention_call(w, name)
            arguments, options = call.inputs
            q, k, v, mask = arguments[1:5]
            result = call.output
            call.output = (attend(layer, q, k, v, mask, options.get("scaling")), result[1])
        logits = w.output.logits.save()
    return logits


def compare(model, text, conditions: Mapping[str, Edit | Sequence[Edit]], *, first: int, cache=None):
    """Log p of the text's tokens from column `first` on under each named set of edits, from the same cache.

    Returns a DataFrame with one row per condition: logp (mean over rows of the sum over tokens [nats]) and retrieved (share
    of rows whose tokens are all the argmax). The cache itself is left as it was.
    """
    import copy

    import pandas as pd

    out = []
    for name, edits in conditions.items():
        own = None if cache is None else cache.branch(1) if hasattr(cache, "branch") else copy.deepcopy(cache)
        outcome = intervene(model, text, edits, cache=own, all_logits=True)
        n = outcome.logits.shape[1]
        top = outcome.logits[:, first - 1 : n - 1].argmax(-1) == outcome.tokens[:, first:n].to(outcome.logits.device)
        out.append({"condition": name, "logp": float(outcome.logp(first).sum(-1).mean()), "retrieved": float(top.all(-1).float().mean())})
    return pd.DataFrame(out)
