"""Scripts with a planted fact or two, asked for after given numbers of rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import needles, planting
from .comparing import Ask, Story
from .head_sets import HEADS


@dataclass(frozen=True)
class Wording:
    """What is said and asked; {var}, {x} and {y} are the variable and its two values. apart: between the starts of the boxes [tokens]."""

    boxes: tuple[str, ...] = (needles.FACT.replace("{value}", "{x}"),)
    query: str = needles.QUERY
    answer: str = "{x}"
    apart: int = 0


ONE = Wording()
SPANS = ("x", "y")
"""Names of the boxes' spans; "x value" is the span of the value's tokens in box x, "x answer" where they stand after the last question."""


def stories(config: HEADS, tokenizer, wording: Wording = ONE) -> list[Story]:
    """Stub, filler, the boxes, filler up to the last question. Raises ValueError for boxes that the first round could not take."""
    filler, head, plan = needles.Filler(config.filler, tokenizer), needles.stub(tokenizer), config.plan
    first, last = len(head) + config.pre, planting.first_candidates(plan)
    stop = first + (len(wording.boxes) - 1) * wording.apart + config.box
    if stop > last:
        raise ValueError(f"the last box ends at {stop}: only positions below {last} are candidates from the first round on")
    asked = planting.asked_after(plan, planting.rounds_of(config.rounds)[0], config.query)
    if asked < stop:
        raise ValueError(f"the first question comes after {asked} tokens, before the last box has ended at {stop}: ask later")
    numbers = planting.values(config.seed, 5, 2 * config.instances)
    found = [_story(config, tokenizer, filler, head, first, wording, i, {"x": numbers[i], "y": numbers[-1 - i]}) for i in range(config.instances)]
    if len({(len(s.asks[0].value), *s.spans.values()) for s in found}) > 1:
        raise ValueError("the values take different numbers of tokens: instances could not be compared")
    return found


def _story(config: HEADS, tokenizer, filler, head, first: int, wording: Wording, i: int, numbers: dict) -> Story:
    words = dict(var=needles.VARIABLES[i % len(needles.VARIABLES)], **numbers)
    forbidden = (words["var"], words["var"] + "2", *numbers.values(), "passcode")
    marks, inside = [], {}
    for k, (name, text) in enumerate(zip(SPANS, wording.boxes)):
        ids, (a, z) = needles.locate(tokenizer, text.format(**words), numbers[name])
        start = first + k * wording.apart
        marks.append(planting.Mark(name, start, planting.filled(filler, ids, config.box, forbidden, np.random.default_rng([config.seed, 7, i, k]))))
        inside[f"{name} value"] = (start + a, start + z)
    answer = wording.answer.format(**words)
    asked, span = needles.locate(tokenizer, wording.query.format(**words) + answer, answer)
    query = planting.filled(filler, asked[: span[0]], config.query, forbidden, np.random.default_rng([config.seed, 8, i]), front=True)
    asks = tuple(Ask(f"{n} rounds", planting.asked_after(config.plan, n, config.query), query, asked[span[0] :]) for n in planting.rounds_of(config.rounds))
    for name, _ in zip(SPANS, wording.boxes):
        a, z = needles.locate(tokenizer, wording.query.format(**words) + answer, numbers[name])[1]
        behind = asks[-1].at + config.query - span[0]
        inside[f"{name} answer"] = (behind + a, behind + z)
    ids, spans = planting.write(filler, head, marks, asks[-1].at, forbidden, np.random.default_rng([config.seed, 6, i]))
    facts = ", ".join(f"{words['var']}{'' if name == 'x' else '2'} = {numbers[name]}" for name, _ in zip(SPANS, wording.boxes))
    return Story(i, ids, len(head), asks, spans | inside, facts)
