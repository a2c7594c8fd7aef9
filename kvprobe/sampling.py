"""From logits to the next token: greedy, or by numbers that depend on nothing but (seed, instance, step)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import draws
from .types import wide


@dataclass(frozen=True)
class Sampler:
    """temperature 0 is greedy; top_k 0 and top_p 1 leave everything in. Raises ValueError for what cannot be."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = dict(temperature=self.temperature, top_p=self.top_p)
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name}={value!r} must be a number")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be at least 0; 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 leaves every token in")
        for name, value in dict(top_k=self.top_k, seed=self.seed).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be a whole number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0; 0 leaves every token in")

    def processed(self, logits: Tensor) -> Tensor:
        """[b vocabulary]: logits as transformers' own warpers leave them, in the order of its `generate`; greedy changes nothing."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        if self.temperature == 0:
            return logits
        warpers = [TemperatureLogitsWarper(float(self.temperature))] if self.temperature != 1 else []
        warpers += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        for warp in warpers:
            logits = warp(None, logits)
        return logits

    def pick(self, logits: Tensor, instances: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Tokens [b] for logits [b vocabulary], and their log probability before any warper [b nats].

        float32, or float64 for float64 logits. Raises FloatingPointError for logits that are no numbers.
        """
        logits = logits.to(wide(logits.dtype))
        best = logits.amax(-1)  # -inf bans a token, and is none of the model's faults
        if not bool(torch.isfinite(best).all()):
            bad = (~torch.isfinite(best)).nonzero().flatten().tolist()
            raise FloatingPointError(f"the model's logits are not finite in batch rows {bad}: a wider dtype, or a model whose states overflow this one")
        if self.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = inverse_cdf(self.processed(logits), draws.sampling(self.seed, instances.to(logits.device), step))
        return tokens, torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).squeeze(-1)


def inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """[b]: the first token, in order of ids, at which the cumulative probability of softmax(logits) exceeds u [b] in [0, 1)."""
    p = logits.to(torch.float64).softmax(-1)
    below = p.cumsum(-1).masked_fill(p == 0, 0.0)  # a sum taken in blocks may move at a token that is out
    return (below > (u * below.amax(-1))[:, None]).to(torch.int8).argmax(-1)
