"""Which heads' keys and which heads' values carry a fact: another text's states put into the box, and what the model then says (after Random Attention sec. 5.2).

Two scripts, host and donor, differ in the value only. The donor's post-RoPE keys, values or both of the box replace the host's in
chosen sites (same positions, so that they are copied as they are), and the model is asked. Nothing is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe import needles, places, stats
from kvprobe.comparing import NEVER

if TYPE_CHECKING:
    import pandas as pd

MODES = {"from_box": "everything after the box recomputed", "at_query": "only the finished cache changed before the query"}
WHATS = {"keys": ("keys",), "values": ("values",), "both": ("keys", "values")}
ROWS = 64  # rows of one forward at most: bounds memory


@dataclass(frozen=True)
class CONFIG:
    """Settings of the transplant probe."""

    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    modes: str = "from_box,at_query"
    """from_box (everything after the box is recomputed with the transplanted states), at_query (only the finished cache is changed before the query)"""
    what: str = "keys,values,both"
    """states that are transplanted: keys, values, both"""
    places: str = "all,heads,bands"
    """where: all, heads (each in every layer), bands (each with all heads), grid (each head of each band), sites (each layer and head)"""
    bands: int = 6
    """runs of neighbouring layers that the layers are cut into"""
    instances: int = 24
    """pairs of host and donor, each with its own filler, variable and values"""
    pre: int = 48
    """filler between stub and box [tokens]"""
    age: int = 96
    """from the start of the box to the start of the value [tokens]"""
    query: int = 24
    """room for the query, filled up with filler in front [tokens]"""
    filler: str = "builtin"
    """reasoning text: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    seed: int = 0
    """seed of scripts and bootstrap"""
    batch_size: int = 4
    """pairs per batch; each brings its conditions along as rows"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""

    def __post_init__(self) -> None:
        for name in ("instances", "batch_size", "bands"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.threads, self.seed) < 0:
            raise ValueError("threads and seed must not be negative")
        places.words(self.modes, MODES, "modes")
        places.words(self.what, WHATS, "what")
        places.words(self.places, places.KINDS, "places")
        if self.layout.post < 1:
            raise ValueError(f"age={self.age} leaves no token between box and query: the two take {self.layout.box + self.query}")

    @property
    def layout(self) -> needles.Layout:
        return needles.Layout(pre=self.pre, age=self.age, query=self.query, second_box=False)


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=4, batch_size=2, pre=8, age=96, query=60, bands=2, threads=1),
    "demo": CONFIG(instances=16, threads=1),
    "paper": CONFIG(instances=250, pre=448, age=1536, query=40, places="all,heads,bands,grid", batch_size=1),
}


@dataclass(frozen=True)
class Graft:
    """A condition: which states of which tokens go where. tokens: box, after (box end to query), or text (both)."""

    mode: str
    what: str
    place: places.Place
    tokens: str = "box"
    donor: bool = True

    @property
    def key(self) -> dict:
        return dict(mode=self.mode, what=self.what, place=self.place.name, tokens=self.tokens if self.donor else "own box")


@dataclass(frozen=True)
class Pair:
    """host: the script; donor_ids, donor_value: the same text with another value, different in every digit."""

    host: needles.Script
    donor_ids: np.ndarray
    donor_value: str

    @property
    def differing(self) -> np.ndarray:
        """Which tokens of the value differ."""
        return self.host.ids[slice(*self.host.answer)] != self.donor_ids[slice(*self.host.answer)]


def start(config: CONFIG, model) -> Session:
    """Build the scripts and refuse what cannot work, before anything is computed."""
    return Session(config, model)


def pairs(config: CONFIG, tokenizer) -> list[Pair]:
    """Hosts and their donors. Raises ValueError where a donor's value takes other tokens than the host's."""
    hosts = needles.build(tokenizer, needles.Filler(config.filler, tokenizer), config.layout, range(config.instances), config.seed)
    return [_pair(tokenizer, host, np.random.default_rng([config.seed, 9, host.instance])) for host in hosts]


def _pair(tokenizer, host: needles.Script, rng: np.random.Generator) -> Pair:
    text = tokenizer.decode(np.concatenate([host.ids[: host.box[0]], host.ids[host.value_in_box[1] : host.answer[0]]]).tolist())
    for _ in range(100):
        first = 5 + (int(host.value[0]) - 5 + rng.integers(1, 5)) % 5
        value = "".join(map(str, [first, *((int(d) + rng.integers(1, 10)) % 10 for d in host.value[1:])]))
        if needles.named(text, [value]) is None:
            break
    ids = host.ids.copy()
    for template, (a, z) in ((needles.FACT, host.value_in_box), (needles.QUERY + "{value}", host.answer)):
        whole, (start_, stop) = needles.locate(tokenizer, template.format(var=host.variable, value=value), value)
        if stop - start_ != z - a:
            raise ValueError(f"the values {host.value} and {value} take different numbers of tokens: host and donor could not be compared")
        ids[a:z] = whole[start_:stop]
    return Pair(host, ids, value)


class Session:
    """Every graft on every pair: all conditions of a mode are rows of one branch."""

    def __init__(self, config: CONFIG, model):
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} came without a tokenizer: planted facts need one")
        self.config, self.model = config, model
        if model.geometry.skipped:
            raise ValueError(f"{model.name} keeps other states than growing keys and values (layers {list(model.geometry.skipped)}): they would stay the host's")
        self.pairs = pairs(config, model.tokenizer)
        self.box, self.before = self.pairs[0].host.box, self.pairs[0].host.answer[0]
        self.query = self.before - config.query  # where the query's room begins
        longest = len(self.pairs[0].host.ids)
        if model.context is not None and longest > model.context:
            raise ValueError(f"the script takes {longest} tokens, {model.name} has a context of {model.context}")
        self.grafts = {mode: self._grafts(mode) for mode in places.words(config.modes, MODES, "modes")}
        self.batches = [range(i, min(i + config.batch_size, config.instances)) for i in range(0, config.instances, config.batch_size)]

    def _grafts(self, mode: str) -> list[Graft]:
        c, g = self.config, self.model.geometry
        where = [p for kind in places.words(c.places, places.KINDS, "places") for p in places.expand(kind, g, c.bands)]
        everywhere = places.of(g)
        main = [Graft(mode, what, place) for what in places.words(c.what, WHATS, "what") for place in where]
        controls = [Graft(mode, "both", everywhere), Graft(mode, "both", everywhere, donor=False)]
        if mode == "at_query":
            controls += [Graft(mode, what, everywhere, tokens) for tokens in ("after", "text") for what in WHATS]
        return list(dict.fromkeys(main + controls))

    # -- what the runner asks ---------------------------------------------------------------------------------------

    @property
    def n_batches(self) -> int:
        return len(self.batches)

    @property
    def bytes_needed(self) -> int:
        """Rough size of the folder: 150 bytes a row."""
        return 5 * 150 * self.config.instances * sum(map(len, self.grafts.values())) + 1_000_000

    def tokens(self, batch: int) -> int:
        """Model tokens of a batch, for the progress bar."""
        v = len(self.pairs[0].host.ids) - self.before
        ends = {"from_box": self.before - 1 - self.box[1], "at_query": self.before - 1 - self.query}
        return len(self.batches[batch]) * (2 * (self.before - 1 + 2 * v) + sum(len(g) * (ends[mode] + 2 * v) for mode, g in self.grafts.items()))

    def facts(self) -> dict:
        """What the manifest says about the scripts."""
        s = self.pairs[0].host
        return {"script": {"tokens": len(s.ids), "stub": s.stub, "box": s.box, "value_in_box": s.value_in_box, "query": self.query, "answer": s.answer,
                           "age": s.answer[0] - s.box[0], "hashes": {str(p.host.instance): p.host.sha256 for p in self.pairs},
                           "facts": {str(p.host.instance): f"{p.host.variable} = {p.host.value}, donor {p.donor_value}" for p in self.pairs}}}

    # -- computing --------------------------------------------------------------------------------------------------

    def compute(self, batch: int, rows, tick):
        """Rows of one batch; nothing is evicted, so there is no keep log."""
        from kvprobe import engine

        some = [self.pairs[i] for i in self.batches[batch]]
        texts = {"host": self._ids([p.host.ids for p in some]), "donor": self._ids([p.donor_ids for p in some])}
        caches, out = {name: self._empty(some) for name in texts}, []
        at_box = {}
        for name, cache in caches.items():
            for stop in (self.box[1], self.query, self.before - 1):
                if stop == self.box[1] or stop > cache.get_seq_length():
                    engine.force(self.model, cache, texts[name][:, cache.get_seq_length() : stop], tick=tick)
                at_box[name, stop] = cache.branch(1)
            out += self._rows(some, [dict(mode="", what=name, place="", tokens="")], self._ask(cache, texts, 1, tick))
        for mode, grafts in self.grafts.items():
            stop = self.box[1] if mode == "from_box" else self.query
            host, donor, size = at_box["host", stop], at_box["donor", stop], max(1, ROWS // len(some))
            for part in (grafts[i : i + size] for i in range(0, len(grafts), size)):
                grafted = self.grafted(host, donor, part)
                engine.force(self.model, grafted, texts["host"][:, stop : self.before - 1].repeat_interleave(len(part), 0), tick=tick)
                out += self._rows(some, [g.key for g in part], self._ask(grafted, texts, len(part), tick))
        return out, None, []

    def _ids(self, ids: Sequence[np.ndarray]):
        import torch

        return torch.as_tensor(np.stack(ids), device=self.model.device)

    def _empty(self, some):
        from kvprobe import registry
        from kvprobe.eviction_cache import EvictionCache

        return EvictionCache(self.model.model.config, self.model.geometry, NEVER, registry.make_policy("random"), instances=[p.host.instance for p in some])

    def grafted(self, host, donor, grafts: Sequence[Graft]):
        """A branch of the host's cache with one row per pair and graft, pairs first."""
        new, n = host.branch(len(grafts)), host.batch
        spans = {"box": self.box, "after": (self.box[1], self.query), "text": (self.box[0], self.query)}
        for k, graft in enumerate(grafts):
            a, z = spans[graft.tokens]
            for layer, head in graft.place.sites:
                for what in WHATS[graft.what]:
                    source = getattr((donor if graft.donor else host).layers[layer], what)
                    getattr(new.layers[layer], what)[k :: len(grafts)][:n, head, a:z] = source[:, head, a:z]
        return new

    def _ask(self, cache, texts, repeats: int, tick):
        """log p [value, row, token] of the host's and the donor's value, each under its own digits, and argmax hits."""
        from kvprobe import engine

        found = []
        for name in ("host", "donor"):
            ids = texts[name][:, self.before - 1 :].repeat_interleave(repeats, 0)
            found.append(engine.force(self.model, cache.branch(1), ids[:, :-1], targets=ids[:, 1:], first=1, tick=tick))
        return [f.logp.double().numpy() for f in found], [f.top.numpy() for f in found]

    def _rows(self, some, keys: Sequence[dict], answers) -> list[dict]:
        (host, donor), (host_top, donor_top) = answers
        out = []
        for row in range(len(some) * len(keys)):
            pair, key = some[row // len(keys)], keys[row % len(keys)]
            d = pair.differing
            values = [("odds", donor[row][d].sum() - host[row][d].sum(), "nats"), ("logp_host", host[row].sum(), "nats"), ("logp_donor", donor[row].sum(), "nats"),
                      ("says_host", host_top[row].all(), "fraction"), ("says_donor", donor_top[row].all(), "fraction")]
            out += [dict(instance=pair.host.instance, **key, metric=m, value=float(v), unit=u) for m, v, u in values]
        return out

    # -- reporting --------------------------------------------------------------------------------------------------

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.runner import Report

        table = report_table(rows, folder.manifest)
        title = f"transplant, {self.model.name}, n={self.config.instances} pairs, value {self.before - self.box[0]} tokens after the box's start, no eviction"
        return Report(title, table, table.to_string(index=False), list(self._checks(rows)), {"title": title})

    def _checks(self, rows):
        from kvprobe.runner import Check

        odds = wide(rows)
        host, donor = odds["", "host", "", ""], odds["", "donor", "", ""]
        exact = self.model.model.dtype.itemsize >= 4

        def same(name, mode, tokens, other):
            worst = float((odds[mode, "both", "all", tokens] - other).abs().max())
            return Check(name, worst <= 1e-2 if exact else None, f"largest difference {worst:.1e} nats", "<= 0.01 nats")

        for mode in self.grafts:
            yield same(f"{mode}: the host's own states put into the host change nothing", mode, "own box", host)
        if "from_box" in self.grafts:
            yield same("from_box: everything of the box everywhere gives the donor's own answer", "from_box", "box", donor)
        if "at_query" in self.grafts:
            yield same("at_query: everything from the box to the query everywhere gives the donor's own answer", "at_query", "text", donor)
        gap = stats.difference(donor, host, self.config.seed)
        yield Check("host and donor are far apart", gap.value >= 6 if self.config.model != "tiny" else None, f"log-odds donor - host = {gap.text()} nats, n={gap.n}", ">= 6 nats")


def wide(rows: pd.DataFrame, metric: str = "odds") -> pd.DataFrame:
    """One row per pair, one column per (mode, what, place, tokens)."""
    return rows[rows.metric == metric].pivot(index="instance", columns=["mode", "what", "place", "tokens"], values="value").sort_index()


def share_moved(odds: np.ndarray, host: np.ndarray, donor: np.ndarray, seed: int = 0) -> stats.Estimate:
    """Share of the log-odds that a transplant moves, a ratio of sums over pairs: sum(D - D_host) / sum(D_donor - D_host).

    D = sum over the value's differing tokens t of log p(donor_t | donor_<t) - log p(host_t | host_<t) [nats]. 0: the model answers as
    the host does, 1: as the donor. Worked example: D_host = (-8, -10), D_donor = (8, 10), D = (0, 5): (8 + 15) / (16 + 20) = 0.64.
    """
    return stats.ratio(np.asarray(odds) - np.asarray(host), np.asarray(donor) - np.asarray(host), seed, clusters=range(len(odds)))


def summary(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """Per condition: share of the log-odds moved and how often the model says the donor's or the host's value, with intervals."""
    import pandas as pd

    seed, odds = manifest["settings"]["seed"], wide(rows)
    says = {name: wide(rows, name) for name in ("says_donor", "says_host")}
    host, donor, out = odds["", "host", "", ""], odds["", "donor", "", ""], []
    for column in odds:
        found = dict(share=share_moved(odds[column], host, donor, seed)) | {k: stats.mean(v[column], seed, clusters=range(len(v))) for k, v in dict(odds=odds, **says).items()}
        flat = {name: getattr(e, part) for k, e in found.items() for name, part in ((k, "value"), (f"{k}_low", "low"), (f"{k}_high", "high"))}
        out.append(dict(zip(odds.columns.names, column)) | dict(n=len(odds)) | flat)
    return pd.DataFrame(out)


def report_table(rows: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The table as printed."""
    import pandas as pd

    def text(r, key):
        return stats.Estimate(r[key], r[f"{key}_low"], r[f"{key}_high"], r["n"]).text()

    s = summary(rows, manifest)
    return pd.DataFrame([{"mode": r["mode"] or "-", "states": r.what, "tokens": r.tokens or "-", "where": r.place or "-", "n": r.n, "share moved [95 %]": text(r, "share"),
                          "says donor's": text(r, "says_donor"), "says host's": text(r, "says_host"), "log-odds [nats]": text(r, "odds")} for _, r in s.iterrows()])
