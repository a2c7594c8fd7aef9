"""What comparisons of policies refuse before any work, where questions are put, and what a story is made of."""

import dataclasses
import re

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import arms, needles, planting, registry
from kvprobe.comparing import Ask, Comparing, Gather, Story, answer_rows, eviction_seed
from kvprobe.models import load
from kvprobe.types import Needs, Plan

PROBES = ("keep_log", "passcode", "blocks", "distance", "protection", "fork")


@pytest.fixture(scope="module")
def model():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module", autouse=True)
def one_filler():
    """Encoding the filler is most of a start."""
    import functools

    real = needles.Filler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needles, "Filler", functools.lru_cache(lambda source, tokenizer: real(source, tokenizer)))
        yield


def start(probe: str, model, **fields):
    module = registry.find("probe", probe)
    return module.start(dataclasses.replace(module.PRESETS["smoke"], **fields), model)


# -- refused before any work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
def test_a_model_without_a_tokenizer_is_refused(probe, model):
    with pytest.raises(ValueError, match="'tiny' came without a tokenizer"):
        start(probe, dataclasses.replace(model, tokenizer=None))


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("bad, says", [
    (dict(policies="nope"), "'nope' is unknown|policies=random"), (dict(policies="random(size=1)"), "no option 'size'|policies=random"), (dict(policies=""), "names no policy|policies=random"),
    (dict(protection="maybe"), "known: with, without, both|protection=without|needs both"), (dict(instances=0), "instances=0"), (dict(batch_size=0), "batch_size=0"),
    (dict(eviction_seeds=0), "eviction_seeds=0"), (dict(buffer=0), "buffer=0"), (dict(keep=0), "keep=0"), (dict(seed=-1), "must not be negative"), (dict(positions="shuffled"), "original, renumbered"),
    (dict(model="nope"), "allowed: 'smollm2'"), (dict(filler="none.txt"), "builtin")], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_bad_settings_leave_no_folder(probe, bad, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        kvprobe.run(probe, preset="smoke", out=tmp_path / "never", progress=False, **bad)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("probe, bad, says", [
    ("keep_log", dict(keep=30), "cannot hold the protected prompt of 37"),
    ("keep_log", dict(keep=16, rounds=20, protection="without"), "the prompt of 37 tokens alone reaches a round"),
    ("keep_log", dict(keep=4, buffer=4, rounds=3), "leave no body after the prompt"),
    ("keep_log", dict(rounds=0), "rounds=0"),
    ("keep_log", dict(rounds=2000, buffer=8), "has a context of 8192"),
    ("passcode", dict(rounds="2,1"), "rising"), ("passcode", dict(rounds="0"), "from 1 on"), ("passcode", dict(rounds="x"), "from 1 on"), ("passcode", dict(pre=-1), "pre=-1"),
    ("passcode", dict(pre=90), "only positions below 144 are candidates"),
    ("passcode", dict(keep=96, buffer=24, pre=30), "before the passcode has ended"),
    ("passcode", dict(keep=30, buffer=90, pre=0, protection="with"), "cannot hold the protected prompt"),
    ("passcode", dict(rounds="1,200"), "has a context of 8192"),
    ("blocks", dict(blocks="0"), "from 1 on"), ("blocks", dict(blocks="40", keeps="32"), "block=40 is larger than keep=32"), ("blocks", dict(keeps="64,0"), "from 1 on"),
    ("blocks", dict(keeps="64,8", buffer=24, blocks="1,8"), "keep=8 cannot hold 16 pinned entries"),
    ("blocks", dict(keeps="64,250"), "nothing would be evicted"), ("blocks", dict(age=9000), "context|too short"), ("blocks", dict(age=60), "age=60 is too short"), ("blocks", dict(query=10), "its room is 10"),
    ("distance", dict(factors="twice"), "known are once, verbatim, derived"), ("distance", dict(factors=""), "known are once"), ("distance", dict(apart=20), "apart=20 must be at least box=24"),
    ("distance", dict(protection="both"), "once with and once without"), ("distance", dict(box=8, apart=8), "its room is 8"), ("distance", dict(keep=40, buffer=100), "keep=40 cannot hold 48 pinned entries"), ("distance", dict(box=30), "1 rounds of 48 cannot delete the 2 boxes of 30"),
    ("distance", dict(pre=140), "only positions below 208"),
    ("protection", dict(keep=150), "cannot hold the protected prompt of 1"), ("protection", dict(keep=100, buffer=48, rounds=1), "leave no room after the prompt"), ("protection", dict(rounds=0), "from 1 on"),
    ("fork", dict(keep=15), "cannot hold a pinned range of 16"), ("fork", dict(prompt=37), "must be longer than the stub of 37"), ("fork", dict(new=0), "new=0"), ("fork", dict(ranges=0), "ranges=0"),
    ("fork", dict(keep=50, protection="with"), "protected stub of 37 tokens and a pinned range of 16"), ("fork", dict(new=4, prompt=44), "nothing would be evicted"),
    ("fork", dict(new=9000), "has a context of 8192"), ("fork", dict(keep=16), "alone reaches a round")])
def test_what_cannot_work_is_refused_at_the_start(probe, bad, says, model):
    with pytest.raises(ValueError, match=says):
        start(probe, model, **bad)


def test_a_prompt_to_write_on_from_may_be_longer_than_a_round(model):
    """Only its stub is the first forward."""
    start("fork", model, keep=24, prompt=100)


def test_one_round_is_enough(model):
    """The script of one round ends where it fires."""
    s = start("keep_log", model, rounds=1, policies="random", instances=1, eviction_seeds=1, protection="without")
    rows, log, _ = s.compute(0, lambda: None, lambda n: None)
    assert log.fired == ((s.plan.fires_at,),) and log.length == (s.plan.fires_at,)
    assert next(r["value"] for r in rows if r["metric"] == "rounds") == 1


class Bare(Comparing):
    def rows_of(self, arm, story, k, log, answers):
        return []


def test_a_session_that_gives_no_rows_is_told_before_any_work(model):
    with pytest.raises(ValueError, match="gives no rows: its session needs rows_of, or a compute of its own"):
        Comparing(registry.find("probe", "keep_log").PRESETS["smoke"], model, [Story(0, np.arange(200), 10)])


def test_a_question_no_round_comes_before_is_refused(model):
    """A round fires after a forward: one token later it matters."""
    at = Plan(64, 8).fires_at - 1

    def asked(more: int):
        ids = np.arange(at + more)
        return Bare(registry.find("probe", "keep_log").PRESETS["smoke"].__class__(model="tiny", keep=64, buffer=8, policies="random"), model,
                         [Story(0, ids, 10, (Ask("q", len(ids), np.arange(2), np.arange(3)),))])

    asked(0)
    with pytest.raises(ValueError, match="nothing would be evicted: the script has 79 tokens before it is asked"):
        asked(-1)


def test_stories_of_unequal_shape_are_refused(model):
    config = registry.find("probe", "keep_log").PRESETS["smoke"]
    one = Story(0, np.arange(200) % 200, 10)
    for other in (Story(1, np.arange(199), 10), Story(1, np.arange(200), 11), Story(1, np.arange(200), 10, (Ask("q", 90, np.arange(2), np.arange(2)),)), Story(1, np.arange(200), 10, (), {"box": (2, 3)})):
        with pytest.raises(ValueError, match="the stories differ"):
            Bare(config, model, [one, other])


# -- where questions are put ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep, buffer, query", [(16, 4, 3), (16, 1, 5), (16, 2, 1), (9, 3, 2), (256, 16, 40), (96, 48, 60)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_rounds_asked_for_have_fired_before_the_value(keep, buffer, query, rounds):
    """By walking: at each length a round may fire, and the token after it feels it. The first value token is predicted by the query's last."""
    plan = Plan(keep, buffer)
    at = planting.asked_after(plan, rounds, query)
    held = fired = felt = 0
    for _ in range(at + query):
        felt = fired  # what the token of this step sees
        held += 1
        if held == keep + 2 * buffer:
            held, fired = keep + buffer, fired + 1
    assert felt == rounds


def test_rounds_are_read_and_refused():
    assert planting.rounds_of("15,57") == (15, 57) and planting.rounds_of(" 3 , 4 ") == (3, 4)
    for bad in ("", "0", "3,3", "4,3", "1.5", "-1", "a", "3,,4"):
        with pytest.raises(ValueError, match="whole numbers of rounds"):
            planting.rounds_of(bad)


def test_values_are_distinct_four_digits_of_their_stream():
    found = planting.values(0, 3, 5000)
    assert len(set(found)) == 5000 and all(len(v) == 4 and 5000 <= int(v) <= 9999 for v in found)
    assert planting.values(0, 3, 4) == found[:4] != planting.values(0, 5, 4)
    for bad in (0, 5001):
        with pytest.raises(ValueError, match=f"instances={bad}"):
            planting.values(0, 3, bad)


def test_marks_stand_where_they_were_put_and_nothing_else_names_them(model):
    filler, head = needles.Filler("builtin", model.tokenizer), np.array([7, 8, 9])
    marks = [planting.Mark("b", 60, needles.encode(model.tokenizer, "zq = 1234")), planting.Mark("a", 10, needles.encode(model.tokenizer, "zq"))]
    ids, spans = planting.write(filler, head, marks, 120, ["zq", "1234"], np.random.default_rng(0))
    assert len(ids) == 120 and ids[:3].tolist() == [7, 8, 9] and spans == {"a": (10, 12), "b": (60, 69)}
    for mark in marks:
        assert ids[slice(*spans[mark.name])].tolist() == mark.ids.tolist()
    rest = model.tokenizer.decode(np.concatenate([ids[3:10], ids[12:60], ids[69:]]).tolist())
    assert "zq" not in rest and "1234" not in rest
    built_in = needles.Filler("builtin", model.tokenizer).ids.tobytes()
    assert np.concatenate([ids[3:10], ids[12:60], ids[69:]]).tobytes() in built_in  # one stretch, cut and never decoded
    for bad in ([planting.Mark("a", 2, marks[1].ids)], [planting.Mark("a", 59, marks[1].ids), marks[0], planting.Mark("c", 68, marks[1].ids)], [planting.Mark("a", 119, marks[1].ids)]):
        with pytest.raises(ValueError, match="does not fit between"):
            planting.write(filler, head, bad, 120, [], np.random.default_rng(0))


@pytest.mark.parametrize("probe", PROBES)
def test_stories_say_what_they_claim(probe, model):
    """H01, H02: the value's tokens are found by ids, the spans hold what they name, the text is whole, and the question does not hold the value."""
    s = start(probe, model)
    decode = model.tokenizer.decode
    for group in getattr(s, "by_factor", {"": s.stories}).values():
        for story in group:
            values = [part.split()[-1] for part in story.facts.split(", ") if not part.startswith("control")] if story.facts else []
            asks = [a for a in story.asks if not a.name.endswith("control")]  # a control states what it asks for
            for ask, value in zip(asks, values * len(asks) if len(values) == 1 else values, strict=bool(values)):
                assert decode(ask.value.tolist()).strip() == value and value not in decode(ask.query.tolist())
            text = decode(story.ids.tolist())
            stated = {"passcode": 1, "distance": len(story.spans), "blocks": 1, "protection": 1}.get(probe, 0)
            assert all(text.count(v) == stated for v in values)
            for name, (a, z) in story.spans.items():
                assert all(v in decode(story.ids[a:z].tolist()) for v in values), name
            if probe != "fork":  # its text is written by the first stage; the tiny tokenizer's one special token begins the stub
                assert (story.ids[1:] != model.tokenizer.bos_token_id).all()
    assert len({story.facts for story in s.stories}) in (1, len(s.stories))
    numbers = [w for story in s.stories for w in re.findall(r"\d{4}", story.facts)]
    assert len(set(numbers)) == len(numbers)  # no value is another's, nor a control's


def test_factors_share_filler_names_and_values(model):
    s = start("distance", model)
    for i in range(2):
        once, twice, derived = (s.by_factor[f][i] for f in ("once", "verbatim", "derived"))
        assert once.facts == twice.facts == derived.facts
        for other in (twice, derived):
            a, z = other.spans["box1"]
            assert (once.ids[:a] == other.ids[:a]).all() and (once.ids[z:] == other.ids[z:]).all() and (once.ids[a:z] != other.ids[a:z]).any()
        assert all((x.query == y.query).all() and (x.value == y.value).all() and x.at == y.at for x, y in zip(once.asks, derived.asks))


# -- arms ----------------------------------------------------------------------------------------------------------------


def test_eviction_seeds_are_far_apart_and_the_first_is_the_runs_own():
    seeds = [eviction_seed(s, d) for s in range(50) for d in range(5)]
    assert len(set(seeds)) == 250 and eviction_seed(7, 0) == 7


def test_the_shared_prefix_gathers_what_the_greediest_needs(model):
    s = start("passcode", model, policies="random,rkv_released,h2o,snapkv(window=9)", instances=1)
    ids = torch.as_tensor(s.stories[0].ids)[None]
    cache = s._shared(s.stories[:1], ids)
    assert cache.policy == Gather(Needs(window=9, attn_mass=True)) and cache.get_seq_length() == min(s.plan.fires_at - 1, s.stories[0].asks[0].at)
    assert start("passcode", model, policies="random,recency", instances=1)._shared(s.stories[:1], ids).policy == Gather(Needs())


def test_answers_become_rows(model):
    from types import SimpleNamespace

    answer = SimpleNamespace(ask=SimpleNamespace(name="q"), logp=torch.tensor([[-1.0, -2.0], [-0.5, -0.25]]), top=torch.tensor([[True, False], [True, True]]), rounds=[3, 4])
    got = [{r["metric"]: (r["value"], r["unit"], r["ask"]) for r in answer_rows(None, k, answer)} for k in (0, 1)]
    assert got == [{"logp": (-3.0, "nats", "q"), "retrieved": (0.0, "fraction", "q"), "rounds": (3.0, "rounds", "q")},
                   {"logp": (-0.75, "nats", "q"), "retrieved": (1.0, "fraction", "q"), "rounds": (4.0, "rounds", "q")}]


@pytest.mark.parametrize("probe, policies", [("passcode", "random (block=2),h2o"), ("keep_log", "rkv(lam=0.25),lazyeviction")])
def test_facts_name_every_policy_as_it_was_written(probe, policies, model):
    import hashlib
    from pathlib import Path

    s = start(probe, model, policies=policies)
    found = s.facts()["policies"]
    assert list(found) == arms.split(policies)
    for name, facts in found.items():
        module = registry.find("policy", name.split("(")[0].strip())
        assert set(facts["fields"]) == {f.name for f in dataclasses.fields(module.POLICY)}
        assert facts["sha256"] == hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:16]
    assert found[arms.split(policies)[0]]["fields"] | {"shared": False, "block": 2, "lam": 0.25} == {"shared": False, "block": 2, "lam": 0.25} | found[arms.split(policies)[0]]["fields"]
