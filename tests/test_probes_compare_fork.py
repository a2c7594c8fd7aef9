"""The fork probe: against runs of its own, token by token, and plain counting in its keep logs."""

import numpy as np
import pytest
import torch

import compared
import kvprobe
from compared import SEEDS, pick, value
from kvprobe import engine
from kvprobe.keeplog import ALIVE
from kvprobe.pins import SpanPin

cheap, lm, stock, done = compared.cheap, compared.lm, compared.stock, compared.done


@torch.no_grad()
def greedy(stock, ids, new: int) -> list[int]:
    """The whole text again for every token."""
    ids, out = ids[None], []
    for _ in range(new):
        out.append(int(stock(ids).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[out[-1]]])], 1)
    return out


@torch.no_grad()
def evicted_greedy(lm, ids, new: int, **options) -> list[int]:
    """Token by token behind an evicting cache."""
    cache, out = kvprobe.cache(lm, **options), []
    logits = lm.model(ids[None], cache=cache, use_cache=True).logits
    for _ in range(new):
        out.append(int(logits[0, -1].argmax()))
        logits = lm.model(torch.tensor([[out[-1]]]), cache=cache, use_cache=True).logits
    return out


def test_the_fork_is_where_a_run_of_its_own_leaves_the_full_text(done, lm, stock):
    d, forks = done("fork"), 0
    for i in range(2):
        prompt = torch.as_tensor(d.session.stories[i].ids[:48])
        full = greedy(stock, prompt, 40)
        assert pick(d.rows, stage="write", metric="token", instance=i).sort_values("start").value.astype(int).tolist() == full
        for draw, seed in enumerate(SEEDS):
            own = evicted_greedy(lm, prompt, 40, policy="random", keep=40, buffer=8, instances=[i], seed=seed)
            apart = [t for t in range(40) if own[t] != full[t]]
            mine = pick(d.rows, stage="fork", draw=draw, instance=i)
            assert value(mine, metric="forked") == bool(apart)
            if apart:
                assert value(mine, metric="fork") == apart[0] and 48 + apart[0] > 56
                assert value(mine, metric="logp_full") == value(d.rows, stage="write", metric="logp", instance=i, start=apart[0])
                forks += 1
    assert forks >= 2


def test_the_gain_of_a_pinned_range_is_that_of_a_run_of_its_own(done, lm):
    d, tried = done("fork"), 0

    def forced(i: int, draw: int, ids, pins=()):
        cache = kvprobe.cache(lm, policy="random", keep=40, buffer=8, instances=[i], seed=SEEDS[draw], pins=pins)
        got = engine.force(lm, cache, ids[None, :-1], targets=ids[None, -1:], first=len(ids) - 1)
        return float(got.logp), bool(got.top), cache.keep_log

    for _, row in pick(d.rows, stage="fork", metric="gain").iterrows():
        i, draw, start = row.instance, row.draw, int(row.start)
        mine = pick(d.rows, stage="fork", draw=draw, instance=i)
        fork = int(value(mine, metric="fork"))
        text = np.concatenate([d.session.stories[i].ids[:48], pick(d.rows, stage="write", metric="token", instance=i).sort_values("start").value.to_numpy()]).astype(np.int64)
        ids = torch.as_tensor(text[: 48 + fork + 1])
        before, after = forced(i, draw, ids), forced(i, draw, ids, [SpanPin(start, start + 16)])
        assert value(mine, metric="logp") == pytest.approx(before[0], abs=1e-9) and not before[1]
        assert row.value == pytest.approx(after[0] - before[0], abs=1e-9)
        assert value(mine, metric="mended", kind=row.kind, start=row.start) == after[1]
        assert (after[2].died[..., start : start + 16] == ALIVE).all() and (after[2].held(0, 0).sum(-1) == 48).all()
        tried += 1
    assert tried >= 4


def test_ranges_called_evicted_were(done):
    d, tried = done("fork"), 0
    for (i, label, draw), (log, k) in d.logs.items():
        mine = pick(d.rows, stage="fork", draw=draw, instance=i)
        if not value(mine, metric="forked"):
            continue
        stop = 48 + int(value(mine, metric="fork"))
        rounds = sum(f <= stop - 1 for f in log.fired[k])
        gone = np.array([np.mean([log.died[layer, k, h, p] < rounds for layer in (0, 1) for h in (0, 1)]) for p in range(stop - 8)])
        lost = {a: gone[a : a + 16].mean() for a in range(0, len(gone) - 15, 16)}
        worst = sorted(lost.values(), reverse=True)[:2]
        named = pick(mine, metric="lost", kind="evicted")
        assert named.value.tolist() == pytest.approx([w for w in worst if w]) and (named.value > 0).all()
        for _, row in pick(mine, metric="lost").iterrows():
            assert row.value == pytest.approx(gone[int(row.start) : int(row.start) + 16].mean()) and row.start + 16 <= len(gone)
        assert len(pick(mine, metric="lost", kind="random")) == len(named)
        tried += len(named)
    assert tried >= 2
