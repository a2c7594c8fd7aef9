"""Numbers against closed forms and hand-made values."""

import numpy as np
import pytest

from kvprobe import metrics, stats


def test_recall_is_a_ratio_of_sums():
    r = metrics.recall_gain([-1, -3], [-9, -5], [-1, -1])
    assert r.value == pytest.approx(10 / 12)
    assert r.value != pytest.approx(np.mean([8 / 8, 2 / 4]))  # what a mean of ratios would give


def test_recall_is_one_for_kept_and_zero_for_deleted():
    kept, deleted = np.array([-0.2, -0.3, -0.1]), np.array([-9.0, -8.0, -12.0])
    assert metrics.recall_gain(kept, deleted, kept).value == 1
    assert metrics.recall_gain(deleted, deleted, kept).value == 0


def test_recall_is_null_where_nothing_could_be_recalled():
    rng = np.random.default_rng(0)
    same = rng.normal(size=30)
    r = metrics.recall_gain(same, same + rng.normal(size=30), same + rng.normal(size=30))
    assert r.value is None and r.text() == "n/a"


def test_recall_is_null_where_kept_is_worse_than_deleted():
    worse, better = np.array([-9.0, -8.0, -9.5]), np.array([-1.0, -2.0, -1.5])
    assert metrics.recall_gain(better, better, worse).value is None and metrics.recall_gain(better, worse, better).value == 1
    assert metrics.recall_gain([-2], [-1], [-3]).value is None
    one = metrics.recall_gain([-2], [-5], [-1])  # a value, but no interval
    assert one.value == 0.75 and np.isnan([one.low, one.high]).all() and one.text() == "0.75 [-]"


def test_interval_matches_the_normal_one_for_a_large_sample():
    x = np.random.default_rng(1).normal(size=400)
    e = metrics.mean(x, seed=2)
    half = 1.96 * x.std(ddof=1) / 20
    assert e.value == pytest.approx(x.mean())
    assert e.low == pytest.approx(x.mean() - half, abs=0.015) and e.high == pytest.approx(x.mean() + half, abs=0.015)


def test_interval_against_an_independent_percentile_bootstrap():
    x = np.random.default_rng(3).exponential(size=25)
    rng = np.random.default_rng(7)
    means = np.array([rng.choice(x, 25).mean() for _ in range(20000)])
    e = metrics.mean(x, seed=5)
    assert [e.low, e.high] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.03)


def test_pairing_narrows_a_difference():
    rng = np.random.default_rng(4)
    base = rng.normal(size=50) * 10
    d = metrics.difference(base + 1 + rng.normal(size=50) * 0.1, base)
    assert d.high - d.low < 0.1 and d.low < 1 < d.high


def test_equal_instances_give_a_point_and_one_instance_says_n():
    e = metrics.mean([1.0] * 8)
    assert (e.value, e.low, e.high, e.n) == (1, 1, 1, 8)
    one = metrics.mean([0.5])
    assert one.n == 1 and one.value == 0.5 and np.isnan([one.low, one.high]).all() and one.text() == "0.50 [-]"
    assert metrics.mean([1.0, 3.0], clusters=["a", "a"]).text() == "2.00 [-]"


@pytest.mark.parametrize("rounds, prompt, want", [(15, 0, .402778), (57, 0, .031568), (15, 90, .370037), (39, 150, .063538)])
def test_survival_closed_form(rounds, prompt, want):
    assert metrics.survival(1024, 64, rounds, prompt) == pytest.approx(want, abs=5e-7)


def test_the_t_interval_is_the_text_book_one():
    e = stats.t_mean([1, 2, 3, 6])  # sd 2.160, t(.975, 3) = 3.182
    assert (e.value, e.n) == (3, 4) and [e.low, e.high] == pytest.approx([3 - 3.437, 3 + 3.437], abs=2e-3)
    assert stats.t_mean([1, 2, 3]).text() == "2.00 [-]"
