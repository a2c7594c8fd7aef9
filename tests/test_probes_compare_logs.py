"""The probes that compare policies: rounds, budgets and what their keep logs hold."""

import numpy as np
import pytest

import compared
from compared import SMALL, pick, value
from kvprobe.keeplog import ALIVE

cheap, lm, done = compared.cheap, compared.lm, compared.done


@pytest.mark.parametrize("probe", SMALL)
def test_equal_budgets_and_rounds_of_the_closed_form(done, probe):
    """H15: right after every round every head of every arm of a table holds K + r entries; B19: what is not held was evicted."""
    d = done(probe)
    assert len(d.logs) == sum(len(cut) for arm, cut in d.session.batches if arm is not None and arm.evicts)
    for (_, label, _), (log, k) in d.logs.items():
        keep = int(label.split(",")[0].removeprefix("K=")) if probe == "blocks" else d.config.keep
        fires, r = keep + 2 * d.config.buffer, d.config.buffer
        assert (log.keep, log.buffer) == (keep, r) and log.fired[k] == tuple(range(fires, log.length[k] + 1, r)) != ()
        for n in range(log.rounds(k)):
            assert (log.held(k, n).sum(-1) == keep + r).all()
        assert ((log.died[:, k] != ALIVE).sum(-1) == r * log.rounds(k)).all()


def test_rounds_before_the_blocks_value(done):
    d = done("blocks")
    for keep in (64, 32):
        last = 37 + 40 + 128 - 1  # the token whose logits give the value's first: rounds up to its position have fired
        assert set(pick(d.rows, metric="rounds", keep=keep).value) == {(last - (keep + 16)) // 8 + 1}
    assert d.session.stories[0].asks[0].at + 60 == 37 + 40 + 128


def test_keep_log_rows_are_those_of_the_stored_logs(done):
    """Sets, one policy of each kind: drawn without a model, drawn with one, and scored."""
    d = done("keep_log")
    for label, protect, draw in (("random", False, 1), ("vase + prompt", True, 1), ("h2o", False, 0)):
        log, k = d.logs[1, label, draw]
        mine = pick(d.rows, policy=label.split(" +")[0], protect=protect, draw=draw, instance=1)
        prompt, union, one, slots = 37, [], [], []
        for n in range(6):
            kept = [[set(np.flatnonzero(h)) for h in layer] for layer in log.held(k, n)]
            union += [len((layer[0] | layer[1]) & set(range(prompt))) / prompt for layer in kept]
            one += [len(h & set(range(prompt))) / prompt for layer in kept for h in layer]
            candidates = log.fired[k][n] - 8
            slots += [len({p for h in layer for p in h if p < candidates}) / (2 * 48) for layer in kept]
        assert value(mine, metric="prompt_union") == pytest.approx(np.mean(union)) and value(mine, metric="prompt_head") == pytest.approx(np.mean(one))
        assert value(mine, metric="decorrelation") == pytest.approx(np.mean(slots)) and value(mine, metric="rounds") == 6
        assert value(mine, metric="prompt_head") == 1 or not protect
        oldest = pick(mine, metric="age_head").sort_values("low").iloc[-1]
        ages = [np.mean([p in h for layer in [[set(np.flatnonzero(h)) for h in layer] for layer in log.held(k, n)] for h in layer])
                for n, length in enumerate(log.fired[k]) for p in range(prompt, length) if oldest.low <= length - p < oldest.high]
        assert oldest.value == pytest.approx(np.mean(ages))
    shared = pick(d.rows, policy="random(shared=True)")
    assert pick(shared, metric="slot_coverage", protect=False).value.tolist() == pytest.approx([48 / 56] * 4) and pick(shared, metric="decorrelation").value.tolist() == pytest.approx([0.5] * 8)


@pytest.mark.parametrize("probe", ["blocks", "distance"])
def test_endpoints_hold_and_delete_the_boxes(done, probe):
    d, checked = done(probe), 0
    for (i, label, draw), (log, k) in d.logs.items():
        end, factor = label.split(", ")[-1], label.split(", ")[1]
        if end not in ("kept", "deleted"):
            continue
        story = d.session.stories[i] if probe == "blocks" else d.session.by_factor[factor][i]
        boxes = [p for name, span in story.spans.items() if name.startswith("box") for p in range(*span)]
        left = list(boxes)  # a round takes up to r of those that are candidates, oldest first
        for n, length in enumerate(log.fired[k]):
            if end == "deleted":
                left = left[min(log.buffer, sum(p < length - log.buffer for p in left)) :]
            held = log.held(k, n)
            assert all(np.flatnonzero(held[layer, h, boxes]).tolist() == [j for j, p in enumerate(boxes) if p in left and p < length] for layer in (0, 1) for h in (0, 1))
        assert end == "kept" or not left
        checked += 1
    assert checked == {"blocks": 2 * 2 * 2, "distance": 3 * 2 * 2}[probe]
