"""LazyEviction: its score, and the state that follows every query, against a slow plain version."""

import math
from types import SimpleNamespace

import pytest
import torch

import kvprobe
import oracle
from kvprobe import attention
from kvprobe.policies.lazyeviction import POLICY, recurrence
from oracle import Reference
from sidebyside import feed, walk
from test_policies import BUFFER, KEEP

R10 = {(100, 90, 10): 0.238653, (100, 90, 1): 1.000033, (100, 100, 0): 0.537883, (100, 10, 50): 0.114648, (100, 99, 0): 0.0}


def plain(t: int, last: int, interval: int) -> float:
    """Methods 22, as the port writes it."""
    x = 1 + (t - last) / (interval + 1e-5)
    first = 0.0 if x > 700 else 2 / (1 + math.exp(x))
    return first + (0.0 if interval == 0 or interval > 700 else 2 / (1 + math.exp(interval - 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_reference_numbers(dtype):
    """methods R10; exp overflows in the last one."""
    since, interval = (torch.tensor(x) for x in zip(*((t - last, m) for t, last, m in R10)))
    assert recurrence(since, interval, dtype).tolist() == pytest.approx(list(R10.values()), abs=6e-7)
    assert [plain(*key) for key in R10] == pytest.approx(list(R10.values()), abs=6e-7)
    assert recurrence(since, interval, dtype)[-1] == 0
    assert recurrence(torch.tensor([2**31 - 1]), torch.tensor([2**31 - 2]), dtype).isfinite().all()


class Watching(Reference):
    """A reference that keeps (last, interval) per (layer, row, query head, position), one query after the other."""

    alpha = POLICY.alpha

    def _observe(self, n):
        super()._observe(n)
        state = self.__dict__.setdefault("state", {})
        for layer, seen in oracle._seen.items():
            weights = seen["weights"].double().numpy()
            for row, columns in enumerate(self.column):
                for t, column in enumerate(columns):
                    if column < self.columns - n:
                        continue  # an earlier forward's query
                    for h in range(weights.shape[1]):
                        state[layer, row, h, t] = (t, 0)
                        for p in range(t + 1):
                            if weights[row, h, column - (self.columns - n), columns[p]] >= self.alpha:
                                last, interval = state[layer, row, h, p]
                                state[layer, row, h, p] = (t, max(interval, t - last))


def recurring(reference, layer, row, head, number, candidates):
    t, group = len(reference.column[row]) - 1, 2
    return {p: max(plain(t, *reference.state[layer, row, h, p]) for h in range(head * group, (head + 1) * group)) for p in candidates}


def watching(llama, alpha, **options):
    model, stock = llama
    reference = Watching(stock, model.geometry.kv_layers, model.geometry.n_kv, KEEP, BUFFER, recurring, **options)
    reference.alpha = alpha
    return reference


@pytest.mark.parametrize("alpha", [1e-4, 0.03, 0.2])
@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_through_rounds(llama, ids, alpha, longest, padded):
    mask = torch.ones(3, 46, dtype=torch.bool)
    mask[1, :5] = not padded
    cache = kvprobe.cache(llama[0], policy="lazyeviction", keep=KEEP, buffer=BUFFER, alpha=alpha)
    reference = watching(llama, alpha)
    assert walk(llama[0], cache, reference, ids[:, :46], prefill=20, longest=longest, mask=mask if padded else None) >= 18
    intervals = {interval for _, interval in reference.state.values()}
    assert alpha == 1e-4 or len(intervals) > 4, "a text on which nothing recurs tests nothing"


def test_at_prompt_end(llama, ids):
    cache = kvprobe.cache(llama[0], policy="lazyeviction", keep=14, schedule="prompt_end", alpha=0.03)
    reference = Watching(llama[1], (0, 1), 2, 14, 0, recurring, rounds=False)
    reference.alpha = 0.03
    assert walk(llama[0], cache, reference, ids[:, :40], prefill=33, longest=3) == 3


def columns(model, ids, sizes, mask=None):
    cache, at = kvprobe.cache(model, policy="lazyeviction", keep=100, alpha=0.03), 0
    for n in sizes:
        feed(model, cache, ids[:, at : at + n], None if mask is None else mask[:, : at + n])
        at += n
    return [layer.columns for layer in cache.layers]


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_the_state_does_not_depend_on_how_a_text_is_cut(llama, ids, monkeypatch, padded):
    """One prefill, blocks of it, chunks and tokens; last is the entry's own query at least."""
    model, total = llama[0], 40
    mask = torch.ones(3, total, dtype=torch.bool)
    mask[1, :7], mask[2, :1] = not padded, not padded
    mask = mask if padded else None
    whole = columns(model, ids, [total], mask)
    real = torch.ones(3, total, dtype=torch.bool) if mask is None else mask
    assert all(c["last"].shape == (3, 2, total, 2) and (c["last"].transpose(1, 2)[real] >= 0).all() and (c["last"].transpose(1, 2)[~real] == -1).all() for c in whole)
    assert len(whole[0]["interval"].unique()) > 4
    for sizes in ([17, 1, 1, 13, 8], [9] + [1] * 31):
        for one, other in zip(whole, columns(model, ids, sizes, mask)):
            assert all(torch.equal(one[name], other[name]) for name in ("last", "interval"))
    monkeypatch.setattr(attention, "BLOCK_BYTES", 8 * 3 * 4 * total * 3)  # three queries at a time
    for one, other in zip(whole, columns(model, ids, [total], mask)):
        assert all(torch.equal(one[name], other[name]) for name in ("last", "interval"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_histories_tie_exactly(dtype):
    """Whatever lane of a vector they are computed in: the newest of them stay."""
    last = torch.tensor([40, 50, 60], dtype=torch.int32).repeat(1003)[None, None, :, None]
    interval = torch.tensor([3, 7, 7], dtype=torch.int32).repeat(1003)[None, None, :, None]
    view = SimpleNamespace(columns=dict(last=last, interval=interval), now=torch.tensor([73]), keys=torch.zeros(1, dtype=dtype))
    score = POLICY().score(view)
    assert score.dtype == dtype and len(score.unique()) == 3
    assert score[0, 0, :3].tolist() == pytest.approx([plain(72, 40, 3), plain(72, 50, 7), plain(72, 60, 7)], rel=1e-6)


def test_entries_of_no_recurrence_go_oldest_first(llama, ids):
    """alpha=1: only the first token, which can see nothing else, gives one entry all of its attention."""
    cache = kvprobe.cache(llama[0], policy="lazyeviction", keep=KEEP, buffer=BUFFER, alpha=1.0)
    feed(llama[0], cache, ids[:, :18])
    assert (cache.positions == torch.arange(18 - KEEP - BUFFER, 18)).all()


def test_a_threshold_that_cannot_be_is_refused(llama):
    for alpha in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="alpha="):
            kvprobe.cache(llama[0], policy="lazyeviction", keep=8, alpha=alpha)
