"""Conditions of a head-pinning probe: which sites (layer, KV head) keep a span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from .pins import Pin, SpanPin
from .types import Geometry

SETS = {"singles": 1, "pairs": 2, "triples": 3}
BEST = {"best-pairs": 2, "best-triples": 3}
HELP = "0, 1+2, all, kept, deleted, natural, full, singles, pairs, triples, subsets, best-pairs, best-triples"


@dataclass(frozen=True)
class Condition:
    """Which KV heads keep the span, in which layers; elsewhere it is banned.

    heads None: no pins at all ("natural": the policy decides). evicts False: the full cache ("full").
    """

    name: str
    heads: tuple[int, ...] | None
    layers: tuple[int, ...]
    evicts: bool = True

    @property
    def sites(self) -> frozenset[tuple[int, int]] | None:
        return None if self.heads is None else frozenset((layer, head) for layer in self.layers for head in self.heads)

    def pins(self, span: tuple[int, int]) -> tuple[Pin, ...]:
        return () if self.heads is None else (SpanPin(*span, self.sites, elsewhere="ban"),)


def parse_layers(text: str, geometry: Geometry) -> tuple[int, ...]:
    """ "all" or e.g. "0-9,12" -> layers whose cache can be evicted. Raises ValueError naming the valid range."""
    if text == "all":
        return geometry.kv_layers
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"layers {text!r}: {part!r} is no layer; write 'all' or numbers and ranges such as '0-9,12'")
        chosen |= set(range(int(first), int(last or first) + 1))
    for layer in sorted(chosen):
        geometry.check_site(layer, 0)
    if not chosen:
        raise ValueError(f"layers {text!r} names no layer")
    return tuple(sorted(chosen))


def parse(text: str, geometry: Geometry, layers: str = "all") -> tuple[list[Condition], dict[str, int]]:
    """Conditions named by a comma-separated list, without repeats, and the sizes of sets that a ranking must choose.

    kept, deleted and full are always there: recall and the checks need them.
    """
    inside = parse_layers(layers, geometry)
    words = [w.strip() for w in text.split(",") if w.strip()]
    best = {word: BEST[word] for word in words if word in BEST}
    for size in best.values():
        choose(size, geometry, inside)  # refuse sets that the model cannot have before anything runs
    plain = [word for word in words if word not in BEST]
    return unique(c for word in [*plain, "kept", "deleted", "full"] for c in _expand(word, geometry, inside)), best


def unique(found: Iterable[Condition]) -> list[Condition]:
    """In order of how much they hold, each set of sites once (all heads of all layers is "kept" by any name)."""
    first: dict[object, Condition] = {}
    for condition in found:
        first.setdefault((condition.sites, condition.evicts), condition)
    return sorted(first.values(), key=_order)


def _expand(word: str, geometry: Geometry, inside: tuple[int, ...]) -> list[Condition]:
    every = tuple(range(geometry.n_kv))
    if word == "natural":
        return [Condition("natural", None, inside)]
    if word == "full":
        return [Condition("full", None, inside, evicts=False)]
    if word == "kept":
        return [Condition("kept", every, geometry.kv_layers)]
    if word in ("deleted", "none"):
        return [Condition("deleted", (), inside)]
    if word == "subsets":
        return [c for size in every for c in choose(size + 1, geometry, inside)]
    if word in SETS:
        return choose(SETS[word], geometry, inside)
    heads = every if word == "all" else _heads(word, geometry)
    return [of_heads(heads, geometry, inside)]


def _heads(word: str, geometry: Geometry) -> tuple[int, ...]:
    parts = word.split("+")
    if not all(p.isdigit() for p in parts):
        raise ValueError(f"condition {word!r} is unknown; known: {HELP}")
    heads = tuple(sorted({int(p) for p in parts}))
    for head in heads:
        geometry.check_site(geometry.kv_layers[0], head)
    return heads


def choose(size: int, geometry: Geometry, inside: tuple[int, ...]) -> list[Condition]:
    """Every set of `size` KV heads. Raises ValueError when the model has fewer."""
    if size > geometry.n_kv:
        raise ValueError(f"sets of {size} KV heads: this model has {geometry.n_kv}")
    return [of_heads(heads, geometry, inside) for heads in combinations(range(geometry.n_kv), size)]


def of_heads(heads: Sequence[int], geometry: Geometry, inside: tuple[int, ...]) -> Condition:
    """The condition that keeps the span in `heads` of the layers `inside`."""
    if len(heads) == geometry.n_kv and inside == geometry.kv_layers:
        return Condition("kept", tuple(heads), inside)
    return Condition("+".join(map(str, heads)), tuple(heads), inside)


def _order(c: Condition) -> tuple:
    return (not c.evicts, c.heads is None, len(c.heads or ()) * len(c.layers), len(c.heads or ()), c.heads or ())
