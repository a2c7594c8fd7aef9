"""Prompts that need their context: spans by ids, depth and length in the model's own tokens, one place for the answer (H01-H03, H05, H08, H11, H12)."""

import dataclasses
import re

import numpy as np
import pytest

from kvprobe import tasks
from kvprobe.models import tiny

LENGTH = {"needles": 1500, "variables": 1500, "passages": 1800}  # of a tokenizer with a token per byte


@pytest.fixture(scope="module")
def tokenizer():
    return tiny()[1]


@pytest.fixture(scope="module")
def words():
    """Another tokenizer, with longer tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "<user>", "<bot>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(tasks.read_sentences("builtin")[:300], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", additional_special_tokens=["<user>", "<bot>"])
    made.chat_template = "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<bot>"
    return made


@pytest.fixture(params=tasks.KINDS)
def kind(request):
    return request.param


def of(tokenizer, kind, instances=range(3), **options):
    return tasks.build(tokenizer, kind, instances, **({"length": LENGTH[kind]} | options))


def text(tokenizer, ids) -> str:
    return tokenizer.decode(list(map(int, ids)))


def test_ids_say_what_the_texts_say(tokenizer, words, kind):
    for t in of(tokenizer, kind):
        assert text(tokenizer, t.ids[: t.cut]) == "<s>" + t.context and t.length == len(t.ids)
        assert text(tokenizer, t.ids[t.cut :]).startswith(t.question + "\n") and text(tokenizer, t.answer_ids[t.scored]).strip().endswith(t.answer)
    for t in of(words, kind, length=800):
        assert text(words, t.ids).startswith("<s><user>" + t.context + t.question + "<bot>")
        assert text(words, t.ids[: t.cut]) == "<s><user>" + t.context and text(words, t.answer_ids[t.scored]).strip().endswith(t.answer)
        assert np.isin(t.ids, words.all_special_ids).sum() == 3


def test_spans_hold_what_they_are_named_for(tokenizer, words, kind):
    for tok, length in ((tokenizer, LENGTH[kind]), (words, 800)):
        for t in of(tok, kind, length=length):
            (answer,), evidence = t.spans["answer"], t.spans["evidence"]
            assert text(tok, t.ids[slice(*answer)]).strip() == t.answer
            assert evidence[0][0] <= answer[0] < answer[1] <= evidence[0][1] <= t.cut
            assert all(text(tok, t.ids[slice(*s)]).strip() in t.context for s in (*evidence, *t.spans["distractors"]))
            assert t.spans["context"][0][1] == t.cut and text(tok, t.ids[slice(*t.spans["question"][0])]).strip() == t.question
            taken = np.concatenate([np.arange(*s) for s in (*evidence, *t.spans["distractors"])])
            assert len(set(taken)) == len(taken) and len(t.spans["distractors"]) >= 2


def test_the_answer_stands_in_its_evidence_only(tokenizer, kind):
    """Also the ids: with the answer's span cut out nothing matches, and it is there before."""
    for t in of(tokenizer, kind, range(6)):
        a, z = t.spans["answer"][0]
        assert tasks.matches(t.context, t.answer) and not tasks.matches(t.question, t.answer)
        assert not tasks.matches(text(tokenizer, np.concatenate([t.ids[:a], t.ids[z:]])), t.answer)


def test_filler_or_a_question_that_holds_the_answer_is_refused(tokenizer, monkeypatch):
    story = tasks.STORIES["needles"]

    def leaking(*args):
        made = story(*args)
        return dataclasses.replace(made, question=f"{made.question} Is it {made.answer}?")

    monkeypatch.setitem(tasks.STORIES, "needles", leaking)
    with pytest.raises(ValueError, match="stands elsewhere"):
        of(tokenizer, "needles", [0])


def test_the_chain_is_in_order(tokenizer):
    for t in of(tokenizer, "variables", range(6)):
        said = [text(tokenizer, t.ids[slice(*s)]) for s in t.spans["evidence"]]
        assert [s[0] for s in t.spans["evidence"]] == sorted(s[0] for s in t.spans["evidence"])
        names = [re.findall(r"\b[a-z]{2}\b(?=[ .;])", s) for s in said]
        link = said[0].split()[1]
        assert text(tokenizer, t.answer_ids) == f"{link}.\nLet {link} = {t.answer}" and text(tokenizer, t.answer_ids[t.scored]) == link + t.answer
        assert t.answer in said[0] and all(set(a) & set(b) for a, b in zip(names, names[1:])) and names[-1][0] in t.question


def test_lengths_meet_their_target(tokenizer, words, kind):
    for t in of(tokenizer, kind, range(4)):
        assert abs(t.length - LENGTH[kind]) <= 0.05 * LENGTH[kind]
    for length in (700, 1000):
        assert all(abs(t.length - length) <= 0.05 * length for t in of(words, kind, range(2), length=length))


@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_depth_is_that_of_the_models_tokens(tokenizer, words, kind, depth):
    """Measured here from the ids alone, for two tokenizers (H12)."""
    for tok, length in ((tokenizer, 2400), (words, 900)):
        for t in of(tok, kind, range(2), length=length, depth=depth):
            begin = t.spans["context"][0][0]
            own = sum(z - a for a, z in t.spans["evidence"])
            found = (t.spans["evidence"][0][0] - begin) / (t.cut - begin - own)
            assert abs(found - depth) < (0.09 if kind == "passages" else 0.06) and abs(t.depth - depth) < 0.09
            if depth in (0, 1) and kind != "variables":
                between = [s for s in t.spans["distractors"] if (s[0] < t.spans["evidence"][0][0]) == (depth == 0)]
                assert not between


def test_depth_is_drawn_per_instance(tokenizer):
    found = [t.depth for t in of(tokenizer, "needles", range(12))]
    assert min(found) < 0.3 and max(found) > 0.7 and len({round(d, 2) for d in found}) >= 6


def test_an_instance_depends_on_its_number_and_seed_only(tokenizer, kind):
    alone, among = of(tokenizer, kind, [5])[0], of(tokenizer, kind, range(7))[5]
    other = of(tokenizer, kind, [5], seed=1)[0]
    assert alone.sha256 == among.sha256 != other.sha256 and alone.spans == among.spans and alone.answer != other.answer


def test_answers_are_distinct(tokenizer, kind):
    made = of(tokenizer, kind, range(12))
    assert len({t.answer for t in made}) == len({t.context for t in made}) == 12


def test_without_a_chat_template(words):
    t = of(words, "needles", [0], length=800, chat=False)[0]
    assert text(words, t.ids).startswith("<s>Here") and "<user>" not in text(words, t.ids)


@pytest.mark.parametrize("said", ["48213", "It is 48213.", "48,213", "(48213)", "is\n48213, they say", "= 48,213."])
def test_matches(said):
    assert tasks.matches(said, "48213")


@pytest.mark.parametrize("said", ["", "482137", "148213", "48213.5", "0.48213", "-48213", "x48213", "1,48213", "48 213", "148,213", "48,213,000", "4821"])
def test_does_not_match(said):
    assert not tasks.matches(said, "48213")


def test_matching_words():
    assert tasks.matches("it was  ada\nKelvik.", "Ada Kelvik") and tasks.matches("48213", "48,213")
    assert not tasks.matches("Ada Kelviks", "Ada Kelvik") and not tasks.matches("Kelvik, Ada", "Ada Kelvik") and not tasks.matches("anything", " ")


def test_filler_of_your_own(tokenizer, tmp_path):
    path = tmp_path / "filler.txt"
    path.write_text(" ".join(f"We add the term {i} to the sum once more." for i in range(200)))
    t = of(tokenizer, "needles", [0], filler=str(path))[0]
    assert "We add the term" in t.context


@pytest.mark.parametrize("content, options, says", [
    ("Too short to fill it.", {}, "there is filler for"),
    ("Here is a <s> in the text. " * 100, {}, "special token '<s>'"),
    ("no sentence", {}, "holds no sentence"),
])
def test_bad_filler_is_refused(tokenizer, tmp_path, content, options, says):
    path = tmp_path / "filler.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=says):
        of(tokenizer, "needles", [0], filler=str(path), **options)


@pytest.mark.parametrize("options, says", [
    (dict(length=100), "too short: the facts, the question and the template alone take"),
    (dict(context=1000), "more than the 1000 tokens"),
    (dict(instances=[1000]), "instances are numbered 0..999"),
    (dict(instances=[-1]), "instances are numbered"),
    (dict(depth=1.5), "in .0, 1."),
    (dict(kind="riddles"), "known: needles, variables, passages"),
    (dict(filler="nowhere.txt"), "allowed: 'builtin'"),
])
def test_what_cannot_be_is_refused(tokenizer, options, says):
    given = dict(kind="needles", instances=[0], length=1500) | options
    with pytest.raises(ValueError, match=says):
        tasks.build(tokenizer, **given)


def test_a_prompt_may_use_the_whole_context_but_no_more(tokenizer):
    t = of(tokenizer, "needles", [0])[0]
    assert of(tokenizer, "needles", [0], context=max(LENGTH["needles"], t.length + len(t.answer_ids)))
    with pytest.raises(ValueError, match="this model takes|more than the"):
        of(tokenizer, "needles", [0], context=t.length + len(t.answer_ids) - 1)


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="fast tokenizer is needed"):
        tasks.build(object(), "needles", [0])


def test_a_tokenizer_that_joins_the_value_with_its_neighbours_is_refused():
    tokenizer = tiny()[1]
    value = of(tokenizer, "needles", [0])[0].answer
    tokenizer.add_tokens([f"= {value}"])
    with pytest.raises(ValueError, match="joins"):
        of(tokenizer, "needles", [0])


@pytest.mark.model
def test_the_full_cache_knows_the_answers():
    """On the embedded model: what a compressed cache is measured against must know the answers, and not without the context."""
    import torch

    import kvprobe

    lm, right, blind = kvprobe.load("smollm2"), [], []
    for t in tasks.build(lm.tokenizer, "needles", range(3), length=400, context=lm.context):
        for ids, found in ((t.ids, right), (np.concatenate([t.ids[:1], t.ids[t.cut :]]), blind)):
            with torch.no_grad():
                top = lm.model(torch.from_numpy(np.concatenate([ids, t.answer_ids]))[None, :-1], logits_to_keep=len(t.answer_ids)).logits[0].argmax(-1)
            found.append(bool((top.numpy() == t.answer_ids)[t.scored].all()))
    assert sum(right) >= 2 and not any(blind)
