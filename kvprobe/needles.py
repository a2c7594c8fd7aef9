"""Planted facts: scripts of filler with a fact in a box of fixed size, cut and joined by token ids only.

Layout (protocols 2): stub | pre | BOX x | [mid | BOX y |] post | query | value. Text is never decoded and encoded
again, so that what the model reads is what was measured, and all scripts of a run have equal length and spans.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLES = ("zq", "kx", "vb", "jw", "qm", "xr", "wn", "pz")
LOWEST, HIGHEST = 5000, 9999
QUERY = "\nWait — I need the stored constants now. {var} = "
FACT = "\nLet {var} = {value}.\n"
STUB_LIMIT = 64
TASK = "Solve the problem."
OPENER = "Let me think about this step by step.\n"


@dataclass(frozen=True)
class Layout:
    """Lengths in tokens. age: from the start of box x to the start of the value at the end."""

    pre: int = 448
    age: int = 1536
    box: int = 16
    query: int = 40
    second_box: bool = True
    mid: int = 256

    @property
    def post(self) -> int:
        """Filler between the last box and the query."""
        return self.age - self.box - self.query - (self.mid + self.box if self.second_box else 0)

    def __post_init__(self) -> None:
        if min(self.pre, self.mid) < 0 or min(self.box, self.query) < 1:
            raise ValueError(f"lengths must not be negative: pre={self.pre}, box={self.box}, query={self.query}, mid={self.mid}")
        if self.post < 0:
            raise ValueError(f"age={self.age} is too short: the boxes and the query alone take {self.age - self.post} tokens")


@dataclass(frozen=True)
class Script:
    """One instance. ids [n]; box and value_in_box are half-open spans of positions; answer is the span of the value at
    the end, whose tokens are the measurement points."""

    instance: int
    variable: str
    value: str
    ids: np.ndarray
    box: tuple[int, int]
    value_in_box: tuple[int, int]
    answer: tuple[int, int]
    stub: int

    @property
    def sha256(self) -> str:
        """16 hex digits of the token ids' hash."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]


class Filler:
    """Reasoning text as one stream of token ids that scripts are cut from.

    source: "builtin" (written by the embedded model, committed with how it was made), a .jsonl file of
    `kvprobe traces`, or a text file. Raises ValueError when the file is missing, empty, or holds special tokens.
    """

    def __init__(self, source: str, tokenizer):
        from . import traces

        path = Path(__file__).parent / "data" / "filler.jsonl" if source == "builtin" else Path(source)
        if not path.is_file():
            raise ValueError(f"filler {source!r} is no file; allowed: 'builtin', a .jsonl file of `kvprobe traces`, a text file")
        self.source, self.tokenizer = source, tokenizer
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        texts = [trace["text"] for trace in traces.read(path)[1]]
        encoded = [encode(tokenizer, text.strip() + "\n\n") for text in texts]
        self.ids = np.concatenate(encoded) if encoded else np.zeros(0, dtype=np.int64)
        special = np.isin(self.ids, tokenizer.all_special_ids)
        if special.any():
            token = tokenizer.convert_ids_to_tokens(int(self.ids[special.argmax()]))
            raise ValueError(f"filler {source!r} contains the special token {token!r}")

    def passage(self, length: int, forbidden: Sequence[str], rng: np.random.Generator) -> np.ndarray:
        """A random stretch of `length` ids that names none of the forbidden words. Raises ValueError when there is none."""
        last = len(self.ids) - length
        if last < 0:
            raise ValueError(f"filler {self.source!r} is too short: it has {len(self.ids)} tokens, a script needs {length}")
        for start in rng.permutation(last + 1)[:2000]:
            ids = self.ids[start : start + length]
            found = named(self.tokenizer.decode(ids.tolist()), forbidden)
            if found is None:
                return ids
        raise ValueError(f"filler {self.source!r} has no stretch of {length} tokens free of {list(forbidden)} (last found: {found!r})")


def named(text: str, words: Sequence[str]) -> str | None:
    """The first of `words` that the text contains: numbers anywhere, names only as whole words ('known' does not name 'wn')."""
    for word in words:
        pattern = re.escape(word) if word.isdigit() else rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])"
        if re.search(pattern, text, flags=re.IGNORECASE if word == "passcode" else 0):
            return word
    return None


def encode(tokenizer, text: str) -> np.ndarray:
    """Ids of a text, no special token added."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def locate(tokenizer, text: str, part: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Ids of `text` and the span of the tokens that hold its last `part`, found by character offsets.

    Raises ValueError where a token holds anything else but the part and blanks, or decoding does not give the text back.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} cannot say which characters a token holds; a fast tokenizer is needed")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    begin = text.rindex(part)
    inside = [i for i, (a, z) in enumerate(offsets) if a < begin + len(part) and z > begin]
    start, stop = inside[0], inside[-1] + 1
    if tokenizer.decode(ids) != text:
        raise ValueError(f"the tokenizer does not give {text!r} back")
    if tokenizer.decode(ids[start:stop]).strip() != part:
        raise ValueError(f"the tokenizer joins {part!r} with its neighbours in {text!r}")
    return np.asarray(ids, dtype=np.int64), (start, stop)


def stub(tokenizer) -> np.ndarray:
    """The prefilled opening: the chat template around a task, if there is one, and an opener. Raises if 64 tokens or more."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": TASK}]
        head = tokenizer.apply_chat_template(turn, tokenize=True, add_generation_prompt=True)
        head = head["input_ids"] if hasattr(head, "keys") else head
    else:
        head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = np.concatenate([np.asarray(head, dtype=np.int64), encode(tokenizer, OPENER)])
    if len(ids) >= STUB_LIMIT:
        raise ValueError(f"the chat template and opener take {len(ids)} tokens, the stub must stay under {STUB_LIMIT}")
    return ids


def build(tokenizer, filler: Filler, layout: Layout, instances: Sequence[int], seed: int) -> list[Script]:
    """The scripts of the given instances; each depends on its number, the seed and the filler only.

    Raises ValueError where values differ in their number of tokens, a box or query does not fit, or filler runs out.
    """
    if max(instances, default=0) >= HIGHEST - LOWEST + 1 or min(instances, default=0) < 0:
        raise ValueError(f"instances are numbered 0..{HIGHEST - LOWEST}: that many four-digit values are distinct")
    values = np.random.default_rng([seed, 0]).permutation(np.arange(LOWEST, HIGHEST + 1))
    head = stub(tokenizer)
    scripts = [_script(tokenizer, filler, layout, head, i, values, seed) for i in instances]
    lengths = {script.answer[1] - script.answer[0] for script in scripts}
    if len(lengths) > 1:
        raise ValueError(f"the values take different numbers of tokens ({sorted(lengths)}): instances could not be compared")
    return scripts


def _script(tokenizer, filler: Filler, layout: Layout, head: np.ndarray, instance: int, values: np.ndarray, seed: int) -> Script:
    variable = VARIABLES[instance % len(VARIABLES)]
    value, other = str(values[instance]), str(values[-1 - instance])
    fact, in_fact = locate(tokenizer, FACT.format(var=variable, value=value), value)
    asked, in_asked = locate(tokenizer, QUERY.format(var=variable) + value, value)
    question, answer = asked[: in_asked[0]], asked[in_asked[0] :]
    boxes = [fact]
    if layout.second_box:
        boxes.append(encode(tokenizer, FACT.format(var=variable + "2", value=other)))
    for ids, room, what in [(b, layout.box, "box") for b in boxes] + [(question, layout.query, "query")]:
        if len(ids) > room:
            raise ValueError(f"the {what} takes {len(ids)} tokens with this tokenizer, its room is {room}")
    gaps = [layout.pre, *(layout.box - len(b) for b in boxes), layout.mid if layout.second_box else 0, layout.post, layout.query - len(question)]
    rng = np.random.default_rng([seed, 1, instance])
    text = filler.passage(sum(gaps), [variable, variable + "2", value, other, "passcode"], rng)
    pieces = iter(np.split(text, np.cumsum(gaps)[:-1]))
    pre, *pads = [next(pieces) for _ in range(1 + len(boxes))]
    mid, post, pad = pieces
    middle = [mid, boxes[1], pads[1]] if layout.second_box else []
    parts = [head, pre, fact, pads[0], *middle, post, pad, question, answer]
    ids = np.concatenate(parts)
    start, end = len(head) + layout.pre, len(ids)
    return Script(instance, variable, value, ids, (start, start + layout.box), (start + in_fact[0], start + in_fact[1]),
                  (end - len(answer), end), len(head))
