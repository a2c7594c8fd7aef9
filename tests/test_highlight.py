"""Token-level highlighting: shares against a count over sites, one piece and one cell per token, and what is refused."""

import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import highlight
from kvprobe.keeplog import ALIVE
from kvprobe.token_text import pieces

SPLIT = "Hi <b>&amp; it’s 🙂\n\n\tzwölf 'a' \x07 \u202e."


@pytest.fixture(scope="module")
def lm():
    return kvprobe.load("tiny")


@pytest.fixture(scope="module")
def prompt(lm):
    return lm.tokenizer(SPLIT, add_special_tokens=False).input_ids


class Page(HTMLParser):
    """The cells of a page, block by block: [(title, background, colour, text)]."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.blocks, self.tags, self.open = [], set(), False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attrs = dict(attrs)
        if tag == "p":
            self.blocks.append([])
        if tag == "b":
            look = dict(part.split(":", 1) for part in attrs["style"].split(";"))
            self.blocks[-1].append([attrs["title"], look["background"], look["color"], ""])
            self.open = True

    def handle_endtag(self, tag):
        self.open &= tag != "b"

    def handle_data(self, data):
        if self.open:
            self.blocks[-1][-1][3] += data


# -- shares -------------------------------------------------------------------------------------------------------------


def test_shares_are_a_count_over_sites_of_what_the_cache_holds(lm):
    made = kvprobe.compress(lm, [[5] + list(range(40, 90)), list(range(20, 60))], policy="snapkv", keep=12, protect_window=4)
    for row, n in enumerate((51, 40)):
        count = np.zeros(n)
        for layer in range(2):
            for head in range(2):
                for position in made.cache.positions[layer, row, head].tolist():
                    count[position] += position >= 0
        for of in (made, made.cache, made.keep_log):
            np.testing.assert_array_equal(highlight.share(of, row), count / 4)
        one = np.isin(np.arange(n), made.cache.positions[1, row, 0].tolist())
        np.testing.assert_array_equal(highlight.share(made, row, sites=[(1, 0)]), one)
    assert 0 < len(set(highlight.share(made).tolist()) - {0.0, 1.0}), "heads differ, or this shows nothing"


def test_a_round_of_the_past_is_what_was_held_then():
    died = np.array([[0, 1, ALIVE, ALIVE, ALIVE], [1, 0, ALIVE, 1, ALIVE]])[None, None]  # one layer, one row, two heads
    log = kvprobe.KeepLog(died, ((3, 4),), (5,), (7,), 1, 0)
    np.testing.assert_array_equal(highlight.share(log, after=0), [0.5, 0.5, 1, np.nan, np.nan])
    np.testing.assert_array_equal(highlight.share(log, after=1), [0, 0, 1, 0.5, np.nan])
    np.testing.assert_array_equal(highlight.share(log), [0, 0, 1, 0.5, 1])
    np.testing.assert_array_equal(highlight.share(log, sites=[(7, 1)]), [0, 0, 1, 0, 1])
    for wrong, said in ((dict(row=1), "rows 0..0"), (dict(sites=[(0, 0)]), "layers 7"), (dict(sites=[(7, 2)]), "KV heads 0..1"),
                        (dict(sites=[]), "empty"), (dict(after=2), "0..1")):
        with pytest.raises(ValueError, match=said):
            highlight.share(log, **wrong)
    with pytest.raises(ValueError, match="keep log"):
        highlight.share(dataclasses.make_dataclass("Full", ["keep_log"])(None))


def test_what_each_site_holds_of_a_span(lm):
    made = kvprobe.compress(lm, [list(range(20, 60))], policy="snapkv", keep=12, protect_window=4)
    found = highlight.by_site(made, [(3, 9), (20, 22)])
    assert found.shape == (2, 2)
    for layer in range(2):
        for head in range(2):
            held = set(made.cache.positions[layer, 0, head].tolist())
            assert found[layer, head] == len(held & {*range(3, 9), 20, 21}) / 8
    np.testing.assert_array_equal(highlight.by_site(made, [(3, 9), (20, 22), (4, 8)]), found)  # a token that two spans hold counts once
    np.testing.assert_array_equal(highlight.by_site(made, torch.tensor([[3, 9], [20, 22]])), found)
    for wrong, said in (((30, 41), "within the 40 tokens"), ([], "empty"), (3, "whole numbers"), ((3.0, 9.0), "whole numbers"), ((1, 2, 3), "whole numbers")):
        with pytest.raises(ValueError, match=said):
            highlight.by_site(made, wrong)


def test_sampled_continuations_as_text(lm):
    made = kvprobe.compress(lm, "Let x = 3. So", policy="lore", keep=8, protect_window=4, protect_first=0, m=3, t=4, seed=2)
    ahead = made.future.lookahead
    ahead.valid[0, 1, 2:] = False  # as if its second token had ended it
    found = highlight.sampled(lm.tokenizer, made.future)
    assert found.tokens.tolist() == [4, 2, 4] and found.weight.sum() == pytest.approx(1)
    assert found.text[1] == "".join(pieces(lm.tokenizer, ahead.tokens[0, 1, :2].tolist()))
    assert found.logq[1] == pytest.approx(float(ahead.logq[0, 1, :2].sum()) / 2)
    assert highlight.sampled(lm.tokenizer, ahead).weight.isna().all()
    assert highlight.sampled(lm.tokenizer, made).equals(found)
    for wrong in (None, kvprobe.compress(lm, "Let x = 3. So", policy="snapkv", keep=8, protect_window=4, protect_first=0)):
        with pytest.raises(ValueError, match="no continuations"):
            highlight.sampled(lm.tokenizer, wrong)
    with pytest.raises(ValueError, match="rows 0..0"):
        highlight.sampled(lm.tokenizer, made, row=1)


def test_means_by_span(lm, prompt):
    n = len(prompt)
    kept = np.where(np.arange(n) == 3, np.nan, np.arange(n) / n)
    found = highlight.tokens(lm.tokenizer, prompt, {"p": kept}, {"two": [(1, 2), (4, 6)], "gone": (3, 4)}).by_span()
    assert list(found) == ["two (3 tokens)", "gone (1 tokens)", f"all ({n} tokens)"]
    assert found.iloc[0, 0] == pytest.approx((1 + 4 + 5) / n / 3)
    assert np.isnan(found.iloc[0, 1])
    assert found.iloc[0, 2] == pytest.approx((sum(range(n)) - 3) / n / (n - 1))


# -- pieces -------------------------------------------------------------------------------------------------------------


def test_one_piece_per_token_and_together_the_text(lm, prompt):
    found = pieces(lm.tokenizer, prompt)
    assert len(found) == len(prompt) and "".join(found) == SPLIT
    assert found[found.index("🙂") :][:4] == ["🙂", "", "", ""]  # four tokens of one byte each


def test_bytes_that_are_no_text_are_written_out(lm):
    ids = lm.tokenizer("a🙂b", add_special_tokens=False).input_ids
    assert pieces(lm.tokenizer, [*ids[:3], *ids[5:]]) == ["a", "\\xf0", "\\x9f", "b"]
    assert pieces(lm.tokenizer, ids[2:]) == ["\\x9f", "\\x99", "\\x82", "b"]
    assert pieces(lm.tokenizer, [0, 10**6]) == pieces(lm.tokenizer, [0]) + ["<1000000>"]
    for wrong in (-1, -(2**40), 2**31, 2**32, 2**70):
        assert pieces(lm.tokenizer, [0, wrong, 0]) == pieces(lm.tokenizer, [0]) + [f"<{wrong}>"] + pieces(lm.tokenizer, [0])


class SentencePiece:
    """What a tokenizer of the other family offers."""

    names = ["▁the", "▁", "<0xE2>", "<0x80>", "<0x99>", "s", "<s>"]
    added_tokens_decoder = {6: "<s>"}

    def convert_ids_to_tokens(self, ids):
        return [self.names[i] for i in ids]


def test_pieces_of_other_vocabularies():
    assert pieces(SentencePiece(), [6, 0, 1, 2, 3, 4, 5]) == ["<s>", " the", " ", "’", "", "", "s"]


# -- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_has_one_cell_per_token_with_its_colour_and_text_escaped(lm, prompt):
    n = len(prompt)
    kept = {"a<i>": np.arange(n) / (n - 1), "b": np.arange(n) % 2 == 0, "c": np.where(np.arange(n) == 4, np.nan, 0.25)}
    shown = highlight.tokens(lm.tokenizer, prompt, kept, {"x<u>": (3, 6), "y": [(5, 6)]}, title="<script>")
    page = Page(shown._repr_html_())
    assert [len(block) for block in page.blocks] == [n] * 3
    assert page.tags <= {"style", "div", "span", "strong", "p", "b", "br"}
    table = shown.table()
    for name, block in zip(kept, page.blocks):
        mine = table[table.policy == name]
        for cell, row in zip(block, mine.itertuples()):
            value = "no value" if np.isnan(row.share) else f"kept {row.share:.3f}"
            assert cell[0].startswith(f"{row.position} | id {prompt[row.position]} | {value}")
            assert tuple(cell[1:3]) == highlight.color(row.share)
            assert cell[3] == highlight.visible(row.piece)
    assert "".join(cell[3] for cell in page.blocks[0]) == "Hi·<b>&amp;·it’……s·🙂………↵↵⇥zwö…lf·'a'·\\x07·\\u202e……."
    assert [i for i, cell in enumerate(page.blocks[0]) if "x<u>" in cell[0]] == [3, 4, 5]
    assert [i for i, cell in enumerate(page.blocks[0]) if cell[0].endswith("y")] == [5]


def test_text_is_escaped_where_a_token_is_a_whole_tag():
    shown = highlight.Tokens((7, 8), ("<i a='b'>&amp;", "</b>"), {"p": np.ones(2)}, {})
    assert [cell[3] for cell in Page(shown._repr_html_()).blocks[0]] == ["<i a='b'>&amp;", "</b>"]


def luminance(*rgb):
    """Relative luminance of an sRGB colour as WCAG 2 writes it."""
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_text_is_read_on_every_background():
    """Contrast of at least 4.5 to 1 (WCAG 2), and colours that do not follow the theme."""
    rgb = lambda text: [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]  # noqa: E731
    from matplotlib import colormaps

    backs = set()
    for value in [*np.linspace(0, 1, 201), np.nan]:
        back, front = (luminance(*rgb(c)) for c in highlight.color(value))
        assert (max(back, front) + 0.05) / (min(back, front) + 0.05) >= 4.5
        backs.add(highlight.color(value)[0])
        if value == value:
            assert rgb(highlight.color(value)[0]) == pytest.approx(colormaps[highlight.COLORS](value)[:3], abs=0.5 / 255)
    assert len(backs) > 150 and highlight.color(0.5)[0] != highlight.MISSING


def test_a_page_of_a_long_prompt_is_bounded(lm):
    n = 8000
    shown = highlight.tokens(lm.tokenizer, np.arange(n) % 200, {"p": np.linspace(0, 1, n)})
    assert len(shown._repr_html_()) < 130 * n
    assert len(shown.binned()) <= highlight.WIDEST


# -- the figure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [90, 2 * highlight.WIDEST + 1])
def test_what_the_figure_draws_is_in_its_table(lm, n):
    kept = {"p": np.linspace(0, 1, n), "q": np.where(np.arange(n) < n // 2, 0.5, np.nan)}
    shown = highlight.tokens(lm.tokenizer, np.arange(n) % 200, kept, {"evidence": (10, 20), "others": [(30, 40), (50, 55)]})
    figure, drawn = shown.figure("tiny"), shown.binned()
    above, ax = figure.axes[:2]
    cells = ax.collections[0].get_array()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["p", "q"]
    for row, name in enumerate(kept):
        mine = drawn[drawn.policy == name]
        np.testing.assert_array_equal(np.ma.filled(cells[row], np.nan), mine.share)
        for bin_ in mine.itertuples():  # each bin against the tokens themselves
            inside = kept[name][bin_.start : bin_.end]
            assert np.isnan(inside).all() if np.isnan(bin_.share) else bin_.share == pytest.approx(np.nanmean(inside))
        assert list(mine.start[1:]) == list(mine.end[:-1]) and mine.end.iloc[-1] == n
    assert cells.mask[1].any() and not cells.mask[0].any()
    assert ax.collections[0].cmap.get_bad()[:3] == pytest.approx([0xBD / 255] * 3, abs=1e-6)
    spans = [[(p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in c.get_paths()] for c in above.collections]
    assert spans == [[(10, 20)], [(30, 40), (50, 55)]]
    assert "[tokens]" in ax.get_xlabel() and ax.get_ylabel() == "policy" and "share" in figure.axes[2].get_ylabel()
    said = " ".join(t.get_text() for t in figure.texts)
    assert re.search(rf"one text \(n = 1\) of {n} tokens", said) and "no value" in said and "tiny" in said
    assert ("one cell per token" in said) == (n == 90)


def test_names_and_titles_are_no_formulas(lm):
    name = "a $x_{ y$"
    figure = highlight.tokens(lm.tokenizer, [1, 2, 3], {name: [0, 1, 1]}, {name: (0, 2)}, title=name).figure(name)
    figure.draw_without_rendering()
    assert [t.get_text() for ax in figure.axes[:2] for t in ax.get_yticklabels()] == [name] * 2 and figure.get_suptitle() == name


def test_what_it_says_holds_of_any_text_and_of_one_site(lm):
    """Also of text under decode-time eviction, and where one site was looked at."""
    shown = highlight.tokens(lm.tokenizer, [1, 2, 3], {"p": [0, 1, 1]})
    figure = shown.figure()
    assert figure.axes[1].get_xlabel() == "position in the text [tokens]" and "looked at" in figure.axes[2].get_ylabel() and "prompt" not in figure.get_suptitle()
    assert "sites (layer, KV head) looked at" in shown._repr_html_()


def test_shares_of_any_float(lm):
    share = torch.tensor([0.0, 0.5, 1.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        shown = highlight.tokens(lm.tokenizer, [1, 2, 3], {"p": share.to(dtype).requires_grad_()})
        np.testing.assert_array_equal(shown.kept["p"], [0, 0.5, 1])


# -- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, said", [
    (dict(kept={"p": [True] * 4}), "5 tokens"),
    (dict(kept={"p": np.ones((5, 1))}), r"\[5, 1\]"),
    (dict(kept={"p": [0, 0, 0, 0, 1.5]}), "1.5"),
    (dict(kept={"p": ["a"] * 5}), "bool or a share"),
    (dict(kept={}), "at least one policy"),
    (dict(kept=np.ones(5)), "at least one policy"),
    (dict(ids=[[1, 2, 3, 4, 5]]), r"\[1, 5\]"),
    (dict(ids=[]), "whole numbers"),
    (dict(ids=[0.5] * 5), "whole numbers"),
    (dict(spans={"e": (3, 6)}), "within the 5 tokens"),
    (dict(spans={"e": (3, 3)}), "half-open"),
    (dict(spans={"e": [(0, 1), (-1, 2)]}), "half-open"),
    (dict(spans={"e": 3}), "whole numbers"),
    (dict(spans={"e": (1, 2, 3)}), "whole numbers"),
    (dict(spans=[(1, 2)]), "must be named"),
    (dict(spans={"all": (1, 2)}), "'all'"),
    (dict(tokenizer=None), "without a tokenizer"),
])
def test_bad_shapes_are_refused(lm, change, said):
    good = dict(tokenizer=lm.tokenizer, ids=[1, 2, 3, 4, 5], kept={"p": [True] * 5})
    highlight.tokens(**good)
    highlight.tokens(**good | dict(ids=torch.tensor([1, 2, 3, 4, 5]), kept={"p": torch.ones(5, dtype=torch.bool)}))
    with pytest.raises(ValueError, match=said):
        highlight.tokens(**good | change)
