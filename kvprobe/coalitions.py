"""Cooperative games: what each player adds to a coalition's worth, which pairs need each other, which sets are enough.

A game on p players is its worths [2^p, ...], indexed by bit mask (bit i: player i takes part); further axes are games of
their own (instances). Only worth over the empty coalition counts: v(S) below is worth[S] - worth[0]. All values but the
sufficient sets are linear in the worth, so that they pool over instances as recall R does, as ratios of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from math import comb

import numpy as np

from kvprobe.stats import Estimate, t_mean


def mask(players: Iterable[int]) -> int:
    """The number of a coalition: (0, 2) -> 5."""
    return sum(1 << i for i in set(players))


def members(coalition: int) -> tuple[int, ...]:
    """The players of a coalition: 5 -> (0, 2)."""
    return tuple(i for i in range(coalition.bit_length()) if coalition >> i & 1)


def players_of(worth: np.ndarray) -> int:
    """p of worths [2^p, ...]. Raises ValueError for another length."""
    p = len(worth).bit_length() - 1
    if len(worth) != 1 << p or p < 1:
        raise ValueError(f"{len(worth)} worths are not those of all coalitions: p players have 2^p, from 2 on")
    return p


def _over_empty(worth: np.ndarray) -> tuple[np.ndarray, int]:
    worth = np.asarray(worth, dtype=float)
    p = players_of(worth)
    if not np.isfinite(worth).all():
        raise ValueError("every worth must be a finite number")
    return worth - worth[0], p


# -- exact ------------------------------------------------------------------------------------------------------------


def shapley(worth: np.ndarray) -> np.ndarray:
    """Shapley values [p, ...]: a player's mean addition over all orders in which players may come (Shapley 1953).

    phi_i = sum over S without i of |S|! (p - |S| - 1)! / p! * (v(S + i) - v(S)). They add up to v(all). Worked example:
    v(0) = 1, v(1) = 0, v(01) = 3: phi_0 = (1 + 3) / 2 = 2, phi_1 = (0 + 2) / 2 = 1.
    """
    v, p = _over_empty(worth)
    sets = np.arange(1 << p)
    sizes = np.bitwise_count(sets)
    out = []
    for i in range(p):
        without = sets[sets >> i & 1 == 0]
        weight = np.array([1 / (p * comb(p - 1, s)) for s in sizes[without]])
        out.append(np.tensordot(weight, v[without | 1 << i] - v[without], 1))
    return np.stack(out)


def interaction(worth: np.ndarray) -> np.ndarray:
    """Shapley interaction indices [p, p, ...], symmetric, nan on the diagonal (Grabisch and Roubens 1999).

    I_ij = sum over S without i, j of |S|! (p - |S| - 2)! / (p - 1)! * (v(S + ij) - v(S + i) - v(S + j) + v(S)): above 0 where
    the two are worth more together than apart, below 0 where one stands in for the other. Worked example: v(0) = 1,
    v(1) = 0, v(01) = 3: I_01 = 3 - 1 - 0 = 2.
    """
    v, p = _over_empty(worth)
    sets = np.arange(1 << p)
    sizes = np.bitwise_count(sets)
    out = np.full((p, p, *v.shape[1:]), np.nan)
    for i, j in combinations(range(p), 2):
        s = sets[(sets >> i & 1 == 0) & (sets >> j & 1 == 0)]
        weight = np.array([1 / ((p - 1) * comb(p - 2, n)) for n in sizes[s]])
        out[i, j] = out[j, i] = np.tensordot(weight, _together(v, s, i, j), 1)
    return out


def _together(v, s, i: int, j: int):
    """What i and j add to S together beyond what each adds alone; v takes an array of coalitions."""
    return v[s | 1 << i | 1 << j] - v[s | 1 << i] - v[s | 1 << j] + v[s]


def disjoint_pairs(p: int) -> Iterator[tuple[int, int]]:
    """All unordered pairs of disjoint coalitions that are not empty: (3^p - 2^(p+1) + 1) / 2 of them."""
    for s in range(1, 1 << p):
        rest = ((1 << p) - 1) & ~s
        t = rest
        while t > s:  # every subset t of the rest, each pair once
            yield s, t
            t = (t - 1) & rest


def superadditivity(worth: np.ndarray) -> np.ndarray:
    """Superadditivity index, in units of the worth: the mean of v(S + T) - v(S) - v(T) over all pairs of disjoint coalitions.

    Divide it by v(all) for a share: 0 for an additive game, above 0 where coalitions gain by joining, below 0 where they
    hold the same thing twice. Worked example: majority of three (v = 1 for two players or more): three pairs of single
    players gain 1, a player and the other two gain 0, mean 3/6 = 0.5.
    """
    v, p = _over_empty(worth)
    if p < 2:
        raise ValueError("superadditivity needs at least 2 players")
    s, t = np.array(list(disjoint_pairs(p))).T
    return (v[s | t] - v[s] - v[t]).mean(0)


def pooling(worth: np.ndarray) -> np.ndarray:
    """Pooling gain, in units of the worth: v(all) - sum of v(i), what no player has alone.

    Divide it by v(all): 0 for an additive game, 1 where every player alone is worthless, below 0 for redundant players.
    Worked example: v(0) = 1, v(1) = 0, v(01) = 3: 3 - 1 - 0 = 2, a share of 0.67.
    """
    v, p = _over_empty(worth)
    return v[-1] - sum(v[1 << i] for i in range(p))


def sufficient(worth: np.ndarray | Mapping[int, float], share: float = 0.9) -> list[int]:
    """Coalitions worth at least `share` of v(all) of which no player can be spared, smallest first; worths [2^p], v(all) > 0.

    Of a sampled game the coalitions at hand, none and all among them, by number: a player can be spared where the coalition without it is at
    hand and enough. Worked example: majority of three, share 1: (0, 1), (0, 2), (1, 2); of all three one can be spared.
    """
    if isinstance(worth, Mapping):
        v = {s: float(w) - float(worth[0]) for s, w in worth.items()}
    else:
        table, _ = _over_empty(worth)
        if table.ndim != 1:
            raise ValueError("sufficient sets are of one game: give worths [2^p], pooled over instances")
        v = dict(enumerate(table.tolist()))
    everyone = v[max(v)]
    if not everyone > 0:
        raise ValueError(f"all players together are worth {everyone:g} more than none: nothing can be enough of that")
    enough = {s for s, w in v.items() if w >= share * everyone}
    minimal = [s for s in enough if not any(s & ~(1 << i) in enough for i in members(s))]
    return sorted(minimal, key=lambda s: (s.bit_count(), members(s)))


# -- sampled ----------------------------------------------------------------------------------------------------------


def orders(p: int, count: int, seed: int) -> np.ndarray:
    """`count` random orders [count, p] in which players may come, two by two each other's reverse (which steadies the mean)."""
    if count < 4 or count % 2:
        raise ValueError(f"{count} orders: an even number from 4 on is needed, every order comes with its reverse")
    rng = np.random.default_rng([seed, p])
    half = np.stack([rng.permutation(p) for _ in range(count // 2)])
    return np.stack([half, half[:, ::-1]], axis=1).reshape(count, p)


def prefixes(order: np.ndarray) -> np.ndarray:
    """The coalitions [..., p + 1] that form as players come in the given orders [..., p], from none to all; Python's integers, for any p."""
    bits = _bits(order)
    return np.concatenate([np.zeros_like(bits[..., :1]), np.cumsum(bits, axis=-1)], axis=-1)


def _bits(order: np.ndarray) -> np.ndarray:
    """1 << player of every entry, dtype object: an int64 would overflow silently from 63 players on."""
    order = np.asarray(order)
    return np.array([1 << int(i) for i in order.ravel()], dtype=object).reshape(order.shape)


def needed(order: np.ndarray, pairs: bool = False) -> list[int]:
    """Coalitions whose worth the sampled values read, each once; pairs: for the sampled interactions too."""
    chains = prefixes(order)
    found = set(chains.ravel().tolist())
    if pairs:
        found |= set((chains[:, :-2] | _bits(order[:, 1:])).ravel().tolist())  # the next but one comes first
    return sorted(found)


def additions(worth: Mapping[int, np.ndarray] | np.ndarray, order: np.ndarray) -> np.ndarray:
    """What each player added in each order [orders, p, ...]; its mean over orders estimates `shapley` without bias."""
    chains, out = prefixes(order), []
    for chain, came in zip(chains, order):
        v = np.stack([np.asarray(worth[int(s)], dtype=float) for s in chain])
        out.append(np.diff(v, axis=0)[np.argsort(came)])
    return np.stack(out)


def sampled_shapley(worth: Mapping[int, float] | np.ndarray, order: np.ndarray) -> list[Estimate]:
    """Shapley values of one game from sampled orders, with 95 % t intervals over pairs of an order and its reverse; NaN below 4 pairs.

    A percentile bootstrap of the few pairs there are is too narrow.
    """
    added = additions(worth, order)
    return [t_mean(x) for x in added.reshape(-1, 2, added.shape[1]).mean(1).T]


def sampled_interaction(worth: Mapping[int, np.ndarray] | np.ndarray, order: np.ndarray) -> np.ndarray:
    """Interaction indices [p, p, ...] from neighbours in sampled orders; nan for pairs that were never neighbours.

    In a random order the players before two neighbours are a set drawn with the weights of `interaction`, so the mean is
    unbiased. Reads v(S), v(S + i), v(S + j), v(S + ij): `needed(..., pairs=True)`.
    """
    p, found = order.shape[1], {}
    for came, chain in zip(order, prefixes(order)):
        for k in range(p - 1):
            i, j, s = int(came[k]), int(came[k + 1]), int(chain[k])
            found.setdefault((min(i, j), max(i, j)), []).append(_together(_Lookup(worth), s, i, j))
    shape = np.shape(next(iter(found.values()))[0])
    out = np.full((p, p, *shape), np.nan)
    for (i, j), values in found.items():
        out[i, j] = out[j, i] = np.mean(values, axis=0)
    return out


class _Lookup:
    """Worths by coalition number, of a table or of the coalitions at hand."""

    def __init__(self, worth):
        self.worth = worth

    def __getitem__(self, coalition: int) -> np.ndarray:
        return np.asarray(self.worth[int(coalition)], dtype=float)
