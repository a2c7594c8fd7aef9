"""The probes that compare policies: every row is there, the manifest holds everything, and a run that was killed is resumed."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import compared
import kvprobe
from compared import FAR, SMALL, pick, value
from kvprobe import registry, results

cheap, lm, done = compared.cheap, compared.lm, compared.done


FULL = ("full", False, 0)
ARMS = {
    "keep_log": [(p, protect, d) for p, draws in (("random", 2), ("random(shared=True)", 2), ("recency", 1), ("h2o", 1), ("vase", 2), ("triattention", 1)) for protect in (False, True) for d in range(draws)],
    "passcode": [FULL] + [(p, False, d) for p, draws in (("random", 2), ("recency", 1), ("h2o", 1), ("rkv", 1), ("vase", 2), ("triattention", 1)) for d in range(draws)],
    "protection": [FULL] + [(p, protect, d) for p, draws in (("random", 2), ("recency", 1), ("h2o", 1)) for protect in (False, True) for d in range(draws)],
}
UNITS = {"logp": "nats", "logp_full": "nats", "gain": "nats", "rounds": "rounds", "token": "id", "fork": "tokens"}


@pytest.mark.parametrize("probe", ["passcode", "protection"])
def test_answers_are_complete(done, probe):
    d = done(probe)
    asks = ["1 rounds", "2 rounds"] if probe == "passcode" else [f"fact {k}" for k in range(4)]
    want = {(*arm, i, ask, m) for arm in ARMS[probe] for i in range(2) for ask in asks for m in ("logp", "retrieved", "rounds")}
    rows = d.rows[d.rows.metric.isin(["logp", "retrieved", "rounds"])]
    got = list(rows[["policy", "protect", "draw", "instance", "ask", "metric"]].itertuples(index=False, name=None))
    assert set(got) == want and len(got) == len(want)
    rest = d.rows[~d.rows.metric.isin(["logp", "retrieved", "rounds"])]
    if probe == "passcode":
        controls, rest = pick(rest, metric="control_retrieved"), rest[rest.metric != "control_retrieved"]
        assert len(controls) == len(want) / 3 and set(controls.ask) == set(asks)
    per = {"passcode": 2 * 4, "protection": 2}[probe]  # copies by question and site; two shares of the prompt
    assert len(rest) == per * 2 * (len(ARMS[probe]) - 1) and not (rest.policy == "full").any()


def test_keep_log_is_complete(done):
    d = done("keep_log")
    plain = {"slot_coverage", "position_coverage", "decorrelation", "prompt_union", "prompt_head", "rounds"}
    oldest = 64 + 5 * 8 - 37  # K + 2r + 5 more rounds, from the first body position
    bands = d.module.bands(oldest)
    assert bands[0][0] == 0 and bands[-1][1] == oldest + 1 and all(a[1] == b[0] for a, b in zip(bands, bands[1:])) and len(bands) == 5
    want = {(*arm, i, m, None, None) for arm in ARMS["keep_log"] for i in range(2) for m in plain}
    want |= {(*arm, i, f"age_{m}", *band) for arm in ARMS["keep_log"] for i in range(2) for m in ("head", "union", "uniform") for band in bands}
    rows = d.rows.assign(low=[None if np.isnan(x) else int(x) for x in d.rows.low], high=[None if np.isnan(x) else int(x) for x in d.rows.high])
    got = [tuple(None if isinstance(x, float) and np.isnan(x) else x for x in t) for t in rows[["policy", "protect", "draw", "instance", "metric", "low", "high"]].itertuples(index=False, name=None)]
    assert set(got) == want and len(got) == len(want)


def test_blocks_are_complete(done):
    d = done("blocks")
    want = {(keep, block, end, draw, i, m) for keep in (64, 32) for block, end, draws in ((1, "", 2), (8, "", 2), (1, "kept", 1), (1, "deleted", 1))
            for draw in range(draws) for i in range(2) for m in ("logp", "retrieved", "rounds")}
    got = list(d.rows[["keep", "block", "end", "draw", "instance", "metric"]].itertuples(index=False, name=None))
    assert set(got) == want and len(got) == len(want)


def test_distance_is_complete(done):
    d = done("distance")
    arms = [("random", 0, ""), ("random", 1, ""), ("h2o", 0, ""), ("random", 0, "kept"), ("random", 0, "deleted")]
    want = {(f, *arm, i, ask, m) for f in ("once", "verbatim", "derived") for arm in arms for i in range(2) for ask in ("1 rounds", "2 rounds") for m in ("logp", "retrieved", "rounds")}
    got = list(d.rows[["factor", "policy", "draw", "end", "instance", "ask", "metric"]].itertuples(index=False, name=None))
    assert set(got) == want and len(got) == len(want)


def test_fork_is_complete(done):
    d = done("fork")
    text = pick(d.rows, stage="write")
    assert set(text[["instance", "metric", "start"]].itertuples(index=False, name=None)) == {(i, m, t) for i in range(2) for m in ("token", "logp") for t in range(40)} and len(text) == 160
    for i in range(2):
        for draw in range(2):
            mine = pick(d.rows, stage="fork", policy="random", draw=draw, instance=i)
            forked = value(mine, metric="forked")
            assert forked in (0, 1) and all(len(pick(mine, metric=m)) == forked for m in ("fork", "logp", "logp_full"))
            assert all(len(pick(mine, metric=m, kind=k)) <= 2 for m in ("gain", "mended", "lost") for k in ("evicted", "random"))


@pytest.mark.parametrize("probe", SMALL)
def test_values_have_their_units_and_ranges(done, probe):
    rows = done(probe).rows
    assert rows.value.notna().all() and np.isfinite(rows.value).all()
    for metric, part in rows.groupby("metric"):
        assert set(part.unit) == {UNITS.get(metric, "fraction")}, metric
        if UNITS.get(metric, "fraction") == "fraction":
            assert part.value.between(0, 1).all(), metric
        if metric in ("logp", "logp_full"):
            assert (part.value <= 0).all()


# -- manifest, resume, rerun ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", SMALL)
def test_the_manifest_holds_everything(done, probe):
    """H04: every setting, field of every policy, seed, version and hash."""
    d = done(probe)
    m = json.loads((d.run.path / "manifest.json").read_text())
    assert m["settings"] == {"probe": probe, "preset": "smoke"} | dataclasses.asdict(d.config) and m["status"] == "finished" and m["batches"] == d.session.n_batches
    assert m["eviction_seeds_used"] == [0, FAR] and m["settings"]["eviction_seeds"] == 2
    names = {a.name for a in d.session.arms if a.evicts}
    assert set(m["policies"]) == names
    for name, facts in m["policies"].items():
        source = registry.find("policy", name.split("(")[0])
        assert set(facts["fields"]) == {f.name for f in dataclasses.fields(source.POLICY)}
        assert facts["sha256"] == hashlib.sha256(Path(source.__file__).read_bytes()).hexdigest()[:16]
    for name, stories in getattr(d.session, "by_factor", {"": d.session.stories}).items():
        told = m["factors"][name] if name else m["script"]
        for s in stories:
            text = np.concatenate([s.ids, *(x for a in s.asks for x in (a.query, a.value))]).astype("<i8")
            assert told["hashes"][str(s.instance)] == hashlib.sha256(text.tobytes()).hexdigest()[:16]
            assert told["facts"][str(s.instance)] == s.facts
        assert (told["tokens"], told["prompt"], told["asks"]) == (len(s.ids), s.prompt, {a.name: a.at for a in s.asks})
    assert m["dtype"] == "float64" and m["attention_function"] == "kvprobe" and m["threads"] == 1 and len(m["model"]["fingerprint"]) == 16
    assert all(m["versions"][n] for n in ("kvprobe", "torch", "transformers", "numpy"))
    assert m["rows_sha256"] == hashlib.sha256((d.run.path / "rows.jsonl").read_bytes()).hexdigest()
    assert all(c["passed"] is not False for c in m["checks"]) and m["checks"]


@pytest.mark.parametrize("probe", SMALL)
def test_killed_and_resumed_a_rerun_gives_the_same_rows(done, probe, tmp_path, monkeypatch):
    """Killed after a batch and within the next one's rows: the rest is computed, and the bytes are the uninterrupted run's."""
    d, real, stored, said = done(probe), results.RunFolder.append, [], []

    def dies(self, batch, rows, log, members):
        if len(stored) == 2:
            with open(self.path / "rows.jsonl", "a") as file:
                file.write(json.dumps({"batch": batch} | rows[0])[:-9])
            raise KeyboardInterrupt
        stored.append(batch)
        real(self, batch, rows, log, members)

    monkeypatch.setattr(results.RunFolder, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        kvprobe.rerun(d.run.path / "manifest.json", out=tmp_path / "again", progress=False)
    monkeypatch.setattr(results.RunFolder, "append", lambda self, batch, *rest: (stored.append(batch), real(self, batch, *rest)))
    again = kvprobe.rerun(d.run.path / "manifest.json", out=tmp_path / "again", progress=False, say=said.append)
    assert stored == list(range(d.session.n_batches)) and any("2 whole batches" in s for s in said)
    assert (again.path / "rows.jsonl").read_bytes() == (d.run.path / "rows.jsonl").read_bytes() and "rows are identical to the manifest's" in said
    assert again.manifest["rows_sha256"] == d.manifest["rows_sha256"] and again.manifest["checks"] == d.manifest["checks"]
