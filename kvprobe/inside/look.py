"""capture(): queries, keys, values, attention weights and outputs of a forward, a cached chunk, or a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvprobe.models import Model, prepare

from . import backends, sites
from .capture import LIMIT_BYTES, Capture, Positions, Request
from .read import Pass, Reader

BACKENDS = ("nnsight", "attention_function", "transformer_lens")


def estimate(model, text, *, steps: int = 0, **asked) -> int:
    """Bytes that `capture` with the same arguments would hold."""
    model = as_model(model)
    ids, *_ = tokens_of(model, text)
    request = Request.check(model.geometry, list(sites.attention_modules(model.model)), **asked)
    return request.bytes(model.geometry, ids.shape[0], ids.shape[1] + steps, model.model.dtype.itemsize)


def capture(model, text, *, layers=None, q_heads: Sequence[int] | None = None, kv_heads: Sequence[int] | None = None, positions: Positions = None,
            what: Sequence[str] = ("q", "k", "v"), steps: int = 0, cache=None, attention_mask: Tensor | None = None,
            backend: str = "nnsight", remote: bool | str = False, limit_bytes: int = LIMIT_BYTES) -> Capture:
    """Run the model on `text` and return what its attention saw.

    model: what `kvprobe.load` returned, a transformers model, or an nnsight wrapper of one. text: a string, a list of
    strings (padded on the left), or ids [b n] with an attention_mask [b n] where padded. layers, q_heads, kv_heads:
    numbers or slices in the model's own numbering; KV heads default to those that the asked query heads read.
    positions: tokens of each row's text. what: of "q", "k", "v", "attn", "out". steps: greedy tokens to generate and
    capture along; the result says where a row ended. cache: a cache that already holds text, stock or evicting; `text` is
    then the next chunk. backend: "nnsight", "attention_function" or "transformer_lens". remote: passed to nnsight.

    Only what was asked for is kept, as copies. Raises ValueError for what the model does not have (the valid range is
    named) and for more than limit_bytes.
    """
    wrapper = model if type(model).__module__.startswith("nnsight") else None
    model = as_model(model)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; known: {', '.join(BACKENDS)}")
    if remote and (wrapper is None or not hasattr(wrapper, "to_model_key")):
        raise ValueError("remote execution needs a model that nnsight can name: pass an nnsight.TransformersModel")
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    past = 0 if cache is None else cache.get_seq_length()
    ids, mask, before = tokens_of(model, text, attention_mask, past)
    request = Request.check(model.geometry, list(sites.attention_modules(model.model)), layers, q_heads, kv_heads, positions, what)
    length = past + ids.shape[1] + steps
    need = request.bytes(model.geometry, ids.shape[0], length, model.model.dtype.itemsize)
    if need > limit_bytes:
        raise ValueError(f"this capture would hold {need / 1e9:.2f} GB, the limit is {limit_bytes / 1e9:.2f} GB: ask for fewer layers, heads or positions, or raise limit_bytes")
    walk = _Walk(model, request, Reader(request, length, hold_keys=steps > 0, cached=cache is not None), cache, backend, wrapper, remote, steps, before)
    walk.reader.lengths = [n + steps for n in walk.row_lengths(ids, mask)]
    return walk.run(ids, mask)


def as_model(model) -> Model:
    """A kvprobe model from whatever holds a transformers model."""
    if isinstance(model, Model):
        return model
    inner = getattr(model, "_module", None)
    tokenizer = getattr(model, "tokenizer", None)
    return prepare(inner if inner is not None else model, tokenizer)


def tokens_of(model: Model, text, attention_mask: Tensor | None = None, past: int = 0) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """ids [b n], a mask [b n] or None where nothing is padded, and the mask of the past [b past] where one was given.

    An attention_mask may cover the text, or the past too. A tokenizer without a padding token is no obstacle: padding is a
    matter of the mask, and any id will do.
    """
    before = None
    if isinstance(text, Tensor):
        ids = text[None] if text.ndim == 1 else text
        mask = attention_mask
        if mask is not None and mask.shape[1] == past + ids.shape[1]:
            before, mask = (mask[:, :past] if past else None), mask[:, past:]
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"an attention_mask of shape {list(attention_mask.shape)} fits neither the text {list(ids.shape)} nor, with it, the {past} cached columns")
    else:
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} came without a tokenizer: give token ids")
        rows = [model.tokenizer(t).input_ids for t in ([text] if isinstance(text, str) else text)]
        if not rows:
            raise ValueError("no text was given")
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    if ids.shape[1] == 0:
        raise ValueError("the text has no tokens")
    if mask is not None and bool(mask.bool().all()):
        mask = None
    if mask is not None and not bool(mask[:, -1].bool().all()):
        raise ValueError("a row ends in padding: pad on the left")
    return ids.to(model.device), None if mask is None else mask.to(model.device), before


class Walk(ABC):
    """Steps a model through a text and perhaps greedy tokens behind it; a subclass says what happens in each forward."""

    def __init__(self, model: Model, cache, steps: int, before: Tensor | None = None):
        self.model, self.cache, self.steps, self.before = model, cache, steps, before
        if cache is None and steps:
            from transformers import DynamicCache

            self.cache = DynamicCache(config=model.model.config)
        self.columns: Tensor | None = None  # positions of all columns so far [b t], -1 for padding and behind a row's end
        self.padding: Tensor | None = None  # which of them the model must not see

    def feed(self, ids: Tensor, shown: Tensor) -> tuple[dict, Pass]:
        """Arguments of one forward over ids [b n], of which `shown` [b n] are no padding, and where its tokens stand."""
        if self.columns is None:
            self.columns = self._past(ids)
        start = self.columns.amax(1, keepdim=True) + 1 if self.columns.shape[1] else torch.zeros(ids.shape[0], 1, dtype=torch.int64, device=ids.device)
        q = (start + shown.cumsum(1) - 1).masked_fill(~shown, -1)
        evicted = {}
        if hasattr(self.cache, "geometry"):
            n_kv, new = self.cache.geometry.n_kv, q[:, None, :]
            old = self.cache.positions if self.cache.batch else None
            for i, layer in enumerate(self.cache.geometry.kv_layers):
                tail = new.expand(-1, n_kv, -1).to(torch.int64)
                evicted[layer] = tail if old is None else torch.cat([old[i].to(q.device, torch.int64), tail], dim=-1)
        # a row that has ended goes on as if it had not, unseen by the result: a cache wants real columns at its end
        new = shown if self.padding is None else torch.ones_like(shown)
        old_padding = self.columns < 0 if self.padding is None else self.padding
        self.columns = torch.cat([self.columns, q], dim=1)
        self.padding = torch.cat([old_padding, ~new], dim=1)
        arguments = dict(input_ids=ids, use_cache=self.cache is not None, logits_to_keep=1, position_ids=q.clamp(min=0))
        if self.cache is not None:
            arguments["cache"] = self.cache
        if bool(self.padding.any()):
            arguments["attention_mask"] = (~self.padding).to(torch.int64)
        return arguments, Pass(q, self.columns, evicted)

    def _past(self, ids: Tensor) -> Tensor:
        """Positions of the columns that the cache has seen [b past], -1 for padding: an evicting cache knows its rows' lengths, of a
        stock one the caller's mask tells."""
        past = 0 if self.cache is None else self.cache.get_seq_length()
        if past and getattr(self.cache, "seen", None):
            lengths = torch.tensor(self.cache.seen, device=ids.device)[:, None]
            columns = torch.arange(past, device=ids.device) - (past - lengths)
            return columns.clamp(min=-1)
        if self.before is None:
            return torch.arange(past, device=ids.device).expand(ids.shape[0], past)
        shown = self.before.to(ids.device).bool()
        return (shown.cumsum(1) - 1).masked_fill(~shown, -1)

    def row_lengths(self, ids: Tensor, mask: Tensor | None) -> list[int]:
        """Tokens of each row's text once `ids` has been read."""
        past = self._past(ids)
        old = past.amax(1) + 1 if past.shape[1] else torch.zeros(len(ids), dtype=torch.int64)
        new = ids.new_full((len(ids),), ids.shape[1]) if mask is None else mask.sum(1)
        return (old.to(new.device) + new).tolist()

    @abstractmethod
    def forward(self, arguments: dict, at: Pass) -> Tensor:
        """One forward; returns logits [b n vocabulary]."""

    def walk(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[int | None], Tensor]:
        """All ids [b n + steps], where rows ended, and the logits of the last forward that each row lived through."""
        ends = self.model.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        shown = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        stopped: list[int | None] = [None] * ids.shape[0]
        every, x = [ids], ids
        for step in range(self.steps + 1):
            logits = self.forward(*self.feed(x, shown))
            if step == self.steps:
                break
            x = logits[:, -1].argmax(-1, keepdim=True)
            stopped = [s if s is not None else step + 1 if int(t) in ends else None for s, t in zip(stopped, x[:, 0])]
            if all(s is not None for s in stopped):
                break
            shown = torch.tensor([[s is None] for s in stopped], device=ids.device)
            every.append(x)
        return torch.cat(every, dim=1), stopped, logits


class _Walk(Walk):
    """Captures along."""

    def __init__(self, model, request, reader, cache, backend, wrapper, remote, steps, before):
        super().__init__(model, cache, steps, before)
        self.request, self.reader, self.backend, self.wrapper, self.remote = request, reader, backend, wrapper, remote
        self.parts: list[dict[int, dict]] = []
        self.passes: list[Pass] = []

    def forward(self, arguments: dict, at: Pass) -> Tensor:
        def read(layer, q, k, v, mask, scaling, out, own):
            return self.reader(at, layer, q, k, v, mask, q.shape[-1] ** -0.5 if scaling is None else scaling, out, own)

        layers = self.request.layers
        if self.backend == "nnsight":
            got, logits = backends.with_nnsight(self.model, layers, arguments, read, self.wrapper, self.remote, "out" in self.request.what)
        elif self.backend == "attention_function":
            got, logits = backends.with_attention_function(self.model, layers, arguments, read)
        else:
            from .with_lens import with_transformer_lens

            got, logits = with_transformer_lens(self.model, layers, arguments, read)
        self.parts.append(got)
        self.passes.append(at)
        return logits

    def run(self, ids: Tensor, mask: Tensor | None) -> Capture:
        every, stopped, logits = self.walk(ids, mask)
        joined: dict[str, dict[int, Tensor]] = {name: {} for name in ("q", "k", "v", "attn", "out", "k_positions")}
        for layer in self.request.layers:
            for name in ("q", "attn", "out"):
                if name in self.request.what:
                    parts = [p[layer].pop(name) for p in self.parts]
                    joined[name][layer] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            final = self.parts[-1][layer]
            if "held" in final:
                final = self.reader.keys(layer, final["held"], final["where"])
            for name in ("k", "v", "k_positions"):
                if name in final:
                    joined[name][layer] = final[name]
        rows = [self.reader.rows(p)[0] for p in self.passes]
        at = [torch.where(r >= 0, p.q_positions.gather(1, r.clamp(min=0)), -1) for r, p in zip(rows, self.passes)]
        m = self.model
        return Capture(**joined, q_positions=torch.cat(at, dim=1), layers=self.request.layers, q_heads=self.request.q_heads, kv_heads=self.request.kv_heads,
                       geometry=m.geometry, tokens=every, prompt=ids.shape[1], steps=every.shape[1] - ids.shape[1], stopped=tuple(stopped),
                       backend=self.backend, model=m.name, fingerprint=m.fingerprint, logits=logits[:, -1])
