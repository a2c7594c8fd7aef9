"""The session of prompt-time probes: its arms against runs of kvprobe.compress, its measures one arm at a time, what it refuses."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe
from kvprobe import lookahead, oracle, prompting, registry
from kvprobe.metrics import fidelity
from kvprobe.compression import compress
from kvprobe.models import load
from kvprobe.prompt_settings import COMMON, build_tasks
from kvprobe.prompt_tables import per_prompt, seed_spread
from kvprobe.prompting import CHANCE, Arm, Prompting, arm

SMALL = COMMON(model="tiny", instances=2, length=480, keeps="96", window=8, future=4, sampling_seeds=2, kinds="needles", dtype="float64")
LORE = "lore(window=8,m=2,t=3,chunk=4)"
KEEP = 96


@pytest.fixture(scope="module")
def lm():
    return load("tiny", dtype="float64")


def made(lm, *policies, config=SMALL, extra=()):
    arms = [Arm("full", None), Arm("oracle", oracle.Given(), KEEP), *(a for p in policies for a in arm(p, p, KEEP, config, lm)), *extra]
    return Prompting(config, lm, build_tasks(config, lm), arms)


@pytest.fixture(scope="module")
def session(lm):
    return made(lm, "random", LORE, "lore(window=8,m=0,tau=1.0,chunk=1)", "snapkv(window=8)", "h2o")


@pytest.fixture(scope="module")
def prompt(session):
    return session.read(1)


@pytest.fixture(scope="module")
def rows(session):
    return pd.DataFrame(session.compute(1, None, lambda n: None)[0])


def alone(lm, prompt, policy, draw=0, **options):
    """The same arm by the public call; a prompt's number is its instance."""
    return compress(lm, [prompt.ids.tolist()], policy=policy, keep=KEEP, protect_window=8, seed=draw * 1_000_003, instances=[1], **options)


@pytest.mark.parametrize("name, policy, options", [("random", "random", {}), (LORE, "lore", dict(window=8, m=2, t=3)), ("snapkv(window=8)", "snapkv", dict(window=8)), ("h2o", "h2o", {}),
                                                   ("lore(window=8,m=0,tau=1.0,chunk=1)", "lore", dict(window=8, m=0, tau=1.0, chunk=1))])
def test_an_arm_is_what_compress_makes(lm, session, prompt, name, policy, options):
    mine = [a for a in session.arms if a.name == name]
    assert len(mine) == (2 if policy == "random" or name == LORE else 1)
    for a in mine:
        branch, own = session.evicted(a, prompt), alone(lm, prompt, policy, a.draw, **options)
        assert torch.equal(branch.positions, own.cache.positions)
        assert all(torch.equal(x.keys, y.keys) for x, y in zip(branch.layers, own.cache.layers))
    if len(mine) == 2:
        assert not torch.equal(session.evicted(mine[0], prompt).positions, session.evicted(mine[1], prompt).positions)


def test_rows_are_each_arm_measured_alone(lm, session, prompt, rows):
    """Arms are measured as rows of one batch: here one by one, on the caches that compress makes, the answer by a plain forward."""
    text = torch.as_tensor(prompt.task.answer_ids)[None]
    for name, policy, options in [("random", "random", {}), (LORE, "lore", dict(window=8, m=2, t=3)), ("lore(window=8,m=0,tau=1.0,chunk=1)", "lore", dict(window=8, m=0, tau=1.0, chunk=1))]:
        for draw in rows[rows.arm == name].draw.unique():
            own = alone(lm, prompt, policy, int(draw), **options).cache
            every, free = prompt.truth.recall(prompt.truth.kept(own), KEEP)
            want = {"recall": float(every.mean()), "recall_free": float(free.mean()), "error": float(prompt.truth.error(own).mean())}
            with torch.no_grad():
                logits = lm.model(input_ids=text[:, :-1], position_ids=torch.arange(len(prompt.ids), len(prompt.ids) + text.shape[1] - 1)[None], cache=own, use_cache=True).logits
            logp = logits.log_softmax(-1).gather(-1, text[:, 1:, None])[0, :, 0]
            want |= {"logp": float(logp.sum()), "retrieved": float((logits.argmax(-1) == text[:, 1:]).all())}
            found = rows[(rows.arm == name) & (rows.draw == draw)].set_index("metric").value.to_dict()
            assert found == pytest.approx(want, rel=1e-9)


def test_the_full_cache_and_the_oracle(lm, prompt, rows):
    with torch.no_grad():
        text = torch.cat([torch.as_tensor(prompt.ids), torch.as_tensor(prompt.task.answer_ids)])[None]
        logits = lm.model(input_ids=text).logits[0, len(prompt.ids) : -1].log_softmax(-1)
    want = float(logits.gather(-1, torch.as_tensor(prompt.task.answer_ids[1:])[:, None]).sum())  # the first comes from the prefill in every arm
    assert rows[(rows.arm == "full") & (rows.metric == "logp")].value.item() == pytest.approx(want, rel=1e-9)
    assert set(rows[rows.arm == "full"].metric) == {"logp", "retrieved"}
    assert rows[(rows.arm == "oracle") & rows.metric.isin(["recall", "recall_free"])].value.tolist() == [1, 1]
    chance = rows[rows.arm == CHANCE].set_index("metric").value
    protected = int(prompt.truth.protected[0, 0, 0].sum())
    assert tuple(chance[["recall", "recall_free"]]) == fidelity.random_recall(len(prompt.ids), KEEP, protected) and protected == 9  # bos is the sink


def test_only_tokens_that_count_are_scored(lm):
    config = dataclasses.replace(SMALL, kinds="variables", instances=1, length=540)
    session = made(lm, config=config)
    prompt = session.read(0)
    assert 0 < prompt.task.scored[1:].sum() < len(prompt.task.scored) - 1
    with torch.no_grad():
        text = torch.cat([torch.as_tensor(prompt.ids), torch.as_tensor(prompt.task.answer_ids)])[None]
        logp = lm.model(input_ids=text).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1).gather(-1, torch.as_tensor(prompt.task.answer_ids)[:, None])[:, 0]
    counted = torch.as_tensor(prompt.task.scored)
    counted[0] = False
    assert session.answered(session.evicted(session.arms[0], prompt), prompt)[0]["logp"] == pytest.approx(float(logp[counted].sum()), rel=1e-9)


def test_an_unseen_question_is_seen_by_nobody(lm):
    """The prompt ends before it, all of the answer is read from the compressed cache, and the future comes behind it."""
    config = dataclasses.replace(SMALL, question="unseen", instances=1)
    session = made(lm, "random", LORE, config=config)
    prompt = session.read(0)
    task = prompt.task
    assert prompt.ids.tolist() == task.ids[: task.cut].tolist() and prompt.tail.tolist() == task.ids[task.cut :].tolist()
    assert prompt.cache.seen == [task.cut] and len(prompt.tail) > 10
    with torch.no_grad():
        want = lm.model.generate(torch.as_tensor(task.ids)[None], max_new_tokens=4, do_sample=False, eos_token_id=-1)[0, len(task.ids) :]
    assert torch.equal(prompt.truth.ahead.tokens[0], want)
    rows = pd.DataFrame(session.compute(0, None, lambda n: None)[0])
    own = compress(lm, [prompt.ids.tolist()], policy="lore", keep=KEEP, protect_window=8, window=8, m=2, t=3, instances=[0]).cache
    text = torch.as_tensor(np.concatenate([prompt.tail, task.answer_ids]))[None]
    with torch.no_grad():
        logits = lm.model(input_ids=text[:, :-1], position_ids=torch.arange(task.cut, task.cut + text.shape[1] - 1)[None], cache=own, use_cache=True).logits[0, len(prompt.tail) - 1 :]
    logp = logits.log_softmax(-1).gather(-1, torch.as_tensor(task.answer_ids)[:, None]).sum()
    assert rows[(rows.arm == LORE) & (rows.draw == 0) & (rows.metric == "logp")].value.item() == pytest.approx(float(logp), rel=1e-9)


def test_more_arms_than_are_measured_together(lm, session, prompt, rows, monkeypatch):
    monkeypatch.setattr(prompting, "TOGETHER", 2)
    again = pd.DataFrame(session.compute(1, None, lambda n: None)[0])
    keys = ["arm", "draw", "metric"]
    assert again[keys].equals(rows[keys]) and np.allclose(again.value, rows.value, rtol=1e-9)


def test_budgets_that_are_not_equal_are_no_comparison(lm, prompt):
    class Uneven(registry.find("policy", "random").POLICY):
        level = "layer"  # where it would be right

        def allocate(self, score, keep, *more):
            return keep + torch.tensor([1, -1])

    session = made(lm, extra=(Arm("uneven", Uneven(), KEEP),))
    assert session.evicted(session.arms[-1], prompt).ragged
    Uneven.level = "own"
    with pytest.raises(ValueError, match="uneven holds 95..97"):
        session.evicted(session.arms[-1], prompt)


@pytest.mark.parametrize("bad, says", [(dict(instances=0), "instances=0"), (dict(question="maybe"), "known: seen, unseen"), (dict(keeps="x"), "keeps='x'"), (dict(keeps="4,4"), "different whole numbers"),
                                       (dict(kinds="riddles"), "known are"), (dict(kinds=""), "known are"), (dict(seed=-1), "must not be negative"), (dict(form="cubed"), "magnitude, squared"), (dict(future=0), "future=0")])
def test_bad_settings(bad, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **bad)


def test_refused_before_any_work(lm):
    with pytest.raises(ValueError, match="cannot hold the 9 protected"):
        Prompting(SMALL, lm, build_tasks(SMALL, lm), [Arm("oracle", oracle.Given(), 8)])
    with pytest.raises(ValueError, match="nothing would be evicted"):
        Prompting(SMALL, lm, build_tasks(SMALL, lm), [Arm("oracle", oracle.Given(), 600)])
    with pytest.raises(ValueError, match="name a window"):
        Prompting(SMALL, lm, build_tasks(SMALL, lm), [Arm("snapkv", registry.make_policy("snapkv", dict(window=-1)), 50)])
    with pytest.raises(ValueError, match="without a tokenizer"):
        build_tasks(SMALL, dataclasses.replace(lm, tokenizer=None))
    with pytest.raises(ValueError, match="has a context of 8192"):
        made(lm, config=dataclasses.replace(SMALL, future=8000))


def test_prompts_of_several_kinds_take_turns(lm):
    found = build_tasks(dataclasses.replace(SMALL, kinds="needles,variables", instances=3, length=600), lm)
    assert [t.kind for t in found] == ["needles", "variables", "needles"] and [t.instance for t in found] == [0, 1, 2]


def test_per_prompt_is_a_mean_over_seeds():
    rows = pd.DataFrame([dict(instance=i, arm="a", draw=d, metric="recall", value=v) for i, d, v in [(1, 0, 0.2), (1, 1, 0.4), (0, 0, 0.5), (0, 1, 0.7)]])
    assert per_prompt(rows, "recall", arm="a").tolist() == pytest.approx([0.6, 0.3])
    assert seed_spread(rows, "recall") == pytest.approx(abs(0.35 - 0.55) / 2**0.5) and seed_spread(rows[rows.draw == 0], "recall") is None


# -- lookahead_geometry ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def geometry(lm):
    module = registry.find("probe", "lookahead_geometry")
    config = dataclasses.replace(module.PRESETS["smoke"], dtype="float64", ms="1,3", ts="2,4", instances=1)
    session = module.start(config, lm)
    return session, session.read(0)


def test_geometry_every_size_is_the_policy_itself(lm, geometry):
    """The shared walk against the lore policy, arm by arm, and against compress, which samples for itself."""
    session, prompt = geometry
    mine = [a for a in session.arms if a.columns["criterion"]]
    assert len(mine) == 2 * (1 + 4 * 2)
    for a in mine:
        walked, own = session.evicted(a, prompt), Prompting.evicted(session, a, prompt)
        assert torch.equal(walked.positions, own.positions), a.name
    last = next(a for a in mine if a.columns == dict(criterion="LORE", m=3, t=2) and a.draw == 1)
    own = compress(lm, [prompt.ids.tolist()], policy="lore", keep=96, protect_window=8, window=8, m=3, t=2, chunk=1, form="magnitude", seed=1_000_003, instances=[0])
    assert torch.equal(session.evicted(last, prompt).positions, own.cache.positions)
    assert len({tuple(session.evicted(a, prompt).positions.flatten().tolist()) for a in mine}) > 10


def test_geometry_sizes_are_nested(geometry):
    session, prompt = geometry
    found = lookahead.sample(session.model, prompt.cache, prompt.logits, 1, 2, seed=0, eos=(session.model.tokenizer.eos_token_id,))
    assert (prompt.draws[0].m, prompt.draws[0].t) == (3, 4) and torch.equal(prompt.draws[0].first(1, 2).tokens, found.tokens)


def test_geometry_runs_and_reports(tmp_path):
    from kvprobe.probes import lookahead_geometry as module

    run = kvprobe.run("lookahead_geometry", preset="smoke", out=tmp_path / "run", progress=False, dtype="float64")
    rows = run.rows
    assert run.ok and run.manifest["protected"] == [9, 9] and run.manifest["draw"] == {"particles": 2, "horizon": 3}
    s = module.summary(rows, run.manifest).set_index("arm")
    part = rows[(rows.arm == "LORE, M=2 T=3") & (rows.metric == "error")]
    assert s.loc["LORE, M=2 T=3", "error"] == pytest.approx(part.value.mean()) and s.loc["LORE, M=2 T=3", "n"] == 2
    assert s.loc["LORE, M=2 T=3", "error_sd"] == pytest.approx(part.groupby("draw").value.mean().std())
    gain = module.contrasts(rows, run.manifest)["M=2 T=3 over the window only"]["error"]
    assert gain.value == pytest.approx(s.loc["LORE, M=2 T=3", "error"] - s.loc["LORE, window only", "error"])
    assert len(run.table) == 4 + 2 * 5 and (tmp_path / "run" / "figures" / "lookahead_geometry.png").stat().st_size > 10_000


@pytest.mark.parametrize("bad, says", [(dict(ms="0"), "ms='0'"), (dict(ts=""), "ts=''"), (dict(keeps="64,128"), "at one budget"), (dict(keeps="4"), "cannot hold")])
def test_geometry_refuses(bad, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        kvprobe.run("lookahead_geometry", preset="smoke", out=tmp_path / "never", progress=False, **bad)
    assert not (tmp_path / "never").exists()


# -- ablations -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ablation(lm):
    module = registry.find("probe", "ablations")
    config = dataclasses.replace(module.PRESETS["smoke"], dtype="float64", instances=1)
    session = module.start(config, lm)
    return session, session.read(0)


def test_ablations_every_variant_is_the_policy_itself(ablation):
    """Scores from shared walks, and the rest the policy's own, against the policy doing everything itself; both budgets, both draws."""
    session, prompt = ablation
    mine = [a for a in session.arms if a.columns["axis"]]
    assert len({a.name for a in mine}) == 23 and {a.draw for a in mine} == {0, 1} and {a.keep for a in mine} == {48, 96}
    seen = {}
    for a in mine:
        walked, own = session.evicted(a, prompt), Prompting.evicted(session, a, prompt)
        assert torch.equal(walked.positions, own.positions), (a.name, a.keep, a.draw)
        seen.setdefault(a.name, []).append(tuple(walked.positions.flatten().tolist()))
    core = seen["LORE /E"]
    same = {name for name, sets in seen.items() if sets == core}
    assert {"M=0, the window only", "M=1", "M=8", "twice the weight", "attention mass", "AnDPro's criterion", "unprojected norm", "chunks of 4", "robust aggregation",
            "adaptive head budgets", "adaptive budgets, diversity", "a quarter of the window"} & same == set()


def test_ablations_options_are_table_14s(ablation):
    """Every variant differs from the core in what its name says, and in nothing else."""
    fields = {a.name: {f.name: getattr(a.policy, f.name) for f in dataclasses.fields(a.policy)} for a in ablation[0].arms if a.columns["axis"]}
    core = fields["LORE /E"]
    assert (core["m"], core["beta"], core["gamma"], core["lam_d"], core["lam_l"], core["chunk"], core["form"], core["objective"]) == (4, 1, 1.3, 0, 1, 1, "magnitude", "projected")
    differs = {name: {k: v for k, v in f.items() if v != core[k]} for name, f in fields.items()}
    assert differs["LORE /D"] == dict(gamma=1, lam_d=0.3) and differs["log probability only"] == dict(gamma=1) and differs["entropy and disagreement"] == dict(lam_d=0.3)
    assert differs["uniform"] == dict(beta=0, gamma=0) and differs["typicality only"] == dict(gamma=0) and differs["M=8"] == dict(m=8) and differs["a quarter of the window"] == dict(window=2)
    assert differs["adaptive budgets, diversity"] == dict(tau=1, lam_k=0.1, lam_v=0.1) and differs["robust aggregation"] == dict(alpha=0.5) and all(d for n, d in differs.items() if n != "LORE /E")


def test_ablations_pairs_by_prompt():
    from kvprobe.probes import ablations

    rng, lines = np.random.default_rng(0), []
    values = {(name, i, d): rng.normal() for name in ("LORE /E", "M=1") for i in range(5) for d in range(2)}
    for (name, i, d), v in values.items():
        lines.append(dict(instance=i, arm=name, keep=64, draw=d, axis="core", metric="error", value=v))
    s = ablations.summary(pd.DataFrame(lines), {"settings": {"seed": 0}}).set_index("arm")
    gaps = [np.mean([values["M=1", i, d] - values["LORE /E", i, d] for d in range(2)]) for i in range(5)]
    assert s.loc["M=1", "error_gain"] == pytest.approx(np.mean(gaps)) and s.loc["M=1", "n"] == 5
    assert min(gaps) <= s.loc["M=1", "error_gain_low"] < s.loc["M=1", "error_gain"] < s.loc["M=1", "error_gain_high"] <= max(gaps)
    assert s.loc["LORE /E", ["error_gain", "error_gain_low", "error_gain_high"]].tolist() == [0, 0, 0]


def test_ablations_and_figures_of_a_run(tmp_path):
    """One axis, its report, and both figures' pictures of small runs."""
    run = kvprobe.run("ablations", preset="smoke", out=tmp_path / "run", progress=False, axes="other", instances=1, keeps="48", sampling_seeds=1)
    assert run.ok and len(run.table) == 3 + 2 + 2 and (tmp_path / "run" / "figures" / "ablations.png").stat().st_size > 10_000
    assert set(run.rows[run.rows.arm == "chunks of 4"].metric) == set(prompting.METRICS)


@pytest.mark.parametrize("bad, says", [(dict(axes="nope"), "axes='nope'"), (dict(axes=""), "known are all"), (dict(t=0), "t=0"), (dict(keeps="4"), "cannot hold")])
def test_ablations_refuses(bad, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        kvprobe.run("ablations", preset="smoke", out=tmp_path / "never", progress=False, **bad)
    assert not (tmp_path / "never").exists()
