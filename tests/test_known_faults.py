"""Faults of other tools that no other file here is named after: the same small inputs, the behaviour that is right (rows A, H and I)."""

import pytest
import torch

import kvprobe
from kvprobe import oracle, tasks
from kvprobe.metrics import fidelity


@pytest.fixture(scope="module")
def lm():
    return kvprobe.load("tiny", dtype="float64")


IDS = torch.arange(3, 43)[None]


def test_a01_layers_are_read_in_run_order_whatever_order_they_are_asked_for(lm):
    one, other = (kvprobe.capture(lm, IDS, layers=layers, what=("q", "attn")) for layers in ([0, 1], [1, 0]))
    assert sorted(other.layers) == [0, 1] and all(torch.equal(one.q[i], other.q[i]) and torch.equal(one.attn[i], other.attn[i]) for i in (0, 1))


def test_a10_heads_look_the_same_with_and_without_a_cache(lm):
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.model.config)
    with torch.no_grad():
        lm.model(input_ids=IDS[:, :30], cache=cache, use_cache=True)
    whole, rest = kvprobe.capture(lm, IDS, what="attn"), kvprobe.capture(lm, IDS[:, 30:], what="attn", cache=cache)
    for i in (0, 1):
        assert torch.allclose(whole.attn[i][:, :, 30:], rest.attn[i], atol=1e-12)
        looks = [x[i][0, :, -1, 5].argsort().tolist() for x in (whole.attn, rest.attn)]
        assert looks[0] == looks[1]


def test_a11_an_output_is_the_one_before_its_projection_and_any_later_norm(lm):
    got = []
    layer = lm.model.model.layers[1].self_attn
    hook = layer.register_forward_hook(lambda module, args, out: got.append(out[0]))
    seen = kvprobe.capture(lm, IDS, layers=[1], what="out")
    hook.remove()
    weights = kvprobe.head_weights(lm, "O", 1)
    assert torch.allclose(torch.einsum("bhnd,hde->bne", seen.out[1], weights.double()), got[-1], atol=1e-10)


def test_h10_what_is_thought_is_not_answered():
    assert tasks.matches("<think>is it 1111 or 48213?</think>It is 48213.", "48213")
    assert not tasks.matches("<think>48213?</think>It is 1111.", "48213")
    assert not tasks.matches("it may be 48213</think>\n1111", "48213")  # the template opened the block
    assert not tasks.matches("<think>it is 48213, but let me see", "48213")  # cut off by the limit


def test_h16_greedy_is_the_default_whatever_the_models_own_settings_say(lm):
    plain = kvprobe.generate(lm, IDS.tolist(), policy=None, max_new_tokens=6, ignore_eos=True)
    settings = lm.model.generation_config
    before = settings.do_sample, settings.temperature
    settings.do_sample, settings.temperature = True, 5.0
    try:
        again = kvprobe.generate(lm, IDS.tolist(), policy=None, max_new_tokens=6, ignore_eos=True, seed=9)
    finally:
        settings.do_sample, settings.temperature = before
    assert torch.equal(torch.as_tensor(again.tokens[0]), torch.as_tensor(plain.tokens[0]))


def test_h19_recall_against_an_oracle_on_a_hand_made_matrix_with_ties():
    """The oracle's set: the protected entry, then the highest scores, the newest first among equals. Of its 4 entries 2 are kept, of its 3 free ones 1."""
    score = torch.tensor([0.0, 5.0, 2.0, 2.0, 2.0, 1.0])
    held = torch.arange(6) == 0
    best = oracle.top(score, 4, held)
    assert best.tolist() == [True, True, False, True, True, False]
    kept = torch.tensor([True, False, True, True, False, True])
    assert [float(x) for x in fidelity.recall(kept, best, held)] == [0.5, pytest.approx(1 / 3)]


@pytest.mark.model
def test_h20_prompts_belong_to_their_tokenizer():
    """Two vocabularies, one instance: other ids, the same statement inside the span of either, and lengths in its own tokens."""
    byte, word = kvprobe.load("tiny").tokenizer, kvprobe.load("smollm2").tokenizer
    made = [tasks.build(t, "needles", [0], length=n)[0] for t, n in ((byte, 900), (word, 400))]
    assert made[0].sha256 != made[1].sha256
    for task, tokenizer in zip(made, (byte, word)):
        said = tokenizer.decode(task.ids[slice(*task.spans["answer"][0])].tolist())
        assert task.answer in said.replace(" ", "")


def test_i04_plain_values_come_back_from_a_capture(lm):
    seen = kvprobe.capture(lm, IDS[:, :8], what="q", steps=2)
    assert seen.steps == 2 and seen.stopped == (None,) and isinstance(seen.prompt, int)
