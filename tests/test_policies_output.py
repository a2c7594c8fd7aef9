"""Policies of keys alone and of attention outputs against slow plain versions: keydiff, knorm, caote, obcache."""

import dataclasses
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import attention
from kvprobe.policies import caote, keydiff, knorm, obcache
from kvprobe.types import CacheView
from oracle import Reference
from sidebyside import walk
from test_policies import BUFFER, KEEP, average, largest, reference_for, softmax

# -- keys alone -----------------------------------------------------------------------------------------------------


def differing(reference, layer, row, head, number, candidates):
    unit = [k / np.sqrt(np.sum(k * k)) for k in reference.keys_at(layer, row, head, candidates)]
    anchor = sum(unit) / len(unit)
    return {p: float(-(u @ anchor) / np.sqrt(anchor @ anchor)) for p, u in zip(candidates, unit)}


def small(reference, layer, row, head, number, candidates):
    return {p: float(-np.sqrt(np.sum(k * k))) for p, k in zip(candidates, reference.keys_at(layer, row, head, candidates))}


# -- the output of an attention head --------------------------------------------------------------------------------


def dropped(a, z, v):
    """CAOTE as it is meant: drop an entry, attend to the others again, measure how far the output moved."""
    out, costs = a @ v, []
    for j in range(len(a)):
        others = [i for i in range(len(a)) if i != j]
        rest = a[others].sum()
        costs.append(np.linalg.norm(out - (a[others] @ v[others] / rest if rest > 0 else 0)))
    return np.array(costs)


def from_mean(a, z, v):
    return np.array([a[j] / (1 - a[j]) * np.linalg.norm(v.mean(0) - v[j]) for j in range(len(a))])


def value(a, z, v):
    return np.array([a[j] ** 2 * (v[j] @ v[j]) for j in range(len(a))])


def key(a, z, v):
    out = a @ v
    return np.array([(a[j] * z[j]) ** 2 * ((v[j] - out) @ (v[j] - out)) for j in range(len(a))])


def joint(a, z, v):
    out = a @ v
    cross = np.array([2 * a[j] ** 2 * z[j] * (v[j] @ v[j] - v[j] @ out) for j in range(len(a))])
    return value(a, z, v) + key(a, z, v) + cross


def by_output(rule, window=BUFFER, reduce=np.mean, pool=lambda x: x):
    """`rule` per query head and query of the window over the candidates it sees, reduced over queries, pooled, summed over the group."""

    def scores(reference, layer, row, head, number, candidates):
        keys, queries = reference.keys_at(layer, row, head, candidates), reference.newest_queries(layer, row, window)
        columns = [reference.column[row][p] for p in candidates]
        values = reference.cache.layers[layer].values[row, head, columns].double().numpy()
        first, group = len(reference.column[row]) - len(queries), queries.shape[1] // reference.heads
        total = np.zeros(len(candidates))
        for h in range(head * group, (head + 1) * group):
            costs = np.zeros((len(queries), len(candidates)))
            for w, q in enumerate(queries):
                z = keys @ q[h] * reference.scaling
                hidden = np.array([p > first + w for p in candidates])
                costs[w] = rule(softmax(np.where(hidden, -np.inf, z)), z, values)
            total += pool(reduce(costs, axis=0))
        return dict(zip(candidates, total))

    return scores


RULES = {
    "keydiff": ("keydiff", {}, differing),
    "knorm": ("knorm", {}, small),
    "caote": ("caote", {}, by_output(dropped)),
    "fastcaote": ("caote", dict(centre="mean"), by_output(from_mean)),
    "caote, window 2": ("caote", dict(window=2), by_output(dropped, 2)),
    "obcache": ("obcache", {}, by_output(joint, reduce=np.sum)),
    "obcache value": ("obcache", dict(form="value"), by_output(value, reduce=np.sum)),
    "obcache key": ("obcache", dict(form="key"), by_output(key, reduce=np.sum)),
    "obcache, max 3": ("obcache", dict(kernel=3, window=9), by_output(joint, 9, np.sum, lambda x: largest(x, 3))),
    "obcache, average 5": ("obcache", dict(kernel=5, pooling="average", form="value"), by_output(value, reduce=np.sum, pool=lambda x: average(x, 5))),
}


@pytest.mark.parametrize("longest", [1, 64], ids=["tokens", "chunks"])
@pytest.mark.parametrize("rule", RULES)
def test_through_rounds(llama, ids, rule, longest):
    name, options, scores = RULES[rule]
    cache = kvprobe.cache(llama[0], policy=name, keep=KEEP, buffer=BUFFER, **options)
    assert walk(llama[0], cache, reference_for(llama, scores), ids[:2, :40], prefill=3, longest=longest) == 2 * 6


@pytest.mark.parametrize("rule", RULES)
def test_with_padding(llama, ids, rule):
    """Padding enters no mean, norm, softmax or vote."""
    name, options, scores = RULES[rule]
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, :3], mask[2, :8] = False, False
    cache = kvprobe.cache(llama[0], policy=name, keep=KEEP, buffer=BUFFER, **options)
    assert walk(llama[0], cache, reference_for(llama, scores), ids[:, :40], prefill=22, longest=2, mask=mask) > 12


def without_first(rule):
    """A window as long as the prompt: its first query sees only itself, which FastCAOTE's 1 / (1 - a) cannot take."""
    return lambda a, z, v: rule(a, z, v) if a.max() < 1 else np.where(a == 1, 1e30 * np.linalg.norm(v - v.mean(0), axis=1), 0)


AT_END = {"keydiff": differing, "knorm": small, "caote": by_output(dropped, 6), "obcache": by_output(joint, 6, np.sum)}


@pytest.mark.parametrize("name", AT_END)
def test_at_prompt_end(llama, ids, name):
    """The window's own entries are candidates here, and see one another causally."""
    options = dict(window=6) if name in ("caote", "obcache") else {}
    cache = kvprobe.cache(llama[0], policy=name, keep=14, schedule="prompt_end", **options)
    reference = Reference(llama[1], (0, 1), 2, 14, 0, AT_END[name], rounds=False)
    assert walk(llama[0], cache, reference, ids[:, :40], prefill=33, longest=3) == 3


@pytest.mark.parametrize("centre, rule", [("output", dropped), ("mean", without_first(from_mean))])
def test_a_query_that_sees_one_entry(llama, ids, centre, rule):
    """Its output has nothing left when that entry goes: the cost is the whole of it, and finite."""
    cache = kvprobe.cache(llama[0], policy="caote", keep=14, schedule="prompt_end", window=16, centre=centre)
    reference = Reference(llama[1], (0, 1), 2, 14, 0, by_output(rule, 16), rounds=False)
    assert walk(llama[0], cache, reference, ids[:, :20], prefill=16, longest=3) == 3


# -- by hand --------------------------------------------------------------------------------------------------------


def view(query, key, value, now=1000) -> CacheView:
    """Queries [hq w d] at the newest positions, keys and values [c d] of one KV head, at scaling 1."""
    c, w = len(key), query.shape[1]
    return CacheView(
        layer=0, positions=torch.arange(c)[None, None], keys=key[None, None], values=value[None, None], now=torch.tensor([now]), round=torch.tensor([0]),
        keep=1, buffer=w, scaling=1.0, queries=query[None], query_positions=torch.arange(now - w, now)[None], columns={}, rand=None, banned=None)


def toy(shift: float = 0.0, dtype=torch.float64) -> CacheView:
    """methods R6: attention .5 .3 .2 from logits ln a + shift."""
    a, v = torch.tensor([0.5, 0.3, 0.2], dtype=dtype), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=dtype)
    return view((a.log() + shift)[None, None], torch.eye(3, dtype=dtype), v)


R6 = {
    "caote": (caote.POLICY(), [0.583095, 0.368671, 0.145774]),
    "fastcaote": (caote.POLICY(centre="mean"), [0.745356, 0.319438, 0.117851]),
    "obc-v": (obcache.POLICY(form="value"), [0.25, 0.09, 0.08]),
    "obc-k": (obcache.POLICY(form="key"), [0.040839, 0.096540, 0.035228]),
    "obc-vk": (obcache.POLICY(), [0.186866, 0.078183, 0.012224]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", R6)
def test_the_reference_numbers(name, dtype):
    policy, want = R6[name]
    got = policy.score(toy(dtype=dtype))
    assert got.dtype == dtype and got[0, 0].tolist() == pytest.approx(want, abs=7e-7)


def test_keys_by_hand():
    key = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
    v = view(torch.zeros(1, 1, 2), key, key)
    assert knorm.POLICY().score(v)[0, 0].tolist() == [-5.0, -2.0, -1.0]
    anchor = np.array([0.6 + 0 - 1, 0.8 + 1 + 0]) / 3
    want = [-(np.array(u) @ anchor) / np.linalg.norm(anchor) for u in ([0.6, 0.8], [0, 1], [-1, 0])]
    assert keydiff.POLICY().score(v)[0, 0].tolist() == pytest.approx(want, abs=1e-6)
    assert torch.isfinite(keydiff.POLICY().score(view(torch.zeros(1, 1, 2), torch.zeros(3, 2), key))).all(), "keys of no direction"


def test_a_constant_on_all_logits():
    """It leaves attention, CAOTE and OBC-V alone and moves OBC-K and OBC-VK: raw logits are not shifted before scoring."""
    for name, (policy, _) in R6.items():
        before, after = policy.score(toy()), policy.score(toy(2.0))
        assert torch.allclose(before, after, atol=1e-14) == (name not in ("obc-k", "obc-vk")), name
    a, z, v = np.array([0.5, 0.3, 0.2]), np.log([0.5, 0.3, 0.2]) + 2, toy().values[0, 0].numpy()
    for form, rule in (("key", key), ("joint", joint)):
        assert obcache.POLICY(form=form).score(toy(2.0))[0, 0].tolist() == pytest.approx(rule(a, z, v).tolist(), abs=1e-14)


@pytest.mark.parametrize("gap", [1.0, 20.0, 45.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_entry_with_nearly_all_attention(gap, dtype):
    """1 - a and o - v both vanish as exp(-gap): against 400 digits."""
    z, offset = torch.tensor([0.3, gap, -0.2, 0.1], dtype=dtype), 4096.0  # values far from the origin: a common part must not cancel
    v = torch.tensor([[1.0, 0.5], [0.25, 0.0], [0.0, 1.5], [1.0, 1.0]], dtype=dtype) + offset
    with localcontext() as context:
        context.prec = 400
        e = [Decimal(x).exp() for x in z.tolist()]
        a = [x / sum(e) for x in e]
        values = [[Decimal(x) for x in row] for row in v.tolist()]
        out = [sum(w * row[i] for w, row in zip(a, values)) for i in range(2)]
        mean = [sum(row[i] for row in values) / 4 for i in range(2)]
        for centre, at in (("output", out), ("mean", mean)):
            want = [w / (1 - w) * sum((o - x) ** 2 for o, x in zip(at, row)).sqrt() for w, row in zip(a, values)]
            got = caote.POLICY(centre=centre).score(view(z[None, None], torch.eye(4, dtype=dtype), v))[0, 0].tolist()
            if centre == "mean" and 1 - a[1] < Decimal(1e-30):  # FastCAOTE's grows as exp(gap): capped to what float32 holds
                want[1] *= (1 - a[1]) * Decimal(1e30)
            rel = 1e-6 if dtype == torch.float32 else 1e-11
            assert got == pytest.approx([float(x) for x in want], rel=rel, abs=1e-40), centre


def test_blocks_of_queries_add_up(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    many = view(*(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 7, 4), (20, 4), (20, 4))))
    late = dataclasses.replace(many, query_positions=torch.arange(-2, 5)[None])  # two are padding, the others see what is before them
    policies = [caote.POLICY(), caote.POLICY(centre="mean"), *(obcache.POLICY(form=f, kernel=3) for f in ("value", "key", "joint"))]
    want = [p.score(x) for p in policies for x in (many, late)]
    monkeypatch.setattr(attention, "BLOCK_BYTES", 8 * 3 * 20 * 2)
    assert all(torch.allclose(w, p.score(x), rtol=1e-12) for w, (p, x) in zip(want, [(p, x) for p in policies for x in (many, late)]))
    assert all(w.isfinite().all() for w in want)


def test_an_empty_slot_changes_nothing():
    """Slots of position -1 may hold anything."""
    generator = torch.Generator().manual_seed(3)
    full = view(*(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 4), (9, 4), (9, 4))))
    junk = torch.full((1, 1, 2, 4), 1e6, dtype=torch.float64)
    padded = dataclasses.replace(full, keys=torch.cat([junk, full.keys], 2), values=torch.cat([junk, full.values], 2),
                                 positions=torch.cat([torch.full((1, 1, 2), -1), full.positions], 2))
    for policy in (keydiff.POLICY(), knorm.POLICY(), caote.POLICY(), caote.POLICY(centre="mean"), obcache.POLICY(kernel=3), obcache.POLICY(form="key")):
        got = policy.score(padded)
        assert got.isfinite().all() and torch.allclose(got[..., 2:], policy.score(full), rtol=1e-12), policy


def test_what_cannot_be_is_refused(llama):
    for name, options, say in (("caote", dict(window=0), "window=0"), ("obcache", dict(kernel=2), "kernel=2"), ("obcache", dict(form="vk"), "form=")):
        with pytest.raises(ValueError, match=say):
            kvprobe.cache(llama[0], policy=name, keep=8, **options)
    for name in ("caote", "obcache"):
        with pytest.raises(ValueError, match="window"):
            kvprobe.cache(llama[0], policy=name, keep=8, schedule="prompt_end")
