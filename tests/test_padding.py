"""Left padding is no text: a batch of unequal prompts is the single prompts, whatever stands in the padding."""

import pytest
import torch

import kvprobe
import stub
import tiny
from kvprobe import engine
from kvprobe.registry import make_policy
from kvprobe.types import Needs
from oracle import cache_sets
from sidebyside import ATOL, feed

KEEP, BUFFER = 10, 4
PADS = [0, 3, 9]
POLICIES = sorted(set(kvprobe.available("policy")) - set(tiny.AHEAD))


def padded(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same ids with the first PADS[b] of row b taken for padding, and their mask."""
    mask = torch.ones_like(ids)
    for b, n in enumerate(PADS):
        mask[b, :n] = 0
    return ids, mask


def of_row(cache, row: int) -> dict:
    return {(layer, head): v for (layer, b, head), v in cache_sets(cache).items() if b == row}


def run(model, cache, text, mask, steps, pad: int = 0):
    """Logits of all steps; `pad` columns are cut off the front of the text."""
    return torch.cat([feed(model, cache, text[:, max(a, pad) : z], None if pad else mask[:, :z]) for a, z in steps], 1)


@pytest.mark.parametrize("prefill", [15, 30])
@pytest.mark.parametrize("name", POLICIES)
def test_a_padded_batch_is_its_single_runs(llama, ids, calibrated, name, prefill):
    """D01, D02: logits on real positions, keep-sets and logs; a prefill below and one above a round, then decoding."""
    model, _ = llama
    text, mask = padded(ids[:, :40])
    options = calibrated.get(name, {})
    batch = kvprobe.cache(model, policy=name, keep=KEEP, buffer=BUFFER, instances=[4, 5, 6], **options)
    steps = [(0, prefill)] + [(t, t + 1) for t in range(prefill, 40)]
    got = run(model, batch, text, mask, steps)
    for b, pad in enumerate(PADS):
        single = kvprobe.cache(model, policy=name, keep=KEEP, buffer=BUFFER, instances=[4 + b], **options)
        want = run(model, single, text[b : b + 1], mask[b : b + 1], steps, pad)
        assert float((got[b, pad:] - want[0]).abs().max()) < ATOL
        assert of_row(batch, b) == of_row(single, 0)
        log = batch.keep_log.select([b])
        assert (log.died[..., : 40 - pad] == single.keep_log.died).all() and log.fired == single.keep_log.fired


def test_what_stands_in_the_padding_changes_nothing(llama, ids):
    """F02: neither logits nor keep-sets, to the bit; padding gives finite output of its own."""
    model, _ = llama
    text, mask = padded(ids[:, :30])
    found = []
    for filling in (0, 55):
        changed = torch.where(mask.bool(), text, filling)
        cache = kvprobe.cache(model, policy="h2o", keep=KEEP, buffer=BUFFER)
        logits = torch.cat([feed(model, cache, changed[:, a:z], mask[:, :z]) for a, z in [(0, 20), *((t, t + 1) for t in range(20, 30))]], 1)
        assert torch.isfinite(logits).all()
        found.append((logits[mask.bool()], cache_sets(cache)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_padding_gives_zeros():
    """F02: a query of padding gives zeros and no nan, and takes part in nothing else."""
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, :, :, :4] = False
    key = torch.randn(2, 2, 6, 2, generator=torch.Generator().manual_seed(0))
    (out,) = stub.step(stub.cache(KEEP, BUFFER), 6, 2, query=key, key=key, mask=mask)
    assert (out[1, :4] == 0).all() and torch.isfinite(out).all()
    (single,) = stub.step(stub.cache(KEEP, BUFFER), 2, query=key[1:, :, 4:], key=key[1:, :, 4:])
    assert torch.allclose(out[1, 4:], single[0]) and torch.equal(out[1, 4, :], key[1, :, 4])


def test_generate_on_a_padded_batch(llama, ids):
    model, _ = llama
    text, mask = padded(ids[:, :22])
    batch = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[1, 2, 3])
    out = engine.generate(model, batch, text, attention_mask=mask, max_new_tokens=20)
    for b, pad in enumerate(PADS):
        single = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[1 + b])
        alone = engine.generate(model, single, text[b : b + 1, pad:], max_new_tokens=20)
        assert out[b, 22:].tolist() == alone[0, 22 - pad :].tolist()
        assert of_row(batch, b) == of_row(single, 0)


def test_the_protected_prompt_is_each_rows_own(llama, ids):
    """Padding makes no row's prompt longer."""
    model, _ = llama
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    cache = kvprobe.cache(model, policy="recency", keep=KEEP, buffer=BUFFER, protect_prompt=True)
    engine.generate(model, cache, ids[:2, :9], attention_mask=mask, max_new_tokens=42)
    assert of_row(cache, 0)[0, 0] == [*range(9), *range(45, 50)] and of_row(cache, 1)[0, 0] == [*range(4), *range(32, 45)]


def test_padding_without_position_ids(llama, ids):
    """D01: rotary positions are relative, so that the shift by the padding costs only the float32 of their angles."""
    model, _ = llama
    text, mask = padded(ids[:, :30])
    cache, alone = (kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=i) for i in ([0, 1, 2], [2]))
    steps = ((0, 25), (25, 26), (26, 27), (27, 29))
    with torch.no_grad():
        logits = torch.cat([model.model(text[:, a:z], attention_mask=mask[:, :z], cache=cache).logits for a, z in steps], 1)
    want = run(model, alone, text[2:], mask[2:], steps, pad=9)
    assert float((logits[2, 9:] - want[0]).abs().max()) < 1e-5
    assert of_row(cache, 2) == of_row(alone, 0)


def test_forcing_after_a_padded_prefill(llama, ids):
    """The forced tokens stand right behind each row's own text."""
    model, _ = llama
    text, mask = padded(ids[:, :22])
    script, targets = ids[:, 22:50], ids[:, 23:51]
    batch = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[1, 2, 3])
    kvprobe.prefill(model, batch, text, mask)
    got = kvprobe.force(model, batch, script, targets=targets)
    for b, pad in enumerate(PADS):
        single = kvprobe.cache(model, keep=KEEP, buffer=BUFFER, instances=[1 + b])
        kvprobe.prefill(model, single, text[b : b + 1, pad:])
        want = kvprobe.force(model, single, script[b : b + 1], targets=targets[b : b + 1])
        assert float((got.logp[b] - want.logp[0]).abs().max()) < ATOL


def test_prefill_returns_the_last_logits(llama, ids):
    model, stock = llama
    text, mask = padded(ids[:, :12])
    got = kvprobe.prefill(model, kvprobe.cache(model, keep=KEEP, buffer=BUFFER), text, mask)
    for b, pad in enumerate(PADS):
        with torch.no_grad():
            assert float((got[b] - stock(text[b : b + 1, pad:]).logits[0, -1]).abs().max()) < ATOL


def test_pads_are_never_counted_or_kept(llama, ids):
    """A row fires by its own count of real entries, and no pad outlives a round."""
    model, _ = llama
    text, mask = padded(ids[:, :40])
    cache = kvprobe.cache(model, keep=KEEP, buffer=BUFFER)
    feed(model, cache, text[:, :17], mask[:, :17])
    assert (cache.positions[0, :, 0] < 0).sum(-1).tolist() == PADS and cache.keep_log.fired == ((), (), ())
    feed(model, cache, text[:, 17:18], mask[:, :18])
    assert cache.keep_log.fired == ((18,), (), ()) and cache.count[0, :, 0].tolist() == [14, 15, 9]
    assert cache.physical == 15, "the widest row is left, without its padding"


def test_two_padded_prompts_score_as_single_ones(llama, ids):
    """D02: scores of every row by its own text, pads of no weight."""
    model, _ = llama
    text, mask = padded(ids[:, :30])
    noted = {}

    class Noting:
        def __init__(self, name, policy):
            self.name, self.policy, self.needs = name, policy, policy.needs

        def score(self, view):
            score = self.policy.score(view)
            noted[self.name, view.layer] = (score, view.real)
            return score

    for policy in (make_policy("snapkv"), make_policy("snapkv", dict(window=28)), make_policy("h2o")):
        feed(model, kvprobe.cache(model, policy=Noting("batch", policy), keep=KEEP, buffer=BUFFER), text, mask)
        for b, pad in enumerate(PADS):
            feed(model, kvprobe.cache(model, policy=Noting("single", policy), keep=KEEP, buffer=BUFFER), text[b : b + 1, pad:])
            for layer in (0, 1):
                score, real = noted["batch", layer]
                assert real[b].sum() == 2 * (30 - pad - BUFFER)
                assert torch.allclose(score[b][real[b]], noted["single", layer][0].flatten(), atol=1e-12)


def test_a_hidden_token_in_the_middle(llama, ids):
    """B17: nobody attends to it, nothing keeps it, no position is spent on it."""
    model, _ = llama
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 11] = 0
    hidden, without = (kvprobe.cache(model, policy="h2o", keep=KEEP, buffer=BUFFER) for _ in range(2))
    rest = [t for t in range(30) if t != 11]
    steps = [(0, 20), *((t, t + 1) for t in range(20, 30))]
    got = torch.cat([feed(model, hidden, ids[:1, a:z], mask[:, :z]) for a, z in steps], 1)[:, rest]
    want = torch.cat([feed(model, without, ids[:1, [t for t in range(a, z) if t != 11]]) for a, z in steps], 1)
    assert float((got - want).abs().max()) < ATOL
    assert cache_sets(hidden) == cache_sets(without)


@pytest.mark.parametrize("at", [16, 18])
def test_a_hidden_token_in_the_buffer(llama, ids, at):
    """The newest r are real entries: a hidden column is none of them."""
    model, _ = llama
    mask = torch.ones(1, 19, dtype=torch.long)
    mask[0, at - 1] = 0
    hidden, without = (kvprobe.cache(model, policy="recency", keep=KEEP, buffer=BUFFER) for _ in range(2))
    feed(model, hidden, ids[:1, :19], mask)
    feed(model, without, ids[:1, [t for t in range(19) if t != at - 1]])
    assert cache_sets(hidden) == cache_sets(without)
    random, plain = (kvprobe.cache(model, keep=KEEP, buffer=BUFFER) for _ in range(2))
    feed(model, random, ids[:1, :19], mask)
    feed(model, plain, ids[:1, [t for t in range(19) if t != at - 1]])
    assert cache_sets(random) == cache_sets(plain)


def test_a_row_is_judged_only_when_it_is_due():
    """Scores of row 1, five tokens behind, are not finite: that is an error of its own first round."""

    class Sick:
        needs = Needs()

        def score(self, view):
            return torch.zeros(view.positions.shape).index_fill(0, torch.tensor([1]), float("nan"))

    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    mask[1, :, :, :5] = False
    cache = stub.cache(KEEP, BUFFER, Sick())
    stub.step(cache, 8, 2, mask=mask)
    stub.walk(cache, 22, batch=2)
    assert cache.keep_log.fired == ((18, 22), ())
    with pytest.raises(ValueError, match="not finite"):
        stub.walk(cache, 23, batch=2)


def test_right_padding_is_refused(llama, ids):
    model, _ = llama
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 10:] = 0
    with pytest.raises(ValueError, match="left padding"):
        feed(model, kvprobe.cache(model, keep=KEEP, buffer=BUFFER), ids[:, :12], mask)


def test_other_masks_are_refused():
    """A mask that hides more than padding and the future would be lost silently after the first round."""
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, 0, 4, 1] = False
    with pytest.raises(ValueError, match="hides more"):
        stub.step(stub.cache(KEEP, BUFFER), 6, mask=mask)
    seeing = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="causal"):
        stub.step(stub.cache(KEEP, BUFFER), 6, mask=seeing)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["random", "snapkv", "h2o", "rkv_released", "vase"])
def test_half_precision_stays_finite(llama, ids, name, dtype):
    """F01, F02: ragged heads and rows, 20 decode steps; random draws keep the same sets as in float64."""
    model, _ = tiny.pair("llama", dtype)
    pins = [kvprobe.SpanPin(2, 6, frozenset({(0, 1)}))]
    text, mask = padded(ids[:, :44])
    cache = kvprobe.cache(model, policy=name, keep=KEEP, buffer=BUFFER, pins=pins, pins_free=True)
    steps = [(0, 24)] + [(t, t + 1) for t in range(24, 44)]
    logits = run(model, cache, text, mask, steps)
    assert torch.isfinite(logits).all() and logits.dtype == dtype and min(map(len, cache.keep_log.fired)) >= 4
    if name == "random":
        wide = kvprobe.cache(llama[0], keep=KEEP, buffer=BUFFER, pins=pins, pins_free=True)
        run(llama[0], wide, text, mask, steps)
        assert cache_sets(wide) == cache_sets(cache)
