"""The probes that choose which KV heads hold a fact, on a random model of three KV heads in float64: rows against an independent reference, logs
against plain counting, draws and tables against closed forms."""

import copy
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvprobe
from kvprobe import head_checks, head_sets, head_stories, models, needles, planting, registry, results, runner, stats
from kvprobe.keeplog import ALIVE
from kvprobe.probes import correlation_dose, distance_by_heads, fragments, two_facts
from kvprobe.types import Geometry
from oracle import Reference, random_scores

FIGURES = {"fragments": "fragments_shape", "two_facts": "two_facts_sum", "distance_by_heads": "heads_over_rounds", "correlation_dose": "dose_by_correlation"}
SMALL = {"fragments": {}, "two_facts": dict(splits="different,same,0+1|2"), "distance_by_heads": dict(full=True), "correlation_dose": dict(survival_draws=40)}
GEOMETRY = Geometry(2, 6, 3, 16, 64, (0, 1), {})
SEEDS = (0, 1_000_003)


def three_heads():
    """A random Llama like the tiny model's with 6 query and 3 KV heads, and the tiny model's tokenizer."""
    config = LlamaConfig(vocab_size=259, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=16,
                         max_position_embeddings=8192, tie_word_embeddings=False, initializer_range=0.08)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def stock():
    return three_heads()


@pytest.fixture(scope="module", autouse=True)
def cheap(stock):
    """Probes load the model of three heads; figures have a test of their own, and encoding filler takes longer than the model."""
    real, made, tokenizer = needles.Filler, {}, models.tiny()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", lambda *args, **kwargs: models.prepare(copy.deepcopy(stock), tokenizer, name="three heads"))
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        patch.setattr(registry, "_first_line", lambda name, package: "")
        patch.setattr(needles, "Filler", lambda source, tokenizer: made.get(source) or made.setdefault(source, real(source, tokenizer)))
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """probe -> its finished smoke run, session and stored logs by member (instance, case, draw), made once."""
    made: dict = {}

    def get(probe: str) -> SimpleNamespace:
        if probe not in made:
            run = kvprobe.run(probe, preset="smoke", out=tmp_path_factory.mktemp("runs") / probe, progress=False, **SMALL[probe])
            module = registry.find("probe", probe)
            config = runner.configure(probe, "smoke", SMALL[probe])
            folder = results.RunFolder(run.path, run.manifest["settings"])
            folder.read()
            logs = {tuple(member): (log, k) for _, log, members in folder.logs() for k, member in enumerate(members)}
            made[probe] = SimpleNamespace(run=run, rows=run.rows, manifest=run.manifest, module=module, config=config, session=module.start(config, models.load()), logs=logs, folder=folder)
        return made[probe]

    return get


def value(rows, **where) -> float:
    for column, wanted in where.items():
        rows = rows[rows[column] == wanted]
    assert len(rows) == 1, (len(rows), where)
    return float(rows.value.iloc[0])


# -- the rows -----------------------------------------------------------------------------------------------------------

SETS = ["0", "1", "2", "0+1", "0+2", "1+2"]
SPLITS = [f"x {x}, y {y}" for x, y in product("012", "012")] + ["x 0+1, y 2"]
CASES = {
    "fragments": [f"whole c={len(s.split('+'))} {s}" for s in SETS] + [f"dealt c={c} shift {s}" for c in (1, 2) for s in range(3)],
    "two_facts": SPLITS + [f"x {x}, y -" for x in ("0", "1", "2", "0+1")] + [f"x -, y {y}" for y in "012"],
    "distance_by_heads": SETS, "correlation_dose": SETS}


@pytest.mark.parametrize("probe", SMALL)
def test_every_row_is_there_and_every_check_passes(done, probe):
    d = done(probe)
    draws, asks = (range(2), ["1 rounds", "2 rounds"]) if probe == "distance_by_heads" else (range(1), ["1 rounds"])
    wanted = {(case, draw, i, ask) for case in CASES[probe] + ["kept", "deleted"] for draw in draws for i in range(d.config.instances) for ask in asks}
    wanted |= {("full", 0, i, ask) for i in range(d.config.instances) for ask in asks}
    for metric in ("logp", "retrieved", "rounds"):
        got = list(d.rows[d.rows.metric == metric][["case", "draw", "instance", "ask"]].itertuples(index=False, name=None))
        assert set(got) == wanted and len(got) == len(wanted)
    checks = d.run.checks
    assert d.run.ok and len(checks) >= 3 and sum(c.passed is True for c in checks) >= 2
    assert {c.name.split(":")[0] for c in checks} >= {"audit", "rounds before the value, counted from the keep log, are those asked for", "the endpoints kept and deleted are far apart"}
    assert len(d.run.table) > len(CASES[probe]) and "nan" not in d.run.table.to_string()


def fed(stock, config, ids, first: int, held: dict, banned: dict, seed: int, instance: int) -> Reference:
    """The reference after `ids` [n], fed as rounds allow; held and banned: head -> positions, in every layer."""
    plan = config.plan
    ref = Reference(stock, range(2), 3, plan.keep, plan.buffer, random_scores(seed, [instance]), held=lambda layer, row, head, _: held.get(head, set()), banned=lambda layer, row, head, _: banned.get(head, set()))
    at = 0
    while at < len(ids):
        n = first if at == 0 else min(len(ids) - at, plan.fires_at - max(map(len, ref.kept.values())))
        ref.last = ref.feed(torch.as_tensor(ids[at : at + n])[None])[0]
        at += n
    return ref


def held_by(probe: str, case: str, config, spans: dict) -> dict[str, list[set[int]]]:
    """span -> per token of its box the heads that are to hold it, from the case's name alone."""
    def heads(text):
        return {int(h) for h in text.split("+") if h.isdigit()}

    if probe == "two_facts":
        x, y = case.removeprefix("x ").split(", y ")
        return {"x": [heads(x)] * config.box, "y": [heads(y)] * config.box}
    if case.startswith("dealt"):
        c, shift = int(case.split("c=")[1][0]), int(case[-1])
        return {"x": [{(shift + i * c + j) % 3 for j in range(c)} for i in range(config.box)]}
    return {"x": [heads(case.split(" ")[-1])] * config.box}


@pytest.mark.parametrize("probe, case, draw, instance", [("fragments", "dealt c=2 shift 1", 0, 1), ("fragments", "dealt c=1 shift 2", 0, 0), ("two_facts", "x 0+1, y 2", 0, 1),
                                                         ("two_facts", "x -, y 1", 0, 0), ("distance_by_heads", "0+2", 1, 1), ("correlation_dose", "1", 0, 2)])
def test_answers_are_those_of_a_stock_model_under_masks(done, stock, probe, case, draw, instance):
    d = done(probe)
    story = d.session.stories[instance]
    held, banned = {h: set() for h in range(3)}, {h: set() for h in range(3)}
    for span, tokens in held_by(probe, case, d.config, story.spans).items():
        for i, some in enumerate(tokens):
            for h in range(3):
                (held if h in some else banned)[h].add(story.spans[span][0] + i)
    for n, ask in enumerate(story.asks, 1):
        ref = fed(stock, d.config, np.concatenate([story.ids[: ask.at], ask.query]), story.prompt, held, banned, SEEDS[draw], instance)
        felt = sum(length < ask.at + len(ask.query) for _, length, _ in ref.history)
        logp, top = [], []
        for token in ask.value:
            row = torch.log_softmax(ref.last[-1], -1)
            logp, top = [*logp, float(row[token])], [*top, int(row.argmax()) == token]
            ref.last = ref.feed(torch.tensor([[int(token)]]))[0]
        mine = d.rows[(d.rows.case == case) & (d.rows.draw == draw) & (d.rows.instance == instance) & (d.rows.ask == ask.name)]
        assert value(mine, metric="logp") == pytest.approx(sum(logp), abs=1e-8) and value(mine, metric="retrieved") == all(top[:4] + top[-4:])  # not the comma
        assert value(mine, metric="rounds") == felt == n
        if probe == "two_facts":
            assert value(mine, metric="logp x") == pytest.approx(sum(logp[:4]), abs=1e-8) and value(mine, metric="logp y") == pytest.approx(sum(logp[-4:]), abs=1e-8)


@pytest.mark.parametrize("probe", SMALL)
def test_the_boxes_are_held_in_exactly_the_named_heads_of_every_layer(done, probe):
    d = done(probe)
    for (instance, case, _), (log, k) in d.logs.items():
        story = d.session.stories[instance]
        if case in ("kept", "deleted"):
            every = set(range(3)) if case == "kept" else set()
            wanted = {span: [every] * d.config.box for span in (("x", "y") if probe == "two_facts" else ("x",))}
        else:
            wanted = held_by(probe, case, d.config, story.spans)
        for round_ in range(log.rounds(k)):  # r is at least the box, so that the first round takes all of it
            held = log.held(k, round_)
            for span, tokens in wanted.items():
                a, z = story.spans[span]
                for layer in range(2):
                    if round_ or probe != "two_facts":
                        assert [set(np.flatnonzero(held[layer, :, p]).tolist()) for p in range(a, z)] == tokens


@pytest.mark.parametrize("probe", SMALL)
def test_equal_counts_and_rounds_by_the_closed_form(done, probe):
    d = done(probe)
    plan = d.config.plan
    for (instance, _, _), (log, k) in d.logs.items():
        last = d.session.stories[instance].asks[-1]
        length = last.at + len(last.query) + len(last.value) - 1
        assert log.length[k] == length and log.fired[k] == tuple(range(plan.fires_at, length + 1, plan.buffer))
        for n in range(log.rounds(k)):
            assert (log.held(k, n).sum(-1) == plan.keep + plan.buffer).all()
    for ask in d.session.stories[0].asks:  # rounds whose length is at most the position of the token that gives the value's first
        told = set(d.rows[(d.rows.metric == "rounds") & (d.rows.ask == ask.name) & (d.rows.case != "full")].value)
        assert told == {(ask.at + len(ask.query) - 1 - plan.fires_at) // plan.buffer + 1} == {int(ask.name.split()[0])}
    assert set(d.rows[(d.rows.metric == "rounds") & (d.rows.case == "full")].value) == {0}


def test_how_rows_are_batched_changes_nothing(done, tmp_path):
    d = done("two_facts")
    again = kvprobe.run("two_facts", preset="smoke", out=tmp_path / "b", progress=False, batch_size=1, rows_per_batch=5, **SMALL["two_facts"]).rows
    index = ["case", "instance", "ask", "metric"]
    a, b = (x.set_index(index).value.sort_index() for x in (d.rows, again))
    assert len(a) == len(b) and np.abs(a - b).max() < 1e-10
    assert d.session.n_batches == 1 + 2 and len(again.batch.unique()) == 2 * (1 + 4)  # the full cache alone, 19 cases in twelves, in fives per script


def test_eviction_seeds_differ_and_endpoints_follow_them(done):
    rows = done("distance_by_heads").rows
    wide = rows[rows.metric == "logp"].pivot_table(index=["case", "instance", "ask"], columns="draw", values="value")
    assert (wide.drop("full")[0] != wide.drop("full")[1]).all() and wide.loc["full"][1].isna().all()


# -- fragments ----------------------------------------------------------------------------------------------------------


def test_fragments_share_no_more_heads_than_they_must(done):
    d, shapes = done("fragments"), {}
    for (instance, case, _), (log, k) in d.logs.items():
        a, z = d.session.stories[instance].spans["x"]
        held = log.died[:, k, :, a:z] == ALIVE
        assert (held == held[:1]).all()
        if case not in ("kept", "deleted"):
            c = int(case.split("c=")[1][0])
            assert (held.sum((1, 2)) == c * (z - a)).all()
            assert value(d.rows, case=case, instance=instance, metric="entries") == c * (z - a)
            pairs = (held[0, :, 1:] & held[0, :, :-1]).sum()
            assert value(d.rows, case=case, instance=instance, metric="neighbours") == pairs and value(d.rows, case=case, instance=instance, metric="layers_alike") == 1
            if case.startswith("dealt"):
                assert pairs == {1: 0, 2: z - a - 1}[c] and (c == 1 or not (~held[0, :, 1:] & ~held[0, :, :-1]).any())
                shapes.setdefault(c, []).append(held[0].sum(-1))
            else:
                assert pairs == c * (z - a - 1)
    assert (np.unique(np.concatenate(shapes[1]), return_counts=True)[0] == [8]).all()  # 24 tokens over 3 heads


@pytest.mark.parametrize("heads", [(0, 1), (0, 1, 2), (1, 4, 5, 7), tuple(range(5)), tuple(range(8))])
def test_the_deal(heads):
    h, tokens = len(heads), 17
    for c in range(1, h):
        load = dict.fromkeys(heads, 0)
        for shift in range(h):
            dealt = [set(x) for x in fragments.deal(heads, c, tokens, shift)]
            assert all(len(x) == c and x <= set(heads) for x in dealt)
            shared = {len(x & y) for x, y in zip(dealt, dealt[1:])}
            assert shared == {max(0, 2 * c - h)}
            if 2 * c >= h:
                assert all(x | y == set(heads) for x, y in zip(dealt, dealt[1:]))  # no head misses two neighbours
            for some in dealt:
                for head in some:
                    load[head] += 1
        assert set(load.values()) == {c * tokens}
    for c in (0, h):
        with pytest.raises(ValueError, match=f"1..{h - 1}"):
            fragments.deal(heads, c, tokens)


def made_rows(values: dict[str, list[float]], ask="8 rounds", draw=0, **more) -> pd.DataFrame:
    """Rows of log p, and of retrieval 1 where it is above -1."""
    out = [dict(case=c, draw=draw, instance=i, ask=ask, metric=m, value=v if m == "logp" else float(v > -1), **more) for c, x in values.items() for i, v in enumerate(x) for m in ("logp", "retrieved")]
    return pd.DataFrame(out)


def test_dealt_minus_whole_of_the_worked_example():
    rows = made_rows({"whole c=1 0": [-2, -5], "whole c=1 1": [-4, -5], "dealt c=1 shift 0": [-4, -6], "dealt c=1 shift 1": [-4, -6], "kept": [0, 0], "deleted": [-10, -10], "full": [0, 0]})
    manifest = {"settings": {"seed": 0}, "heads": [0, 1], "copies": [1]}
    found = fragments.contrast(rows, manifest).iloc[0]
    assert (found.R, found.logp, found.retrieval) == (pytest.approx(-0.1), -1, 0)
    table = fragments.summary(rows, manifest)
    mean = table[table.name == "mean"].set_index("kind").R
    assert mean.whole == pytest.approx((7 + 5) / 20) and mean.dealt == pytest.approx((6 + 4) / 20)


# -- two facts ----------------------------------------------------------------------------------------------------------


def test_two_facts_stand_where_they_should_and_are_both_asked_for(done):
    d = done("two_facts")
    tokenizer = models.load().tokenizer
    for i, s in enumerate(d.session.stories):
        var, text = needles.VARIABLES[i], tokenizer.decode(s.ids.tolist())
        x, y = s.facts.split(", ")[0].split(" = ")[1], s.facts.split(" = ")[2]
        assert s.spans["y"][0] - s.spans["x"][0] == d.config.apart == 48
        for span, said, number in (("x", f"\nLet {var} = {x}.\n", x), ("y", f"\nLet {var}2 = {y}.\n", y)):
            assert tokenizer.decode(s.ids[slice(*s.spans[span])].tolist()).startswith(said) and text.count(number) == 1
            assert tokenizer.decode(s.ids[slice(*s.spans[f"{span} value"])].tolist()) == number
            ask = s.asks[0]
            whole = np.concatenate([s.ids[: ask.at], ask.query, ask.value])
            assert tokenizer.decode(whole[slice(*s.spans[f"{span} answer"])].tolist()) == number
        assert tokenizer.decode(ask.query.tolist()).endswith(f"({var}, {var}2) = (") and tokenizer.decode(ask.value.tolist()) == f"{x}, {y}"


def test_the_sum_and_the_surplus_of_the_worked_example():
    rows = made_rows({"deleted": [-20, -20], "kept": [0, 0], "full": [0, 0], "x 0, y -": [-18, -16], "x -, y 1": [-17, -17], "x 0, y 1": [-12, -12]})
    s = two_facts.by_split(rows, {"settings": {"seed": 0}, "splits": [["0", "1"]]}).iloc[0]
    assert [s.x, s.y, s["sum"], s.both, s.surplus] == pytest.approx([0.15, 0.15, 0.3, 0.4, 0.1])
    rows = made_rows({"deleted": [-20], "kept": [0], "full": [0], "x 0, y -": [-18], "x -, y 1": [-17], "x 0, y 1": [-12], "x 1, y -": [-20], "x -, y 0": [-20], "x 1, y 0": [-20]})
    s = two_facts.by_split(rows, {"settings": {"seed": 0}, "splits": [["0", "1"], ["1", "0"]]}).set_index("split")
    assert s.loc["x in 0, y in 1", "surplus"] == pytest.approx(0.15) and s.loc["mean over the 2 pairs of single heads", "surplus"] == pytest.approx(0.075)


def test_the_mean_over_pairs_leaves_sets_of_heads_and_one_head_out(done):
    d = done("two_facts")
    logp = d.rows[d.rows.metric == "logp"].pivot(index="instance", columns="case", values="value")
    pairs = [(a, b) for a in "012" for b in "012" if a != b]  # not 0+1 | 2, not 0 | 0
    top = sum((logp[f"x {a}, y {b}"] + logp["deleted"] - logp[f"x {a}, y -"] - logp[f"x -, y {b}"]).sum() for a, b in pairs) / 6
    s = two_facts.by_split(d.rows, d.manifest | {"settings": {"seed": 0}})
    assert len(s) == 11 and s.split.iloc[-1] == "mean over the 6 pairs of single heads"
    available = logp["kept"] - logp["deleted"]
    there = stats.mean(available.to_numpy(), 0).low > 0
    assert (np.isnan(s.surplus.iloc[-1]) and not there) or s.surplus.iloc[-1] == pytest.approx(top / available.sum())


# -- distance -----------------------------------------------------------------------------------------------------------


def test_recall_lies_between_the_endpoints_of_its_own_distance():
    near = {"kept": [0, 0], "deleted": [-10, -20], "0": [-5, -5]}
    far = {"kept": [-2, -2], "deleted": [-12, -12], "0": [-10, -9]}
    rows = pd.concat([made_rows(x, ask=f"{n} rounds") for n, x in ((3, near), (57, far))])
    s = distance_by_heads.summary(rows, {"settings": {"seed": 0}}).set_index(["name", "rounds"])
    assert s.loc[("0", 3), "R"] == pytest.approx(20 / 30) and s.loc[("0", 57), "R"] == pytest.approx(5 / 20) and np.isnan(s.loc[("0", 3), "seed_sd"])
    assert distance_by_heads.trend(rows, {"settings": {"seed": 0}}).iloc[0].R == pytest.approx(5 / 20 - 20 / 30)


def test_the_spread_over_seeds_of_the_worked_example():
    ends = [(-10, -8), (-20, -14), (-30, -18)]  # R = .2, .3, .4 between each seed's own endpoints
    rows = pd.concat([made_rows({"kept": [0, 0], "deleted": [gone, gone], "0": [mine, mine]}, draw=draw) for draw, (gone, mine) in enumerate(ends)])
    assert distance_by_heads.seed_spread(rows, "0", "8 rounds") == pytest.approx(0.1)


# -- survival with stated marginal and correlation ----------------------------------------------------------------------


@pytest.mark.parametrize("marginal, rho", [(0.4, 0.0), (0.4, 0.5), (0.4, 1.0), (0.2, 0.3)])
def test_ten_thousand_draws_have_the_stated_marginal_and_correlation(marginal, rho):
    held = correlation_dose.survivors(3, range(10), 1000, 3, marginal, rho).reshape(10_000, 3)
    for h in range(3):
        assert held[:, h].mean() == pytest.approx(marginal, abs=4 * np.sqrt(marginal * (1 - marginal) / 10_000))
    for a, b in combinations(range(3), 2):
        found = np.corrcoef(held[:, a], held[:, b])[0, 1]
        assert found == pytest.approx(rho, abs=1e-12 if rho == 1 else 0.045)
    for pattern in product((False, True), repeat=3):
        p = correlation_dose.probability(sum(pattern), 3, marginal, rho)
        assert (held == pattern).all(-1).mean() == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / 10_000) + 1e-12)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("marginal, rho", [(0.4, 0.0), (0.4, 0.5), (0.4, 1.0), (0.7, 0.2), (0.0, 0.5), (1.0, 0.5)])
def test_the_law_of_the_draw_in_closed_form(heads, marginal, rho):
    law = {pattern: correlation_dose.probability(sum(pattern), heads, marginal, rho) for pattern in product((0, 1), repeat=heads)}
    assert sum(law.values()) == pytest.approx(1)
    assert sum(p for pattern, p in law.items() if pattern[0]) == pytest.approx(marginal)
    if heads > 1:
        both = sum(p for pattern, p in law.items() if pattern[0] and pattern[-1])
        assert both - marginal**2 == pytest.approx(rho * marginal * (1 - marginal))


def test_a_draw_depends_on_seed_instance_draw_and_head_only():
    whole = correlation_dose.survivors(1, range(6), 200, 3, 0.4, 0.5)
    assert (correlation_dose.survivors(1, [4, 2], 200, 3, 0.4, 0.5) == whole[[4, 2]]).all()
    assert (correlation_dose.survivors(1, range(6), 50, 3, 0.4, 0.5) == whole[:, :50]).all()
    assert (correlation_dose.survivors(1, range(6), 200, 2, 0.4, 0.5) == whole[..., :2]).all()
    assert (correlation_dose.survivors(2, range(6), 200, 3, 0.4, 0.5) != whole).mean() > 0.3 and (whole[0] != whole[1]).mean() > 0.3
    more = correlation_dose.survivors(1, range(6), 200, 3, 0.6, 0.5)
    assert (more >= whole).all() and (more > whole).any()  # the same numbers under a higher marginal


def test_a_cell_is_the_mean_over_its_draws(done):
    d = done("correlation_dose")
    logp, kept, deleted = (d.rows[(d.rows.metric == "logp") & (d.rows.case == c)].set_index("instance").value if c else d.rows[d.rows.metric == "logp"].set_index(["instance", "case"]).value for c in (None, "kept", "deleted"))
    table = correlation_dose.summary(d.rows, d.manifest).set_index(["marginal", "correlation"])
    assert len(table) == 9
    for (p, rho), row in table.iterrows():
        held = correlation_dose.survivors(0, range(3), 40, 3, p, rho)
        names = {(): "deleted", (0, 1, 2): "kept"}
        each = [[logp[i, names.get(s := tuple(np.flatnonzero(x)), "+".join(map(str, s)))] for x in held[i]] for i in range(3)]
        assert row.logp == pytest.approx(np.mean(each)) and row.held == pytest.approx(held.mean()) and row["any"] == pytest.approx(held.any(-1).mean()) and row.draws == 40
        exact = 0.0
        for pattern in product((0, 1), repeat=3):
            s = tuple(np.flatnonzero(pattern))
            alone = np.prod([p if x else 1 - p for x in pattern])
            weight = rho * (p if all(pattern) else 1 - p if not any(pattern) else 0) + (1 - rho) * alone
            exact += weight * np.array([logp[i, names.get(s, "+".join(map(str, s)))] for i in range(3)])
        share = (exact - deleted.to_numpy()).sum() / (kept - deleted).sum()
        if np.isfinite(row["R exact"]):
            assert row["R exact"] == pytest.approx(share) and row.R == pytest.approx((np.mean(each, axis=1) - deleted.to_numpy()).sum() / (kept - deleted).sum())
        if rho == 1 and np.isfinite(row["R exact"]):
            assert row["R exact"] == pytest.approx(p)  # all heads or none


def test_dose_of_the_worked_example():
    worth = {"deleted": 0, "0": 0.3, "1": 0.3, "2": 0.3, "0+1": 0.7, "0+2": 0.7, "1+2": 0.7, "kept": 1}
    rows = made_rows({c: [10 * v - 10] for c, v in worth.items()})
    drawn = [dict(case=c, draw=0, instance=0, ask="8 rounds", metric="drawn", marginal=0.4, correlation=rho, value=float(c in ("kept", "deleted"))) for c in worth for rho in (0, 1)]
    rows, manifest = pd.concat([rows, pd.DataFrame(drawn)]), {"settings": {"seed": 0}, "model": {"kv_heads": 3}}
    s = correlation_dose.summary(rows, manifest).set_index("correlation")
    assert s.loc[0, "R exact"] == pytest.approx(0.432 * 0.3 + 0.288 * 0.7 + 0.064) and s.loc[1, "R exact"] == pytest.approx(0.4) and s.loc[0, "R"] == pytest.approx(0.5)
    c = correlation_dose.contrast(rows, manifest).iloc[0]
    assert c["R exact"] == pytest.approx(-0.0048) and c.R == pytest.approx(0)
    part = rows[rows.case != "0+1"]
    assert np.isnan(correlation_dose.summary(part, manifest)["R exact"]).all() and np.isnan(correlation_dose.contrast(part, manifest)["R exact"]).all()


# -- checks, refusals, figures ------------------------------------------------------------------------------------------


def test_the_audit_finds_a_log_that_lies(done):
    d = done("fragments")
    (log, k), story = d.logs[0, "dealt c=1 shift 0", 0], d.session.stories[0]
    pins = d.session.pins(d.session.by_member["dealt c=1 shift 0", 0], story)
    assert len(pins) == 24 and head_checks.audit_check([(log, k, pins)], 10**6).passed is True
    lie = log.select([k])
    lie.died[0, 0, 0, story.spans["x"][0]] = 0  # token 0 belongs to head 0
    assert head_checks.audit_check([(lie, 0, pins)], 10**6).passed is False
    late = log.select([k])
    late.died[1, 0, 2, story.spans["x"][0]] = ALIVE
    assert head_checks.audit_check([(late, 0, pins)], 10**6).passed is False
    assert head_checks.audit_check([(log, k, pins)], log.fired[k][0] - 1).passed is False  # asked before the banned tokens were gone
    assert head_checks.rounds_check({"3 rounds": [3]}).passed and not head_checks.rounds_check({"3 rounds": [3, 4]}).passed
    assert head_checks.near_check(-0.6, "", 3, False).passed is None and not head_checks.near_check(-0.6, "", 3, True).passed and not head_checks.far_check(2.9, "", 3, True).passed


@pytest.mark.parametrize("full, passed", [(0, True), (-9, None)])
def test_kept_is_judged_by_the_full_cache_only_where_that_retrieves(full, passed):
    rows = made_rows({"kept": [0.0, -0.5], "deleted": [-10, -10], "full": [full, full]})
    session = SimpleNamespace(config=SimpleNamespace(model="any", seed=0))
    near, far = head_sets.HeadSets._ends(session, rows, ["8 rounds"])
    assert near.passed is passed and far.passed is True and ("not judged: the full cache itself retrieves 0.00" in near.measured) == (passed is None)


@pytest.mark.parametrize("module, given, message", [
    (fragments, dict(heads="0"), "at least 2 heads"), (fragments, dict(heads="0+3"), r"KV heads 0\.\.2"), (fragments, dict(heads="x"), "write all, or numbers"), (fragments, dict(copies="3"), r"numbers in 1\.\.2"),
    (fragments, dict(rounds="1,2"), "asks once"), (fragments, dict(policies="random,recency"), "name one"), (fragments, dict(protection="with"), "only 'without'"),
    (fragments, dict(rows_per_batch=0), "at least 1"), (fragments, dict(pre=100), "only positions below"), (fragments, dict(box=12), "its room is 12"),
    (two_facts, dict(splits="0"), "heads of x"), (two_facts, dict(splits="0|x"), "no set of KV heads"), (two_facts, dict(splits="0|0+1+2"), "not all 3"), (two_facts, dict(splits=" "), "names no split"),
    (two_facts, dict(splits="0|7"), r"KV heads 0\.\.2"), (two_facts, dict(apart=8), "at least box"), (distance_by_heads, dict(sets="best-pairs"), "ranks nothing"), (distance_by_heads, dict(sets=""), "names no set"), (distance_by_heads, dict(sets=" ,"), "names no set"), (distance_by_heads, dict(sets="0+9"), r"0\.\.2"),
    (correlation_dose, dict(marginals="2"), r"0\.\.1"), (correlation_dose, dict(correlations="a"), r"0\.\.1"), (correlation_dose, dict(survival_draws=0), "at least 1")])
def test_bad_settings_are_refused_before_any_work(module, given, message):
    with pytest.raises(ValueError, match=message):
        module.start(runner.configure(module.__name__.split(".")[-1], "smoke", given), models.load())


def test_a_question_before_the_box_ends_is_refused():
    config = fragments.CONFIG(model="tiny", keep=96, buffer=48, rounds="1", instances=1, pre=8, query=180, box=24)
    with pytest.raises(ValueError, match="after 36 tokens, before the last box has ended at 69"):
        head_stories.stories(config, models.load().tokenizer)


@pytest.mark.parametrize("probe", SMALL)
def test_figures_draw_the_table_and_nothing_else(done, probe):
    d, module = done(probe), registry.find("figure", FIGURES[probe])
    table = module.reduce(d.rows, d.manifest)
    figure = module.draw(table, d.manifest)
    numbers = table.select_dtypes("number").to_numpy().ravel()
    known = np.append(numbers[np.isfinite(numbers)], 0.0)
    for ax in figure.axes:
        assert any("[" in other.get_ylabel() for other in ax.get_shared_y_axes().get_siblings(ax))
        drawn = [y for line in ax.get_lines() for y in line.get_ydata()] + [bar.get_height() for bar in ax.patches]
        drawn += [p for c in ax.collections for path in c.get_paths() for p in path.vertices[:, 1]]
        for y in np.asarray(drawn, dtype=float):
            assert np.isnan(y) or np.abs(known - y).min() < 1e-9
    assert f"n = {d.config.instances}" in figure._suptitle.get_text() and any("K = " in t.get_text() and "bootstrap" in t.get_text() for t in figure.texts)
    assert d.module.PRESETS["demo"].keep == 256 and d.module.PRESETS["demo"].buffer == 16
    figure.canvas.draw()


def test_stated_sizes_of_the_presets():
    for module in (fragments, two_facts, correlation_dose):
        assert module.PRESETS["demo"].instances >= 16 and module.PRESETS["paper"].keep == 1024 and module.PRESETS["paper"].rounds == "15"
    demo = distance_by_heads.PRESETS["demo"]
    assert (demo.rounds, demo.instances, demo.eviction_seeds) == ("3,15,39,57", 8, 3) and two_facts.PRESETS["demo"].apart == 96
    assert planting.rounds_of(demo.rounds) == (3, 15, 39, 57) and stats.REPLICATES == 4000
