"""Settings of a probe of prompt-time eviction, and the prompts they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import tasks


@dataclass(frozen=True)
class COMMON:
    """Settings that every probe of prompt-time eviction has."""

    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    kinds: str = "needles,variables"
    """kinds of prompts, taken in turn (kvprobe.tasks): needles, variables, passages"""
    length: int = 600
    """of a prompt, up to the answer [tokens]"""
    instances: int = 12
    """prompts in all, each with its own names, values and filler"""
    question: Literal["seen", "unseen"] = "seen"
    """whether the prompt that is compressed ends behind the question, or before it"""
    keeps: str = "128"
    """budgets: entries kept per KV head, the protected ones inside (B), e.g. 64,128"""
    sampling_seeds: int = 3
    """fresh seeds under which every arm that samples or draws is repeated"""
    window: int = 32
    """newest prompt tokens: protected, and their queries score (w) [tokens]"""
    future: int = 32
    """most tokens of the greedy continuation that arms are measured against [tokens]"""
    form: Literal["magnitude", "squared"] = "magnitude"
    """cost of deletion, of the oracle and the arms: its magnitude (eq. 12, analyses) or the square (eq. 6, deployed)"""
    filler: str = "builtin"
    """text around the facts: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    seed: int = 0
    """seed of prompts, draws and bootstrap"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""

    def __post_init__(self) -> None:
        for name in ("instances", "sampling_seeds", "window", "future", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.threads, self.seed) < 0:
            raise ValueError("threads and seed must not be negative")
        for name, known in (("question", ("seen", "unseen")), ("form", ("magnitude", "squared"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        unknown = [k for k in names(self.kinds) if k not in tasks.KINDS]
        if unknown or not names(self.kinds):
            raise ValueError(f"kinds={self.kinds!r}: known are {', '.join(tasks.KINDS)}")
        self.budgets

    @property
    def budgets(self) -> list[int]:
        return numbers("keeps", self.keeps)


def names(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str) -> list[int]:
    """ "1,2" -> [1, 2]. Raises ValueError for anything but different whole numbers from 1 on."""
    parts = names(text)
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{name}={text!r} must be different whole numbers from 1 on, e.g. 64,128")
    return [int(p) for p in parts]


def build_tasks(config: COMMON, model) -> list[tasks.Task]:
    """The prompts, kinds in turn. Raises ValueError for a model without a tokenizer or whose context is too short."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: prompts of text need one")
    kinds, out = names(config.kinds), {}
    for k, kind in enumerate(kinds):
        mine = range(k, config.instances, len(kinds))
        out |= dict(zip(mine, tasks.build(model.tokenizer, kind, mine, length=config.length, seed=config.seed, filler=config.filler, context=model.context)))
    return [out[i] for i in range(config.instances)]
