"""An independent reference for eviction: a stock full cache whose evicted entries are hidden by a mask per KV head.

Written from docs/protocols.md alone; uses nothing of kvprobe but the raw number of a draw. Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvprobe import draws

Site = tuple[int, int, int]  # (layer, row, KV head)
_keep: dict[int, torch.Tensor] = {}  # layer -> bool [b hkv columns], what may be seen by the forward in progress
_seen: dict[int, dict] = {}  # layer -> what its attention was given and made


def _attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
    """Attention with everything written out: repeated heads, a causal mask and a mask per KV head."""
    layer = module.layer_idx
    if layer not in _keep:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    group, n, s = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    causal = torch.arange(s)[None, :] <= torch.arange(s - n, s)[:, None]
    visible = (_keep[layer][:, :, None, :] & causal).repeat_interleave(group, 1)
    logits = (query @ key.repeat_interleave(group, 1).transpose(2, 3)) * scaling
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # a hidden column's query may see nothing
    _seen[layer] = dict(query=query.clone(), key=key, weights=weights, scaling=scaling)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("oracle", _attention)
AttentionMaskInterface.register("oracle", sdpa_mask)


def survivors(entries: list[int], keep: int, buffer: int, score: dict[int, float], held: set[int], banned: set[int], free: bool) -> list[int]:
    """One round at one site, protocols 1: the newest `buffer` are no candidates, `keep` of the others stay."""
    newest = entries[len(entries) - buffer :]
    candidates = entries[: len(entries) - buffer]
    stay = keep + (len(held & set(candidates)) if free else 0)
    surplus = max(0, len(candidates) - stay)
    order = sorted((p for p in candidates if p not in held), key=lambda p: (p not in banned, 0.0 if p in banned else score[p], p))
    assert surplus <= len(order), "a test asks for more pins than fit"
    gone = set(order[:surplus])
    return [p for p in candidates if p not in gone] + newest


class Reference:
    """Steps a stock model over a full cache and hides what the rule `scores` evicts.

    scores(reference, layer, row, head, round, candidates) -> {position: score}. held and banned are sets of positions
    per site, given as functions of (layer, row, head, reference). Kept sets after each step are in `kept`.
    """

    def __init__(self, model, layers, heads: int, keep: int, buffer: int, scores: Callable, held=None, banned=None, free=False, rounds=True):
        self.model, self.layers, self.heads = model, tuple(layers), heads
        self.keep, self.buffer, self.scores, self.free, self.rounds = keep, buffer, scores, free, rounds
        self.held, self.banned = held or (lambda *_: set()), banned or (lambda *_: set())
        self.cache = DynamicCache(config=model.config)
        self.kept: dict[Site, list[int]] = {}
        self.history: list[tuple[int, int, dict]] = []  # (row, its length, its kept sets) after every round
        self.column: list[list[int]] = []  # row -> position -> column
        self.columns = 0
        self.closed = False
        self.mass: dict[int, np.ndarray] = {}  # layer -> [b hq columns], attention received so far
        self.queries: dict[int, list[np.ndarray]] = {}  # layer -> per column [b hq d]
        self.keys: dict[int, np.ndarray] = {}
        self.scaling = 1.0

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        """One forward; mask [b n] marks the real columns of this forward. Returns logits [b n vocabulary]."""
        b, n = ids.shape
        mask = torch.ones(b, n, dtype=torch.bool) if mask is None else mask.bool()
        self._enter(b, n, mask)
        _keep.clear(), _seen.clear()
        _keep.update({layer: self._visible(layer, b) for layer in self.layers})
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("oracle")
        logits = self.model(input_ids=ids, position_ids=self._position_ids(mask), attention_mask=self._mask(b), cache=self.cache, **kwargs).logits
        self.model.set_attn_implementation(before)
        self._observe(n)
        self._leave(b)
        return logits

    def _enter(self, b: int, n: int, mask: torch.Tensor) -> None:
        if not self.column:
            self.column = [[] for _ in range(b)]
            self.kept = {(layer, row, head): [] for layer in self.layers for row in range(b) for head in range(self.heads)}
        for row in range(b):
            for j in torch.nonzero(mask[row]).flatten().tolist():
                self.column[row].append(self.columns + j)
                for layer in self.layers:
                    for head in range(self.heads):
                        self.kept[layer, row, head].append(len(self.column[row]) - 1)
        self.columns += n
        if not hasattr(self, "prompt"):
            self.prompt = [len(c) for c in self.column]

    def _mask(self, b: int) -> torch.Tensor:
        mask = torch.zeros(b, self.columns, dtype=torch.long)
        for row, columns in enumerate(self.column):
            mask[row, columns] = 1
        return mask

    def _position_ids(self, mask: torch.Tensor) -> torch.Tensor:
        start = torch.tensor([len(c) for c in self.column])[:, None] - mask.sum(1, keepdim=True)
        return (start + mask.cumsum(1) - 1).clamp(min=0)

    def _visible(self, layer: int, b: int) -> torch.Tensor:
        visible = torch.zeros(b, self.heads, self.columns, dtype=torch.bool)
        for row in range(b):
            for head in range(self.heads):
                visible[row, head, [self.column[row][p] for p in self.kept[layer, row, head]]] = True
        return visible

    def _observe(self, n: int) -> None:
        for layer, seen in _seen.items():
            weights = seen["weights"].double().numpy()
            real = self._mask(len(self.column)).numpy()[:, None, -n:, None]
            mass = (weights * real).sum(2)
            if layer in self.mass:
                mass[..., : self.mass[layer].shape[-1]] += self.mass[layer]
            self.mass[layer] = mass
            self.keys[layer] = seen["key"].double().numpy()
            self.queries.setdefault(layer, []).extend(seen["query"].double().numpy().transpose(2, 0, 1, 3))
            self.scaling = seen["scaling"]

    def _due(self, row: int) -> bool:
        if not self.rounds:  # prompt end: once, after the first forward
            return not self.closed
        sites = [s for s in self.kept if s[1] == row]
        return any(len(self.kept[s]) - self._free(s) >= self.keep + 2 * self.buffer for s in sites)

    def _free(self, site: Site) -> int:
        old = set(self.kept[site][: len(self.kept[site]) - self.buffer])
        return len(self.held(*site, self) & old) if self.free else 0

    def _leave(self, b: int) -> None:
        for row in range(b):
            if not self._due(row):
                continue
            number = sum(r == row for r, _, _ in self.history)
            for site in [s for s in self.kept if s[1] == row]:
                entries = self.kept[site]
                candidates = entries[: len(entries) - self.buffer]
                score = self.scores(self, *site, number, candidates)
                self.kept[site] = survivors(entries, self.keep, self.buffer, score, self.held(*site, self), self.banned(*site, self), self.free)
            self.history.append((row, len(self.column[row]), {s: list(v) for s, v in self.kept.items() if s[1] == row}))
        self.closed = True

    def keys_at(self, layer: int, row: int, head: int, positions: list[int]) -> np.ndarray:
        return self.keys[layer][row, head, [self.column[row][p] for p in positions]]

    def newest_queries(self, layer: int, row: int, count: int) -> np.ndarray:
        """[w hq d]: the row's newest real queries."""
        return np.stack([self.queries[layer][c][row] for c in self.column[row][-count:]])


def raw_draws(seed: int, instance: int, layer: int, head: int, number: int, counters: list[int]) -> list[float]:
    """The numbers of one site in one round, from scalars, so that no axis can be mixed up."""
    parts = [torch.tensor(x) for x in (instance, layer, head, number)]
    return draws.uniform(draws.key(seed, *parts), torch.tensor(counters)).tolist()


def random_scores(seed: int, instances):
    """The `random` policy, a draw per (seed, instance, layer, KV head, round, position)."""

    def scores(reference, layer, row, head, number, candidates):
        return dict(zip(candidates, raw_draws(seed, instances[row], layer, head, number, candidates)))

    return scores


def cache_sets(cache) -> dict[Site, list[int]]:
    """What a kvprobe cache says it holds, in the reference's terms."""
    positions = cache.positions
    layers = cache.geometry.kv_layers
    return {(layers[i], b, h): [p for p in positions[i, b, h].tolist() if p >= 0]
            for i in range(positions.shape[0]) for b in range(positions.shape[1]) for h in range(positions.shape[2])}
