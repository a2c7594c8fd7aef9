"""The logit oracle: what the model says after a token has really been deleted, against what the closed-form scores predict (beyond LORE app. F).

A token is deleted after the prompt was read, in all sites at once or at one site, and the first tokens of the full cache's own greedy future are forced
through the model: one forward per deletion, some of them as rows of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import deletion, oracle
from ..metrics.divergence import kl_by_token
from ..prompting import Prompt
from .answers import Full, follow, rows_at_once, targets
from ..types import Needs

ROWS = 8
"""Most deletions in one batch: each takes a copy of the prompt's cache for a moment."""
UNITS = {"kl_deleted": "nats per token", "logp_lost": "nats per token", "kl_noise": "nats per token", "predicted_magnitude": "output norm", "predicted_squared": "output norm squared", "predicted_attention": "attention mass"}
PREDICTORS = {"predicted_magnitude": dict(form="magnitude"), "predicted_squared": dict(form="squared"), "predicted_attention": dict(objective="attention")}
"""Closed-form costs of the deletion on the future's queries: eq. 12, eq. 6, and attention alone."""


@dataclass(frozen=True)
class Delete:
    """Takes the entries whose score is negative, {layer: [b hkv n]}, however many a site has of them."""

    needs = Needs()
    level = "own"

    def score(self, view) -> Tensor:
        return view.future[view.layer]

    def allocate(self, score: Tensor, keep: Tensor, held: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        return (real & (score >= 0)).sum(-1)


@dataclass(frozen=True)
class Target:
    """One deletion: of the token at a position, in every site, or at one (layer index, KV head). sample names how it was chosen."""

    position: int
    sample: str
    site: tuple[int, int] | None = None


def chosen(score: Tensor, protected: Tensor, count: int, top: int, layer: int, singles: int) -> list[Target]:
    """Deletions of a prompt with scores S* [l hkv n]: `count` candidates evenly spaced by position ("even": a sample of all), the `top`
    ones of highest summed score beside them ("top"), and in each KV head of a layer (its index) `singles`, half of them its highest
    and half evenly spaced ("site, top", "site, even"). All candidates where there are fewer.
    """
    free = (~protected).all(0).all(0).nonzero().squeeze(-1)
    even, total = _even(free, count), score.double().sum((0, 1))
    best = [p for p in free[total[free].argsort(descending=True)].tolist() if p not in set(even)][:top]
    out = [Target(p, "even") for p in even] + [Target(p, "top") for p in best]
    for head in range(score.shape[1]):
        high = free[score[layer, head, free].argsort(descending=True)][: singles // 2].tolist()
        rest = free[~torch.isin(free, torch.tensor(high, dtype=free.dtype))]
        out += [Target(p, "site, top", (layer, head)) for p in high] + [Target(p, "site, even", (layer, head)) for p in _even(rest, singles - len(high))]
    return out


def _even(positions: Tensor, count: int) -> list[int]:
    """`count` of the positions, in the middle of as many equal parts."""
    count = min(count, len(positions))
    return [int(positions[int((i + 0.5) * len(positions) / count)]) for i in range(count)]


def shortened(prompt: Prompt, future: int) -> Prompt:
    """The same prompt with no more than `future` tokens ahead that count; S* and the protected entries stay."""
    ahead = prompt.truth.ahead
    short = dataclasses.replace(ahead, valid=ahead.valid & (ahead.valid.cumsum(-1) <= future))
    return dataclasses.replace(prompt, truth=dataclasses.replace(prompt.truth, ahead=short))


def deleted(prompt: Prompt, targets: list[Target]):
    """A cache with a row per deletion."""
    from ..lookahead import NEVER

    n = len(prompt.ids)
    cache = prompt.cache.branch(len(targets), plan=dataclasses.replace(NEVER, keep=n - 1), policy=Delete())
    marks = torch.zeros(*prompt.truth.score.shape[:1], len(targets), *prompt.truth.score.shape[2:], device=cache.kept_device)
    for row, target in enumerate(targets):
        layer, head = (slice(None), slice(None)) if target.site is None else target.site
        marks[layer, row, head, target.position] = -1
    cache.evict_now(dict(zip(cache.geometry.kv_layers, marks)))
    if not torch.equal(prompt.truth.kept(cache), marks >= 0):
        raise RuntimeError("a deletion took something else than its token: it may be protected")
    return cache


def rows(session, prompt: Prompt, said: Full) -> Iterator[dict]:
    """True costs and predictions of every deletion, on the same queries: those of all tokens of the future but the last, whose next ones are forced.
    And the noise, the KL of a batch that deletes nothing."""
    from ..lookahead import spare

    c, layers = session.config, prompt.cache.geometry.kv_layers
    prompt = shortened(prompt, c.deletion_future)
    said = dataclasses.replace(said, logits=said.logits[: len(targets(prompt))][_first(prompt) :])
    if not len(said.logits):
        return  # a future of one token has no query that another is predicted from
    score, protected = prompt.truth.score[:, 0], prompt.truth.protected[:, 0]
    made = chosen(score, protected, c.deletions, c.deletions_top, layers.index(c.deletion_layer), c.deletions_single)
    predicted = {name: _predicted(session.model, prompt, dataclasses.replace(oracle.ANALYSIS, **changes)) for name, changes in PREDICTORS.items()}
    logp, told = _logp(said.logits, targets(prompt)[_first(prompt) :]), dict(sample="none")
    together = rows_at_once(prompt.cache, ROWS)
    noise = _costs(session.model, spare(prompt.cache, together), prompt, said, logp)
    yield from (dict(metric="kl_noise", value=x, unit=UNITS["kl_noise"]) | told for x in noise["kl_deleted"][:1])
    for one in (True, False):  # whole tokens, then single sites: a batch of one kind has equal counts
        some = [t for t in made if (t.site is None) == one]
        for start in range(0, len(some), together):
            part = some[start : start + together]
            found = _costs(session.model, deleted(prompt, part), prompt, said, logp)
            for i, t in enumerate(part):
                at = dict(position=t.position, sample=t.sample) | ({} if t.site is None else dict(layer=layers[t.site[0]], head=t.site[1]))
                values = {name: x[i] for name, x in found.items()} | {name: float(x[..., t.position].sum() if t.site is None else x[(*t.site, t.position)]) for name, x in predicted.items()}
                yield from (dict(metric=name, value=float(v), unit=UNITS[name]) | at for name, v in values.items())


def _predicted(model, prompt: Prompt, cost: deletion.Cost) -> Tensor:
    """[l hkv n]: what deletion costs on the queries that the measured logits come from, summed over the query heads of a group."""
    ahead = prompt.truth.ahead
    last = ahead.valid.cumsum(-1) == ahead.valid.sum(-1, keepdim=True)  # no logits behind it are measured
    return oracle.score(model, prompt.cache, dataclasses.replace(ahead, valid=ahead.valid & ~last), dataclasses.replace(cost, group="sum"))[:, 0].double()


def _first(prompt: Prompt) -> int:
    """Logits of `follow` that come from no token of the future: an unseen question's last token gives one, whose query S* does not know."""
    return 1 if len(prompt.tail) else 0


def _costs(model, cache, prompt: Prompt, said: Full, logp: Tensor) -> dict[str, list[float]]:
    logits = follow(model, cache, prompt)[:, _first(prompt) :]
    kl = kl_by_token(said.logits.expand_as(logits), logits).mean(-1)
    return {"kl_deleted": kl.tolist(), "logp_lost": (logp - _logp(logits, targets(prompt)[_first(prompt) :])).mean(-1).tolist()}


def _logp(logits: Tensor, tokens: Tensor) -> Tensor:
    """float64 [.. k] of logits [.. k v]; a token at a time."""
    return torch.stack([logits[..., i, :].double().log_softmax(-1)[..., int(t)] for i, t in enumerate(tokens)], dim=-1) if len(tokens) else logits.new_zeros(*logits.shape[:-1])
