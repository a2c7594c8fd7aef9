"""Scripts: spans by ids, screening, equal lengths, refusals (known_faults H01-H03)."""

import numpy as np
import pytest

from kvprobe import needles
from kvprobe.models import tiny

LAYOUT = needles.Layout(pre=40, age=256, query=60, second_box=False)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny()[1]


@pytest.fixture
def filler(tokenizer, tmp_path):
    rng = np.random.default_rng(3)
    words = ["so", "we", "add", "the", "terms", "known", "and", "find", "twelve", "apples", "12", "+", "30", "=", "42", ".\n"]
    path = tmp_path / "filler.txt"
    path.write_text(" ".join(rng.choice(words, 4000)))
    return needles.Filler(str(path), tokenizer)


def test_spans_hold_exactly_the_box_and_the_value(tokenizer, filler):
    for s in needles.build(tokenizer, filler, LAYOUT, range(6), seed=1):
        box = tokenizer.decode(s.ids[slice(*s.box)].tolist())
        assert box.startswith(f"\nLet {s.variable} = {s.value}.\n") and s.box[1] - s.box[0] == 16
        assert tokenizer.decode(s.ids[slice(*s.value_in_box)].tolist()) == s.value
        assert tokenizer.decode(s.ids[slice(*s.answer)].tolist()) == s.value
        assert tokenizer.decode(s.ids[s.stub :].tolist()).endswith(f"I need the stored constants now. {s.variable} = {s.value}")
        assert s.answer[0] - s.box[0] == LAYOUT.age and s.answer[1] == len(s.ids) and s.box[0] == s.stub + LAYOUT.pre


def test_instances_have_equal_lengths_and_distinct_values(tokenizer, filler):
    scripts = needles.build(tokenizer, filler, LAYOUT, range(20), seed=1)
    assert len({(len(s.ids), s.box, s.answer) for s in scripts}) == 1
    assert len({s.value for s in scripts}) == 20 and all(5000 <= int(s.value) <= 9999 for s in scripts)


def test_an_instance_depends_on_its_number_and_seed_only(tokenizer, filler):
    alone = needles.build(tokenizer, filler, LAYOUT, [5], seed=1)[0]
    among = needles.build(tokenizer, filler, LAYOUT, range(8), seed=1)[5]
    other = needles.build(tokenizer, filler, LAYOUT, [5], seed=2)[0]
    assert alone.sha256 == among.sha256 != other.sha256


def test_no_special_token_inside_the_body(tokenizer, filler):
    for s in needles.build(tokenizer, filler, LAYOUT, range(4), seed=0):
        assert not np.isin(s.ids[s.stub :], tokenizer.all_special_ids).any()


def test_the_fact_is_stated_once(tokenizer, filler):
    for s in needles.build(tokenizer, filler, LAYOUT, range(8), seed=0):
        text = tokenizer.decode(s.ids[: s.answer[0]].tolist())
        assert text.count(s.value) == 1 and needles.named(text.replace(f"Let {s.variable} =", "", 1).replace(f"now. {s.variable} =", ""), [s.variable]) is None


def test_second_box_lies_256_tokens_behind_the_first(tokenizer, filler):
    layout = needles.Layout(pre=40, age=512, query=60, second_box=True)
    s = needles.build(tokenizer, filler, layout, [0], seed=0)[0]
    y = s.box[1] + 256
    assert tokenizer.decode(s.ids[y : y + 16].tolist()).startswith(f"\nLet {s.variable}2 = ")
    assert s.answer[0] - s.box[0] == 512


@pytest.mark.parametrize("text, word", [("let zq = 1", "zq"), ("is 57291 here", "5729"), ("The Passcode is", "passcode"), ("zq2", "zq")])
def test_screening_finds(text, word):
    assert needles.named(text, [word]) == word


@pytest.mark.parametrize("text, word", [("as is well known and shown", "wn"), ("value 4729", "5729"), ("ezqual", "zq")])
def test_screening_lets_through(text, word):
    assert needles.named(text, [word]) is None


def test_filler_that_holds_the_value_everywhere_is_refused(tokenizer, tmp_path):
    value = str(np.random.default_rng([0, 0]).permutation(np.arange(5000, 10000))[0])
    path = tmp_path / "bad.txt"
    path.write_text(f"so {value} it is. " * 200)
    with pytest.raises(ValueError, match="free of"):
        needles.build(tokenizer, needles.Filler(str(path), tokenizer), LAYOUT, [0], seed=0)


def test_short_filler_is_refused_with_both_lengths(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a b c")
    with pytest.raises(ValueError, match=r"has \d+ tokens, a script needs \d+"):
        needles.build(tokenizer, needles.Filler(str(path), tokenizer), LAYOUT, [0], seed=0)


def test_filler_with_a_special_token_is_refused(tokenizer, tmp_path):
    path = tmp_path / "special.txt"
    path.write_text("good text <s> more text " * 100)
    with pytest.raises(ValueError, match="special token"):
        needles.Filler(str(path), tokenizer)


def test_missing_filler_says_what_is_allowed(tokenizer):
    with pytest.raises(ValueError, match="builtin"):
        needles.Filler("nowhere.txt", tokenizer)


def test_values_of_unequal_token_counts_are_refused(filler):
    from tokenizers import AddedToken

    tokenizer = tiny()[1]
    value = str(np.random.default_rng([0, 0]).permutation(np.arange(5000, 10000))[1])
    tokenizer.add_tokens([AddedToken(value, normalized=False)])
    with pytest.raises(ValueError, match="different numbers of tokens"):
        needles.build(tokenizer, filler, LAYOUT, range(3), seed=0)


def test_a_box_or_query_that_does_not_fit_is_refused(tokenizer, filler):
    with pytest.raises(ValueError, match="query takes"):
        needles.build(tokenizer, filler, needles.Layout(pre=4, age=100, query=20, second_box=False), [0], seed=0)


def test_an_age_too_short_for_its_parts_is_refused():
    with pytest.raises(ValueError, match="too short"):
        needles.Layout(age=50, query=40, box=16, second_box=False)


def test_the_committed_filler_is_long_enough_for_the_paper_preset(tokenizer):
    filler = needles.Filler("builtin", tokenizer)
    assert len(filler.ids) > 40_000
