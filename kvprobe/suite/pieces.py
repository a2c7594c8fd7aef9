"""What the oracle suite stores of a prompt beside its rows: queries, trajectories, scores, kept sets. Keys and values are recomputed, not stored.

One .npz per prompt, at the place of a batch's log (`keeplogs/batch-0000.npz`), so that a prompt counts as done once its piece is whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """arrays by name: ids [n]; future.tokens, future.valid [t]; layers [l] (model numbering of the scores' first axis);
    draw.D.tokens, draw.D.valid, draw.D.logq [m t]; of the chosen layers L queries.L.window [hq w d], queries.L.future [hq t d], queries.L.draw.D [m hq t d];
    of each arm A under sampling seed D score.A.D [l hkv n] float32 and kept.A.D [l hkv ceil(n / 8)], packed bits of the main budget's sets."""

    arrays: dict[str, np.ndarray]

    def save(self, path: str | os.PathLike) -> None:
        """Write whole or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part.npz")
        np.savez(part, **self.arrays)
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike) -> Pieces:
        """Read what `save` wrote. Raises ValueError for another file."""
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        if "ids" not in found or "future.tokens" not in found:
            raise ValueError(f"{path} holds no pieces of the oracle suite")
        return Pieces(found)

    def kept(self, arm: str, draw: int = 0) -> np.ndarray:
        """bool [l hkv n]: what the arm keeps at the main budget."""
        return np.unpackbits(self.arrays[f"kept.{arm}.{draw}"], axis=-1, count=len(self.arrays["ids"])).astype(bool)


def of(prompt, ranked, budget: int, layers: tuple[int, ...]) -> Pieces:
    """The pieces of a prompt; `layers`: those whose queries are stored."""
    ahead, cache = prompt.truth.ahead, prompt.cache
    arrays = {"ids": np.asarray(prompt.ids), "future.tokens": _n(ahead.tokens[0]), "future.valid": _n(ahead.valid[0]), "layers": np.array(cache.geometry.kv_layers)}
    for d, found in prompt.draws.items():
        arrays |= {f"draw.{d}.{name}": _n(getattr(found, name)[0]) for name in ("tokens", "valid", "logq")}
        arrays |= {f"queries.{layer}.draw.{d}": _n(found.queries[layer][0]) for layer in layers}
    for layer in layers:
        arrays |= {f"queries.{layer}.window": _n(cache.layers[layer].queries[0]), f"queries.{layer}.future": _n(ahead.queries[layer][0])}
    kept = ranked.kept(budget)
    for i, o in enumerate(ranked.orders):
        key = f"{o.arm.name}.{o.arm.draw}"
        arrays |= {f"score.{key}": _n(o.score[:, 0]).astype(np.float32), f"kept.{key}": np.packbits(_n(kept[:, i]), axis=-1)}
    return Pieces(arrays)


def size(n: int, model, arms: int, draws: int, particles: int, horizon: int, window: int, future: int, layers: int) -> int:
    """Bytes of a prompt's piece, about, for float32 queries."""
    g = model.geometry
    queries = layers * g.n_q * g.d_head * 4 * (window + future + draws * particles * horizon)
    return arms * len(g.kv_layers) * g.n_kv * (4 * n + n // 8 + 1) + queries + 8 * n + draws * particles * horizon * 17 + 400 * (arms * 2 + layers * (draws + 2) + 10)


def _n(x) -> np.ndarray:
    return (x.float() if str(x.dtype) == "torch.bfloat16" else x).detach().cpu().numpy()
