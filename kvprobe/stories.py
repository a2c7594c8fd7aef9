"""What a prompt that needs its context says: key-value facts, variable chains, invented passages; `kvprobe.tasks` puts it in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import traces
from .needles import HIGHEST, LOWEST, named

LIMIT = 1000
"""Instances per kind and seed: that many answers are distinct."""
Block = tuple[str, str]
"""(tag, text): tag is "evidence", "distractors" or "filler"."""


@dataclass(frozen=True)
class Story:
    """What a prompt says, before it is put in order.

    asked: the statements that lead to the answer, in order, which the first one holds. others: distractors, each a list of
    statements in order. pads: what fills up, taken as far as the length allows. path: the links
    that an answer names before the value.
    """

    intro: str
    asked: list[str]
    others: list[list[str]]
    pads: Iterator[Block]
    question: str
    prefix: str
    answer: str
    path: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """What is forced, and whether it counts."""
        return [piece for name in self.path for piece in ((name, True), (f".\nLet {name} = ", False))] + [(self.answer, True)]

    @property
    def forced(self) -> str:
        return "".join(text for text, _ in self.pieces)


NAMES = ("zq", "kx", "vb", "jw", "qm", "xr", "wn", "pz", "hf", "gd", "tk", "bv", "rj", "fw", "lx", "mq")


def _numbers(seed: int, instance: int, rng: np.random.Generator, count: int) -> tuple[str, list[str]]:
    """The instance's own four-digit number, 5000-9999 (filler stays below), and `count` others."""
    values = np.random.default_rng([seed, 0]).permutation(np.arange(LOWEST, HIGHEST + 1)).astype(str).tolist()
    return values[instance], rng.choice(values[LIMIT:], count, replace=False).tolist()


FACTS = 6
"""Facts of the same form in a prompt of needles."""


def needles(instance: int, seed: int, sentences: Sequence[str], rng: np.random.Generator) -> Story:
    names = rng.permutation(NAMES).tolist()[:FACTS]
    value, rest = _numbers(seed, instance, rng, FACTS - 1)
    asked, *others = [f"Let {name} = {v}." for name, v in zip(names, [value, *rest])]
    return Story("Here are some notes. They state a few constants.", [asked], [[o] for o in others], _filler(sentences, [*NAMES, value, *rest], rng),
                 f"What is the value of {names[0]} in the notes?", f"Let {names[0]} =", value)


CHAINS, HOPS = 3, 1
"""Chains of variables in a prompt, and links of each."""


def variables(instance: int, seed: int, sentences: Sequence[str], rng: np.random.Generator) -> Story:
    names = rng.permutation(NAMES).reshape(-1)[: CHAINS * (HOPS + 1)].reshape(CHAINS, -1).tolist()
    value, rest = _numbers(seed, instance, rng, CHAINS - 1)
    asked, *others = [[f"Let {chain[0]} = {v}.", *(f"Let {b} = {a}." for a, b in zip(chain, chain[1:]))] for chain, v in zip(names, [value, *rest])]
    last, plain = names[0][-1], _plain(sentences, "variable tracking")
    return Story("Here are some notes. They assign variables.", asked, others, _filler(plain, [*NAMES, value, *rest], rng),
                 f"What is the value of {last} in the notes?", f"Let {last} =", value, tuple(names[0][-2::-1]))


def _filler(sentences: Sequence[str], forbidden: Sequence[str], rng: np.random.Generator) -> Iterator[Block]:
    """The sentences in order from a random one on, without those that name a variable or a value; once around."""
    start = int(rng.integers(len(sentences)))
    return (("filler", s) for s in (*sentences[start:], *sentences[:start]) if named(s, forbidden) is None)


def _plain(sentences: Sequence[str], kind: str) -> list[str]:
    """Those without digits: a small model takes a number of the filler for the one asked for."""
    plain = [s for s in sentences if not re.search(r"\d", s)]
    if not plain:
        raise ValueError(f"the filler holds no sentence without digits, which {kind} needs")
    return plain


def read_sentences(source: str) -> list[str]:
    """Sentences of 4-40 words of a filler file, in order. Raises ValueError when the file is missing or holds none."""
    path = Path(__file__).parent / "data" / "filler.jsonl" if source == "builtin" else Path(source)
    if not path.is_file():
        raise ValueError(f"filler {source!r} is no file; allowed: 'builtin', a .jsonl file of `kvprobe traces`, a text file")
    found = [" ".join(s.split()) for trace in traces.read(path)[1] for s in re.split(r"(?<=[.!?])\s+|\n+", trace["text"])]
    found = [s for s in found if 4 <= len(s.split()) <= 40 and s[-1] in ".!?"]
    if not found:
        raise ValueError(f"filler {source!r} holds no sentence of 4-40 words")
    return found


STARTS = ("Bren", "Tal", "Vor", "Kel", "Mar", "Os", "Hal", "Dur", "Fen", "Lor", "Sar", "Wex", "Nim", "Gar", "Pel", "Rud", "Sel", "Tor", "Ul", "Yar", "Zan", "Cor", "Dal", "Hed")
ENDS = ("low", "vik", "mere", "dale", "holm", "wick", "ford", "stead", "nar", "ton", "gard")
THINGS = ("lighthouse", "bridge", "library", "mill", "clock", "market", "museum", "harbour", "castle", "theatre", "chapel", "school", "garden", "hospital", "station", "bakery",
          "palace", "tower", "farm", "hotel", "cathedral", "prison", "factory", "square")
FIRST = ("Ada", "Bruno", "Carla", "Diana", "Edgar", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karen", "Laura", "Martin", "Nora", "Oscar", "Peter",
         "Quentin", "Rosa", "Simon", "Tina", "Ursula", "Victor", "Walter", "Yvonne", "Albert", "Betty", "Conrad", "Doris", "Emma", "Frank", "Gloria", "Harold")
LAST = ("Baker", "Carter", "Dixon", "Ellis", "Fisher", "Graham", "Hunter", "Irving", "Jordan", "Keller", "Lambert", "Mason", "Norton", "Owens", "Parker", "Quinn",
        "Russell", "Sawyer", "Turner", "Underwood", "Vaughn", "Walker", "Young", "Archer", "Bishop", "Cooper", "Dawson", "Farmer", "Gibson", "Harper", "Kramer", "Lowell")
LOOKS = ("red", "blue", "green", "white", "black", "golden", "silver", "copper", "wooden", "marble", "iron", "glass", "painted", "carved", "broken", "crooked",
         "narrow", "wide", "tall", "low", "round", "square", "old", "new", "dark", "bright", "heavy", "hidden", "empty", "purple", "yellow", "ancient")
GOODS = ("doors", "lamps", "windows", "gates", "chairs", "bells", "mirrors", "clocks", "benches", "flags", "stoves", "carpets", "curtains", "tables", "ladders", "boats",
         "hats", "shoes", "bottles", "spoons", "baskets", "ropes", "candles", "drums", "flutes", "knives", "barrels", "wheels", "toys", "rings", "coats", "pots")
ASKED = (("Who is", "is {person}", ("keeper", "owner", "painter", "builder")),
         ("What are", "are {goods}", ("treasures", "prizes", "gifts", "toys")),
         ("What is", "is {cost}", ("price", "weight", "number", "code")))
"""(how the question begins, how the statement ends, what may be asked)"""
ASIDES = ("Children like it.", "Few travellers know it.", "The road there is narrow.", "It is open on most days.", "Painters often come in the spring.", "Some say that it will be closed next year.",
          "In the winter the way there is covered with snow.", "A small shop beside it sells bread, cheese and postcards.", "People of the region are proud of it and gather there every summer.")
RIVALS = 2
"""Other places of which a prompt says the very thing that is asked."""
OTHERS = 1
"""Further places, of which it says something else."""


def passages(instance: int, seed: int, sentences: Sequence[str], rng: np.random.Generator) -> Story:
    """A fact about an invented place, and two sentences that say nothing; others of the same form about other places; filler between them.

    Few passages, and in each statement the place comes first and the thing right before its end: what a small model can look up.
    """
    facts = _facts(instance, seed, rng)[: 1 + RIVALS + OTHERS]
    begins, ends, topics = ASKED[instance % len(ASKED)]
    topic = str(rng.choice(topics))
    rest = [(t, form) for _, form, more in ASKED for t in more if t != topic]
    told = [(topic, ends)] * (1 + RIVALS) + [rest[i] for i in rng.choice(len(rest), OTHERS, replace=False)]
    stated = [f"In {f['place']}, the {t} of the {f['thing']} {form.format(**f)}" for (t, form), f in zip(told, facts)]
    said = [" ".join([f"{s}.", *rng.choice(ASIDES, 2, replace=False).tolist()]) for s in stated]
    answer = ends.split()[1].format(**facts[0])
    question = f"{begins} the {topic} of the {facts[0]['thing']} in {facts[0]['place']}?"
    return Story("Read these passages.", said[:1], [[s] for s in said[1:]], _filler(_plain(sentences, "a passage"), [answer], rng),
                 question, stated[0].removesuffix(f" {answer}"), answer)


def _facts(instance: int, seed: int, rng: np.random.Generator) -> list[dict[str, str]]:
    """What the instance's passage may say, then what others may: no two of a prompt share a word of a name, a thing or goods."""
    cost, others = _numbers(seed, instance, rng, len(THINGS) - 1)
    columns = dict(place=[a + b for a, b in zip(rng.permutation(STARTS), rng.choice(ENDS, len(STARTS)))], thing=rng.permutation(THINGS), cost=[cost, *others],
                   person=_pairs(FIRST, LAST, instance, [seed, 1], rng), goods=_pairs(LOOKS, GOODS, instance, [seed, 2], rng))
    return [dict(zip(columns, map(str, row))) for row in zip(*columns.values())]


def _pairs(left: Sequence[str], right: Sequence[str], instance: int, seed: list[int], rng: np.random.Generator) -> list[str]:
    """The instance's own pair of words, then pairs that share none with it or with each other."""
    a, b = divmod(int(np.random.default_rng(seed).permutation(len(left) * len(right))[instance]), len(right))
    rest = zip(rng.permutation([w for w in left if w != left[a]]), rng.permutation([w for w in right if w != right[b]]))
    return [f"{x} {y}" for x, y in ((left[a], right[b]), *rest)]


STORIES = {"needles": needles, "variables": variables, "passages": passages}
