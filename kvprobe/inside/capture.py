"""What a capture returns, what it will cost, and how it is stored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from kvprobe.types import Geometry

WHAT = ("q", "k", "v", "attn", "out")
LIMIT_BYTES = 4 * 2**30
"""Captures that would hold more than this are refused unless the limit is raised [bytes]."""

Positions = slice | Sequence[int] | int | None


@dataclass(frozen=True)
class Request:
    """What is asked of a forward, checked against the model.

    positions: which tokens of each row's own text (negative: from its end), for queries, outputs, attention rows and for
    keys and values, in ascending order; attention always spans all keys. None means all.
    """

    layers: tuple[int, ...]
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    positions: tuple[int, ...] | slice | None
    what: tuple[str, ...]

    @staticmethod
    def check(geometry: Geometry, attention_layers: Sequence[int], layers=None, q_heads=None, kv_heads=None,
              positions: Positions = None, what: Sequence[str] = ("q", "k", "v")) -> Request:
        """Raises ValueError naming the valid range for whatever the model does not have."""
        what = (what,) if isinstance(what, str) else tuple(what)
        unknown = [w for w in what if w not in WHAT]
        if unknown or not what:
            raise ValueError(f"what={what}: {unknown or 'nothing'} cannot be captured; known: {', '.join(WHAT)}")
        chosen = _indices(layers, attention_layers, "layer")
        queries = _indices(q_heads, range(geometry.n_q), "query head")
        keys = _indices(kv_heads, range(geometry.n_kv), "KV head") if kv_heads is not None else None
        if keys is None:  # the KV heads that the asked query heads read
            keys = tuple(sorted({h // geometry.group for h in queries})) if q_heads is not None else tuple(range(geometry.n_kv))
        elif q_heads is None:
            queries = tuple(h for h in queries if h // geometry.group in keys)
        if isinstance(positions, int):
            positions = (positions,)
        if positions is not None and not isinstance(positions, slice):
            positions = tuple(int(p) for p in positions)
            if len(set(positions)) < len(positions):
                raise ValueError(f"positions {list(positions)} name a token twice")
        return Request(chosen, queries, keys, positions, what)

    def columns(self, length: int, strict: bool = True) -> list[int]:
        """Positions asked for in a text of `length` tokens, ascending; raises ValueError for one that it does not have,
        unless a longer row of the batch may have it (not strict).
        """
        if self.positions is None:
            return list(range(length))
        if isinstance(self.positions, slice):
            return list(range(length))[self.positions]
        bad = [p for p in self.positions if not -length <= p < length]
        if bad and strict:
            raise ValueError(f"position {bad[0]} is out of range: the text has positions 0..{length - 1}")
        return sorted({p % length for p in self.positions if -length <= p < length})

    def bytes(self, geometry: Geometry, batch: int, tokens: int, itemsize: int) -> int:
        """Memory of the result for a text of `tokens` tokens [bytes]."""
        n = len(self.columns(tokens))
        per = {"q": len(self.q_heads) * n * geometry.d_head * itemsize, "out": len(self.q_heads) * n * geometry.d_head * itemsize,
               "k": len(self.kv_heads) * n * geometry.d_head * itemsize, "v": len(self.kv_heads) * n * geometry.d_head * itemsize,
               "attn": len(self.q_heads) * n * tokens * max(itemsize, 4)}
        return batch * len(self.layers) * sum(per[w] for w in self.what)


def _indices(given, known: Iterable[int], kind: str) -> tuple[int, ...]:
    known = list(known)
    if hasattr(given, "__index__"):
        given = given.__index__()  # numpy's integers too
    if given is None:
        return tuple(known)
    given = range(known[-1] + 1)[given] if isinstance(given, slice) else [given] if isinstance(given, int) else list(given)
    given = [g for g in given if g in known] if isinstance(given, range) else given
    bad = [g for g in given if g not in known]
    if bad or not given:
        ranges = f"{known[0]}..{known[-1]}" if known == list(range(known[0], known[-1] + 1)) else str(known)
        raise ValueError(f"{kind} {bad[0] if bad else 'list'} is {'out of range' if bad else 'empty'}: this model has {kind}s {ranges}")
    return tuple(given)


@dataclass(frozen=True)
class Capture:
    """Post-RoPE queries, keys and values as attention sees them, attention weights and outputs of chosen sites.

    q[layer], out[layer] [b hq n d]; k[layer], v[layer] [b hkv s d]; attn[layer] [b hq n p] over all positions p of the
    text (0 where a key was hidden or evicted). out is what a head hands to its output projection: before W_O, and before any norm that
    a model puts behind it, so that it adds up to the residual stream through both (`head_weights(model, "O", layer)` has W_O). Heads are in the order of q_heads and kv_heads; the head axis is before
    the token axis. q_positions [b n] and k_positions [layer][b hkv s] are indices into each row's own text, -1 where a
    row has no token; such slots hold zeros.
    stopped: per row, at which generated step its text ended, None if it did not.
    """

    q: Mapping[int, Tensor] = field(default_factory=dict)
    k: Mapping[int, Tensor] = field(default_factory=dict)
    v: Mapping[int, Tensor] = field(default_factory=dict)
    attn: Mapping[int, Tensor] = field(default_factory=dict)
    out: Mapping[int, Tensor] = field(default_factory=dict)
    q_positions: Tensor | None = None
    k_positions: Mapping[int, Tensor] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    q_heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    geometry: Geometry | None = None
    tokens: Tensor | None = None
    prompt: int = 0
    steps: int = 0
    stopped: tuple[int | None, ...] = ()
    backend: str = ""
    model: str = ""
    fingerprint: str = ""
    logits: Tensor | None = None

    @property
    def kv_of_q(self) -> dict[int, int]:
        """KV head that each captured query head reads."""
        return {h: h // self.geometry.group for h in self.q_heads}

    @property
    def nbytes(self) -> int:
        """Bytes of the captured tensors."""
        return sum(t.numel() * t.element_size() for name in WHAT for t in getattr(self, name).values())

    def select(self, layers=None, q_heads=None, kv_heads=None, positions: Positions = None) -> Capture:
        """A smaller capture: layers and heads by the model's numbers, positions as indices of the text (or a slice of the
        captured tokens). Raises ValueError for what was not captured."""
        chosen = _indices(layers, self.layers, "captured layer")
        qs, kvs = _indices(q_heads, self.q_heads, "captured query head"), _indices(kv_heads, self.kv_heads, "captured KV head")
        qi, ki = [self.q_heads.index(h) for h in qs], [self.kv_heads.index(h) for h in kvs]

        def cut(name: str, heads: list[int]) -> dict[int, Tensor]:
            return {i: getattr(self, name)[i][:, heads] for i in chosen if i in getattr(self, name)}

        new = replace(self, layers=chosen, q_heads=qs, kv_heads=kvs, q=cut("q", qi), out=cut("out", qi), attn=cut("attn", qi),
                      k=cut("k", ki), v=cut("v", ki), k_positions=cut("k_positions", ki))
        return new if positions is None else new._at(positions)

    def _at(self, positions: Positions) -> Capture:
        if self.q_positions is None or len({tuple(p) for p in self.q_positions.tolist()}) != 1:
            raise ValueError("rows of this capture hold different positions: select rows first, or capture with positions=...")
        have = self.q_positions[0].tolist()
        wanted = have[positions] if isinstance(positions, slice) else [positions] if isinstance(positions, int) else list(positions)
        missing = [p for p in wanted if p not in have]
        if missing:
            raise ValueError(f"position {missing[0]} was not captured; captured: {have[0]}..{have[-1]}")
        n = [have.index(p) for p in wanted]
        cut = {name: {i: t[:, :, n] for i, t in getattr(self, name).items()} for name in ("q", "out", "attn")}
        for name in ("k", "v", "k_positions"):
            cut[name] = {i: _by_position(t, self.k_positions[i], wanted) for i, t in getattr(self, name).items()}
        return replace(self, q_positions=self.q_positions[:, n], **cut)

    def to(self, device) -> Capture:
        """The same on another device, or in another dtype."""
        moved = {name: {i: t.to(device) for i, t in getattr(self, name).items()} for name in WHAT}
        if isinstance(device, str | torch.device):
            moved["k_positions"] = {i: t.to(device) for i, t in self.k_positions.items()}
            moved["q_positions"] = None if self.q_positions is None else self.q_positions.to(device)
        return replace(self, **moved)

    def stack(self, name: str) -> Tensor:
        """All layers of "q", "k", "v", "attn" or "out" as one tensor, layers first."""
        if not getattr(self, name):
            raise ValueError(f"{name!r} was not captured")
        return torch.stack([getattr(self, name)[i] for i in self.layers])

    def save(self, path: str | os.PathLike) -> None:
        """Write a .safetensors file."""
        from safetensors.torch import save_file

        tensors = {f"{name}.{i}": t.contiguous() for name in (*WHAT, "k_positions") for i, t in getattr(self, name).items()}
        tensors |= {name: getattr(self, name).contiguous() for name in ("q_positions", "tokens", "logits") if getattr(self, name) is not None}
        head = {name: getattr(self, name) for name in ("layers", "q_heads", "kv_heads", "prompt", "steps", "stopped", "backend", "model", "fingerprint")}
        geometry = asdict(self.geometry) | {"skipped": {str(k): v for k, v in self.geometry.skipped.items()}}
        part = f"{os.fspath(path)}.part"
        save_file(tensors, part, metadata={"kvprobe": json.dumps(head | {"geometry": geometry})})
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike) -> Capture:
        """Read what `save` wrote; raises ValueError when it is something else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), "pt") as file:
                head = json.loads((file.metadata() or {})["kvprobe"])
                flat = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is not a capture of kvprobe: {error}") from error
        geometry = head.pop("geometry")
        skipped = {int(k): v for k, v in geometry.pop("skipped").items()}
        head = {k: tuple(v) if isinstance(v, list) else v for k, v in head.items()}
        parts: dict[str, dict[int, Tensor]] = {name: {} for name in (*WHAT, "k_positions")}
        for name, tensor in flat.items():
            if "." in name:
                kind, layer = name.split(".")
                parts[kind][int(layer)] = tensor
        single = {name: flat.get(name) for name in ("q_positions", "tokens", "logits")}
        geometry["kv_layers"] = tuple(geometry["kv_layers"])
        return Capture(**parts, **single, **head, geometry=Geometry(**geometry, skipped=skipped))

    def __repr__(self) -> str:
        shapes = {name: tuple(next(iter(getattr(self, name).values())).shape) for name in WHAT if getattr(self, name)}
        return f"Capture({shapes} in layers {list(self.layers)}, {self.nbytes / 1e6:.1f} MB, {self.backend}, {self.model})"


def _by_position(t: Tensor, positions: Tensor, wanted: list[int]) -> Tensor:
    """Entries of t [b hkv s ...] at the wanted positions; raises ValueError where a head does not hold one."""
    if not wanted:
        raise ValueError("no positions were named")
    found = []
    for p in wanted:
        at = positions == p
        if not bool(at.any(-1).all()):
            raise ValueError(f"position {p} is not held by every captured KV head")
        found.append(at.to(torch.int8).argmax(-1))
    index = torch.stack(found, dim=-1)
    return t.gather(2, index[..., None].expand(*index.shape, t.shape[-1])) if t.ndim == 4 else t.gather(2, index)
