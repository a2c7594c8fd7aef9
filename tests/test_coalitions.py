"""Games whose values are known in closed form, the axioms, and sampling against the exact values."""

from itertools import permutations
from math import factorial

import numpy as np
import pytest

from kvprobe import coalitions as games


def game(p, worth):
    """Worths [2^p] of a function of a tuple of players."""
    return np.array([worth(games.members(s)) for s in range(1 << p)], dtype=float)


def random_game(p, seed=0, more=()):
    return np.random.default_rng(seed).normal(size=(1 << p, *more))


SHARES = np.array([0.5, -2.0, 3.0, 0.0])
ADDITIVE = game(4, lambda s: SHARES[list(s)].sum() + 7)  # 7 without anyone: only what players add counts
MAJORITY = game(5, lambda s: len(s) >= 3)
UNANIMITY = game(5, lambda s: {0, 2, 3} <= set(s))  # 1 and 4 are null players
GLOVE = game(3, lambda s: min(len({0} & set(s)), len({1, 2} & set(s))))  # one left glove, two right ones


def test_coalitions_are_numbered_by_bits():
    assert games.mask((0, 2)) == games.mask([2, 0, 2]) == 5 and games.members(5) == (0, 2) and games.members(0) == ()
    assert all(games.mask(games.members(s)) == s for s in range(64))


@pytest.mark.parametrize("worth, want", [(ADDITIVE, SHARES), (MAJORITY, [0.2] * 5), (UNANIMITY, [1 / 3, 0, 1 / 3, 1 / 3, 0]), (GLOVE, [2 / 3, 1 / 6, 1 / 6]),
                                         (np.array([0, 1, 0, 3.0]), [2, 1])])
def test_shapley_values_in_closed_form(worth, want):
    assert games.shapley(worth) == pytest.approx(want, abs=1e-14)


def test_interactions_in_closed_form():
    off = ~np.eye(4, dtype=bool)
    assert games.interaction(ADDITIVE)[off] == pytest.approx(0, abs=1e-14)
    # majority of five: v(S + ij) - v(S + i) - v(S + j) + v(S) is 1 for |S| = 1, -1 for |S| = 2; sizes are equally likely
    assert games.interaction(MAJORITY)[~np.eye(5, dtype=bool)] == pytest.approx(0, abs=1e-14)
    three = game(3, lambda s: len(s) >= 2)  # |S| = 0: 1, |S| = 1: -1
    assert games.interaction(three)[0, 1] == pytest.approx(0, abs=1e-14)
    got = games.interaction(UNANIMITY)  # 1 once all others of the set are there: the third comes before both in half of the orders
    assert got[0, 2] == got[2, 3] == pytest.approx(1 / 2) and got[0, 1] == got[1, 4] == pytest.approx(0, abs=1e-14)
    got = games.interaction(GLOVE)
    assert got[0, 1] == pytest.approx(1 / 2) and got[1, 2] == pytest.approx(-1 / 2)  # a pair to be made; a right glove too many
    assert np.isnan(np.diag(got)).all()


def test_values_of_a_random_game_by_brute_force():
    worth, p = random_game(5, 3), 5
    orders = list(permutations(range(p)))
    want, together = np.zeros(p), np.zeros((p, p))
    for order in orders:
        for k, i in enumerate(order):
            want[i] += worth[games.mask(order[: k + 1])] - worth[games.mask(order[:k])]
    for i in range(p):
        for j in range(p):
            if i != j:
                rest = [k for k in range(p) if k not in (i, j)]
                for s in range(1 << len(rest)):
                    chosen = [rest[k] for k in games.members(s)]
                    weight = factorial(len(chosen)) * factorial(p - len(chosen) - 2) / factorial(p - 1)
                    together[i, j] += weight * (worth[games.mask([*chosen, i, j])] - worth[games.mask([*chosen, i])] - worth[games.mask([*chosen, j])] + worth[games.mask(chosen)])
    assert games.shapley(worth) == pytest.approx(want / len(orders))
    off = ~np.eye(p, dtype=bool)
    assert games.interaction(worth)[off] == pytest.approx(together[off])


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_axioms(p):
    worth = random_game(p, p)
    values = games.shapley(worth)
    assert values.sum() == pytest.approx(worth[-1] - worth[0])  # efficiency
    blind = np.array([worth[s & ~1] for s in range(1 << p)])  # player 0 changes nothing
    assert games.shapley(blind)[0] == pytest.approx(0, abs=1e-14)
    if p > 1:
        assert games.interaction(blind)[0, 1] == pytest.approx(0, abs=1e-13)
        alike = np.array([worth[_swapped(s)] + worth[s] for s in range(1 << p)])  # players 0 and 1 are interchangeable
        got = games.shapley(alike)
        assert got[0] == pytest.approx(got[1])  # symmetry
    assert games.shapley(2 * worth + random_game(p, 9)) == pytest.approx(2 * values + games.shapley(random_game(p, 9)))  # linearity


def _swapped(s):
    return s & ~3 | (s & 1) << 1 | s >> 1 & 1


def test_further_axes_are_games_of_their_own():
    worth = random_game(4, 1, more=(3, 2))
    assert games.shapley(worth)[:, 2, 1] == pytest.approx(games.shapley(worth[:, 2, 1]))
    assert games.interaction(worth)[0, 1, 0, 1] == pytest.approx(games.interaction(worth[:, 0, 1])[0, 1])
    assert games.superadditivity(worth)[1, 1] == pytest.approx(games.superadditivity(worth[:, 1, 1]))


@pytest.mark.parametrize("p", [2, 3, 5])
def test_disjoint_pairs_come_once_each(p):
    pairs = list(games.disjoint_pairs(p))
    want = {frozenset((s, t)) for s in range(1, 1 << p) for t in range(1, 1 << p) if not s & t}
    assert {frozenset(x) for x in pairs} == want and len(pairs) == len(want) == (3**p - 2 ** (p + 1) + 1) // 2


def test_superadditivity_and_pooling_in_closed_form():
    assert games.superadditivity(ADDITIVE) == pytest.approx(0, abs=1e-13) and games.pooling(ADDITIVE) == pytest.approx(0, abs=1e-13)
    three = game(3, lambda s: len(s) >= 2)
    assert games.superadditivity(three) == 0.5 and games.pooling(three) == 1
    assert games.pooling(np.array([0, 1, 0, 3.0])) == 2
    anyone = game(3, lambda s: len(s) >= 1)  # every player has all of it: joining loses one of two
    assert games.superadditivity(anyone) == -1 and games.pooling(anyone) == -2
    assert games.superadditivity(GLOVE) == pytest.approx(3 / 6)  # (0)(1), (0)(2), (0)(12): 1 each; (1)(2), (1)(02), (2)(01): 0


def test_sufficient_sets_are_those_that_can_spare_nobody():
    def named(worth, share):
        return [games.members(s) for s in games.sufficient(worth, share)]

    assert named(game(3, lambda s: len(s) >= 2), 1.0) == [(0, 1), (0, 2), (1, 2)]
    assert named(UNANIMITY, 0.9) == [(0, 2, 3)] and named(GLOVE, 0.5) == [(0, 1), (0, 2)]
    uneven = game(3, lambda s: 0.95 if 2 in s and len(s) < 3 else 1.0 if len(s) == 3 or set(s) == {0, 1} else 0)
    assert named(uneven, 0.9) == [(2,), (0, 1)] and named(uneven, 0.99) == [(0, 1)]
    assert named({s: uneven[s] for s in (0, 3, 5, 7)}, 0.9) == [(0, 1), (0, 2)]  # 2 alone was not played
    for bad, message in (({0: 1, 1: 2, 3: 0.5}, "nothing can be enough"), (-MAJORITY, "nothing can be enough"), (random_game(3, 0, (2,)), "pooled over instances")):
        with pytest.raises(ValueError, match=message):
            games.sufficient(bad)


@pytest.mark.parametrize("worth, message", [(np.zeros(6), "2.p"), (np.array([0, np.nan]), "finite"), (np.zeros(1), "2.p")])
def test_bad_games_are_refused(worth, message):
    with pytest.raises(ValueError, match=message):
        games.shapley(worth)


# -- sampling -----------------------------------------------------------------------------------------------------------


def test_orders_are_permutations_with_their_reverses():
    drawn = games.orders(6, 20, 1)
    assert (np.sort(drawn, axis=1) == np.arange(6)).all() and (drawn[::2] == drawn[1::2, ::-1]).all()
    assert (drawn == games.orders(6, 20, 1)).all() and (drawn != games.orders(6, 20, 2)).any()
    for bad in (2, 7):
        with pytest.raises(ValueError, match="even number"):
            games.orders(6, bad, 0)


def test_only_the_needed_worths_are_read():
    worth, order = random_game(8, 5), games.orders(8, 6, 0)
    some = {s: worth[s] for s in games.needed(order)}
    assert len(some) < 60 and games.additions(some, order).shape == (6, 8)
    more = {s: worth[s] for s in games.needed(order, pairs=True)}
    assert set(some) < set(more) and np.isfinite(games.sampled_interaction(more, order)).any()
    with pytest.raises(KeyError):
        games.sampled_interaction(some, order)


def test_more_players_than_an_integer_of_the_machine_has_bits():
    order = games.orders(90, 4, 0)
    for pairs in (False, True):
        played = games.needed(order, pairs)
        assert min(played) == 0 and max(played) == (1 << 90) - 1 and (1 << 90) - 1 in played
    chains = games.prefixes(order)
    assert all(games.members(s) == tuple(sorted(came[:k].tolist())) for came, chain in zip(order, chains) for k, s in enumerate(chain))
    worth = {s: float(sum(games.members(s))) for s in played}  # player i adds i
    assert games.additions(worth, order).mean(0) == pytest.approx(range(90))
    assert games.sampled_interaction(worth, order)[order[0, 0], order[0, 1]] == 0


def test_all_orders_give_the_exact_values():
    worth = random_game(4, 2)
    every = np.array(list(permutations(range(4))))
    assert games.additions(worth, every).mean(0) == pytest.approx(games.shapley(worth))
    off = ~np.eye(4, dtype=bool)
    assert games.sampled_interaction(worth, every)[off] == pytest.approx(games.interaction(worth)[off])


def test_sampling_is_efficient_converges_and_its_intervals_cover():
    worth = random_game(8, 4)
    exact = games.shapley(worth)
    errors = {}
    for count in (20, 2000):
        got = games.sampled_shapley(worth, games.orders(8, count, 0))
        assert sum(e.value for e in got) == pytest.approx(worth[-1] - worth[0])  # each order adds up to v(all)
        errors[count] = np.abs(np.array([e.value for e in got]) - exact).max()
    assert errors[2000] < 0.08 and errors[2000] < errors[20] / 3
    inside = [e.low <= x <= e.high for seed in range(24) for e, x in zip(games.sampled_shapley(worth, games.orders(8, 80, seed)), exact)]
    assert 0.88 <= np.mean(inside) <= 0.99  # 192 intervals of nominally 95 %


def test_few_orders_give_an_honest_interval_or_none():
    inside = []
    for seed in range(60):
        worth = random_game(6, seed)
        inside += [e.low <= x <= e.high for e, x in zip(games.sampled_shapley(worth, games.orders(6, 24, seed)), games.shapley(worth))]
    assert len(inside) == 360 and np.mean(inside) >= 0.9  # nominally .95
    assert all(np.isnan([e.low, e.high]).all() and np.isfinite(e.value) for e in games.sampled_shapley(worth, games.orders(6, 6, 0)))
    assert all(e.low < e.value < e.high and e.n == 4 for e in games.sampled_shapley(worth, games.orders(6, 8, 0)))


def test_sampled_interactions_converge():
    worth = random_game(6, 6)
    off = ~np.eye(6, dtype=bool)
    got = games.sampled_interaction(worth, games.orders(6, 6000, 0))
    assert np.abs(got - games.interaction(worth))[off].max() < 0.2 and np.isnan(np.diag(got)).all()
