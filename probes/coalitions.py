"""What each head or layer band adds to recalling a fact, which need each other, and which smallest sets are enough (after Random Attention sec. 5.2).

The players of a game hold the planted fact or lose it; a coalition's worth is recall R where exactly its players hold it. Shapley
values, interactions and the rest: kvprobe/coalitions.py. All are linear in log p, so they are ratios of sums as R is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import coalitions as games
from kvprobe import head_sets, head_stories, head_tables, metrics, places, planting, stats
from kvprobe.head_sets import HEADS, HeadSets, Hold
from kvprobe.head_tables import DELETED, KEPT

if TYPE_CHECKING:
    import pandas as pd

GAMES = ("heads", "bands", "grid")


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the coalitions probe."""

    games: str = "heads,bands"
    """who plays: heads (each in every layer), bands (each with all heads), grid (each head of each band); several games share their ends"""
    bands: int = 6
    """runs of neighbouring layers that the layers are cut into"""
    exact: int = 7
    """games of more players than this are sampled"""
    orders: int = 32
    """random orders of players in a sampled game, every other one its predecessor's reverse; the interval over them needs 8"""
    enough: float = 0.9
    """share of the worth of all players from which on a set is enough"""
    rounds: str = "3"
    """rounds before the value"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(planting.rounds_of(self.rounds)) > 1:
            raise ValueError(f"rounds={self.rounds!r}: a game is played at one distance, run it once for each")
        if min(self.bands, self.exact) < 1:
            raise ValueError(f"bands={self.bands} and exact={self.exact} must be at least 1")
        if not 0 < self.enough <= 1:
            raise ValueError(f"enough={self.enough} must be above 0 and at most 1")
        places.words(self.games, GAMES, "games")
        games.orders(2, self.orders, self.seed)


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=64, buffer=16, instances=3, batch_size=3, pre=8, query=60, box=24, rounds="4", games="heads,bands,grid", bands=2, exact=3, orders=4, threads=1),
    "demo": CONFIG(instances=16, batch_size=16, threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, query=40, rounds="15", instances=250, games="heads,bands,grid", bands=4, exact=8, orders=24),
}


@dataclass(frozen=True)
class Game:
    """players: who may hold the fact. order: the sampled orders [orders, p], None where all coalitions are played."""

    name: str
    players: tuple[places.Place, ...]
    order: np.ndarray | None = None

    @property
    def coalitions(self) -> list[int]:
        """Every coalition that is played, none and all included. Sampled: also each player alone and all others without it."""
        p = len(self.players)
        if self.order is None:
            return list(range(1 << p))
        return sorted({*games.needed(self.order, pairs=True), *(1 << i for i in range(p)), *((1 << p) - 1 ^ 1 << i for i in range(p))})

    def case(self, coalition: int) -> str:
        """The name of the case that plays a coalition."""
        if coalition in (0, (1 << len(self.players)) - 1):
            return KEPT if coalition else DELETED
        return f"{self.name} {'+'.join(map(str, games.members(coalition)))}"

    def sites(self, coalition: int) -> frozenset[tuple[int, int]]:
        return frozenset().union(*(self.players[i].sites for i in games.members(coalition)))


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model)


def games_of(config: CONFIG, geometry) -> list[Game]:
    """Raises ValueError for more bands than layers, and for a game of one player."""
    out = []
    for name in places.words(config.games, GAMES, "games"):
        players = tuple(places.expand(name, geometry, config.bands))
        if len(players) < 2:
            raise ValueError(f"games={config.games!r}: {name} has {len(players)} player in this model, a game needs 2")
        out.append(Game(name, players, None if len(players) <= config.exact else games.orders(len(players), config.orders, config.seed)))
    return out


class Session(HeadSets):
    """Every coalition of every game on every script."""

    def __init__(self, config: CONFIG, model):
        self.games = games_of(config, model.geometry)
        rules = {g.case(s): (Hold(g.sites(s)),) for g in self.games for s in g.coalitions}
        rules = {name: holds for name, holds in rules.items() if name not in (KEPT, DELETED)}
        super().__init__(config, model, head_stories.stories(config, model.tokenizer), head_sets.cases(config, model, rules))

    def facts(self) -> dict:
        told = {g.name: {"players": [p.name for p in g.players], "coalitions": len(g.coalitions), "orders": None if g.order is None else g.order.tolist()} for g in self.games}
        return super().facts() | {"games": told}

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"coalitions, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {self.config.rounds} rounds before the value, n={self.config.instances}"
        return Report(title, table, table.to_string(index=False), self.checks(rows, folder) + list(self._efficiency(rows, folder.manifest)), {"title": title})

    def _efficiency(self, rows, manifest):
        from kvprobe.runner import Check

        s = summary(rows, manifest)
        for name, part in s[s.quantity == "Shapley value"].groupby("game", sort=False):
            total = part.value.to_numpy().sum()
            yield Check(f"Shapley values of {name} add up to the worth of all", None if np.isnan(total) else bool(abs(total - 1) < 1e-6), f"{total:.6f}", "1")


# -- from rows to values --------------------------------------------------------------------------------------------------


def replay(manifest: dict) -> list[tuple[Game, list[str]]]:
    """The games of a run, without their sites, and the names of their players."""
    out = []
    for name, told in manifest["games"].items():
        order = None if told["orders"] is None else np.array(told["orders"])
        out.append((Game(name, tuple(places.Place(p, frozenset(), ()) for p in told["players"]), order), told["players"]))
    return out


def worths(rows: pd.DataFrame, game: Game) -> dict[int, np.ndarray]:
    """Gain in log p over the fact banned everywhere, per coalition and instance [n], in nats."""
    logp = head_tables.wide(rows, "logp")
    return {s: (logp[game.case(s)] - logp[DELETED]).to_numpy() for s in game.coalitions}


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Tidy: game, quantity, players (numbers, joined by +), names, n, value, low, high in units of R (1: the fact kept everywhere).

    Quantities: worth (R of every coalition played), alone, Shapley value, last (what all lose without the player), interaction,
    pooling, superadditivity, sufficient (R of each set of the smallest size that is enough). low, high: 95 % over instances;
    draw_low, draw_high of a sampled game: 95 % over the pairs of orders drawn (t), from 4 pairs on. Not defined (nan) where the endpoints are not told apart.
    """
    import pandas as pd

    return pd.DataFrame([dict(game=game.name, n=len(next(iter(worth.values())))) | row for game, _ in replay(manifest)
                         for worth in [worths(rows, game)] for row in _values(game, worth, manifest["settings"])])


def _values(game: Game, worth: dict[int, np.ndarray], settings: dict) -> list[dict]:
    p, seed = len(game.players), settings["seed"]
    everyone = (1 << p) - 1
    available = worth[everyone]
    told = stats.mean(available, seed)
    defined = metrics.recallable(told)

    def row(quantity: str, players, gain: np.ndarray, **more) -> dict:
        e = stats.ratio(gain, available, seed, clusters=range(len(gain))) if defined else stats.Estimate(np.nan, np.nan, np.nan, len(gain))
        return dict(quantity=quantity, players="+".join(map(str, players)), names=" + ".join(game.players[i].name for i in players),
                    value=e.value, low=e.low, high=e.high, draw_low=np.nan, draw_high=np.nan) | more

    out = [row("worth", games.members(s), w) for s, w in worth.items()]
    out += [row("alone", [i], worth[1 << i]) for i in range(p)]
    out += [row("Shapley value", [i], *found) if len(found) == 1 else row("Shapley value", [i], found[0], **found[1]) for i, found in enumerate(_shapley(game, worth, defined))]
    out += [row("last", [i], available - worth[everyone ^ 1 << i]) for i in range(p)]
    table = np.stack([worth[s] for s in range(1 << p)]) if game.order is None else None
    pairs = games.interaction(table) if table is not None else games.sampled_interaction(worth, game.order)
    out += [row("interaction", [i, j], pairs[i, j]) for i in range(p) for j in range(i + 1, p) if np.isfinite(pairs[i, j]).all()]
    out.append(row("pooling", [], available - sum(worth[1 << i] for i in range(p))))
    if table is not None:
        out.append(row("superadditivity", [], games.superadditivity(table)))
    return out + [row("sufficient", games.members(s), worth[s]) for s in (_sufficient(worth, settings["enough"]) if defined else [])]


def _shapley(game: Game, worth: dict[int, np.ndarray], defined: bool) -> list[tuple]:
    """Per player the gain [n], and for a sampled game the interval over orders."""
    if game.order is None:
        return [(x,) for x in games.shapley(np.stack([worth[s] for s in range(len(worth))]))]
    gains = games.additions(worth, game.order).mean(0)
    if not defined:
        return [(x,) for x in gains]
    available = worth[max(worth)].sum()
    drawn = games.sampled_shapley({s: w.sum() / available for s, w in worth.items()}, game.order)
    return [(x, dict(draw_low=e.low, draw_high=e.high)) for x, e in zip(gains, drawn)]


def _sufficient(worth: dict[int, np.ndarray], enough: float) -> list[int]:
    """The coalitions of the smallest size, of those played, that are enough."""
    found = games.sufficient({s: w.sum() for s, w in worth.items()}, enough)
    return [s for s in found if s.bit_count() == found[0].bit_count()]


SHOWN = {"alone": "R alone", "Shapley value": "Shapley value", "last": "R lost without it", "interaction": "interaction", "pooling": "pooling gain", "superadditivity": "superadditivity index",
         "sufficient": "R, smallest set that is enough"}


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed: everything but the worth of every coalition."""
    import pandas as pd

    s = summary(rows, manifest)
    s = s[s.quantity.isin(SHOWN)]

    def text(r, low, high):
        return "n/a" if np.isnan(r.value) else stats.Estimate(r.value, r[low], r[high], r["n"]).text()

    table = pd.DataFrame({"game": s.game, "quantity": s.quantity.map(SHOWN), "players": s.names, "n": s.n, "in units of R [95 % over instances]": [text(r, "low", "high") for _, r in s.iterrows()]})
    if s.draw_low.notna().any():
        table["[95 % over orders]"] = ["-" if np.isnan(r.draw_low) else text(r, "draw_low", "draw_high") for _, r in s.iterrows()]
    return table
