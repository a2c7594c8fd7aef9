"""Names for groups of sites: heads in every layer, bands of neighbouring layers, heads of a band, single sites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .types import Geometry

KINDS = ("all", "heads", "bands", "grid", "sites")


@dataclass(frozen=True)
class Place:
    """Some sites by name. band and head say where it lies in a map; None: in all of them."""

    name: str
    sites: frozenset[tuple[int, int]]
    layers: tuple[int, ...]
    head: int | None = None


def bands(geometry: Geometry, count: int) -> list[tuple[int, ...]]:
    """The evicted layers cut into `count` runs of neighbours, as equal as can be. Raises ValueError where there are fewer layers."""
    if not 1 <= count <= len(geometry.kv_layers):
        raise ValueError(f"bands={count} must be in 1..{len(geometry.kv_layers)}: this model evicts that many layers")
    return [tuple(map(int, part)) for part in np.array_split(geometry.kv_layers, count)]


def span_name(layers: Iterable[int]) -> str:
    """ "layers 5-9", "layer 3" """
    layers = tuple(layers)
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def of(geometry: Geometry, layers: Iterable[int] | None = None, head: int | None = None) -> Place:
    """The place of one KV head (None: all) in some layers (None: every evicted one). Raises ValueError for a site that does not exist."""
    inside = geometry.kv_layers if layers is None else tuple(layers)
    heads = range(geometry.n_kv) if head is None else [head]
    for layer in inside:
        geometry.check_site(layer, heads[0])
    where = [span_name(inside)] if layers is not None else []
    who = [f"head {head}"] if head is not None else []
    return Place(", ".join(where + who) or "all", frozenset((layer, h) for layer in inside for h in heads), inside, head)


def expand(kind: str, geometry: Geometry, count: int) -> list[Place]:
    """Places of a kind: all (one), heads, bands (`count` of them), grid (each head of each band), sites (each layer and head).

    Raises ValueError for another word, and for more bands than layers.
    """
    heads = range(geometry.n_kv)
    if kind == "all":
        return [of(geometry)]
    if kind == "heads":
        return [of(geometry, None, h) for h in heads]
    if kind == "bands":
        return [of(geometry, band) for band in bands(geometry, count)]
    if kind == "grid":
        return [of(geometry, band, h) for band in bands(geometry, count) for h in heads]
    if kind == "sites":
        return [of(geometry, [layer], h) for layer in geometry.kv_layers for h in heads]
    raise ValueError(f"{kind!r} is unknown; known: {', '.join(KINDS)}")


def words(text: str, known: Iterable[str], what: str) -> list[str]:
    """The words of a comma-separated list, each once. Raises ValueError for none or unknown ones."""
    found, known = list(dict.fromkeys(w.strip() for w in text.split(",") if w.strip())), list(known)
    bad = [w for w in found if w not in known]
    if bad or not found:
        raise ValueError(f"{what}={text!r}: {bad[0] + ' is unknown' if bad else 'nothing is named'}; known: {', '.join(known)}")
    return found
