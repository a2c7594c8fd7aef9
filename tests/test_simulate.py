"""The keep-set process without a model: against logs of real runs, brute force and closed forms (methods R1, R3, R15)."""

import numpy as np
import pytest

import kvprobe
import tiny
from kvprobe import engine, registry, simulate
from kvprobe.keeplog import ALIVE
from kvprobe.registry import make_policy
from kvprobe.types import Plan

FREE = [("random", {}), ("random", dict(shared=True)), ("random", dict(block=3)), ("random", dict(block=4, shared=True)), ("recency", {}), ("streaming_llm", {})]
NAMES = ["random", "shared", "blocks", "shared blocks", "recency", "streaming_llm"]


def same(a, b) -> bool:
    return np.array_equal(a.died, b.died) and (a.fired, a.length, tuple(a.layers), a.keep, a.buffer) == (b.fired, b.length, tuple(b.layers), b.keep, b.buffer)


@pytest.mark.parametrize("protect", [False, True], ids=["open", "protected"])
@pytest.mark.parametrize("policy, options", FREE, ids=NAMES)
def test_a_simulated_log_is_that_of_a_model(llama, ids, policy, options, protect):
    cache = kvprobe.cache(llama[0], policy=policy, keep=16, buffer=4, protect_prompt=protect, instances=[5, 0, 2], seed=3, **options)
    engine.force(llama[0], cache, ids[:, :7])
    engine.force(llama[0], cache, ids[:, 7:])
    asked = []
    log = simulate.keep_log(2, 2, Plan(16, 4), make_policy(policy, options), tokens=80, prompt=7, protect=protect, instances=[5, 0, 2], seed=3, tick=asked.append)
    assert same(log, cache.keep_log) and len(log.fired[0]) == 15 and sum(asked) == 80
    other = simulate.keep_log(2, 2, Plan(16, 4), make_policy(policy, options), tokens=80, prompt=7, protect=protect, instances=[5, 0, 2], seed=4)
    assert same(log, other) == (policy != "random")


def test_a_prompt_longer_than_a_round_is_evicted_at_once(llama, ids):
    cache = kvprobe.cache(llama[0], keep=16, buffer=4, instances=[1], seed=3)
    engine.prefill(llama[0], cache, ids[:1, :40])
    engine.force(llama[0], cache, ids[:1, 40:])
    log = simulate.keep_log(2, 2, Plan(16, 4), make_policy("random"), tokens=80, prompt=40, instances=[1], seed=3)
    assert same(log, cache.keep_log) and log.fired[0][:2] == (40, 44)


def test_layers_are_the_models_own_numbers(ids):
    """A layer's draws go by its number: those between are no part of the log."""
    model, _ = tiny.pair("gemma3")
    cache = kvprobe.cache(model, keep=16, buffer=4, seed=3)
    engine.force(model, cache, ids[:, :60])
    g = model.geometry
    log = simulate.keep_log(g.n_layers, g.n_kv, Plan(16, 4), make_policy("random"), tokens=60, layers=g.kv_layers, instances=range(3), seed=3)
    assert g.kv_layers == (1, 3) and same(log, cache.keep_log)


@pytest.mark.parametrize("name", [n for n in registry.available("policy") if registry.find("policy", n).POLICY().needs.states])
def test_policies_that_need_a_model_are_refused(name):
    with pytest.raises(ValueError, match="reads keys, values or attention: only policies that need no model can be simulated"):
        simulate.keep_log(1, 2, Plan(8, 2), make_policy(name), tokens=20)


def test_those_that_do_not_are_known():
    assert {n for n in registry.available("policy") if not registry.find("policy", n).POLICY().needs.states} == {p for p, _ in FREE}


def test_bad_lengths_are_refused():
    for prompt in (0, 21):
        with pytest.raises(ValueError, match=f"prompt={prompt} must be in 1..tokens=20"):
            simulate.keep_log(1, 2, Plan(8, 2), make_policy("random"), tokens=20, prompt=prompt)
    with pytest.raises(ValueError, match="cannot hold the protected prompt of 9"):
        simulate.keep_log(1, 2, Plan(8, 2), make_policy("random"), tokens=20, prompt=9, protect=True)


# -- closed forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep, buffer, tokens, prompt, rounds", [(1024, 64, 4096, 1, 47), (1024, 64, 4096 + 64, 64, 48), (16, 4, 80, 7, 15), (16, 4, 23, 7, 0), (16, 4, 24, 7, 1), (16, 1, 40, 1, 23), (16, 4, 50, 30, 6)])
def test_rounds_of_a_row(keep, buffer, tokens, prompt, rounds):
    """R3: at K + 2r entries, then every r tokens; a long prompt fires at once. R15: the count cycles K + r, K + 2r."""
    log = simulate.keep_log(1, 1, Plan(keep, buffer), make_policy("random"), tokens=tokens, prompt=prompt)
    assert log.rounds(0) == rounds == simulate.rounds_until(Plan(keep, buffer), tokens, prompt)
    first = max(prompt, keep + 2 * buffer)
    assert log.fired[0] == tuple(range(first, tokens + 1, buffer))
    for n in range(rounds):
        assert log.held(0, n).sum() == keep + buffer


@pytest.fixture(scope="module")
def many():
    """K = 16, r = 4, 8 heads, 150 independent rows."""
    return simulate.keep_log(1, 8, Plan(16, 4), make_policy("random"), tokens=24 + 25 * 4, instances=range(150), seed=1)


def per_row(log, n: int, first: int = 1):
    return np.array([simulate.survival_by_rounds(log.select([b]), first, [n])[0][1:3] for b in range(len(log.fired))])


@pytest.mark.parametrize("n", [2, 4, 10, 15])
def test_survival_of_a_uniform_draw(many, n):
    """R1 within 4 sigma over rows, which are independent; positions of a row are not."""
    found, p = per_row(many, n), (16 / 20) ** n
    for got, want in zip(found.T, (p, 1 - (1 - p) ** 8)):
        assert abs(got.mean() - want) <= 4 * got.std(ddof=1) / np.sqrt(len(got))
    assert found.mean(0) == pytest.approx(simulate.survival_by_rounds(many, 1, [n])[0][1:3])


def test_survival_beside_a_pinned_prompt():
    log = simulate.keep_log(1, 4, Plan(16, 4), make_policy("random"), tokens=24 + 20 * 4, prompt=6, protect=True, instances=range(100), seed=2)
    assert (log.died[..., :6] == ALIVE).all()
    for n in (1, 4, 8):
        got, p = per_row(log, n, 6), (10 / 14) ** n
        assert abs(got[:, 0].mean() - p) < 4 * got[:, 0].std(ddof=1) / 10


def test_one_round_leaves_exactly_its_share():
    """All of one round's candidates: K of K + r stay, whatever the draw."""
    log = simulate.keep_log(2, 3, Plan(16, 4), make_policy("random"), tokens=24, instances=range(2))
    assert simulate.survival_by_rounds(log, 0, [1])[0][1] == pytest.approx(16 / 20, abs=1e-15)


def test_the_union_of_a_shared_draw_is_one_head():
    log = simulate.keep_log(2, 8, Plan(16, 4), make_policy("random", dict(shared=True)), tokens=100, instances=range(3))
    for n, head, union, _ in simulate.survival_by_rounds(log, 1, (1, 3, 10)):
        assert head == union
    assert (log.died == log.died[:, :, :1]).all() and (log.died[0] != log.died[1]).any()


def test_survival_by_rounds_is_what_counting_gives():
    log = simulate.keep_log(2, 3, Plan(9, 3), make_policy("random", dict(block=2)), tokens=48, prompt=2, instances=range(2), seed=6)
    fired, upto = log.fired[0], (1, 2, 5, 9, 12, 40)
    want = []
    for n in upto:
        heads, unions = [], []
        for p in range(2, 48):
            entered = [m for m, length in enumerate(fired) if p < length - 3]  # the rounds it was a candidate in
            if len(entered) < n:
                continue
            last = entered[n - 1]
            for row in range(2):
                held = log.held(row, last)[:, :, p]
                heads += held.flatten().tolist()
                unions += held.any(1).tolist()
        if heads:
            want.append((n, np.mean(heads), np.mean(unions), len(unions)))
    got = simulate.survival_by_rounds(log, 2, upto)
    assert [g[0] for g in got] == [1, 2, 5, 9, 12] and len(fired) == 12
    for g, w in zip(got, want, strict=True):
        assert g == pytest.approx(w)


def test_the_papers_size_takes_seconds():
    """36 layers, 8 heads, K = 960, r = 64: a tenth of the papers' text."""
    import time

    start = time.process_time()
    log = simulate.keep_log(36, 8, Plan(960, 64), make_policy("random"), tokens=3200)
    assert time.process_time() - start < 20
    assert log.rounds(0) == (3200 - 1088) // 64 + 1 and int((log.died != ALIVE).sum()) == 36 * 8 * 64 * log.rounds(0)


def test_another_folder_is_not_overwritten(tmp_path):
    """A probe's run, or another simulation, is left as it is."""
    from kvprobe.simulate import Settings, command

    small = dict(keep=8, buffer=2, layers=1, heads=2, tokens=40)
    (tmp_path / "manifest.json").write_text('{"settings": {"probe": "keep_log"}}')
    (tmp_path / "rows.jsonl").write_text("rows")
    with pytest.raises(ValueError, match="something else"):
        command(Settings(**small, out=str(tmp_path)))
    assert (tmp_path / "rows.jsonl").read_text() == "rows"
    first = Settings(**small, out=str(tmp_path / "new"))
    assert command(first) == command(first)
    with pytest.raises(ValueError, match="something else"):
        command(Settings(**small, seed=1, out=str(tmp_path / "new")))
