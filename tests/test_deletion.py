"""The cost of deleting an entry against deleting it: keys removed, weights normalised again, output projected, in float64."""

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvprobe import deletion, deletion_walks
from kvprobe.deletion import Cost, Psi
from kvprobe.policies import caote
from kvprobe.types import CacheView

B, HQ, HKV, Q, N, D, WIDTH, SCALING = 2, 4, 2, 5, 150, 6, 9, 0.7


def states(seed=0, dtype=torch.float64, b=B, hq=HQ, hkv=HKV, q=Q, n=N, d=D, width=WIDTH):
    """Queries, keys, values, W_O and a mask in which some keys are seen by nobody and one query sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((b, hq, q, d), (b, hkv, n, d), (b, hkv, n, d), (hq, d, width))]
    visible = torch.rand(b, hkv, q, n, generator=generator) < 0.8
    visible[:, 0, :, :3], visible[0, -1, min(2, q - 1)] = False, False
    return (*made, visible)


def without_each(z, v):
    """[n d]: the output when key i is really gone and the others' weights are made again; nothing where it was alone."""
    gone = torch.eye(len(z), dtype=torch.bool)
    return z.expand(len(z), -1).masked_fill(gone, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def by_removal(z, v, w):
    """[n] |W (o - o without i)|^2: eps = 0."""
    return ((z.softmax(-1) @ v - without_each(z, v)) @ w).square().sum(-1)


def by_formula(z, v, w, eps):
    """[n] eq. 5 and 6 as they stand."""
    a = z.softmax(-1)
    return ((a / (1 - a + eps))[:, None] * (v - a @ v) @ w).square().sum(-1)


def each(states, rule):
    """[b hq q n] of rule(logits, values, W_h) over the keys each query sees."""
    queries, keys, values, w, visible = states
    group = queries.shape[1] // keys.shape[1]
    e = torch.zeros(*queries.shape[:3], keys.shape[2], dtype=torch.float64)
    for b, h, q in itertools.product(*map(range, queries.shape[:3])):
        seen = visible[b, h // group, q].nonzero().squeeze(-1)
        if len(seen):
            z = keys[b, h // group, seen].double() @ queries[b, h, q].double() * SCALING
            e[b, h, q, seen] = rule(z, values[b, h // group, seen].double(), w[h].double())
    return e


RULES = {
    ("projected", "squared", 0.0): by_removal,
    ("projected", "magnitude", 0.0): lambda z, v, w: by_removal(z, v, w).sqrt(),
    ("projected", "squared", 1e-6): lambda z, v, w: by_formula(z, v, w, 1e-6),
    ("projected", "magnitude", 0.1): lambda z, v, w: by_formula(z, v, w, 0.1).sqrt(),
    ("unprojected", "squared", 0.0): lambda z, v, w: by_removal(z, v, torch.eye(len(v[0]), dtype=v.dtype)),
    ("unprojected", "magnitude", 1e-6): lambda z, v, w: by_formula(z, v, torch.eye(len(v[0]), dtype=v.dtype), 1e-6).sqrt(),
    ("attention", "squared", 1e-6): lambda z, v, w: z.softmax(-1),
    ("anchor", "squared", 1e-6): lambda z, v, w: z.softmax(-1) * (v @ (z.softmax(-1) @ v)),
}
GROUPS = {"mean": lambda x: x.mean(2), "sum": lambda x: x.sum(2), "max": lambda x: x.amax(2)}


@pytest.fixture(params=["one tile", "tiles", "tiles made twice"])
def tiling(request, monkeypatch):
    if request.param != "one tile":
        monkeypatch.setitem(deletion.BLOCK, "cpu", 1)
        monkeypatch.setattr(deletion_walks, "STRIP", 4)
    if request.param == "tiles made twice":
        monkeypatch.setattr(deletion_walks, "HELD_BYTES", 0)


@pytest.fixture(scope="module")
def expected():
    made = states()
    everything = (*made[:4], torch.ones_like(made[4]))
    return {(rule, masked): each(made if masked else everything, by) for rule, by in RULES.items() for masked in (True, False)}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all visible"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: " ".join(map(str, r)))
def test_leave_one_out(tiling, expected, rule, masked):
    queries, keys, values, w, visible = states()
    e, generator = expected[rule, masked], torch.Generator().manual_seed(5)
    visible, weight = visible if masked else None, torch.rand(B, Q, generator=generator, dtype=torch.float64)
    for group, reduce in GROUPS.items():
        cost = Cost(*rule, group)
        for given, by in ((None, torch.full((B, Q), 1 / Q, dtype=torch.float64)), (weight, weight), (weight[0], weight[:1].expand(B, Q))):
            want = reduce((e * by[:, None, :, None]).sum(2).unflatten(1, (HKV, -1)))
            got = deletion.weighted(queries, keys, values, SCALING, deletion.gram(w), visible, given, cost)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("psi", [Psi(), Psi(0.5, 0.3), Psi(1.0, 1e-9), Psi(1.0, 1.0)], ids=str)
@pytest.mark.parametrize("rule", [("projected", "squared", 1e-6), ("projected", "magnitude", 0.1), ("anchor", "squared", 1e-6)], ids=str)
def test_sets_of_queries(tiling, expected, rule, psi):
    """Rows may have sets of different sizes, down to none; the top ones are taken over queries and heads of the group together."""
    queries, keys, values, w, visible = states()
    sets = {"window": torch.tensor([True, True, True, False, False]), "all": torch.ones(Q, dtype=torch.bool),
            "first": torch.tensor([[False, False, False, True, True], [False, False, False, False, True]]), "late": torch.tensor([[False] * Q, [True] * Q])}
    for group in GROUPS:
        got = deletion.by_set(queries, keys, values, SCALING, sets, deletion.gram(w), visible, psi, Cost(*rule, group))
        for name, members in sets.items():
            want = torch.zeros(B, HKV, N, dtype=torch.float64)
            for b, h in itertools.product(range(B), range(HKV)):
                heads = [expected[rule, True][b, x, members.expand(B, Q)[b]] for x in (2 * h, 2 * h + 1)]

                def value(e):
                    count = math.ceil(round(psi.kappa * len(e), 6)) or 1
                    return psi.alpha * e.sort(0).values[-count:].sum(0) / count + (1 - psi.alpha) * e.sum(0) / len(e)

                if len(heads[0]):
                    want[b, h] = torch.maximum(*map(value, heads)) if group == "max" else value(torch.cat(heads)) * (2 if group == "sum" else 1)
            torch.testing.assert_close(got[name], want, rtol=1e-9, atol=1e-13)


def test_shares_of_sets_are_weights_of_queries():
    """Eq. 7 with psi = mean: one weighted sum."""
    queries, keys, values, w, _ = states()
    sets = {"window": torch.tensor([True, True, True, False, False]), "0": torch.tensor([[False] * 3 + [True, True], [False] * 4 + [True]])}
    shares = {"window": 1.0, "0": torch.tensor([0.25, 0.75])}
    parts = deletion.by_set(queries, keys, values, SCALING, sets, deletion.gram(w))
    got = deletion.weighted(queries, keys, values, SCALING, deletion.gram(w), weight=deletion.per_query(sets, shares))
    torch.testing.assert_close(got, parts["window"] + shares["0"][:, None, None] * parts["0"], rtol=1e-10, atol=1e-14)


# -- numbers known beforehand ---------------------------------------------------------------------------------------


def toy(dtype=torch.float64):
    """methods R6: attention .5 .3 .2; queries [1 1 1 3], keys, values [1 1 3 2]."""
    a, v = torch.tensor([0.5, 0.3, 0.2], dtype=dtype), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=dtype)
    return a.log()[None, None, None], torch.eye(3, dtype=dtype)[None, None], v[None, None]


R6 = {
    Cost("projected", eps=0): [0.61, 0.405918, 0.038125],
    Cost("unprojected", "magnitude", eps=0): [0.583095, 0.368671, 0.145774],
    Cost("attention"): [0.5, 0.3, 0.2],
    Cost("anchor"): [0.35, 0.15, 0.24],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cost", R6, ids=lambda c: c.objective)
def test_the_reference_numbers(cost, dtype):
    w = torch.diag(torch.tensor([2.0, 1.0], dtype=dtype))[None]
    got = deletion.weighted(*toy(dtype), 1.0, deletion.gram(w), cost=cost)
    assert got.dtype == dtype and got[0, 0].tolist() == pytest.approx(R6[cost], abs=6e-7)


def test_anchor_adds_up_to_the_output():
    """methods R7: sum over entries of a <o, v> is |o|^2, per query and head."""
    queries, keys, values, _, _ = states()
    got = deletion.weighted(queries, keys, values, SCALING, cost=Cost("anchor", group="sum"), weight=torch.ones(Q)).sum(-1)
    out = ((queries @ keys.repeat_interleave(2, 1).mT * SCALING).softmax(-1) @ values.repeat_interleave(2, 1)).square().sum((-1, -2))
    torch.testing.assert_close(got, out.unflatten(1, (HKV, 2)).sum(2))


def test_unprojected_is_caote():
    """methods R17, against the policy of that name."""
    queries, keys, values, _, _ = states(q=1, b=1)
    view = dict(layer=0, positions=torch.arange(N).expand(1, HKV, N), keys=keys, values=values, now=None, round=None, keep=1, buffer=1, scaling=SCALING, queries=queries,
                query_positions=torch.tensor([[N]]), columns={}, rand=None, banned=None)
    want = caote.POLICY().score(CacheView(**view))
    torch.testing.assert_close(deletion.weighted(queries, keys, values, SCALING, cost=Cost("unprojected", "magnitude", 0.0, "sum")), want)


def test_gram_follows_the_convention_of_head_weights():
    """A head's output z adds z @ W_O[h]."""
    w, z = states()[3], torch.randn(HQ, D, dtype=torch.float64)
    torch.testing.assert_close(torch.einsum("hd,hde,he->h", z, deletion.gram(w), z), torch.stack([(z[h] @ w[h]).square().sum() for h in range(HQ)]))
    assert deletion.gram(w.bfloat16()).dtype == torch.float32


# -- precision ------------------------------------------------------------------------------------------------------


def with_sink(gap, n=700, d=32, hq=2, width=48):
    """States in float32, for a scaling of 0.3, whose first key takes all but exp(-gap) of the attention of the median query."""
    queries, keys, values, w, _ = states(3, torch.float32, 1, hq, 1, 8, n, d, width)
    queries[..., 0], keys[..., 0], keys[:, :, 0] = 4.0, 0.0, 0.0
    others = (queries @ keys[:, :, 1:].mT * 0.3).logsumexp(-1).median()
    keys[:, :, 0, 0] = (others + gap) / 4 / 0.3
    return queries, keys, values, w


@pytest.mark.parametrize("rule", [("squared", 1e-6), ("magnitude", 1e-6), ("squared", 0.0)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 64.0])
def test_float32_at_a_sink(rule, offset, tiling):
    """Relative error under 1e-4 for every entry, the sink too, where 1 - a is 2e-4; also for values far from the origin."""
    queries, keys, values, w = with_sink(8.5)
    values = values + offset
    cost = Cost("projected", *rule)
    wide = [x.double() for x in (queries, keys, values)]
    rest = 1 - (wide[0] @ wide[1].mT * 0.3).softmax(-1)[..., 0]
    assert 1.9e-4 < rest.median() < 2.1e-4
    root = torch.sqrt if cost.form == "magnitude" else lambda x: x
    want = each((*wide, w.double(), torch.ones(1, 1, 8, 700, dtype=torch.bool)), lambda z, v, w: root(by_formula(z / SCALING * 0.3, v, w, cost.eps))).mean(2)
    got = deletion.weighted(queries, keys, values, 0.3, deletion.gram(w), cost=cost)
    assert got.dtype == torch.float32
    assert float(((got.double() - want.mean(1, keepdim=True)) / want.mean(1, keepdim=True)).abs().max()) < 1e-4


@pytest.mark.parametrize("gap", [1.0, 20.0, 45.0])
def test_all_attention_on_one_entry_against_400_digits(gap):
    """1 - a and o - v vanish as exp(-gap)."""
    z = torch.tensor([0.25, gap, -0.25, 0.125])
    v = torch.tensor([[1.0, 0.5], [0.25, 0.0], [0.0, 1.5], [1.0, 1.0]])
    with localcontext() as context:
        context.prec = 400
        e = [Decimal(x).exp() for x in z.tolist()]
        a = [x / sum(e) for x in e]
        out = [sum(w * Decimal(row[i]) for w, row in zip(a, v.tolist())) for i in range(2)]
        want = [float((w / (1 - w) * (o - Decimal(x))) ** 2) for w, row in zip(a, v.tolist()) for o, x in zip(out, row)]
    got = deletion.weighted(z[None, None, None], torch.eye(4)[None, None], v[None, None], 1.0, torch.eye(2)[None], cost=Cost(eps=0.0))[0, 0]
    assert got.tolist() == pytest.approx([want[2 * i] + want[2 * i + 1] for i in range(4)], rel=2e-6, abs=1e-37)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_states(dtype):
    """Scored in float32, hence as their float64 copies are."""
    queries, keys, values, w = (x.to(dtype) for x in with_sink(25.0))
    got = deletion.weighted(queries, keys, values, 0.3, deletion.gram(w))
    assert got.dtype == torch.float32 and bool(got.isfinite().all())
    want = deletion.weighted(queries.double(), keys.double(), values.double(), 0.3, deletion.gram(w.double()))
    assert float(((got - want) / want).abs().max()) < 1e-3


# -- edges ----------------------------------------------------------------------------------------------------------


def test_an_entry_alone():
    """Nothing by the formula; at eps 0, where that is 0 / 0, the whole of |W v|^2."""
    queries, keys, values, w, _ = states(n=1)
    assert not deletion.weighted(queries, keys, values, SCALING, deletion.gram(w)).any()
    want = torch.einsum("bhid,hde->bhie", values.repeat_interleave(2, 1), w).square().sum(-1).unflatten(1, (HKV, 2)).mean(2)
    torch.testing.assert_close(deletion.weighted(queries, keys, values, SCALING, deletion.gram(w), cost=Cost(eps=0.0)), want)


def test_equal_keys_share_the_top(tiling):
    """Of two top entries either may be the one left out."""
    queries, keys, values, w, _ = states()
    keys[:, :, 140] = keys[:, :, 3] = queries.mean(2)[:, ::2] * 5
    want = each((queries, keys, values, w, torch.ones(B, HKV, Q, N, dtype=torch.bool)), by_removal).mean(2).unflatten(1, (HKV, 2)).mean(2)
    torch.testing.assert_close(deletion.weighted(queries, keys, values, SCALING, deletion.gram(w), cost=Cost(eps=0.0)), want, rtol=1e-8, atol=1e-13)


def test_hidden_slots_may_hold_anything(tiling):
    """Padding on the left of one row, of junk that is not even a number."""
    queries, keys, values, w, _ = states()
    keys[1, :, :40], values[1, :, :40] = torch.nan, torch.inf
    visible = torch.ones(B, 1, 1, N, dtype=torch.bool)
    visible[1, :, :, :40] = False
    for cost in (Cost(), Cost(form="magnitude"), Cost("anchor"), Cost("attention")):
        got = deletion.weighted(queries, keys, values, SCALING, deletion.gram(w), visible, cost=cost)
        alone = deletion.weighted(queries[1:], keys[1:, :, 40:], values[1:, :, 40:], SCALING, deletion.gram(w), cost=cost)
        torch.testing.assert_close(got[1:], torch.nn.functional.pad(alone, (40, 0)), rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(got[:1], deletion.weighted(queries[:1], keys[:1], values[:1], SCALING, deletion.gram(w), cost=cost))


class Spy(TorchDispatchMode):
    """The most elements of any tensor made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        fresh = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.most = max([self.most, *(x.untyped_storage().nbytes() // x.element_size() for x in fresh)])
        return out


@pytest.mark.parametrize("cost", [Cost(), Cost(form="magnitude"), Cost("unprojected"), Cost("anchor", group="max")], ids=str)
def test_memory_is_bounded_by_a_tile(cost, monkeypatch):
    """Nothing of size queries x keys, let alone x head size or x model width, once the keys exceed a tile."""
    q, n, d, width = 16, 1024, 16, 64
    queries, keys, values, w, _ = states(1, torch.float32, 1, 4, 2, q, n, d, width)
    monkeypatch.setitem(deletion.BLOCK, "cpu", 2 * q * 64)
    gram = deletion.gram(w)
    with Spy() as spy:
        deletion.weighted(queries, keys, values, SCALING, gram, cost=cost)
        deletion.by_set(queries, keys, values, SCALING, {"all": torch.ones(q, dtype=torch.bool)}, gram, psi=Psi(0.5), cost=cost)
    own = 2 * n * d  # keys and values themselves
    assert spy.most <= max(2 * q * 64, own) < q * n * 4 < q * n * d < q * n * width
    monkeypatch.setitem(deletion.BLOCK, "cpu", 2**19)
    with Spy() as spy:
        deletion.weighted(queries, keys, values, SCALING, gram, cost=cost)
    assert spy.most <= 2**19


def test_what_cannot_be_is_refused():
    queries, keys, values, w, _ = states()
    for make, say in ((lambda: Cost("projektion"), "objective='projektion'"), (lambda: Cost(form="cubed"), "form="), (lambda: Cost(group="min"), "group="), (lambda: Cost(eps=-1), "eps=-1"),
                      (lambda: Psi(2), "alpha=2"), (lambda: Psi(0.5, 0), "kappa=0"), (lambda: deletion.weighted(queries, keys, values, 1.0), "gram"),
                      (lambda: deletion.weighted(queries, keys, values, 1.0, deletion.gram(w)[:2]), "gram")):
        with pytest.raises(ValueError, match=say):
            make()


@pytest.mark.parametrize("tile", [64, 2**19])
def test_a_mask_of_the_last_entries_says_the_rest_is_seen(tile, monkeypatch):
    """At prompt end a window's queries hide a few of the newest from each other and nothing else."""
    monkeypatch.setitem(deletion.BLOCK, "cpu", tile)
    g = torch.Generator().manual_seed(3)
    q, k, v, w = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 4, 6, 8), (2, 2, 150, 8), (2, 2, 150, 8), (4, 8, 12)))
    whole = torch.arange(150)[None, :] <= torch.arange(144, 150)[:, None]
    for cost in (deletion.Cost(), deletion.Cost("anchor"), deletion.Cost(form="magnitude"), deletion.Cost(group="max")):
        want, got = (deletion.weighted(q, k, v, 0.4, deletion.gram(w), m[None, None], None, cost) for m in (whole, whole[:, -6:]))
        assert torch.allclose(want, got, atol=1e-13)
        want, got = (deletion.weighted(q[:, :, -2:], k, v, 0.4, deletion.gram(w), m[None, None, -2:], None, cost) for m in (whole, whole[:, -1:]))
        assert torch.allclose(want, got, atol=1e-13), "one column is the last entry's, not everybody's"
