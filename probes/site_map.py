"""Where a fact is kept: each KV head of each layer band holds it alone, then loses it alone; single sites inside the strongest bands (after Random Attention sec. 5.2).

Per place (some sites): recall gained, R where the fact is kept there and banned everywhere else, and recall lost, 1 - R where it is
banned there and kept everywhere else. A copy that matters only with others gains nothing; one that others replace loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import head_sets, head_stories, head_tables, metrics, places, planting, stats
from kvprobe.head_sets import HEADS, Case, HeadSets, Hold, Together, together
from kvprobe.head_tables import DELETED, KEPT
from kvprobe.places import Place

if TYPE_CHECKING:
    import pandas as pd

ALONE, WITHOUT = "alone in ", "everywhere but "


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the site map."""

    bands: int = 6
    """runs of neighbouring layers that the layers are cut into; each KV head of each is a place"""
    strongest: int = 2
    """how many bands are searched site by site, those in which heads gain and lose most; 0: none, a number of all bands or more: every site"""
    rounds: str = "3"
    """rounds before the value"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(planting.rounds_of(self.rounds)) > 1:
            raise ValueError(f"rounds={self.rounds!r}: a map is of one distance, run it once for each")
        if self.bands < 1 or self.strongest < 0:
            raise ValueError(f"bands={self.bands} must be at least 1, strongest={self.strongest} not negative")
        if self.eviction_seeds > 1:
            raise ValueError(f"eviction_seeds={self.eviction_seeds}: the map takes one, its spread is over instances")


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=64, buffer=16, instances=3, batch_size=3, pre=8, query=60, box=24, rounds="4", bands=1, strongest=1, threads=1),
    "demo": CONFIG(instances=16, batch_size=16, threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, query=40, rounds="15", instances=250, strongest=1000),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model)


def rules(geometry, where: list[Place]) -> dict[str, tuple[Hold, ...]]:
    """Two cases per place, by name: kept there alone, kept everywhere else."""
    every = places.of(geometry).sites
    return {name: (Hold(sites),) for p in where for name, sites in ((ALONE + p.name, p.sites), (WITHOUT + p.name, every - p.sites))}


class Session(HeadSets):
    """Bands first, on all scripts; then the sites of the bands that their rows choose."""

    def __init__(self, config: CONFIG, model):
        g = self.geometry = model.geometry
        self.bands = places.bands(g, config.bands)
        self.grid = places.expand("grid", g, config.bands)
        super().__init__(config, model, head_stories.stories(config, model.tokenizer), head_sets.cases(config, model, rules(g, self.grid)))
        longest = sorted(map(len, self.bands), reverse=True)[: config.strongest]
        most = 2 * g.n_kv * sum(longest)  # bands differ by a layer at most: the last batch may stay unused
        cuts = list(dict.fromkeys(cut for _, cut in self.batches))
        self.batches += [(k, cut) for cut in cuts for k in range(-(-most // self._size(cut)))]
        self.chosen: list[Case] | None = None

    def _size(self, cut: range) -> int:
        """Cases of one batch."""
        return max(1, self.config.rows_per_batch // len(cut))

    def tokens(self, batch: int) -> int:
        group, cut = self.batches[batch]
        if isinstance(group, Together):
            return super().tokens(batch)
        s = self.stories[0]
        return self._size(cut) * len(cut) * (len(s.ids) - self._shared_length(s) + sum(len(a.query) + len(a.value) for a in s.asks))

    def compute(self, batch, rows, tick):
        group, cut = self.batches[batch]
        if not isinstance(group, Together):
            groups = together(self.site_cases(rows), self._size(cut))
            if group >= len(groups):
                return [dict(case="", draw=0, instance=-1, ask=self.stories[0].asks[0].name, metric="unused", value=0.0, unit="")], None, []
            self.batches[batch] = groups[group], cut
        return super().compute(batch, rows, tick)

    def site_cases(self, rows) -> list[Case]:
        """The cases of the single sites, once the bands' rows are there."""
        if self.chosen is None:
            bands = strongest(rows(), self.grid, self.bands, self.config.strongest)
            sites = [places.of(self.geometry, [layer], h) for band in bands for layer in band for h in range(self.geometry.n_kv)]
            fresh = {k: v for k, v in rules(self.geometry, sites).items() if (k, 0) not in self.by_member}  # a band of one layer is done
            self.chosen = [c for c in head_sets.cases(self.config, self.model, fresh, full=False) if c.case in fresh]
            self.by_member |= {(c.case, c.draw): c for c in self.chosen}
        return self.chosen

    def facts(self) -> dict:
        return super().facts() | {"bands": [list(b) for b in self.bands]}

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        self.site_cases(lambda: rows)
        table = report_table(rows, folder.manifest)
        title = f"site map, {self.model.name}, K={self.plan.keep}, r={self.plan.buffer}, {self.config.rounds} rounds before the value, n={self.config.instances}"
        return Report(title, table, table.to_string(index=False), self.checks(rows, folder), {"title": title})


def strongest(rows: pd.DataFrame, grid: list[Place], bands: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The bands in which the sum over heads of mean log p gained (kept alone) and lost (ablated) is largest, in the model's order."""
    logp = head_tables.wide(rows, "logp").mean()

    def strength(band) -> float:
        mine = [p.name for p in grid if p.layers == band]
        return sum(logp[ALONE + name] - logp[DELETED] + logp[KEPT] - logp[WITHOUT + name] for name in mine)

    return sorted(sorted(bands, key=strength, reverse=True)[:count])


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per place: kind (band or site), first and last layer, head, and what is gained and lost there in units of recall R.

    gained = sum(LP_alone - LP_deleted) / sum(LP_kept - LP_deleted); lost = sum(LP_kept - LP_without) / sum(LP_kept - LP_deleted), with
    95 % intervals over instances. *_sd: spread over instances, the standard deviation of LP_alone - LP_deleted (or LP_kept - LP_without)
    over the mean of LP_kept - LP_deleted. Worked example: deleted (-10, -8), kept (0, 0), alone (-8, -8): gained 2 / 18 = 0.11, sd 1.41 / 9
    = 0.16.
    """
    import pandas as pd

    logp, out, seed = head_tables.wide(rows, "logp"), [], manifest["settings"]["seed"]
    available = (logp[KEPT] - logp[DELETED]).to_numpy()
    told = stats.mean(available, seed)
    defined = metrics.recallable(told)
    for kind, layers, head in _places(manifest):
        name = f"{places.span_name(layers)}, head {head}"
        if ALONE + name not in logp:
            continue
        parts = dict(gained=(logp[ALONE + name] - logp[DELETED]).to_numpy(), lost=(logp[KEPT] - logp[WITHOUT + name]).to_numpy())
        row = dict(kind=kind, first=layers[0], last=layers[-1], head=head, place=name, n=len(logp))
        for key, x in parts.items():
            e = stats.ratio(x, available, seed, clusters=range(len(x))) if defined else stats.Estimate(np.nan, np.nan, np.nan, len(x))
            row |= {key: e.value, f"{key}_low": e.low, f"{key}_high": e.high, f"{key}_sd": x.std(ddof=1) / available.mean() if defined and len(x) > 1 else np.nan}
        out.append(row)
    return pd.DataFrame(out)


def _places(manifest: dict):
    heads = range(manifest["model"]["kv_heads"])
    bands = [tuple(b) for b in manifest["bands"]]
    yield from (("band", band, h) for band in bands for h in heads)
    yield from (("site", (layer,), h) for band in bands if len(band) > 1 for layer in band for h in heads)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    s = summary(rows, manifest)

    def text(r, key):
        if np.isnan(r[key]):
            return "n/a"
        told = stats.Estimate(r[key], r[f"{key}_low"], r[f"{key}_high"], r["n"]).text()
        return told if np.isnan(r[f"{key}_sd"]) else told + f", sd {r[f'{key}_sd']:.2f}"  # one instance has none

    return pd.DataFrame({"place": s.place, "n": s.n, "R gained, kept there alone [95 %]": [text(r, "gained") for _, r in s.iterrows()],
                         "R lost, ablated there [95 %]": [text(r, "lost") for _, r in s.iterrows()]})
