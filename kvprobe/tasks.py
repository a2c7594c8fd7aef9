"""Prompts that need their context, for probes of prompt-time eviction: key-value facts, variable chains, invented passages.

Layout: template head | context | question | template tail, answer prefix | answer. `cut` lies between context and question:
what a policy may see when the question is unseen (protocols 5, known_faults H05). The whole text is encoded once, and every
span is found by character offsets in the model's own tokens (H01, H02, H11, H12). Shaped after RULER's multi-key needles and
variable tracking (Hsieh et al. 2024) and after LongBench's passage questions (Bai et al. 2024), at 500-900 tokens.

The embedded model with its full cache, forced along the answer, has every token that counts as its first choice in 19 of 24 needles
(.79 [.62, .92], bootstrap over prompts), 23 of 24 variables (.96 [.88, 1]) and 19 of 24 passages (.79 [.62, .92]): length 700, seed 11,
measured once, after the wording was fixed on other seeds.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .needles import encode
from .stories import LIMIT, STORIES, Block, Story, read_sentences

KINDS = tuple(STORIES)
TOLERANCE = 0.05
"""How far a prompt's length may lie from its target."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Task:
    """One prompt. ids [length] end where the answer begins; answer_ids [a] go on from there and are to be forced. scored [a]: which
    of them count, True for all but for variables, whose answer names the links ("tk.\\nLet tk = 7221"): there the names and the value
    count, each where it first comes, and the words between are given.

    context and question are the texts of the user's turn; cut: index in ids where the question begins, ids[:cut] holds template
    head and context. spans, half-open, in positions of ids: "answer" (the value's tokens in the context), "evidence" (the
    statements that lead to it), "distractors" (statements of the same form), "context", "question". depth: where the evidence
    begins in the context [0, 1], by the model's tokens.
    """

    kind: str
    instance: int
    context: str
    question: str
    answer: str
    ids: np.ndarray
    cut: int
    answer_ids: np.ndarray
    scored: np.ndarray
    spans: Mapping[str, tuple[Span, ...]]
    length: int
    depth: float

    @property
    def sha256(self) -> str:
        """16 hex digits of the hash of prompt and answer ids."""
        return hashlib.sha256(np.concatenate([self.ids, self.answer_ids]).astype("<i8").tobytes()).hexdigest()[:16]


def build(tokenizer, kind: str, instances: Sequence[int], length: int = 700, seed: int = 0, depth: float | None = None,
          filler: str = "builtin", chat: bool = True, context: int | None = None) -> list[Task]:
    """Tasks of the given instances; each depends on (seed, kind, instance) and the settings only, never on its neighbours.

    length: target of `Task.length` [tokens of this tokenizer], met within 5 % by filler or distractors. depth: of the evidence,
    0 (first), 1 (right before the question) or between; None draws one per instance. filler: as in `needles.Filler`. chat: in the tokenizer's chat template where it has one. context: the longest text the model takes [tokens].
    Raises ValueError for an unknown kind, a tokenizer that is not fast or joins what must stay apart, a length that is too short
    for the facts or too long for the model, or filler that holds an answer.
    """
    _check(tokenizer, kind, instances, depth)
    longest = min(context or LIMIT**6, getattr(tokenizer, "model_max_length", None) or LIMIT**6)
    sentences = read_sentences(filler)
    return [_task(tokenizer, kind, i, sentences, length, seed, depth, chat, longest) for i in instances]


def matches(text: str, answer: str) -> bool:
    """Whether a text states the answer as a whole word or number; case, blanks and thousands commas do not count (H08).

    "It is 48213." and "48,213" match 48213; "482137", "48213.5", "-48213" and "x48213" do not. Of a text with a thinking block
    (<think> ... </think>, or its end alone where the template opened it) what comes after it counts; one that was cut off within it states nothing (H10).
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    number = r"(?<!\d[.,])(?<!\s[-−])" if answer[:1].isdigit() else ""
    ahead = r"(?!\w|[.,]\d)" if answer[-1:].isdigit() else r"(?!\w)"
    return bool(answer.strip()) and re.search(rf"(?<!\w){number}{re.escape(_normal(answer).strip())}{ahead}", _normal(text)) is not None


def _normal(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return " " + re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)", lambda m: m[0].replace(",", ""), text)


def _check(tokenizer, kind: str, instances: Sequence[int], depth: float | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} cannot say which characters a token holds; a fast tokenizer is needed")
    if max(instances, default=0) >= LIMIT or min(instances, default=0) < 0:
        raise ValueError(f"instances are numbered 0..{LIMIT - 1}: that many answers are distinct")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must be in [0, 1], or None for one per instance")


# -- order, length, ids ----------------------------------------------------------------------------------------------


def _task(tokenizer, kind: str, instance: int, sentences, length: int, seed: int, depth, chat: bool, longest: int) -> Task:
    rng = np.random.default_rng([seed, 10 + KINDS.index(kind), instance])
    drawn = float(rng.random())
    story = STORIES[kind](instance, seed, sentences, rng)
    size = lambda text: len(encode(tokenizer, " " + text))  # noqa: E731
    fixed = len(_encoded(tokenizer, story, _blocks(story, [], 0.0, size, np.random.default_rng(0)), chat)[1])
    if fixed > length * (1 + TOLERANCE):
        raise ValueError(f"length={length} is too short: the facts, the question and the template alone take {fixed} tokens with this tokenizer")
    if length > longest:
        raise ValueError(f"length={length} is more than the {longest} tokens that this model takes")
    blocks = _blocks(story, _pads(story.pads, length - fixed, size), drawn if depth is None else depth, size, rng)
    task = _measured(tokenizer, kind, instance, story, blocks, chat)
    if abs(task.length - length) > TOLERANCE * length:
        raise ValueError(f"{kind} {instance}: a length of {length} tokens cannot be met within {TOLERANCE:.0%}: there is filler for {task.length}")
    if task.length + len(task.answer_ids) > longest:
        raise ValueError(f"{kind} {instance} takes {task.length} + {len(task.answer_ids)} tokens, this model takes {longest}")
    return task


def _pads(pads: Iterator[Block], room: int, size) -> list[Block]:
    """As many pads as fit; those that do not are passed over, since no sentence is cut."""
    taken, misses = [], 0
    for pad in pads:
        if room < 4 or misses == 60:
            break
        n = size(pad[1])
        misses, room, taken = (misses, room - n, [*taken, pad]) if n <= room else (misses + 1, room, taken)
    return taken


def _blocks(story: Story, pads: Sequence[Block], depth: float, size, rng: np.random.Generator) -> list[Block]:
    """Everything in order: distractors anywhere, the evidence where `depth` of all tokens lie before it, what follows from it behind."""
    blocks = list(pads)
    for chain in story.others:
        _insert(blocks, [("distractors", s) for s in chain], 0, rng)
    first, *links = [("evidence", s) for s in story.asked]
    before = np.cumsum([0, *(size(text) for _, text in blocks)])
    at = int(np.abs(before - depth * (before[-1] + sum(size(text) for _, text in links))).argmin())
    blocks.insert(at, first)
    _insert(blocks, links, at + 1, rng)
    return blocks


def _insert(blocks: list[Block], new: Sequence[Block], first: int, rng: np.random.Generator) -> None:
    """Put `new` in order at random places from index `first` on."""
    for done, (at, block) in enumerate(zip(sorted(rng.integers(first, len(blocks) + 1, len(new)).tolist()), new)):
        blocks.insert(at + done, block)


def _encoded(tokenizer, story: Story, blocks: Sequence[Block], chat: bool):
    """(text, ids, offsets, context, character spans by tag, where the context begins): the prompt with prefix and answer, encoded once."""
    context, spans = story.intro, []
    for i, (tag, text) in enumerate(blocks):
        context += " " if i and tag == blocks[i - 1][0] == "filler" else "\n"
        spans.append((tag, len(context), len(context) + len(text)))
        context += text
    context += "\n\n"
    head, tail = _frame(tokenizer, context + story.question, chat)
    text = f"{head}{context}{story.question}{tail}{story.prefix} {story.forced}"
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return text, np.asarray(made["input_ids"], dtype=np.int64), made["offset_mapping"], context, spans, len(head)


def _frame(tokenizer, content: str, chat: bool) -> tuple[str, str]:
    """What stands before and behind the user's words."""
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return tokenizer.bos_token or "", "\n"
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    if text.count(content) != 1:
        raise ValueError("the chat template does not repeat the user's words once, as they are")
    head, tail = text.split(content)
    return head, tail


def _measured(tokenizer, kind: str, instance: int, story: Story, blocks: Sequence[Block], chat: bool) -> Task:
    text, ids, offsets, context, marks, start = _encoded(tokenizer, story, blocks, chat)
    asked = start + len(context)
    cut, end = _boundary(offsets, text, asked), _boundary(offsets, text, len(text) - len(story.forced))
    scored = _scored(tokenizer, ids, offsets, len(text) - len(story.forced), story.pieces)
    _check_ids(tokenizer, text, ids, story, start, offsets)
    spans = {tag: tuple(_span(offsets, start + a, start + z) for t, a, z in marks if t == tag) for tag in ("evidence", "distractors")}
    tag, a, z = next(m for m in marks if m[0] == "evidence")
    said = start + a + context[a:z].index(story.answer)
    spans["answer"] = (_exact(tokenizer, ids, _span(offsets, said, said + len(story.answer)), story.answer),)
    first, body = _span(offsets, start, asked)[0], _span(offsets, start + len(story.intro) + 1, asked)[0]
    spans |= {"context": ((first, cut),), "question": (_span(offsets, asked, asked + len(story.question)),)}
    _check_answer(context, marks, story)
    evidence = spans["evidence"]
    depth = (evidence[0][0] - body) / max(1, cut - body - sum(z - a for a, z in evidence))
    return Task(kind, instance, context, story.question, story.answer, ids[:end], cut, ids[end:], scored[end:], spans, end, min(1.0, depth))


def _span(offsets, begin: int, stop: int) -> Span:
    """Positions of the tokens that hold any of the characters begin..stop."""
    inside = [i for i, (a, z) in enumerate(offsets) if a < stop and z > begin]
    return inside[0], inside[-1] + 1


def _scored(tokenizer, ids: np.ndarray, offsets, at: int, pieces: Sequence[tuple[str, bool]]) -> np.ndarray:
    """[n] True for the tokens of the pieces that count, the first of which begins at character `at`."""
    out = np.zeros(len(ids), dtype=bool)
    for text, counts in pieces:
        if counts:
            out[slice(*_exact(tokenizer, ids, _span(offsets, at, at + len(text)), text))] = True
        at += len(text)
    return out


def _boundary(offsets, text: str, at: int) -> int:
    """The token that begins at character `at`, or with blanks right before it. Raises ValueError where one token holds both sides."""
    first = _span(offsets, at, at + 1)[0]
    if text[offsets[first][0] : at].strip():
        raise ValueError(f"the tokenizer joins what must stay apart, the end of a part with the next one: {text[slice(*offsets[first])]!r}")
    return first


def _exact(tokenizer, ids: np.ndarray, span: Span, part: str) -> Span:
    if tokenizer.decode(ids[slice(*span)].tolist()).strip() != part:
        raise ValueError(f"the tokenizer joins {part!r} with its neighbours: {tokenizer.decode(ids[slice(*span)].tolist())!r}")
    return span


def _check_ids(tokenizer, text: str, ids: np.ndarray, story: Story, start: int, offsets) -> None:
    """The ids say what the text says, and no special token stands in the user's words."""
    said = text[start : text.rindex(story.question) + len(story.question)]
    back = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if said not in back or not back.endswith(f"{story.prefix} {story.forced}"):
        raise ValueError("the tokenizer does not give the prompt back")
    inside = ids[slice(*_span(offsets, start, start + len(said)))]
    if np.isin(inside, tokenizer.all_special_ids).any():
        raise ValueError(f"the context contains the special token {tokenizer.convert_ids_to_tokens(int(inside[np.isin(inside, tokenizer.all_special_ids)][0]))!r}")


def _check_answer(context: str, marks, story: Story) -> None:
    """Raise ValueError unless the answer stands in the first statement of the evidence, once, and nowhere else."""
    a, z = next((a, z) for tag, a, z in marks if tag == "evidence")
    rest = [context[:a], context[z:], story.question, story.prefix, *story.path]
    if context[a:z].count(story.answer) != 1 or any(matches(r, story.answer) or story.answer in r for r in rest):
        raise ValueError(f"the answer {story.answer!r} stands elsewhere than in its evidence")
