"""The planted-fact probe: its rows against independent paths, its conditions, its instrument checks."""

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import audit, conditions, engine, keeplog
from kvprobe.eviction_cache import EvictionCache
from kvprobe.models import load
from kvprobe.probes import planted_fact
from kvprobe.types import Geometry, Plan

GEOMETRY = Geometry(6, 9, 3, 8, 72, (0, 1, 2, 4, 5), {3: "sliding window, bounded by itself"})


def names(text, layers="all"):
    return [c.name for c in conditions.parse(text, GEOMETRY, layers)[0]]


def test_subsets_are_all_sets_once():
    assert names("subsets,natural,all,0+1+2,none") == ["deleted", "0", "1", "2", "0+1", "0+2", "1+2", "kept", "natural", "full"]


def test_all_heads_of_some_layers_is_not_kept_everywhere():
    found = {c.name: c for c in conditions.parse("all", GEOMETRY, "1-2")[0]}
    assert found["0+1+2"].sites == {(layer, h) for layer in (1, 2) for h in range(3)}
    assert len(found["kept"].sites) == 15


@pytest.mark.parametrize("text, layers, message", [
    ("0+3", "all", r"KV heads 0\.\.2"), ("one", "all", "known: 0, 1"), ("0", "7-9", r"layers 0\.\.5"), ("0", "3", "sliding window"),
    ("0", "a-b", "numbers and ranges"), ("best-triples,-1", "all", "known: 0")])
def test_bad_conditions_name_what_is_valid(text, layers, message):
    with pytest.raises(ValueError, match=message):
        conditions.parse(text, GEOMETRY, layers)


@pytest.fixture(scope="module")
def model():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def session(model):
    return planted_fact.start(planted_fact.CONFIG(model="tiny", dtype="float64", keep=64, buffer=8, instances=3, batch_size=3, pre=40, age=128, query=60), model)


@pytest.fixture(scope="module")
def computed(session):
    return session.compute(0, lambda: None, lambda tokens: None)


def logp_of(rows, instance, condition):
    return [r["value"] for r in rows if r["metric"] == "logp_token" and (r["instance"], r["condition"]) == (instance, condition)]


def test_log_p_equals_the_full_cache_under_per_head_masks(session, computed, model):
    rows, log, members = computed
    for k, (instance, condition) in enumerate(members):
        script = session.scripts[instance]
        want = audit.replay(model, torch.from_numpy(script.ids), log, k, script.answer[0])
        assert logp_of(rows, instance, condition) == pytest.approx(want.tolist(), abs=1e-10)


def test_log_p_equals_one_row_alone_token_by_token_without_a_shared_prefix(session, computed, model):
    rows = computed[0]
    for instance, name in ((0, "0"), (2, "deleted"), (1, "natural")):
        script = session.scripts[instance]
        condition = next(c for c in session.conditions if c.name == name)
        cache = EvictionCache(model.model.config, model.geometry, session.plan, session.policy, instances=[instance], row_pins=[condition.pins(script.box)])
        ids = torch.from_numpy(script.ids)[None]
        got = engine.force(model, cache, ids[:, :-1], targets=ids[:, session.before :], first=session.before, longest=1)
        assert logp_of(rows, instance, name) == pytest.approx(got.logp[0].tolist(), abs=1e-10)


def test_the_full_condition_is_stock_transformers(session, computed, model):
    script = session.scripts[1]
    ids = torch.from_numpy(script.ids)[None]
    logits = model.model(ids).logits[0, session.before - 1 : -1]
    want = torch.log_softmax(logits, -1).gather(-1, ids[0, session.before :, None])[:, 0]
    assert logp_of(computed[0], 1, "full") == pytest.approx(want.tolist(), abs=1e-10)


def test_sums_and_retrieval_follow_from_the_tokens(session, computed, model):
    rows = computed[0]
    for r in rows:
        if r["metric"] == "logp":
            assert r["value"] == pytest.approx(sum(logp_of(rows, r["instance"], r["condition"])))


def test_retrieved_means_every_token_is_the_argmax(model, session):
    script = session.scripts[0]
    ids = torch.from_numpy(script.ids)[None, :60].clone()
    logits = model.model(ids).logits[0]
    targets = torch.stack([logits[55 + i].argmax() for i in range(4)])[None]
    targets[0, 2] += 1
    got = engine.force(model, kvprobe.cache(model, keep=1000, buffer=8), ids, targets=targets, first=56)
    assert got.top.tolist() == [[True, True, False, True]]


def test_rounds_are_counted_from_the_log_up_to_the_value(session, computed):
    rows, log, members = computed
    fired = log.fired[0]
    value_query = session.before - 1  # the token whose logits give the value's first digit
    want = sum(length <= value_query for length in fired)
    got = {r["value"] for r in rows if r["metric"] == "rounds" and r["condition"] not in ("full",)}
    assert got == {want} and want < (session.before - session.scripts[0].box[0]) / session.plan.buffer + 2
    assert fired[0] == session.plan.fires_at == 80


def test_conditions_hold_the_box_in_exactly_their_sites(session, computed):
    _, log, members = computed
    for k, (instance, name) in enumerate(members):
        a, z = session.scripts[instance].box
        alive = (log.died[:, k, :, a:z] == keeplog.ALIVE).all(-1)
        condition = next(c for c in session.conditions if c.name == name)
        if condition.sites is not None:
            assert {(i, h) for i, h in zip(*np.nonzero(alive))} == set(condition.sites)
            gone = (log.died[:, k, :, a:z] == keeplog.ALIVE).any(-1)
            assert (gone == alive).all()  # nothing of the box is left elsewhere


def test_background_draws_are_shared_by_the_conditions_of_an_instance(session, computed):
    """Away from the box, conditions whose boxes compete for no slot at a site lose the same entries there."""
    _, log, members = computed
    rows = {name: k for k, (instance, name) in enumerate(members) if instance == 0}
    one, kept = log.died[:, rows["1"], 1], log.died[:, rows["kept"], 1]  # head 1 holds the box in both
    assert (one == kept).all()
    assert (log.died[:, rows["1"], 0] != log.died[:, rows["1"], 1]).any()


def test_batching_changes_nothing(session, computed, model):
    alone = planted_fact.start(planted_fact.CONFIG(model="tiny", dtype="float64", keep=64, buffer=8, instances=3, batch_size=1, pre=40, age=128, query=60), model)
    rows, log, members = alone.compute(2, lambda: None, lambda tokens: None)
    everyone, their_log, theirs = computed
    for k, member in enumerate(members):
        assert (log.died[:, k] == their_log.died[:, theirs.index(member)]).all()
        assert logp_of(rows, *member) == pytest.approx(logp_of(everyone, *member), abs=1e-10)


def test_the_ranking_uses_other_instances_and_decides_the_sets(tmp_path):
    run = kvprobe.run("planted_fact", preset="smoke", out=tmp_path / "r", progress=False, conditions="singles,best-pairs", rank_instances=2, best=1, instances=2, batch_size=2)
    rank = run.rows[run.rows.stage == "rank"]
    assert set(rank.instance) == {2, 3} and set(run.rows[run.rows.stage == "eval"].instance) == {0, 1}
    assert run.ok and "0+1" in set(rank.condition) | {"0+1"}


def test_keep_ratio_is_a_fraction_of_the_tokens_before_the_value(model):
    config = planted_fact.CONFIG(model="tiny", keep=None, keep_ratio=0.25, buffer=8, instances=1, batch_size=1, pre=40, age=128, query=60)
    s = planted_fact.start(config, model)
    assert s.plan.keep == round(0.25 * s.before)


def test_a_script_longer_than_the_context_is_refused(model):
    with pytest.raises(ValueError, match="context of 8192"):
        planted_fact.start(planted_fact.CONFIG(model="tiny", keep=64, buffer=8, instances=1, age=9000, query=60), model)


def test_checks_fail_when_the_instrument_lies(session, computed, tmp_path):
    """Break the log by hand: a pinned position that died must be a breach."""
    _, log, members = computed
    k = next(i for i, m in enumerate(members) if m[1] == "kept")
    pins = next(c for c in session.conditions if c.name == "kept").pins(session.scripts[0].box)
    assert keeplog.audit(log, k, pins) == []
    log.died[0, k, 0, session.scripts[0].box[0] + 3] = 1
    assert keeplog.audit(log, k, pins)


def test_plan_limits():
    with pytest.raises(ValueError, match="K \\+ 2|keep \\+ 2"):
        planted_fact.start(planted_fact.CONFIG(model="tiny", keep=500, buffer=8, instances=1, pre=40, age=128, query=60), load("tiny"))
    assert Plan(32, 8).fires_at == 48
