"""How well a linear probe reads a fact's digits from each site's keys or values, at the digit and later, beside what pinning says the model uses.

That a state holds a digit in a linearly readable form does not say that the model reads it there. So the same run also plants facts, keeps
them in one place alone or everywhere but there (as site_map does), and puts recall R beside the probe's accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import head_sets, head_stories, head_tables, metrics, needles, places, planting, readout, stats
from kvprobe.comparing import NEVER
from kvprobe.head_sets import HEADS, HeadSets
from kvprobe.head_tables import DELETED, KEPT
from kvprobe.probes import site_map

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.runner import Check

STATES = ("keys", "values")
GROUPS = {"digit": "the digit itself", "next": "the token after the digit", "box": "the rest of the box", "after": "the 16 tokens after it", "query": "the query's last 16",
          "last": "the query's last token"}
EACH = ("digit", "next")
"""Groups in which every digit has a token of its own; in the others every token is asked for every digit."""
NEAR = 16
"""Tokens after the box, and at the end of the query, that are read."""
ALL = -1
"""Stands for the mean over digits."""


@dataclass(frozen=True)
class CONFIG(HEADS):
    """Settings of the linear readout; those of head sets (keep, buffer, rounds, instances, ...) are of its pinning part."""

    readings: int = 256
    """short texts whose states are read, one prefill each"""
    read_pre: int = 8
    """filler between stub and box in a short text [tokens]"""
    folds: int = 5
    """parts of the cross-validation"""
    ridge: float = 30.0
    """penalty of the ridge classifier, on standardised states"""
    logistic_layers: int = 3
    """layers, spread evenly, that are read by logistic regression too, at the last token of each group; 0: none"""
    read_batch: int = 16
    """short texts of one forward"""
    bands: int = 6
    """runs of neighbouring layers whose heads keep or lose the fact in the pinning part"""
    rounds: str = "3"
    """rounds before the value in the pinning part"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(planting.rounds_of(self.rounds)) > 1:
            raise ValueError(f"rounds={self.rounds!r}: the pinning part is of one distance")
        if min(self.read_pre, self.logistic_layers) < 0 or min(self.read_batch, self.bands) < 1 or not 0 < self.ridge < float("inf"):
            raise ValueError("read_pre and logistic_layers must not be negative, read_batch and bands at least 1, ridge above 0 and finite")
        if self.folds < 2 or self.readings < 4 * self.folds:
            raise ValueError(f"folds={self.folds} must be at least 2, readings={self.readings} at least 4 per fold")

    @property
    def reading(self) -> needles.Layout:
        return needles.Layout(pre=self.read_pre, box=self.box, query=self.query, age=self.box + NEAR + self.query, second_box=False)


PRESETS = {
    "smoke": CONFIG(model="tiny", keep=64, buffer=16, instances=3, batch_size=3, pre=8, query=60, box=24, rounds="4", bands=1, readings=24, folds=2, logistic_layers=1, threads=1),
    "demo": CONFIG(instances=16, batch_size=16, query=16, threads=1),
    "paper": CONFIG(keep=1024, buffer=64, pre=448, query=40, rounds="15", instances=250, readings=2000, logistic_layers=6),
}


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
    return Session(config, model)


# -- the session ----------------------------------------------------------------------------------------------------------


class Session:
    """First the pinning part's batches, then one batch of fits per layer; the states are read once per process."""

    def __init__(self, config: CONFIG, model):
        g = model.geometry
        self.config, self.model = config, model
        whole, parts = (site_map.rules(g, places.expand(kind, g, config.bands)) for kind in ("heads", "grid"))
        rules = whole | {name: holds for name, holds in parts.items() if name.startswith(site_map.WITHOUT)}
        self.pinning = HeadSets(config, model, head_stories.stories(config, model.tokenizer), head_sets.cases(config, model, rules))
        filler = needles.Filler(config.filler, model.tokenizer)
        self.texts = needles.build(model.tokenizer, filler, config.reading, range(config.readings), config.seed + 1)
        check_spans(self.texts)
        s = self.texts[0]
        a, z = s.value_in_box
        self.columns = {"digit": range(a, z), "next": range(a + 1, z + 1), "box": range(s.value_in_box[1], s.box[1]), "after": range(s.box[1], s.box[1] + NEAR),
                        "query": range(s.answer[0] - min(NEAR, config.query), s.answer[0]), "last": range(s.answer[0] - 1, s.answer[0])}
        self.labels = np.stack([t.ids[slice(*t.value_in_box)] for t in self.texts])  # [n, digit]
        self.chance = readout.chance(self.labels)
        if min(map(len, self.columns.values())) < 1:
            raise ValueError(f"box={config.box} leaves no token behind the value: the rest of the box cannot be read")
        if model.context is not None and len(s.ids) > model.context:
            raise ValueError(f"a short text takes {len(s.ids)} tokens, {model.name} has a context of {model.context}")
        self._states: dict[str, np.ndarray] | None = None

    @property
    def n_batches(self) -> int:
        return self.pinning.n_batches + len(self.model.geometry.kv_layers)

    @property
    def bytes_needed(self) -> int:
        """Rough size of the folder: the pinning part's and 250 bytes a row."""
        g = self.model.geometry
        return self.pinning.bytes_needed + 250 * 2 * len(STATES) * len(GROUPS) * self.labels.shape[1] * len(g.kv_layers) * g.n_kv * 2

    def tokens(self, batch: int) -> int:
        """Model tokens of a batch; the short texts count where they are read."""
        if batch < self.pinning.n_batches:
            return self.pinning.tokens(batch)
        return self.config.readings * (self.texts[0].answer[0]) if batch == self.pinning.n_batches else 0

    def facts(self) -> dict:
        s = self.texts[0]
        told = {"tokens": s.answer[0], "box": s.box, "value_in_box": s.value_in_box, "groups": {k: [c[0], c[-1] + 1] for k, c in self.columns.items()},
                "hash": _hash(self.texts)}
        return self.pinning.facts() | {"readings": told, "bands": [list(b) for b in places.bands(self.model.geometry, self.config.bands)]}

    def compute(self, batch: int, rows: Callable, tick):
        """Rows of one batch: a pinning batch, or the fits of one layer."""
        if batch < self.pinning.n_batches:
            return self.pinning.compute(batch, rows, tick)
        if self._states is None:
            self._states = self.read(tick)
        return self._fits(batch - self.pinning.n_batches), None, []

    def read(self, tick) -> dict[str, np.ndarray]:
        """keys, values [layer, head, column, n, d] of all short texts, columns from the value's first token to the last before the answer."""
        import torch

        from kvprobe import engine, registry
        from kvprobe.eviction_cache import EvictionCache

        first, stop, g = self.columns["digit"][0], self.texts[0].answer[0], self.model.geometry
        found = {k: np.empty((len(g.kv_layers), g.n_kv, stop - first, len(self.texts), g.d_head), dtype=np.float32) for k in STATES}
        for i in range(0, len(self.texts), self.config.read_batch):
            some = self.texts[i : i + self.config.read_batch]
            ids = torch.as_tensor(np.stack([t.ids[:stop] for t in some]), device=self.model.device)
            cache = EvictionCache(self.model.model.config, g, NEVER, registry.make_policy("random"))
            engine.force(self.model, cache, ids, tick=tick)
            for k in STATES:
                for row, layer in enumerate(g.kv_layers):
                    found[k][row, :, :, i : i + len(some)] = getattr(cache.layers[layer], k)[:, :, first:].permute(1, 2, 0, 3).float().cpu().numpy()
        return found

    def _fits(self, row: int) -> list[dict]:
        c, layer = self.config, self.model.geometry.kv_layers[row]
        folds = readout.folds_of(len(self.texts), c.folds, c.seed)
        mixed = np.random.default_rng([c.seed, 22]).permutation(len(self.texts))
        both = np.concatenate([self.labels, self.labels[mixed]], axis=1)  # the same fits answer for shuffled labels
        deep = len(self.model.geometry.kv_layers)
        by_logistic = {int(x) for x in np.linspace(0, deep - 1, c.logistic_layers).round()} if c.logistic_layers else set()
        out = []
        for k in STATES:
            for head in range(self.model.geometry.n_kv):
                states = self._states[k][row, head]
                base = dict(layer=layer, head=head, state=k)
                out += self._group_rows(base | dict(method="ridge"), lambda x, y: readout.ridge_hits(x, y, folds, c.ridge), states, both, every=True)
                if row in by_logistic:
                    out += self._group_rows(base | dict(method="logistic"), lambda x, y: readout.logistic_hits(x, y, folds), states, self.labels, every=False)
        return out

    def _group_rows(self, base: dict, fit: Callable, states: np.ndarray, labels: np.ndarray, every: bool) -> list[dict]:
        """Accuracy per group of tokens and digit, the mean over the group's tokens; one fit per token. every: all tokens of a group that is no digit's own, else the last."""
        digits, first, out = self.labels.shape[1], self.columns["digit"][0], []
        for group, columns in self.columns.items():
            if group == "query" and not every:
                continue  # its last token is a group of its own
            if group in EACH:
                hits = np.concatenate([fit(states[columns[t % digits] - first], labels[:, t, None]) for t in range(labels.shape[1])], axis=1).astype(float)
            else:
                hits = np.mean([fit(states[x - first], labels) for x in (columns if every else columns[-1:])], axis=0)
            for name, part in (("true", hits[:, :digits]), ("shuffled", hits[:, digits:])):
                for digit in range(ALL, part.shape[1]) if part.size else ():
                    mine = part.mean(1) if digit == ALL else part[:, digit]
                    e = stats.mean(mine, self.config.seed, clusters=range(len(mine)))
                    out.append(base | dict(group=group, digit=digit, labels=name, n=e.n, metric="accuracy", value=e.value, low=e.low, high=e.high, unit="fraction",
                                           chance=float(self.chance.mean() if digit == ALL else self.chance[digit])))
        return out

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"linear readout, {self.model.name}, n={len(self.texts)} short texts; pinned: n={self.config.instances}, K={self.config.keep}, r={self.config.buffer}, {self.config.rounds} rounds"
        s = summary(rows, folder.manifest)
        shuffled = s[(s.method == "ridge") & (s.labels == "shuffled")]
        checks = [shuffled_check(shuffled.groupby(["state", "group"]).accuracy.mean(), self.labels),
                  *self.pinning.checks(rows[rows["case"].notna()], folder)]
        return Report(title, table, table.to_string(index=False), checks, {"title": title})


def shuffled_check(accuracy: pd.Series, labels: np.ndarray) -> Check:
    """Accuracies on shuffled labels, per state and group, against what answers unrelated to the states get, two-sided.

    The tolerance is 3 standard errors of one site: the mean over sites, which share texts and labels, varies by no more.
    """
    from kvprobe.runner import Check

    right, error = readout.unrelated(labels, labels.shape[1])
    off = accuracy - right
    worst = off.loc[off.abs().idxmax()]
    return Check("shuffled labels are read as often as answers unrelated to the states are right (sum of p^2)", bool(abs(worst) <= 3 * error),
                 f"largest deviation {worst:+.3f} from {right:.3f} over states and groups", f"within 3 standard errors, {3 * error:.3f}")


def check_spans(texts) -> None:
    """Every text is read at the same columns. Raises ValueError where one has its value, box or answer elsewhere than the first."""
    first = texts[0]
    for i, t in enumerate(texts):
        for what, mine, its in (("value", t.value_in_box, first.value_in_box), ("box", t.box, first.box), ("answer", t.answer, first.answer)):
            if tuple(mine) != tuple(its):
                raise ValueError(f"the {what} of short text {i} (variable {t.variable!r}) stands at tokens {mine[0]}..{mine[1] - 1}, that of text 0 (variable {first.variable!r}) "
                                 f"at {its[0]}..{its[1] - 1}: this tokenizer cuts variables or values into different numbers of tokens, and one set of columns cannot read both")


def _hash(texts) -> str:
    import hashlib

    return hashlib.sha256("".join(t.sha256 for t in texts).encode()).hexdigest()[:16]


# -- from rows to values --------------------------------------------------------------------------------------------------


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Accuracy per method, labels, state, group, layer and head: the mean over digits with its interval over texts, and chance."""
    table = rows[(rows.metric == "accuracy") & (rows.digit == ALL)].rename(columns={"value": "accuracy"})
    columns = ["method", "labels", "state", "group", "layer", "head", "accuracy", "low", "high", "chance", "n"]
    return table[columns].astype({"layer": int, "head": int, "n": int}).reset_index(drop=True)


def pinned(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Recall R gained (kept there alone) and lost (ablated there), as in site_map: per head in all layers, and lost per head of a band."""
    import pandas as pd

    logp, out, seed = head_tables.wide(rows[rows["case"].notna()], "logp"), [], manifest["settings"]["seed"]
    available = (logp[KEPT] - logp[DELETED]).to_numpy()
    told = stats.mean(available, seed)
    defined = metrics.recallable(told)
    every = [layer for band in manifest["bands"] for layer in band]
    for kind, band in [("head", every), *(("band", b) for b in manifest["bands"])]:
        for head in range(manifest["model"]["kv_heads"]):
            name = f"head {head}" if kind == "head" else f"{places.span_name(band)}, head {head}"
            gains = dict(lost=logp[KEPT] - logp[site_map.WITHOUT + name]) | (dict(gained=logp[site_map.ALONE + name] - logp[DELETED]) if kind == "head" else {})
            row = dict(kind=kind, first=band[0], last=band[-1], head=head, n=len(logp))
            for key, x in gains.items():
                e = stats.ratio(x, available, seed, clusters=range(len(x))) if defined else stats.Estimate(np.nan, np.nan, np.nan, len(x))
                row |= {key: e.value, f"{key}_low": e.low, f"{key}_high": e.high}
            out.append(row)
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per head and state: mean accuracy over layers, and the best layer's, for each group of tokens; beside it R gained and lost by pinning."""
    import pandas as pd

    s, use = summary(rows, manifest), pinned(rows, manifest)
    s = s[s.method == "ridge"]
    true, mixed = s[s.labels == "true"], s[s.labels == "shuffled"]
    out = []
    for (state, head), part in true.groupby(["state", "head"]):
        row = {"states": state, "KV head": head, "n": int(part.n.iloc[0])}
        for group in GROUPS:
            g = part[part.group == group]
            best = g.loc[g.accuracy.idxmax()]
            row[f"{GROUPS[group]}: mean (best layer)"] = f"{g.accuracy.mean():.2f} ({best.accuracy:.2f} in {best.layer})"
        first = rows[(rows.metric == "accuracy") & (rows.method == "ridge") & (rows.labels == "true") & (rows.group == "last") & (rows.digit == 0) & (rows.state == state) & (rows["head"] == head)]
        row["its first digit (best layer)"] = f"{first.value.max():.2f} in {int(first.layer[first.value.idxmax()])}"
        row["shuffled"] = f"{mixed[(mixed.state == state) & (mixed['head'] == head)].accuracy.mean():.2f}"
        row["chance"] = f"{part.chance.mean():.2f}"
        r = use[(use.kind == "head") & (use["head"] == head)].iloc[0]
        for key, title in (("gained", "R, kept in the head alone"), ("lost", "R lost without the head")):
            row[title] = "n/a" if np.isnan(r[key]) else stats.Estimate(r[key], r[f"{key}_low"], r[f"{key}_high"], r.n).text()
        out.append(row)
    return pd.DataFrame(out)
