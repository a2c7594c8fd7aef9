"""`kvprobe traces`: write filler text with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import traces


@dataclass(frozen=True)
class Settings:
    """What to write, with which model."""

    out: str
    """the .jsonl file to write"""
    model: str = "smollm2"
    """smollm2 (embedded), tiny, a local folder, a .gguf file, or a hub id"""
    n: int = 64
    """texts to sample; those that fail the screen for degenerate text are left out"""
    max_new_tokens: int = 800
    """longest text [tokens]"""
    min_new_tokens: int = 0
    """shortest text: the model may not end before [tokens]"""
    min_words: int = 200
    """shortest text that is kept [words]"""
    temperature: float = 0.7
    """sampling temperature"""
    top_p: float = 0.95
    """nucleus"""
    repetition_penalty: float = 1.05
    """above 1 keeps small models out of loops"""
    seed: int = 0
    """seed of the problems and of the sampling"""
    batch_size: int = 16
    """texts sampled at once"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    dtype: str | None = None
    """float32, bfloat16, ...; default float32 on a CPU"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""

    def __post_init__(self) -> None:
        if self.n < 1 or self.batch_size < 1 or self.max_new_tokens < 1:
            raise ValueError("n, batch_size and max_new_tokens must be at least 1")
        if not self.out.endswith(".jsonl"):
            raise ValueError(f"out={self.out!r} must end in .jsonl")


def make(settings: Settings, say: Callable[[str], None] = print) -> Path:
    """Sample, screen, write; returns the file. What is there already is not written over."""
    import torch

    from .models import load

    path = Path(settings.out)
    if path.exists():
        raise ValueError(f"{path} exists; choose another --out")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load(settings.model, device=settings.device, dtype=settings.dtype)
    if model.tokenizer is None:
        raise ValueError(f"model {settings.model!r} came without a tokenizer")
    sampling = {k: getattr(settings, k) for k in ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "repetition_penalty", "seed", "batch_size")}
    made = traces.generate(model.model, model.tokenizer, traces.problems(settings.n, settings.seed), **sampling)
    faults = [traces.fault(trace["text"], settings.min_words) for trace in made]
    good = [trace for trace, fault in zip(made, faults) if fault is None]
    if not good:
        reasons = sorted({f for f in faults if f})
        raise ValueError(f"none of {len(made)} texts passed the screen ({', '.join(reasons)}); try a longer --max-new-tokens or a lower --min-words")
    head = traces.header(settings.model, asdict(settings), f"kvprobe traces, {len(made)} texts sampled, {len(good)} passed the screen")
    path.parent.mkdir(parents=True, exist_ok=True)
    traces.write(path, good, head)
    say(f"{path}: {len(good)} of {len(made)} texts, {sum(t['tokens'] for t in good)} tokens")
    return path
