"""Against the future: what the full cache goes on to write, the entries it needs, and how near a compressed cache comes (LORE app. F).

Nothing of this is seen by a policy: it measures them afterwards. All that is [.. n] counts the slots of the held cache of
the whole prompt, oldest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import allocation, deletion, lookahead
from .metrics import fidelity
from .metrics.perturbation import ANALYSIS, oracle_score
from .models import Model
from .types import CacheView, Needs


@dataclass(frozen=True)
class Given:
    """A policy that scores what it is handed as the cache's future, {layer: [b hkv n]}: the oracle as an arm, or scores made elsewhere."""

    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        return view.future[view.layer]


@dataclass(frozen=True)
class Future:
    """A greedy continuation of the prompt from the full cache: tokens and valid [b t], queries {layer: [b hq t d]} (Q_future).

    valid leaves out the token that ends the text, unless there is no other.
    """

    tokens: Tensor
    valid: Tensor
    queries: dict[int, Tensor]


def future(model: Model, cache, logits: Tensor, t: int = 32) -> Future:
    """Decode greedily from the held, full cache to the end of the text, `t` tokens at most."""
    from .generation_input import eos

    ends = eos(model)
    found = lookahead.sample(model, cache, logits, 1, t, temperature=0.0, eos=tuple(ends))
    tokens, written = found.tokens[:, 0], found.valid[:, 0]
    valid = written & ~torch.isin(tokens, torch.tensor(ends, device=tokens.device, dtype=tokens.dtype))
    valid = torch.where(valid.any(-1, keepdim=True), valid, written)
    return Future(tokens, valid, {layer: q[:, 0] for layer, q in found.queries.items()})


def shown(cache) -> Tensor | None:
    """bool [b n]: slots of a full cache that hold an entry, None where all do (no padding)."""
    real = cache.positions[0, :, 0] >= 0
    return None if bool(real.all()) else real


def _seen(cache, device) -> Tensor | None:
    real = shown(cache)
    return None if real is None else real[:, None, None, :].to(device)


def _gram(model: Model, layer: int, cost: deletion.Cost, device) -> Tensor | None:
    from .inside.sites import head_weights

    return deletion.gram(head_weights(model, "O", layer)).to(device) if cost.objective == "projected" else None


def score(model: Model, cache, ahead: Future, cost: deletion.Cost = ANALYSIS) -> Tensor:
    """S* [l b hkv n]: what deleting each entry costs on Q_future alone, the mean over its queries, softmax over the prompt's keys only."""
    out = []
    for layer in cache.geometry.kv_layers:
        held = cache.layers[layer]
        mine = oracle_score(ahead.queries[layer].to(held.keys.device), held.keys, held.values, held.scaling, _gram(model, layer, cost, held.keys.device),
                            _seen(cache, held.keys.device), ahead.valid, cost)
        out.append(mine.to(cache.kept_device))
    return torch.stack(out)


def protected(cache) -> Tensor:
    """bool [l b hkv n]: entries that the cache's pins hold."""
    bias = cache.pins.bias(cache.positions, cache.prompt, cache.seen)
    return torch.zeros_like(cache.positions, dtype=torch.bool) if bias is None else (bias == torch.inf) & (cache.positions >= 0)


def top(score: Tensor, keep: int, held: Tensor, real: Tensor | None = None) -> Tensor:
    """bool [.. n]: the `keep` best of scores [.. n], what is `held` first; real marks the slots that hold an entry."""
    return allocation.top(score.masked_fill(held, torch.inf), keep, None if real is None else real.expand_as(score))


@dataclass(frozen=True)
class Oracle:
    """A prompt's future and what it needs. score, protected [l b hkv n]; outputs {layer: [b hq t d]} of the future's queries over
    the whole prompt; real [b n] as in `shown`, pad [b] empty slots before each row."""

    ahead: Future
    score: Tensor
    protected: Tensor
    outputs: dict[int, Tensor]
    real: Tensor | None
    pad: Tensor

    def best(self, keep: int) -> Tensor:
        """bool [l b hkv n]: the entries of highest S* beside the protected ones, `keep` in all."""
        return top(self.score, keep, self.protected, None if self.real is None else self.real[None, :, None, :])

    def kept(self, cache) -> Tensor:
        """bool [l b hkv n]: what a compressed cache of this prompt holds of it; of one prompt, b is the cache's, whose rows are arms."""
        positions, n = cache.positions, self.score.shape[-1]
        slots = (positions + self.pad[None, :, None, None]).long()
        slots = slots.masked_fill((positions < 0) | (slots >= n), n)
        return torch.zeros(*slots.shape[:-1], n + 1, dtype=torch.bool, device=positions.device).scatter_(-1, slots, True)[..., :n]

    def recall(self, kept: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """(all B entries, free slots only) [l b hkv]: Recall@B of kept sets [l b hkv n], eq. 14.

        B is `keep` at every site, also where a policy dealt the budget otherwise: a head that was given less cannot reach 1.
        """
        return fidelity.recall(kept, self.best(keep), self.protected)

    def error(self, cache) -> Tensor:
        """[l b hq]: output error of a compressed cache over Q_future, eq. 15. The cache must stand at the prompt's end; rows as in `kept`."""
        positions, out = cache.positions, []
        if bool((torch.tensor(cache.seen, device=self.pad.device) != self.score.shape[-1] - self.pad).any()):
            raise ValueError("the cache has gone on behind the prompt: measure it right after its eviction")
        ragged = bool((positions < 0).any())
        for i, layer in enumerate(cache.geometry.kv_layers):
            held, queries = cache.layers[layer], self.ahead.queries[layer]
            visible = (positions[i] >= 0)[:, :, None, :].to(held.keys.device) if ragged else None
            queries = queries.to(held.keys.device).expand(positions.shape[1], -1, -1, -1)
            mine = fidelity.outputs(queries, held.keys, held.values, held.scaling, visible)
            out.append(fidelity.output_error(mine, self.outputs[layer], self.ahead.valid).to(positions.device))
        return torch.stack(out)


@torch.no_grad()
def of(model: Model, cache, ahead: Future, cost: deletion.Cost = ANALYSIS) -> Oracle:
    """The oracle of the prompt behind a held, full cache, given what comes after it: `future` of this cache, or of a branch that
    has read a question since."""
    outputs = {}
    for layer in cache.geometry.kv_layers:
        held = cache.layers[layer]
        outputs[layer] = fidelity.outputs(ahead.queries[layer].to(held.keys.device), held.keys, held.values, held.scaling, _seen(cache, held.keys.device))
    n, seen = cache.positions.shape[-1], torch.tensor(cache.seen, device=cache.kept_device)
    return Oracle(ahead, score(model, cache, ahead, cost), protected(cache), outputs, shown(cache), n - seen)


@torch.no_grad()
def trajectory_scores(model: Model, cache, found: lookahead.Lookahead, cost: deletion.Cost = ANALYSIS) -> Tensor:
    """[m l b hkv n]: the score of every sampled continuation alone, the mean cost over its valid steps."""
    b, m, t = found.valid.shape
    sets = {str(k): (torch.arange(m)[:, None] == k).expand(m, t).flatten() & found.valid.flatten(1).cpu() for k in range(m)}
    out = []
    for layer in cache.geometry.kv_layers:
        held = cache.layers[layer]
        queries = found.queries[layer].to(held.keys.device).transpose(1, 2).flatten(2, 3)
        psi = deletion.by_set(queries, held.keys, held.values, held.scaling, sets, _gram(model, layer, cost, held.keys.device), _seen(cache, held.keys.device), cost=cost)
        out.append(torch.stack([psi[str(k)].to(cache.kept_device) for k in range(m)]))
    return torch.stack(out, dim=1)


def utility(model: Model, cache, found: lookahead.Lookahead, truth: Oracle, keep: int, cost: deletion.Cost = ANALYSIS) -> tuple[Tensor, Tensor]:
    """(all entries, free slots) [b m]: a trajectory's oracle retention utility (app. F.4), Recall@B of the set that its own score alone
    keeps beside the protected entries, mean over layers and KV heads."""
    real = None if truth.real is None else truth.real[None, :, None, :]
    scores = trajectory_scores(model, cache, found, cost)
    pairs = [truth.recall(top(s, keep, truth.protected, real), keep) for s in scores]
    return tuple(torch.stack([p[i].mean((0, 2)) for p in pairs], dim=-1) for i in (0, 1))
