"""The probes that compare policies, at smoke scale in float64: their rows against independent runs, their logs and plain counting."""

import dataclasses
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

import kvprobe
from kvprobe import audit, engine, needles, registry, results, runner
from kvprobe.keeplog import ALIVE
from kvprobe.models import load, tiny
from kvprobe.pins import SpanPin
from oracle import Reference, random_scores

SMALL = {  # what the smoke presets are, with fewer repetitions
    "keep_log": dict(instances=2, eviction_seeds=2), "passcode": dict(instances=2, eviction_seeds=2), "blocks": dict(instances=2),
    "distance": {}, "protection": dict(instances=2, batch_size=1), "fork": {}}
FAR = 1_000_003  # between eviction seeds
SEEDS = (0, FAR)


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """Figures have tests of their own, and encoding filler, age bands and the first lines of docstrings take longer than the models."""
    real, made = needles.Filler, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        patch.setattr(registry, "_first_line", lambda name, package: "")
        patch.setattr(registry.find("probe", "keep_log"), "BANDS", 5)
        patch.setattr(needles, "Filler", lambda source, tokenizer: made.get(source) or made.setdefault(source, real(source, tokenizer)))
        yield


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def stock():
    return tiny(torch.float64)[0].eval()


@pytest.fixture(scope="module")
def done(tmp_path_factory, lm):
    """probe -> its finished run, its session and its keep logs by member (instance, label, draw), made once."""
    made: dict = {}

    def get(probe: str) -> SimpleNamespace:
        if probe not in made:
            run = kvprobe.run(probe, preset="smoke", out=tmp_path_factory.mktemp("runs") / probe, progress=False, dtype="float64", **SMALL[probe])
            module = registry.find("probe", probe)
            config = runner.config_of(module, {k: v for k, v in run.manifest["settings"].items() if k not in ("probe", "preset")})
            folder = results.RunFolder(run.path, run.manifest["settings"])
            folder.read()
            logs = {tuple(member): (log, k) for _, log, members in folder.logs() for k, member in enumerate(members)}
            made[probe] = SimpleNamespace(run=run, rows=run.rows, manifest=run.manifest, module=module, config=config, session=module.start(config, lm), logs=logs)
        return made[probe]

    return get


def pick(rows, **where):
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return rows


def value(rows, **where) -> float:
    found = pick(rows, **where)
    assert len(found) == 1, (len(found), where)
    return float(found.value.iloc[0])


# -- every row is there --------------------------------------------------------------------------------------------------

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


# -- answers against a stock model on the full cache, hidden by masks per KV head --------------------------------------


def seen(stock, plan, ids, first: int, scores, span=None, hold: bool = False, prompt: int = 0) -> Reference:
    """The reference after `ids` [n], fed as rounds allow; `first` is the prompt's forward. span is held or banned everywhere, the first `prompt` positions are held."""
    inside = set(range(*span)) if span else set()
    ref = Reference(stock, range(2), 2, plan.keep, plan.buffer, scores, held=lambda *_: (inside if hold else set()) | set(range(prompt)), banned=lambda *_: set() if hold else inside)
    ref.last, at = None, 0
    while at < len(ids):
        n = first if at == 0 else min(len(ids) - at, plan.fires_at - max(map(len, ref.kept.values())))
        ref.last = ref.feed(torch.as_tensor(ids[at : at + n])[None])[0]
        at += n
    return ref


def mass(ref, layer, row, head, number, candidates):
    """H2O: attention received so far, mean over the group of two query heads."""
    got = ref.mass[layer][row, 2 * head : 2 * head + 2].mean(0)
    return {p: got[ref.column[row][p]] for p in candidates}


def answered(stock, plan, story, ask, scores, **pins):
    """(log p of the value, retrieved, reference right before the value's first token is predicted)."""
    text = np.concatenate([story.ids[: ask.at], ask.query])
    ref = seen(stock, plan, text, story.prompt, scores, **pins)
    before, logp, top = {s: list(v) for s, v in ref.kept.items()}, 0.0, True
    felt = [h for h in ref.history if h[1] < len(text)]  # the last forward's own round comes after its logits
    if len(felt) < len(ref.history):
        before = None
    for token in ask.value:
        row = torch.log_softmax(ref.last[-1], -1)
        logp, top = logp + float(row[token]), top and int(row.argmax()) == token
        ref.last = ref.feed(torch.tensor([[int(token)]]))[0]
    return logp, top, len(felt), before, ref


def same_sets(log, k: int, ref, upto: int) -> int:
    """Asserts that a stored log is the reference's history; returns the rounds compared."""
    history = [h for h in ref.history if h[1] <= upto]
    assert [h[1] for h in history] == list(log.fired[k][: len(history)])
    for n, (_, _, sets) in enumerate(history):
        held = log.held(k, n)
        for (layer, _, head), kept in sets.items():
            assert np.flatnonzero(held[layer, head]).tolist() == kept
    return len(history)


@pytest.mark.parametrize("policy, draw", [("random", 1), ("h2o", 0)])
def test_passcode_answers_and_copies(done, stock, policy, draw):
    d, i = done("passcode"), 1
    story, (log, k) = d.session.stories[i], d.logs[i, policy, draw]
    a, z = story.spans["value"]
    for n, ask in enumerate(story.asks[:2], 1):
        scores = random_scores(SEEDS[draw], [i]) if policy == "random" else mass
        logp, top, felt, before, ref = answered(stock, d.config.plan, story, ask, scores)
        mine = pick(d.rows, policy=policy, draw=draw, instance=i, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="retrieved") == top
        assert value(mine, metric="rounds") == n == felt
        for (layer, _, head), kept in before.items():
            assert value(mine, metric="value_held", layer=layer, head=head) == pytest.approx(sum(a <= p < z for p in kept) / (z - a))
        assert same_sets(log, k, ref, ask.at) == len([f for f in log.fired[k] if f <= ask.at])


@pytest.mark.parametrize("keep, block, end, draw", [(32, 1, "", 1), (64, 1, "kept", 0), (32, 1, "deleted", 0)])
def test_blocks_answers(done, stock, keep, block, end, draw):
    d, i = done("blocks"), 0
    story, plan, ask = d.session.stories[i], kvprobe.Plan(keep, 8), d.session.stories[i].asks[0]
    pins = dict(span=story.spans["box"], hold=end == "kept") if end else {}
    logp, _, felt, _, ref = answered(stock, plan, story, ask, random_scores(SEEDS[draw], [i]), **pins)
    mine = pick(d.rows, keep=keep, block=block, end=end, draw=draw, instance=i)
    assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds") == felt
    log, k = d.logs[i, f"K={keep}, {end or f'block {block}'}", draw]
    assert same_sets(log, k, ref, ask.at) == log.rounds(k) > 5


@pytest.mark.parametrize("factor, policy, end, draw", [("once", "random", "kept", 0), ("once", "random", "deleted", 0), ("derived", "h2o", "", 0)])
def test_distance_answers(done, stock, factor, policy, end, draw):
    d, i = done("distance"), 1
    story = d.session.by_factor[factor][i]
    pins = dict(span=story.spans["box0"], hold=end == "kept") if end else {}
    for n, ask in enumerate(story.asks, 1):
        logp, _, felt, _, _ = answered(stock, d.config.plan, story, ask, random_scores(SEEDS[draw], [i]) if policy == "random" else mass, **pins)
        mine = pick(d.rows, factor=factor, policy=policy, end=end, draw=draw, instance=i, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds") == n == felt


@pytest.mark.parametrize("policy, protect, draw", [("random", True, 1), ("h2o", False, 0)])
def test_protection_answers_and_survival(done, stock, policy, protect, draw):
    d, i = done("protection"), 1
    story = d.session.stories[i]
    mine = pick(d.rows, policy=policy, protect=protect, draw=draw, instance=i)
    for ask in story.asks[:2]:
        scores = random_scores(SEEDS[draw], [i]) if policy == "random" else mass
        logp, _, felt, before, _ = answered(stock, d.config.plan, story, ask, scores, prompt=story.prompt if protect else 0)
        assert value(mine, metric="logp", ask=ask.name) == pytest.approx(logp, abs=1e-8) and value(mine, metric="rounds", ask=ask.name) == 2 == felt
    kept = {(layer, head): {p for p in v if p < story.prompt} for (layer, _, head), v in before.items()}
    assert value(mine, metric="prompt_head") == pytest.approx(np.mean([len(v) for v in kept.values()]) / story.prompt)
    assert value(mine, metric="prompt_union") == pytest.approx(np.mean([len(kept[layer, 0] | kept[layer, 1]) for layer in (0, 1)]) / story.prompt)


@pytest.mark.parametrize("probe", ["passcode", "protection"])
def test_the_full_cache_is_stock_transformers(done, stock, probe):
    d = done(probe)
    for i, story in enumerate(d.session.stories):
        ask = story.asks[1]
        text = torch.as_tensor(np.concatenate([story.ids[: ask.at], ask.query, ask.value]))[None]
        with torch.no_grad():
            rows = torch.log_softmax(stock(text[:, :-1]).logits[0, -len(ask.value) :], -1)
        assert value(d.rows, policy="full", metric="logp", instance=i, ask=ask.name) == pytest.approx(float(rows.gather(-1, text[0, -len(ask.value) :, None]).sum()), abs=1e-8)
        assert value(d.rows, policy="full", metric="rounds", instance=i, ask=ask.name) == 0


@pytest.mark.parametrize("probe, label, draw", [("passcode", "vase", 1), ("passcode", "triattention", 0), ("passcode", "rkv", 0), ("protection", "h2o + prompt", 0), ("blocks", "K=32, block 8", 1)])
def test_answers_replayed_from_the_keep_log(done, lm, probe, label, draw):
    """Policies without a reference here: the full cache under the masks of their own log, and the stored log is that of the answer's run."""
    d = done(probe)
    batch, (arm, cut) = next((b, x) for b, x in enumerate(d.session.batches) if (x[0].label, x[0].draw) == (label, draw) and 1 in x[1])
    stories = [d.session.stories[i] for i in cut]
    if probe == "blocks":
        d.session._at(arm.keep)
    _, answers = d.session.run(arm, cut, stories, lambda n: None)
    for answer in [a for a in answers if not a.ask.name.endswith("control")]:
        k, story = list(cut).index(1), d.session.stories[1]
        ask = next(a for a in story.asks if a.name == answer.ask.name)
        ids = torch.as_tensor(np.concatenate([story.ids[: ask.at], ask.query, ask.value]))
        want = audit.replay(lm, ids, answer.log, k, ask.at + len(ask.query))
        mine = pick(d.rows[d.rows.batch == batch], instance=1, ask=ask.name)
        assert value(mine, metric="logp") == pytest.approx(float(want.sum()), abs=1e-8)
        stored, row = d.logs[1, label, draw]
        n = sum(f <= ask.at for f in stored.fired[row])
        assert n == sum(f <= ask.at for f in answer.log.fired[k])
        upto = np.minimum(stored.died[:, row, :, : ask.at], n), np.minimum(answer.log.died[:, k, :, : ask.at], n)
        assert (upto[0] == upto[1]).all()


def test_a_row_alone_token_by_token_without_a_shared_prefix(done, lm):
    d, i, draw = done("passcode"), 0, 1
    story = d.session.stories[i]
    cache = kvprobe.cache(lm, policy="vase", keep=96, buffer=48, instances=[i], seed=SEEDS[draw])
    engine.prefill(lm, cache, torch.as_tensor(story.ids[: story.prompt])[None])
    ask, q = story.asks[0], len(story.asks[0].query)
    text = torch.as_tensor(np.concatenate([story.ids[story.prompt : ask.at], ask.query, ask.value]))[None]
    first = ask.at - story.prompt + q
    got = engine.force(lm, cache, text[:, :-1], targets=text[:, first:], first=first, longest=1)
    assert value(d.rows, policy="vase", draw=draw, instance=i, ask=ask.name, metric="logp") == pytest.approx(float(got.logp.sum()), abs=1e-8)


def test_the_control_is_asked_of_a_branch_of_its_own(done, lm):
    """Its fact stands in its own question: the passcode's answer, at the same place, is that of a run without it."""
    d, i = done("passcode"), 0
    story = d.session.stories[i]
    plain, controls = story.asks[:2], story.asks[2:]
    for ask, control in zip(plain, controls, strict=True):
        assert (control.name, control.at) == (ask.name + ", control", ask.at)
        text, number = lm.tokenizer.decode(control.query.tolist()), lm.tokenizer.decode(control.value.tolist())
        assert f"Let zq = {number}.\n" in text and text.endswith("zq = ") and number not in lm.tokenizer.decode(story.ids.tolist())
        ids = torch.as_tensor(np.concatenate([story.ids[: ask.at], control.query, control.value]))[None]
        cache = kvprobe.cache(lm, policy="recency", keep=96, buffer=48, instances=[i])
        got = engine.force(lm, cache, ids[:, :-1], targets=ids[:, -len(control.value) :], first=ids.shape[1] - len(control.value))
        assert value(d.rows, policy="recency", instance=i, ask=ask.name, metric="control_retrieved") == float(got.top.all())


# -- rounds and budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", SMALL)
def test_equal_budgets_and_rounds_of_the_closed_form(done, probe):
    """H15: right after every round every head of every arm of a table holds K + r entries; B19: what is not held was evicted."""
    d = done(probe)
    assert len(d.logs) == sum(len(cut) for arm, cut in d.session.batches if arm is not None and arm.evicts)
    for (_, label, _), (log, k) in d.logs.items():
        keep = int(label.split(",")[0].removeprefix("K=")) if probe == "blocks" else d.config.keep
        fires, r = keep + 2 * d.config.buffer, d.config.buffer
        assert (log.keep, log.buffer) == (keep, r) and log.fired[k] == tuple(range(fires, log.length[k] + 1, r)) != ()
        for n in range(log.rounds(k)):
            assert (log.held(k, n).sum(-1) == keep + r).all()
        assert ((log.died[:, k] != ALIVE).sum(-1) == r * log.rounds(k)).all()


def test_rounds_before_the_blocks_value(done):
    d = done("blocks")
    for keep in (64, 32):
        last = 37 + 40 + 128 - 1  # the token whose logits give the value's first: rounds up to its position have fired
        assert set(pick(d.rows, metric="rounds", keep=keep).value) == {(last - (keep + 16)) // 8 + 1}
    assert d.session.stories[0].asks[0].at + 60 == 37 + 40 + 128


def test_keep_log_rows_are_those_of_the_stored_logs(done):
    """Sets, one policy of each kind: drawn without a model, drawn with one, and scored."""
    d = done("keep_log")
    for label, protect, draw in (("random", False, 1), ("vase + prompt", True, 1), ("h2o", False, 0)):
        log, k = d.logs[1, label, draw]
        mine = pick(d.rows, policy=label.split(" +")[0], protect=protect, draw=draw, instance=1)
        prompt, union, one, slots = 37, [], [], []
        for n in range(6):
            kept = [[set(np.flatnonzero(h)) for h in layer] for layer in log.held(k, n)]
            union += [len((layer[0] | layer[1]) & set(range(prompt))) / prompt for layer in kept]
            one += [len(h & set(range(prompt))) / prompt for layer in kept for h in layer]
            candidates = log.fired[k][n] - 8
            slots += [len({p for h in layer for p in h if p < candidates}) / (2 * 48) for layer in kept]
        assert value(mine, metric="prompt_union") == pytest.approx(np.mean(union)) and value(mine, metric="prompt_head") == pytest.approx(np.mean(one))
        assert value(mine, metric="decorrelation") == pytest.approx(np.mean(slots)) and value(mine, metric="rounds") == 6
        assert value(mine, metric="prompt_head") == 1 or not protect
        oldest = pick(mine, metric="age_head").sort_values("low").iloc[-1]
        ages = [np.mean([p in h for layer in [[set(np.flatnonzero(h)) for h in layer] for layer in log.held(k, n)] for h in layer])
                for n, length in enumerate(log.fired[k]) for p in range(prompt, length) if oldest.low <= length - p < oldest.high]
        assert oldest.value == pytest.approx(np.mean(ages))
    shared = pick(d.rows, policy="random(shared=True)")
    assert pick(shared, metric="slot_coverage", protect=False).value.tolist() == pytest.approx([48 / 56] * 4) and pick(shared, metric="decorrelation").value.tolist() == pytest.approx([0.5] * 8)


@pytest.mark.parametrize("probe", ["blocks", "distance"])
def test_endpoints_hold_and_delete_the_boxes(done, probe):
    d, checked = done(probe), 0
    for (i, label, draw), (log, k) in d.logs.items():
        end, factor = label.split(", ")[-1], label.split(", ")[1]
        if end not in ("kept", "deleted"):
            continue
        story = d.session.stories[i] if probe == "blocks" else d.session.by_factor[factor][i]
        boxes = [p for name, span in story.spans.items() if name.startswith("box") for p in range(*span)]
        left = list(boxes)  # a round takes up to r of those that are candidates, oldest first
        for n, length in enumerate(log.fired[k]):
            if end == "deleted":
                left = left[min(log.buffer, sum(p < length - log.buffer for p in left)) :]
            held = log.held(k, n)
            assert all(np.flatnonzero(held[layer, h, boxes]).tolist() == [j for j, p in enumerate(boxes) if p in left and p < length] for layer in (0, 1) for h in (0, 1))
        assert end == "kept" or not left
        checked += 1
    assert checked == {"blocks": 2 * 2 * 2, "distance": 3 * 2 * 2}[probe]


# -- protection: tables from rows made by hand -----------------------------------------------------------------------


def made_by_hand(gains: dict):
    """policy -> instance -> (log p without, with, prompt survival without), two draws around each."""
    import pandas as pd

    rows = []
    for policy, per in gains.items():
        for instance, (without, with_, head) in enumerate(per):
            for protect, logp, share in ((False, without, head), (True, with_, 1.0)):
                for draw, off in ((0, -0.5), (1, 0.5)):
                    base = dict(policy=policy, protect=protect, draw=draw, instance=instance)
                    rows += [base | dict(ask=f"fact {k}", metric="logp", value=logp + off + k - 0.5) for k in (0, 1)]
                    rows += [base | dict(ask=f"fact {k}", metric="retrieved", value=float(protect)) for k in (0, 1)]
                    rows += [base | dict(ask="", metric=m, value=share) for m in ("prompt_head", "prompt_union")]
    rows += [dict(policy="full", protect=False, draw=0, instance=i, ask="fact 0", metric=m, value=v) for i in range(3) for m, v in (("logp", -0.1), ("retrieved", 1.0))]
    return pd.DataFrame(rows)


def test_gain_is_with_minus_without_and_goes_with_the_deficit():
    from kvprobe.probes import protection

    gains = {"a": [(-9, -1, 0.1), (-8, -2, 0.3), (-7, -1, 0.2)], "b": [(-5, -2, 0.5), (-4, -3, 0.6), (-6, -2, 0.45)], "c": [(-2, -2.5, 0.9), (-3, -2, 0.8), (-2, -1.5, 0.95)]}
    rows, manifest = made_by_hand(gains), {"settings": {"seed": 0}}
    got = protection.gains(rows).set_index(["policy", "instance"])
    for policy, per in gains.items():
        for instance, (without, with_, head) in enumerate(per):
            line = got.loc[policy, instance]
            assert (line.gain, line.deficit, line.gain_retrieved) == pytest.approx((with_ - without, 1 - head, 1.0)) and line.logp == pytest.approx(without)
    assert len(got) == 9 and "full" not in got.index.get_level_values(0)
    pooled, means = protection.correlation(rows, manifest)
    flat = [(1 - head, with_ - without) for per in gains.values() for without, with_, head in per]
    assert pooled.value == pytest.approx(scipy.stats.spearmanr(*zip(*flat)).statistic)
    assert means.value == pytest.approx(scipy.stats.spearmanr(*zip(*[np.mean([(1 - h, w - o) for o, w, h in per], axis=0) for per in gains.values()])).statistic)
    table = protection.report_table(rows, manifest).set_index("policy")
    assert table.loc["b", "gain [nats]"].startswith("2.67") and table.loc["b", "prompt survival, head"] == "0.517" and table.loc["full", "retrieval without"].startswith("1.00")


def test_a_protected_prompt_is_held(done):
    d, protected = done("protection"), 0
    for (i, label, _), (log, k) in d.logs.items():
        prompt = log.died[:, k, :, : d.session.stories[i].prompt]
        if label.endswith(" + prompt"):
            assert (prompt == ALIVE).all()
            protected += 1
        elif label in ("random", "recency"):
            assert (prompt != ALIVE).any()
    assert protected == 2 * 4 and (pick(d.rows, metric="prompt_head", protect=True).value == 1).all()


# -- fork ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(stock, ids, new: int) -> list[int]:
    """The whole text again for every token."""
    ids, out = ids[None], []
    for _ in range(new):
        out.append(int(stock(ids).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[out[-1]]])], 1)
    return out


@torch.no_grad()
def evicted_greedy(lm, ids, new: int, **options) -> list[int]:
    """Token by token behind an evicting cache."""
    cache, out = kvprobe.cache(lm, **options), []
    logits = lm.model(ids[None], cache=cache, use_cache=True).logits
    for _ in range(new):
        out.append(int(logits[0, -1].argmax()))
        logits = lm.model(torch.tensor([[out[-1]]]), cache=cache, use_cache=True).logits
    return out


def test_the_fork_is_where_a_run_of_its_own_leaves_the_full_text(done, lm, stock):
    d, forks = done("fork"), 0
    for i in range(2):
        prompt = torch.as_tensor(d.session.stories[i].ids[:48])
        full = greedy(stock, prompt, 40)
        assert pick(d.rows, stage="write", metric="token", instance=i).sort_values("start").value.astype(int).tolist() == full
        for draw, seed in enumerate(SEEDS):
            own = evicted_greedy(lm, prompt, 40, policy="random", keep=40, buffer=8, instances=[i], seed=seed)
            apart = [t for t in range(40) if own[t] != full[t]]
            mine = pick(d.rows, stage="fork", draw=draw, instance=i)
            assert value(mine, metric="forked") == bool(apart)
            if apart:
                assert value(mine, metric="fork") == apart[0] and 48 + apart[0] > 56
                assert value(mine, metric="logp_full") == value(d.rows, stage="write", metric="logp", instance=i, start=apart[0])
                forks += 1
    assert forks >= 2


def test_the_gain_of_a_pinned_range_is_that_of_a_run_of_its_own(done, lm):
    d, tried = done("fork"), 0

    def forced(i: int, draw: int, ids, pins=()):
        cache = kvprobe.cache(lm, policy="random", keep=40, buffer=8, instances=[i], seed=SEEDS[draw], pins=pins)
        got = engine.force(lm, cache, ids[None, :-1], targets=ids[None, -1:], first=len(ids) - 1)
        return float(got.logp), bool(got.top), cache.keep_log

    for _, row in pick(d.rows, stage="fork", metric="gain").iterrows():
        i, draw, start = row.instance, row.draw, int(row.start)
        mine = pick(d.rows, stage="fork", draw=draw, instance=i)
        fork = int(value(mine, metric="fork"))
        text = np.concatenate([d.session.stories[i].ids[:48], pick(d.rows, stage="write", metric="token", instance=i).sort_values("start").value.to_numpy()]).astype(np.int64)
        ids = torch.as_tensor(text[: 48 + fork + 1])
        before, after = forced(i, draw, ids), forced(i, draw, ids, [SpanPin(start, start + 16)])
        assert value(mine, metric="logp") == pytest.approx(before[0], abs=1e-9) and not before[1]
        assert row.value == pytest.approx(after[0] - before[0], abs=1e-9)
        assert value(mine, metric="mended", kind=row.kind, start=row.start) == after[1]
        assert (after[2].died[..., start : start + 16] == ALIVE).all() and (after[2].held(0, 0).sum(-1) == 48).all()
        tried += 1
    assert tried >= 4


def test_ranges_called_evicted_were(done):
    d, tried = done("fork"), 0
    for (i, label, draw), (log, k) in d.logs.items():
        mine = pick(d.rows, stage="fork", draw=draw, instance=i)
        if not value(mine, metric="forked"):
            continue
        stop = 48 + int(value(mine, metric="fork"))
        rounds = sum(f <= stop - 1 for f in log.fired[k])
        gone = np.array([np.mean([log.died[layer, k, h, p] < rounds for layer in (0, 1) for h in (0, 1)]) for p in range(stop - 8)])
        lost = {a: gone[a : a + 16].mean() for a in range(0, len(gone) - 15, 16)}
        worst = sorted(lost.values(), reverse=True)[:2]
        named = pick(mine, metric="lost", kind="evicted")
        assert named.value.tolist() == pytest.approx([w for w in worst if w]) and (named.value > 0).all()
        for _, row in pick(mine, metric="lost").iterrows():
            assert row.value == pytest.approx(gone[int(row.start) : int(row.start) + 16].mean()) and row.start + 16 <= len(gone)
        assert len(pick(mine, metric="lost", kind="random")) == len(named)
        tried += len(named)
    assert tried >= 2


def test_audit_says_what_it_can_replay(tmp_path):
    """Branches' logs are not kept, and a probe without log p per token is refused by name, not by a traceback."""
    from kvprobe.audit import audit_run

    kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, policies="recency")
    with pytest.raises(ValueError, match="passcode.*planted_fact"):
        audit_run(tmp_path / "run")


OWN = """from dataclasses import dataclass
from kvprobe.types import Needs

@dataclass(frozen=True)
class POLICY:
    needs = Needs()
    level = "own"

    def score(self, view):
        return view.rand()

    def allocate(self, score, keep, held, real, positions):
        return (keep + 5).clamp(max=int(real.sum(-1).min()))
"""


def test_unequal_budgets_are_refused(tmp_path):
    """H15: a policy that sets its own budget is no arm of a comparison at equal budgets."""
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ValueError, match="budgets of a comparison must be equal"):
        kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, rounds="2", policies=f"{tmp_path / 'own.py'}")


def test_a_finished_run_of_another_policy_file_is_not_current(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(OWN.replace('level = "own"', 'level = "head"').replace("(keep + 5).clamp(max=int(real.sum(-1).min()))", "keep"))
    options = dict(preset="smoke", out=tmp_path / "run", progress=False, instances=2, rounds="2", policies=str(mine))
    kvprobe.run("passcode", **options)
    kvprobe.run("passcode", **options)
    mine.write_text(mine.read_text().replace("view.rand()", "-view.rand()"))
    with pytest.raises(ValueError, match="another version of policy"):
        kvprobe.run("passcode", **options)


def test_a_block_that_fits_no_head_is_refused_before_work(tmp_path):
    with pytest.raises(ValueError, match="block=500"):
        kvprobe.run("passcode", preset="smoke", out=tmp_path / "run", progress=False, instances=2, policies="random,random(block=500)")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="keeps"):
        kvprobe.run("blocks", preset="smoke", out=tmp_path / "run", progress=False, keep=32)


def test_endpoints_of_a_protected_distance_are_protected(tmp_path):
    rows = kvprobe.run("distance", preset="smoke", out=tmp_path / "run", progress=False, instances=2, protection="with", factors="once", policies="recency", keep=200, eviction_seeds=1).rows
    assert rows.protect.all() and set(rows.end) == {"", "kept", "deleted"}
