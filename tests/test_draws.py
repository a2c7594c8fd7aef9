"""The uniform draw is a function of (seed, instance, layer, KV head, round, position) and of nothing else."""

from dataclasses import dataclass

import torch
from scipy import stats

import stub
from kvprobe import draws
from kvprobe.types import Needs
from oracle import raw_draws

WORD = (1 << 64) - 1


def mix(x: int) -> int:
    """The finaliser of SplitMix64 on unsigned words."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def by_hand(seed: int, parts: tuple[int, ...], counter: int) -> float:
    """The draw in whole numbers: each part is hashed into the key, the counter steps the generator."""
    gamma = 0x9E3779B97F4A7C15
    key = mix((seed + gamma) & WORD)
    for part in parts:
        key = mix(((key ^ mix((part + gamma) & WORD)) + gamma) & WORD)
    return (mix((counter * gamma + key) & WORD) >> 11) * 2.0**-53


def test_the_hash_is_splitmix64():
    """A run of today is rerun tomorrow: the numbers themselves are fixed."""
    for seed, parts, counter in ((0, (0, 0, 0, 0), 0), (1, (2, 3, 4, 5), 6), (2**40 + 3, (10**6, 35, 7, 1000), 10**6), (5, (1, 2, -1, 3), 4)):
        assert raw_draws(seed, *parts, [counter]) == [by_hand(seed, parts, counter)]


def test_draws_are_uniform_and_independent():
    """100,000 numbers pass a Kolmogorov-Smirnov test; neighbours, heads, rounds and seeds are uncorrelated."""
    counters = torch.arange(100_000)

    def row(seed, *parts):
        return draws.uniform(draws.key(seed, *(torch.tensor(x) for x in parts)), counters)

    base = row(0, 1, 2, 3, 4)
    assert float(base.min()) >= 0 and float(base.max()) < 1 and stats.kstest(base.numpy(), "uniform").pvalue > 1e-3
    others = [row(1, 1, 2, 3, 4), row(0, 2, 2, 3, 4), row(0, 1, 3, 3, 4), row(0, 1, 2, 4, 4), row(0, 1, 2, 3, 5), row(0, 2, 1, 3, 4), base.roll(1)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 4 / 100_000**0.5


@dataclass
class Noted:
    """Notes what each round draws; scores by it."""

    shared: bool = False
    needs = Needs()

    def __post_init__(self):
        self.drawn: dict[tuple[int, int], dict[tuple, float]] = {}  # (layer, round) -> (row, head, position) -> number

    def score(self, view):
        rand = view.rand(shared=self.shared)
        at = {(b, h, p): float(rand[b, h, c]) for b, row in enumerate(view.positions.tolist()) for h, ps in enumerate(row) for c, p in enumerate(ps)}
        self.drawn[view.layer, int(view.round[0])] = at
        return rand


def noted(shared=False, seed=0, instances=(3, 9), layers=2):
    policy = Noted(shared)
    stub.walk(stub.cache(6, 2, policy, layers=layers, instances=list(instances), seed=seed), 14, batch=len(instances))
    return policy.drawn


def test_the_cache_draws_the_hash_of_its_sites():
    drawn = noted(seed=4)
    assert set(drawn) == {(layer, number) for layer in (0, 1) for number in (0, 1, 2)}
    for (layer, number), at in drawn.items():
        for (b, h, p), value in at.items():
            assert value == by_hand(4, ((3, 9)[b], layer, h, number), p)


def test_every_part_of_the_key_matters():
    """No two of all the draws of two seeds, rows, layers, heads, rounds and positions are equal."""
    values = [v for seed in (0, 1) for at in noted(seed=seed).values() for v in at.values()]
    assert len(values) == 2 * 2 * 3 * 2 * 2 * 8 and len(set(values)) == len(values)


def test_the_shared_draw_is_one_for_all_heads_of_a_layer():
    drawn = noted(shared=True)
    for (layer, number), at in drawn.items():
        for (b, h, p), value in at.items():
            assert value == at[b, 0, p]
    first = {layer: drawn[layer, 0] for layer in (0, 1)}
    assert not set(first[0].values()) & set(first[1].values()) and len(set(first[0].values())) == 2 * 8


def test_a_row_draws_the_same_in_any_batch():
    both = noted(instances=(3, 9))
    for b, instance in enumerate((3, 9)):
        alone = noted(instances=(instance,))
        for place, at in alone.items():
            assert at == {(0, h, p): v for (row, h, p), v in both[place].items() if row == b}
