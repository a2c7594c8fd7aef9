"""How far the next-token distributions of a compressed cache are from the full cache's, along a text that both are forced to read."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_by_token(full: Tensor, compressed: Tensor) -> Tensor:
    """float64 [.. t]: KL(full || compressed) of the distributions that logits [.. t v] give [nats], one token at a time.

    Summed as p (x + e^-x - 1) with x = log p - log q, which is the same since both sum to 1. Every term is at least 0, and the rounding of
    log p, which is all that the plain sum shows of two nearly equal distributions, enters as its product with x. A logit of -inf is a
    probability of 0: no cost where p is 0, inf where q alone is. Raises ValueError for nan, +inf, or different shapes.

    >>> p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    >>> kl_by_token(p.log(), q.log() + 3)  # log(2) / 2 + log(2 / 3) / 2
    tensor([0.1438, 0.0000], dtype=torch.float64)
    """
    if full.shape != compressed.shape:
        raise ValueError(f"logits of different tokens: {list(full.shape)} and {list(compressed.shape)}")
    return torch.stack([_kl(full[..., t, :], compressed[..., t, :]) for t in range(full.shape[-2])], dim=-1)


def mean_kl(full: Tensor, compressed: Tensor, valid: Tensor | None = None) -> Tensor:
    """float64 [..]: mean of `kl_by_token` over the tokens that count; valid [.. t], None for all.

    >>> p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    >>> round(float(mean_kl(p.log(), q.log())), 4), round(float(mean_kl(p.log(), q.log(), torch.tensor([True, False]))), 4)
    (0.0719, 0.1438)
    """
    kl = kl_by_token(full, compressed)
    valid = torch.ones_like(kl, dtype=torch.bool) if valid is None else valid.to(kl.device).expand_as(kl)
    return torch.where(valid, kl, 0.0).sum(-1) / valid.sum(-1)


def _kl(full: Tensor, compressed: Tensor) -> Tensor:
    """[..] of logits [.. v]"""
    logp, logq = (torch.log_softmax(x.double(), -1) for x in (full, compressed.to(full.device)))
    if bool(logp.isnan().any() | logq.isnan().any()):
        raise ValueError("logits hold nan or +inf, or nothing but -inf: they are no distribution")
    p, q, x = logp.exp(), logq.exp(), logp - logq
    terms = torch.where(x.abs() < 1, p * (x + torch.expm1(-x)), p * x + (q - p))
    return torch.where(p == 0, q, terms).sum(-1)
