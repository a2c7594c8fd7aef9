"""Original and renumbered positions (C01, C02), against a stock cache whose keys are rotated here, by hand."""

import pytest
import torch
from transformers import DynamicCache

import kvprobe
import tiny


@pytest.fixture(scope="module")
def pair():
    return tiny.pair("llama")


def turn(keys, by, base=10000.0):
    """Rotate post-RoPE keys [... s d] by positions [s], half-split layout."""
    half = keys.shape[-1] // 2
    angle = by[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def test_kept_0_to_3_and_6_to_8_of_9(pair, ids):
    """C02: the next id is 9 with original positions and 7 with renumbered ones."""
    lm, stock = pair
    kept = torch.tensor([0, 1, 2, 3, 6, 7, 8])
    for mode, positions, following in (("original", kept, 9), ("renumbered", torch.arange(7), 7)):
        mine = kvprobe.cache(lm, policy="streaming_llm", keep=7, schedule="prompt_end", positions=mode)
        kvprobe.prefill(lm, mine, ids[:1, :9])
        got = lm.model(ids[:1, 9:10], cache=mine).logits
        theirs = DynamicCache(config=stock.config)
        stock(ids[:1, :9], cache=theirs)
        for layer in theirs.layers:
            layer.keys = turn(layer.keys[:, :, kept], positions - kept)
            layer.values = layer.values[:, :, kept]
        want = stock(ids[:1, 9:10], cache=theirs, position_ids=torch.tensor([[following]])).logits
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)  # the model's own angles are float32
        assert mine.positions[0, 0, 0].tolist() == [*kept.tolist(), 9]


def test_renumbering_round_after_round(pair, ids):
    """Streaming with re-rotation for 80 tokens: the reference keeps a stock cache numbered 0..n-1 by hand."""
    lm, stock = pair
    keep, buffer = 12, 4
    mine = kvprobe.cache(lm, policy="streaming_llm", keep=keep, buffer=buffer, positions="renumbered")
    theirs, held = DynamicCache(config=stock.config), []
    for t in range(80):
        x = ids[:1, t : t + 1]
        got = lm.model(x, cache=mine).logits
        want = stock(x, cache=theirs, position_ids=torch.tensor([[len(held)]])).logits
        held.append(t)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5, msg=f"token {t}")
        if len(held) == keep + 2 * buffer:
            stay = [*range(4), *range(len(held) - keep - buffer + 4, len(held))]
            for layer in theirs.layers:
                layer.keys = turn(layer.keys[:, :, stay], torch.arange(len(stay)) - torch.tensor(stay))
                layer.values = layer.values[:, :, stay]
            held = [held[i] for i in stay]
    assert mine.positions[0, 0, 0].tolist() == held


def test_without_eviction_the_modes_agree(pair, ids):
    lm, _ = pair
    a, b = (lm.model(ids, cache=kvprobe.cache(lm, keep=200, buffer=4, positions=p)).logits for p in ("original", "renumbered"))
    assert torch.equal(a, b)


def test_rows_with_rounds_of_their_own_renumber_by_themselves(pair, ids):
    lm, _ = pair
    batch, mask = ids[:2].clone(), torch.ones_like(ids[:2])
    mask[1, :13] = 0

    def walk(x, m):
        cache = kvprobe.cache(lm, policy="recency", keep=10, buffer=4, positions="renumbered", instances=[0] * len(x))
        out = [kvprobe.prefill(lm, cache, x[:, :30], m[:, :30])]
        for t in range(30, 80):
            out.append(lm.model(x[:, t : t + 1], cache=cache, attention_mask=m[:, : t + 1], position_ids=m[:, : t + 1].sum(1, keepdim=True) - 1).logits[:, -1])
        return torch.stack(out, 1)

    both = walk(batch, mask)
    for b in range(2):
        start = int((mask[b] == 0).sum())
        alone = walk(batch[b : b + 1, :], mask[b : b + 1]) if not start else None
        if alone is not None:
            torch.testing.assert_close(both[b], alone[0], rtol=0, atol=1e-6)
    short = walk_single(lm, batch[1:2, 13:])
    torch.testing.assert_close(both[1], short, rtol=0, atol=1e-5)


def walk_single(lm, x):
    cache = kvprobe.cache(lm, policy="recency", keep=10, buffer=4, positions="renumbered", instances=[0])
    out = [kvprobe.prefill(lm, cache, x[:, :17])]
    for t in range(17, x.shape[1]):
        out.append(lm.model(x[:, t : t + 1], cache=cache).logits[:, -1])
    return torch.stack(out, 1)[0]


def test_the_mode_is_in_the_manifest_and_the_footer(tmp_path):
    run = kvprobe.run("planted_fact", preset="smoke", instances=2, batch_size=2, positions="renumbered", out=tmp_path / "r", progress=False)
    assert run.manifest["settings"]["positions"] == "renumbered"
    assert "renumbered positions" in " ".join(t.get_text() for t in run.figure().texts)


def test_bad_words_are_refused(pair):
    with pytest.raises(ValueError, match="original, renumbered"):
        kvprobe.cache(pair[0], keep=8, buffer=2, positions="fresh")
