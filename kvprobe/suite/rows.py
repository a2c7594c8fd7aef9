"""What the oracle suite measures of a prompt, as rows: every function yields dicts (metric, value, unit, and columns of its own)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..metrics import coverage, fidelity, ranking
from ..metrics.composition import MATCHES, classes, composition, matches
from ..prompting import Prompt
from .orders import ORACLE, Ranked

UNITS = {"recall": "fraction", "recall_free": "fraction", "error": "1 - cosine", "logp": "nats", "retrieved": "fraction", "kl": "nats per token", "coverage": "cosine", "overlap": "fraction",
         "overlap_free": "fraction", "spearman": "rho", "fraction": "fraction", "enrichment": "ratio", "share": "share of the score", "energy": "output norm", "energy_free": "output norm",
         "tokens": "tokens", "future": "tokens", "component_1": "unit-normalised query", "component_2": "unit-normalised query", "explained_1": "fraction of variance", "explained_2": "fraction of variance"}
MASK = 2**23
"""Elements of a mask over sites, queries and entries that are held at a time."""
PROFILE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of the candidates, best first, whose share of a criterion's score is told."""


def row(metric: str, value: float, **columns) -> dict:
    return dict(metric=metric, value=float(value), unit=UNITS[metric]) | columns


def of_arm(a) -> dict:
    return dict(arm=a.name, draw=a.draw)


def agreement(prompt: Prompt, ranked: Ranked, keep: int, main: bool, generated=None) -> Iterator[dict]:
    """Recall@B (eq. 14) and output error (eq. 15) of every arm: means, and at the main budget per layer and KV head."""
    kept, layers = ranked.kept(keep), prompt.cache.geometry.kv_layers
    recall = dict(zip(("recall", "recall_free"), fidelity.recall(kept, prompt.truth.best(keep), prompt.truth.protected)))
    error = errors(prompt, kept, generated)
    for i, a in enumerate(ranked.arms):
        at = of_arm(a) | dict(keep=keep)
        for metric, x in recall.items():
            if bool(x.isnan().any()):
                continue
            yield row(metric, x[:, i].mean(), **at)
            if main:
                for j, layer in enumerate(layers):
                    for h, v in enumerate(x[j, i].tolist()):
                        yield row(metric, v, layer=layer, head=h, **at)
        yield row("error", error[:, i].mean(), **at)
        if main:
            for layer, v in zip(layers, error[:, i].mean(-1).tolist()):
                yield row("error", v, layer=layer, **at)


def errors(prompt: Prompt, kept: Tensor, generated=None) -> Tensor:
    """[l a hq]: output error, eq. 15, of kept sets [l a hkv n] over the future's queries; a layer and some arms at a time.

    generated: a cache that has gone on to read the future; given, its keys behind the prompt are seen causally by full and compressed alike.
    """
    truth, cache, n, out = prompt.truth, prompt.cache, kept.shape[-1], []
    count = int(truth.ahead.valid.sum())
    for i, layer in enumerate(cache.geometry.kv_layers):
        held = cache.layers[layer] if generated is None else generated.layers[layer]
        queries = truth.ahead.queries[layer][:, :, :count].to(held.keys.device)
        g = held.keys.shape[2] - n
        later = None if generated is None else torch.ones(count, g, dtype=torch.bool, device=held.keys.device).tril(g - count)
        full = truth.outputs[layer][:, :, :count] if later is None else _outputs(held, queries, _seen(kept.new_ones(1, 1, n), count, later))
        block = max(1, MASK // (queries.shape[1] * count * held.keys.shape[2]))
        out.append(torch.cat([fidelity.output_error(_outputs(held, queries, _seen(part.to(held.keys.device), count, later)), full).to(kept.device) for part in kept[i].split(block)]))
    return torch.stack(out)


def _seen(kept: Tensor, count: int, later: Tensor | None) -> Tensor:
    """bool [a hkv t s] of kept [a hkv n] and what comes behind them [t g]."""
    if later is None:
        return kept[:, :, None, :]
    shape = (*kept.shape[:2], count, -1)
    return torch.cat([kept[:, :, None, :].expand(shape), later.expand(shape)], dim=-1)


def _outputs(held, queries: Tensor, visible: Tensor) -> Tensor:
    rows = len(visible)
    return fidelity.outputs(queries.expand(rows, -1, -1, -1), held.keys.expand(rows, -1, -1, -1), held.values.expand(rows, -1, -1, -1), held.scaling, visible)


def covered(prompt: Prompt, ms: list[int], window: int) -> Iterator[dict]:
    """Coverage per layer, the mean over query heads: the window, the first m continuations of each draw, and both together."""
    cache, ahead = prompt.cache, prompt.truth.ahead
    layers, windows = cache.geometry.kv_layers, {i: cache.layers[i].queries[:, :, -window:] for i in cache.geometry.kv_layers}
    for number, (draw, found) in enumerate(prompt.draws.items()):
        near = coverage.measure(ahead.queries, ahead.valid, windows, None, found.queries, found.valid)
        wanted = [("window", "union", None)] * (not number) + [(s, f, m) for s in ("continuations", "both") for f in ("mixture", "union") for m in ms]
        for sets, form, m in wanted:
            by_layer = near.coverage(sets, form, m)[:, 0].mean(-1)
            for layer, v in zip(layers, by_layer.tolist()):
                yield row("coverage", v, sets=sets, form=form, m=m or 0, draw=draw, layer=layer)


def likeness(prompt: Prompt, ranked: Ranked, keep: int) -> Iterator[dict]:
    """Top-B overlap and Spearman's rho of every two criteria under the same sampling seed; with the oracle also per layer."""
    kept, protected = ranked.kept(keep), prompt.truth.protected
    for i, one in enumerate(ranked.orders):
        for j, other in enumerate(ranked.orders[i + 1 :], i + 1):
            if one.arm.name == other.arm.name or not _same_draw(one.arm, other.arm, ranked):
                continue
            at = dict(arm=one.arm.name, other=other.arm.name, draw=max(one.arm.draw, other.arm.draw), keep=keep)
            found = dict(zip(("overlap", "overlap_free"), fidelity.recall(kept[:, i], kept[:, j], protected[:, 0])))
            found["spearman"] = ranking.spearman(one.score.double(), other.score.double(), protected)[:, 0]
            for metric, x in found.items():
                if not bool(x.isnan().all()):
                    yield row(metric, x.nanmean(), **at)
                if other.arm.name == ORACLE and metric == "spearman":
                    yield from (row(metric, v, layer=layer, **at) for layer, v in zip(prompt.cache.geometry.kv_layers, ranking.layerwise(x).tolist()) if v == v)


def _same_draw(a, b, ranked: Ranked) -> bool:
    """Arms that draw nothing stand for every draw."""
    draws = {name: sum(o.name == name for o in ranked.arms) for name in (a.name, b.name)}
    return a.draw == b.draw or 1 in draws.values()


def profiles(prompt: Prompt, ranked: Ranked) -> Iterator[dict]:
    """How much of a criterion's score over the candidates its best ones hold, mean over sites (Fig. 9's profiles, as a cumulative share)."""
    free = ~prompt.truth.protected
    many = int(free[0, 0, 0].sum())
    for o in ranked.orders:
        if o.staged is not None:
            continue  # two stages are no single score
        score = o.score.double().masked_fill(~free, 0.0).clamp(min=0).sort(-1, descending=True).values
        share = score.cumsum(-1) / score.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        for top in PROFILE:
            yield row("share", share[..., max(1, round(top * many)) - 1].mean(), top=top, **of_arm(o.arm))


def composed(model, prompt: Prompt, ranked: Ranked, keep: int, window: int) -> Iterator[dict]:
    """Share retained and enrichment of each class of tokens (Fig. 11), and what share of the prompt it is."""
    from ..compression import structural

    n = len(prompt.ids)
    made = classes(prompt.task, n, structural(model, prompt.ids.tolist()), window=window) | {MATCHES: matches(prompt.task, n)}
    kept = ranked.kept(keep)
    for name, found in composition(kept, made).items():
        for i, a in enumerate(ranked.arms):
            for metric, x in zip(("fraction", "enrichment"), found):
                value = float(x[:, i].mean())
                if value == value:
                    yield row(metric, value, cls=name, tokens=int(made[name].sum()), keep=keep, **of_arm(a))


def energies(model, prompt: Prompt, cost) -> Iterator[dict]:
    """Perturbation energy on the future's queries: per query head over all entries (Fig. 12), per KV head over the candidates."""
    from ..metrics.layer_maps import energy
    from ..oracle import _gram

    cache, truth = prompt.cache, prompt.truth
    by = truth.ahead.valid.double() / truth.ahead.valid.sum(-1, keepdim=True)
    free = truth.score.masked_fill(truth.protected, 0.0).sum(-1)
    for i, layer in enumerate(cache.geometry.kv_layers):
        held = cache.layers[layer]
        found = energy(truth.ahead.queries[layer].to(held.keys.device), held.keys, held.values, held.scaling, _gram(model, layer, cost, held.keys.device), weight=by, cost=cost)
        yield from (row("energy", v, layer=layer, head=h) for h, v in enumerate(found[0].tolist()))
        yield from (row("energy_free", v, layer=layer, head=h) for h, v in enumerate(free[i, 0].tolist()))


def plane(prompt: Prompt, layer: int, head: int, window: int) -> Iterator[dict]:
    """Two principal components of the unit-normalised queries of one layer and query head (Fig. 1a): window, continuations of the first draw, future."""
    from sklearn.decomposition import PCA

    ahead, found = prompt.truth.ahead, prompt.draws[min(prompt.draws)]
    sets = {"window": prompt.cache.layers[layer].queries[0, head, -window:], "continuations": found.queries[layer][0, :, head][found.valid[0]], "future": ahead.queries[layer][0, head][ahead.valid[0]]}
    points = {name: torch.nn.functional.normalize(x.double(), dim=-1).cpu() for name, x in sets.items()}
    fitted = PCA(2, svd_solver="full").fit(torch.cat(list(points.values())).numpy())
    for name, x in points.items():
        for k, pair in enumerate(fitted.transform(x.numpy())):
            for metric, value in zip(("component_1", "component_2"), pair):
                yield row(metric, value, sets=name, point=k, layer=layer, head=head)
    for metric, value in zip(("explained_1", "explained_2"), fitted.explained_variance_ratio_):
        yield row(metric, value, sets="all", layer=layer, head=head)
