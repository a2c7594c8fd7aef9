"""Policies that look ahead from a prompt's end: a stock model with attention written out, and what test_policies_ahead_*.py share."""

import copy
import dataclasses

import numpy as np
import torch
from transformers import DynamicCache

import oracle
import tiny
from kvprobe.compression import compress
from kvprobe.registry import make_policy
from test_policies import average, largest, softmax

N, KEEP, W, GROUP = 40, 16, 4, 2
SITES = [(layer, head) for layer in (0, 1) for head in (0, 1)]
OPTIONS = {"laq": dict(window=6, t=5), "laq_plus": dict(window=6, t=5, w2=3), "kvzip": dict(chunk=16, overlap=3), "gvote": dict(window=30, nucleus=0.3, samples=3),
           "dapq": dict(prefix=2, suffix=7), "lore": dict(window=6, m=2, t=3), "single_continuation": dict(window=6, t=3)}
"""What makes every policy bind on a prompt of N tokens."""


class Words:
    """A tokenizer of characters for a vocabulary of 97."""

    all_special_ids: list = []
    added_tokens_decoder: dict = {}

    def __call__(self, text, add_special_tokens=False):
        return type("Encoded", (), dict(input_ids=[ord(c) % tiny.VOCABULARY for c in text]))


class Noting:
    """Runs a policy as it is, twice, and notes its scores by layer."""

    def __init__(self, inner):
        self.inner, self.scores = inner, {}

    def bind(self, model):
        self.inner = make_policy(self.inner, None, model)
        return self

    def __getattr__(self, name):  # what only some policies have
        return getattr(self.inner, name)

    def score(self, view):
        shown = [x for x in (view.positions, view.keys, view.values, view.queries, view.query_positions) if x is not None]
        before = [x.clone() for x in shown]
        first = self.inner.score(view).clone()
        assert torch.equal(first, self.inner.score(view)), "not repeatable"
        assert all(torch.equal(a, b) for a, b in zip(before, shown)), "inputs changed"
        assert first.shape == view.positions.shape and torch.isfinite(first[view.real]).all()
        self.scores[view.layer] = first
        return first


class Brute:
    """One prompt on a stock model whose attention is written out with repeated heads and explicit masks (oracle.py)."""

    def __init__(self, stock, ids):
        self.model = copy.deepcopy(stock)
        self.model.set_attn_implementation("oracle")
        self.cache, self.n = DynamicCache(config=self.model.config), len(ids)
        self.logits, self.prompt = self.feed(ids, hidden={})

    @torch.no_grad()
    def feed(self, ids, hidden, spare=False):
        """Logits behind ids, and by layer what attention saw; hidden: positions of the prompt by site."""
        cache = copy.deepcopy(self.cache) if spare else self.cache
        total = cache.get_seq_length() + len(ids)
        for layer in (0, 1):
            oracle._keep[layer] = torch.ones(1, 2, total, dtype=torch.bool)
            for head in (0, 1):
                oracle._keep[layer][0, head, sorted(hidden.get((layer, head), ()))] = False
        logits = self.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True).logits[0, -1]
        seen = {layer: {name: oracle._seen[layer][name][0].numpy() for name in ("query", "key", "weights")} for layer in (0, 1)}
        oracle._keep.clear()
        return logits, seen

    def votes(self, layer, queries, last=None):
        """[hq q n]: softmax of queries [hq q d] over the prompt's keys, up to last[q]."""
        keys = self.prompt[layer]["key"]
        out = np.zeros((*queries.shape[:2], self.n))
        for h, q in np.ndindex(queries.shape[:2]):
            upto = self.n if last is None else max(0, last[q] + 1)
            if upto:
                out[h, q, :upto] = softmax(keys[h // GROUP, :upto] @ queries[h, q] * queries.shape[-1] ** -0.5)
        return out


def best(score, count, held=()):
    """The positions of `held` and the best others, `count` in all; the newest of equals first."""
    free = sorted((p for p in range(len(score)) if p not in held), key=lambda p: (-score[p], -p))
    return sorted([*held, *free[: count - len(held)]])


HELD = [0, *range(N - W, N)]


def grouped(votes, kernel=1, pooling="max", reduce="mean", group="mean"):
    """[hkv n] of votes [hq q n]."""
    votes = votes.mean(1) if reduce == "mean" else votes.sum(1)
    pooled = np.array([{"max": largest, "average": average}[pooling](v, kernel) for v in votes])
    return getattr(pooled.reshape(2, GROUP, -1), group)(1)


def kept(made, b=0):
    positions = made.cache.positions
    return {(layer, h): [p for p in positions[i, b, h].tolist() if p >= 0] for i, layer in enumerate(made.cache.geometry.kv_layers) for h in range(positions.shape[2])}


def spoken(llama):
    return dataclasses.replace(llama[0], tokenizer=Words())


def run(llama, ids, name, rows=1, **options):
    """(what compress gives, scores by layer)"""
    spy = Noting(make_policy(name, options))
    given = ids[:rows, :N] if isinstance(ids, torch.Tensor) else ids
    return compress(spoken(llama), given, policy=spy, keep=KEEP, protect_window=W, seed=5), spy.scores
