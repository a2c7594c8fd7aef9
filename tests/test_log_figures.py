"""Tables and figures of keep logs against loops over keep-sets, and against closed forms of a uniform draw."""

import numpy as np
import pytest

from kvprobe import log_figures, metrics, retention
from kvprobe.keeplog import ALIVE, KeepLog
from kvprobe.registry import make_policy
from kvprobe.simulate import keep_log
from kvprobe.types import Plan

K, R = 12, 4


@pytest.fixture(scope="module")
def logs():
    run = dict(tokens=60, seed=1, instances=[3, 4], layers=[1, 3])
    policies = {"random": make_policy("random", {}), "shared": make_policy("random", {"shared": True})}
    return {name: keep_log(4, 3, Plan(K, R), policy, **run) for name, policy in policies.items()}


def test_states_are_the_keep_sets(logs):
    log = logs["random"]
    found = log_figures.states(log, 3, row=1)
    assert found.shape == (3, log.rounds(1), 60)
    for head in range(3):
        for n, length in enumerate(log.fired[1]):
            for p in range(60):
                want = 2 if p >= length else int(log.died[1, 1, head, p] > n)
                assert found[head, n, p] == want
    with pytest.raises(ValueError, match="1, 3"):
        log_figures.states(log, 0)
    with pytest.raises(ValueError, match="no round"):
        log_figures.states(KeepLog(np.full((1, 1, 1, 3), ALIVE), ((),), (3,), (0,), K, R), 0)


def test_the_map_draws_the_states(logs):
    figure = log_figures.rounds_map(logs["random"], 1, footer="noted")
    drawn = np.stack([ax.images[0].get_array() for ax in figure.axes])
    np.testing.assert_array_equal(drawn, log_figures.states(logs["random"], 1))
    assert figure.axes[0].images[0].get_extent() == [0, 60, logs["random"].rounds(0) + 0.5, 0.5]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == list(log_figures.STATES)
    said = " ".join(t.get_text() for t in figure.texts)
    assert "n = 1" in said and "noted" in said and "[tokens]" in figure.axes[-1].get_xlabel() and figure.get_size_inches().max() <= 12


def test_coverage_by_round(logs):
    table = log_figures.coverage(logs)
    assert list(table["round"]) == list(range(1, logs["random"].rounds(0) + 1)) * 2
    for name, log in logs.items():
        mine, whole = table[table.policy == name], retention.coverage(log, 0)
        got = (mine.slots.mean(), mine.positions.mean(), mine.decorrelation.mean())
        assert got == pytest.approx((whole.slots, whole.positions, whole.decorrelation))
    np.testing.assert_allclose(table[table.policy == "shared"][["slots", "positions"]], K / (K + R))
    slots, positions = log_figures.draw_coverage(table, logs["random"], "noted").axes
    for ax, column in ((slots, "slots"), (positions, "positions")):
        drawn = [line.get_ydata() for line in ax.lines[:2]]
        assert [list(y) for y in drawn] == [list(table[table.policy == name][column]) for name in logs]
    assert [line.get_ydata()[0] for line in slots.lines[2:]] == [1 - (R / (K + R)) ** 3, K / (K + R)]


def test_survival_by_age_and_what_uniform_draws_predict(logs):
    table = log_figures.survival(logs, row=1, first=5, bands=4)
    for name, log in logs.items():
        for line in table[table.policy == name].itertuples():
            head, union, one, some = [], [], [], []
            for n, length in enumerate(log.fired[1]):
                held = log.held(1, n)
                for p in range(5, length):
                    if line.low <= length - p < line.high:
                        draws = sum(1 for f in log.fired[1][: n + 1] if p < f - R)  # rounds at which it could go
                        head.append(held[:, :, p].mean())
                        union.append(held[:, :, p].any(1).mean())
                        one.append(metrics.survival(K, R, draws))
                        some.append(1 - (1 - metrics.survival(K, R, draws)) ** 3)
            got = (line.head, line.union, line.uniform, line.uniform_union)
            assert got == pytest.approx([np.mean(x) for x in (head, union, one, some)])
    for ax, columns in zip(log_figures.draw_survival(table, logs["random"]).axes, (("head", "uniform"), ("union", "uniform_union"))):
        drawn = [list(line.get_ydata()) for line in ax.lines]
        random = table[table.policy == "random"]
        assert drawn == [list(random[columns[0]]), list(table[table.policy == "shared"][columns[0]]), list(random[columns[1]])]


def test_other_budgets_are_no_comparison(logs):
    other = keep_log(1, 3, Plan(K + 1, R), make_policy("random", {}), tokens=60)
    with pytest.raises(ValueError, match="one K"):
        log_figures.coverage({"a": logs["random"], "b": other})
    for wrong in ({}, [other], {"a": None}):
        with pytest.raises(ValueError, match="by name"):
            log_figures.survival(wrong)


def drawn_log(pinned, fired, layers=500, heads=3):
    """A keep log whose every round is drawn here: the first `pinned` positions stay, K - pinned of the other candidates do."""
    rng = np.random.default_rng(7)
    died = np.full((layers, 1, heads, fired[-1]), ALIVE)
    for n, length in enumerate(fired):
        for one in died.reshape(-1, fired[-1]):
            free = np.flatnonzero(one[: length - R] == ALIVE)[pinned:]
            one[rng.permutation(free)[K - pinned :]] = n
    return KeepLog(died, (tuple(fired),), (fired[-1],), tuple(range(layers)), K, R)


@pytest.mark.parametrize("pinned, fired", [(5, (20, 24, 28, 32)), (0, (40, 44, 48)), (5, (40, 44, 48, 52)), (0, (60,))])
def test_closed_forms_of_a_protected_prompt_and_of_one_that_was_read_at_once(pinned, fired):
    """What `generate` logs by default, what follows a long prompt, and what `compress` logs: a draw must lie on its own closed form."""
    log = drawn_log(pinned, fired)
    for first in (0, pinned):
        table = log_figures.survival({"random": log}, first=first, bands=6, pinned=pinned)
        np.testing.assert_allclose(table.uniform, table["head"], atol=0.02)
        np.testing.assert_allclose(table.uniform_union, table["union"], atol=0.03)
    covered = log_figures.coverage({"random": log})
    figure = log_figures.draw_coverage(covered, log, pinned=pinned)
    line = figure.axes[0].lines[1].get_ydata()
    np.testing.assert_allclose(line if len(line) == len(fired) > 2 else line[0], covered.slots, atol=0.01)
    said = " ".join(t.get_text() for f in (figure, log_figures.draw_survival(table, log, pinned=pinned)) for t in f.texts)
    assert said.count("5 protected") == 4 * (pinned > 0) and (f"/ ({fired[0] - R} candidates" in said) == (fired[0] > K + 2 * R)


def test_a_protected_prompt_that_nobody_named_is_said(logs, recwarn):
    """A log names no pins, and without them the closed forms are of another experiment."""
    log, fired = drawn_log(5, (20, 24, 28, 32), layers=20), "at most 5"

    def said(log, **pinned):
        table = log_figures.survival({"random": log}, bands=6, **pinned)
        figures = (log_figures.draw_coverage(log_figures.coverage({"random": log}), log, **pinned), log_figures.draw_survival(table, log, **pinned))
        return [" ".join(" ".join(t.get_text() for t in f.texts).split()) for f in figures]

    with pytest.warns(UserWarning, match="no site evicted any of the first 5 positions.*at most 5"):
        assert all("without protected entries" in text and fired in text for text in said(log))
    recwarn.clear()
    assert all("without protected" not in text and fired not in text for text in said(log, pinned=5))
    assert all("without protected entries" in text and "no site evicted" not in text for text in said(logs["random"]))
    log_figures.survival({"protected": log, "not": drawn_log(0, (20, 24, 28, 32), layers=20)})  # of one text: then it was not
    assert not recwarn.list
    with pytest.raises(ValueError, match="pinned=6, but position 5 was evicted"):
        log_figures.survival({"random": log}, pinned=6)


def test_names_and_titles_are_no_formulas(logs):
    name = "a $x_{ y$"
    named, log = {name: logs["random"], "b": logs["shared"]}, logs["random"]
    table = log_figures.survival(named)
    for figure in (log_figures.rounds_map(log, 1, title=name, footer=name), log_figures.draw_survival(table, log, name),
                   log_figures.draw_coverage(log_figures.coverage(named), log, name)):
        figure.draw_without_rendering()


def test_rows_and_entries_that_are_not_there_are_said(logs):
    ask = dict(coverage=log_figures.coverage, survival=log_figures.survival)
    for asked in ask.values():
        with pytest.raises(ValueError, match="rows 0..1"):
            asked(logs, row=2)
        with pytest.raises(ValueError, match="no round"):
            asked({"a": KeepLog(np.full((1, 1, 1, 3), ALIVE), ((),), (3,), (0,), K, R)})
    with pytest.raises(ValueError, match="rows 0..1"):
        log_figures.states(logs["random"], 1, row=-1)
    for wrong, said in ((dict(pinned=K + 1), "inside K"), (dict(first=60), "first=60"), (dict(first=-1), "first=-1"), (dict(bands=0), "bands=0")):
        with pytest.raises(ValueError, match=said):
            log_figures.survival(logs, **wrong)
