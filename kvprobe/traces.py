"""Reasoning traces as filler: problems, text that a model writes about them, a screen for degenerate text, and the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

KIND = "kvprobe-traces"
INSTRUCTION = "Solve the problem. Think step by step and explain your reasoning in detail."
BANNED = ("passcode",)  # the word of the planted fact: filler that holds it would answer, or confuse, the probe
NAMES = ("Ada", "Bruno", "Chen", "Dina", "Emeka", "Freya", "Goran", "Hana", "Ivan", "Jaya", "Kofi", "Lena", "Marco", "Nadia")

# <lo-hi> is a random integer, both ends included; all stay below 5000, where the planted numbers begin.
TEMPLATES = (
    "{name} sells <30-90> loaves of bread at $<3-6> each and <20-60> cakes at $<12-25> each. Flour and sugar cost $<110-180>. How much profit does {name} make, and how would it change if every price rose by 10 percent?",
    "A train covers <120-240> km at <50-80> km/h, rests for <10-40> minutes, and covers another <90-200> km at <85-120> km/h. What is its average speed over the whole trip, rest included?",
    "One pump fills a tank in <4-9> hours and a second pump fills it in <10-18> hours. A leak would empty the full tank in <25-40> hours. How long does filling take with both pumps running and the leak open?",
    "{name} mixes <20-60> ml of a <10-25> percent acid solution with <30-90> ml of a <40-70> percent acid solution. What is the concentration of the mixture, and how much water must be added to halve it?",
    "{name} is <24-40> years older than a daughter. In <3-9> years {name} will be <2-3> times as old as the daughter. How old are they now?",
    "{name} saves $<200-900> in an account that pays <2-7> percent a year, compounded yearly. How much is there after <3-5> years, and how much of it is interest?",
    "A rope of <60-150> m is cut into three pieces. The second is <2-4> times as long as the first, and the third is <5-12> m longer than the first. How long is each piece?",
    "{name} buys <3-9> notebooks and <2-8> pens for $<30-48>. A notebook costs $<2-3> more than a pen. What does each cost?",
    "Solve the equation <2-9>(x - <3-12>) + <4-15> = <10-14>x - <20-60> and check the result by substitution.",
    "Find both solutions of x^2 - <7-20>x + <6-12> = 0 with the quadratic formula, and verify them with the sum and the product of the roots.",
    "Solve the system <2-6>x + <3-8>y = <20-70> and <7-9>x - <1-5>y = <10-50>, first by substitution and then by elimination.",
    "Let f(x) = <2-5>x^2 - <6-18>x + <1-15>. Complete the square, find the vertex, and say for which x the function is positive.",
    "An arithmetic sequence starts at <3-15> and grows by <4-11> each time. Find the <20-60>th term and the sum of that many terms, and explain why the formula for the sum works.",
    "A geometric sequence has first term <2-8> and ratio <2-3>. After how many terms does the sum first exceed <700-3000>?",
    "Simplify (x^2 - <16-81>) / (x + <4-9>) as far as possible, and evaluate it at x = <10-30>. When does the fraction have no value?",
    "Find the greatest common divisor of <200-900> and <1000-2400> with Euclid's algorithm, and use it to find their least common multiple.",
    "What is the remainder when <3-8>^<20-90> is divided by <11-19>? Look for a pattern in the powers.",
    "How many whole numbers from 1 to <300-1000> are divisible by <3-6> or by <7-11>, but not by both?",
    "Factor <360-2000> into primes. How many divisors does it have, and how many of them are even?",
    "Find the smallest positive whole number that leaves remainder <1-2> when divided by 3, <1-4> when divided by 5, and <1-6> when divided by 7.",
    "A rectangular garden is <12-40> m long and <6-11> m wide. A path <1-2> m wide runs around the outside. What is the area of the path, and what does it cost to pave at $<15-45> per square metre?",
    "A ladder of <5-13> m leans against a wall with its foot <2-4> m from the wall. How high does it reach? If the foot slides out by 50 cm, how far does the top move down?",
    "A cylinder has radius <3-9> cm and height <10-25> cm. A cone has the same base and the same volume. How tall is the cone, and what is the surface area of the cylinder?",
    "Find the distance between the points (<1-9>, <1-9>) and (<10-30>, <12-35>), the midpoint between them, and the equation of the line through both.",
    "A box holds <4-9> red, <5-12> blue and <3-8> green balls. Two are drawn without putting the first back. What is the probability that both have the same colour?",
    "In how many ways can a committee of <3-4> be chosen from <6-9> women and <5-8> men if at least one man and one woman must be in it?",
    "The mean of <5-9> test scores is <60-75>. After one more test the mean is <76-80>. What was the last score, and what must the next be for a mean of 82?",
)


def problems(n: int, seed: int) -> list[str]:
    """n distinct problems, every template used about equally often. problems(m, seed) begins problems(n, seed) for m < n."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < n:
        for i in rng.permutation(len(TEMPLATES)):
            text = TEMPLATES[i].replace("{name}", NAMES[rng.integers(len(NAMES))])
            found[re.sub(r"<(\d+)-(\d+)>", lambda m: str(rng.integers(int(m[1]), int(m[2]) + 1)), text)] = None
    return list(found)[:n]


def prompt_ids(tokenizer: Any, problem: str) -> list[int]:
    """Token ids of the request to solve one problem, in the tokenizer's chat template where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer(f"{INSTRUCTION}\n\nProblem: {problem}\n\nSolution:").input_ids
    turn = [{"role": "user", "content": f"{INSTRUCTION}\n\n{problem}"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids  # the template has written the special tokens already


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int,
    batch_size: int,
    progress: bool = True,
    repetition_penalty: float = 1.05,
    min_new_tokens: int = 0,
) -> list[dict[str, Any]]:
    """Let the model write about each problem in `prompts` by sampling; one dict per problem, in order.

    problem, text (as decoded, special tokens left out), tokens (how many the text has when encoded again), seed (of its
    batch: batch i uses seed + i, so that a batch can be made again alone). The model may not end a text before
    min_new_tokens. The caller's random state is left as it was. Raises ValueError where a setting is not positive.
    """
    import torch
    from tqdm.auto import tqdm

    if min(max_new_tokens, temperature, top_p, batch_size, repetition_penalty) <= 0:
        raise ValueError("max_new_tokens, temperature, top_p, batch_size and repetition_penalty must be positive")
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    length = dict(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, pad_token_id=pad)
    sampling = dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=0, repetition_penalty=repetition_penalty)
    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    made, gpus = [], [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), tqdm(total=len(groups) * max_new_tokens, unit="step", disable=not progress) as bar:
        counter = SimpleNamespace(put=lambda _: bar.update(), end=lambda: None)  # a streamer is told of every step
        for batch, group in enumerate(groups):
            rows = [prompt_ids(tokenizer, problem) for problem in group]
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
            torch.manual_seed(seed + batch)
            out = model.generate(ids, attention_mask=mask, streamer=counter, **length, **sampling)
            bar.update((batch + 1) * max_new_tokens - bar.n)  # a batch may end early, and its prompt counted as a step
            for problem, row in zip(group, out[:, width:]):
                text = tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
                made.append({"problem": problem, "text": text, "tokens": tokens, "seed": seed + batch})
    return made


def _repeated(items: Sequence[str], n: int = 1) -> float:
    """Share of runs of n items that have occurred before, 0 where there is no run."""
    runs = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def fault(text: str, min_words: int = 200) -> str | None:
    """Why `text` is no good as filler, or None: the first of these that holds.

    A banned word; fewer than min_words words; over 2 % of characters not printable ASCII; a word over 60 characters;
    over half of all characters digits; over 20 % of word 8-grams seen before; over 35 % of lines of three words or more
    seen before; in any window of 100 words, over 40 % of word 4-grams seen before in it (a loop).
    """
    words = text.split()
    ends = (*range(100, len(words), 50), len(words))
    faults = {
        "a banned word": any(word in text.lower() for word in BANNED),
        f"fewer than {min_words} words": len(words) < min_words,
        "characters that are not printable ASCII": sum(not (" " <= c <= "~" or c in "\n\t") for c in text) > 0.02 * len(text),
        "a word over 60 characters": max(map(len, words), default=0) > 60,
        "mostly digits": sum(c.isdigit() for c in text) > 0.5 * len(text),
        "repeated 8-grams": _repeated(words, 8) > 0.20,
        "repeated lines": _repeated([line.strip() for line in text.split("\n") if len(line.split()) >= 3]) > 0.35,
        "a loop": any(_repeated(words[max(0, end - 100) : end], 4) > 0.40 for end in ends),
    }
    return next((reason for reason, holds in faults.items() if holds), None)


def usable(text: str, min_words: int = 200) -> bool:
    """Whether `text` passes the screen for degenerate text; `fault` says what it looks for and names the reason."""
    return fault(text, min_words) is None


def header(model: str, settings: Mapping[str, Any], made: str) -> dict[str, Any]:
    """The header object for `write`: the model's name, the settings of `generate`, how it was made, package versions."""
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"kind": KIND, "model": model, "settings": dict(settings), "made": made, "versions": versions}


def write(path: str | os.PathLike[str], traces: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write JSON Lines, the header first. The file is whole or not there: a failure leaves what was at `path` before."""
    path = Path(path)
    rows = ({"kind": KIND, **header}, *map(dict, traces))
    data = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, traces) of a file that `write` made, or of a plain text file (any other suffix than .jsonl), which is one trace whose other fields are None.

    Raises ValueError naming the file and line where it is not such a file, and OSError where it cannot be read.
    """
    data = (path := Path(path)).read_bytes()
    if path.suffix != ".jsonl":
        try:
            text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {data.count(10, 0, error.start) + 1}: not UTF-8") from error
        if text:
            return {"kind": KIND, "made": "plain text"}, [{"problem": None, "text": text, "tokens": None, "seed": None}]
        raise ValueError(f"{path}: the file holds no text")
    rows: list[Any] = []
    for number, line in enumerate(data.rstrip().split(b"\n"), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        key, wanted = ("kind", f'"kind": "{KIND}"') if number == 1 else ("text", 'a "text"')
        value = rows[-1].get(key) if isinstance(rows[-1], dict) else None
        if not isinstance(value, str) or (number == 1 and value != KIND):
            raise ValueError(f"{path}, line {number}: a JSON object with {wanted} is expected")
    return rows[0], rows[1:]
