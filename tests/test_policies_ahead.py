"""Policies that look ahead from a prompt's end against slow plain versions over a stock model with attention written out."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvprobe
import oracle
import tiny
from kvprobe import draws, lookahead
from kvprobe.compression import Engine, compress
from kvprobe.eviction_cache import EvictionCache
from kvprobe.inside.sites import rotate
from kvprobe.registry import make_policy
from kvprobe.types import Plan
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


# -- LAQ ------------------------------------------------------------------------------------------------------------


def unpooled(weights, window):
    """Attention with nothing at the protected entries of the voting window: they are no neighbours."""
    weights, own = np.array(weights), [p for p in HELD if p >= N - window]
    weights[..., own] = 0.0
    return weights


def written(brute, window, t, kernel=7, pooling="max", reduce="mean", group="mean", eos=()):
    """(tokens, layer -> queries [hq t d]): SnapKV by hand, then greedy steps that see what it kept."""
    hidden = {}
    for layer in (0, 1):
        score = grouped(unpooled(brute.prompt[layer]["weights"][:, -window:], window), kernel, pooling, reduce, group)
        hidden |= {(layer, h): set(range(N)) - set(best(score[h], KEEP, HELD)) for h in (0, 1)}
    tokens, logits, asked = [], brute.logits, {0: [], 1: []}
    for _ in range(t):
        tokens.append(int(logits.argmax()))
        logits, seen = brute.feed(tokens[-1:], hidden)
        for layer in asked:
            asked[layer].append(seen[layer]["query"][:, 0])
        if tokens[-1] in eos:
            break
    return tokens, {layer: np.stack(q, 1) for layer, q in asked.items()}


@pytest.mark.parametrize("name, options", [("laq", {}), ("laq", dict(released_mask=True)), ("laq_plus", {}), ("laq_plus", dict(released_mask=True, w2=8)), ("laq_plus", dict(reduce="sum", group="max")),
                                           ("laq", dict(kernel=3, pooling="average", group="sum")), ("laq", dict(t=1, kernel=1))], ids=str)
def test_laq(llama, ids, name, options):
    """Tokens, scores and kept sets; the first stage's SnapKV, its budget and its pins are written out, too."""
    options = OPTIONS[name] | options
    made, scores = run(llama, ids, name, rows=2, **options)
    of = {f.name: getattr(made.policy.inner, f.name) for f in dataclasses.fields(made.policy.inner)}
    rule = {k: of[k] for k in ("kernel", "pooling", "reduce", "group")}
    for b in range(2):
        brute = Brute(llama[1], ids[b, :N].tolist())
        tokens, asked = written(brute, of["window"], of["t"], **rule)
        assert made.future.tokens[b, 0].tolist() == tokens
        for layer in (0, 1):
            assert np.allclose(made.future.queries[layer][b, 0].numpy(), asked[layer], atol=1e-10)
            own = brute.prompt[layer]["query"][:, N - of["w2"] : N]
            last = [N - of["w2"] + j for j in range(of["w2"])] + [N - 1] * len(tokens)
            if of["released_mask"]:
                last = [N - len(last) + j for j in range(len(last))]
            want = grouped(unpooled(brute.votes(layer, np.concatenate([own, asked[layer]], 1), last), of["w2"]), **rule)
            assert np.allclose(scores[layer][b].numpy(), want, atol=1e-12)
            assert all(kept(made, b)[layer, h] == best(want[h], KEEP, HELD) for h in (0, 1))


def test_the_released_mask_hides_the_last_keys_only(llama, ids):
    """The last query sees everything, the one before it all but the last key, and so on: of one query nothing is hidden."""
    plain = dict(window=6, kernel=1, reduce="sum")
    one = [run(llama, ids, "laq", t=1, released_mask=flag, **plain)[1] for flag in (False, True)]
    assert all(torch.equal(one[0][layer], one[1][layer]) for layer in (0, 1))
    made, masked = run(llama, ids, "laq", t=3, released_mask=True, **plain)
    brute = Brute(llama[1], ids[0, :N].tolist())
    for layer in (0, 1):
        votes = brute.votes(layer, made.future.queries[layer][0, 0].numpy())
        only_last = votes[:, 2, N - 1].reshape(2, GROUP).mean(1)
        assert np.allclose(masked[layer][0, :, N - 1].numpy(), only_last, atol=1e-12)
        free = run(llama, ids, "laq", t=3, **plain)[1][layer]
        assert (free[0, :, : N - 2] < masked[layer][0, :, : N - 2]).all() and (free[0, :, N - 1] > masked[layer][0, :, N - 1]).all()


def test_laq_stops_at_an_end_of_text(llama, ids, monkeypatch):
    """The token that ends a text still asks; what stands behind it does not, in a row that others of the batch outlive."""
    whole = run(llama, ids, "laq", rows=2, **OPTIONS["laq"])[0].future.tokens[:, 0].tolist()
    ends = next(i for i in range(1, 4) if whole[0][i] not in whole[0][:i] + whole[1])
    monkeypatch.setattr(llama[0].model.generation_config, "eos_token_id", whole[0][ends])
    made, scores = run(llama, ids, "laq", rows=2, **OPTIONS["laq"])
    assert made.future.valid[:, 0].sum(-1).tolist() == [ends + 1, 5]
    brute = Brute(llama[1], ids[0, :N].tolist())
    tokens, asked = written(brute, 6, 5, eos=(whole[0][ends],))
    assert len(tokens) == ends + 1
    for layer in (0, 1):
        assert np.allclose(scores[layer][0].numpy(), grouped(brute.votes(layer, asked[layer]), kernel=7), atol=1e-12)


def test_laq_writes_on_what_snapkv_leaves(llama, ids):
    """Its tokens are those of a prompt compressed by SnapKV, the first from the whole prompt."""
    made, _ = run(llama, ids, "laq", **OPTIONS["laq"])
    snap = compress(llama[0], ids[:1, :N], policy="snapkv", keep=KEEP, protect_window=W, window=6, kernel=7, pooling="max")
    assert torch.equal(made.future.tokens[0, 0], snap.ask(max_new_tokens=5).tokens[0])


def test_a_stored_look_ahead_is_taken(llama, ids):
    first = compress(llama[0], ids[:2, :N], policy="laq", keep=KEEP, protect_window=W, **OPTIONS["laq"])
    again = compress(llama[0], ids[:2, :N], policy="laq", keep=KEEP, protect_window=W, future=first.future, **OPTIONS["laq"])
    assert torch.equal(first.cache.positions, again.cache.positions) and "lookahead" not in again.seconds


# -- DapQ-like ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(prefix=0, suffix=5, reduce="sum", group="max"), dict(prefix=3, suffix=0, kernel=5, pooling="average"), dict(prefix=45, suffix=50)], ids=str)
def test_dapq(llama, ids, options):
    """Synthetic tokens behind the prompt in one forward; more of them than the prompt has go round and round."""
    options = OPTIONS["dapq"] | options
    made, scores = run(llama, ids, "dapq", rows=2, **options)
    rule = {k: getattr(made.policy.inner, k) for k in ("kernel", "pooling", "reduce", "group")}
    for b in range(2):
        prompt = ids[b, :N].tolist()
        text = (prompt * 3)[: options["prefix"]] + ((prompt * 3)[-options["suffix"] :] if options["suffix"] else [])
        brute = Brute(llama[1], prompt)
        _, seen = brute.feed(text, {})
        for layer in (0, 1):
            want = grouped(brute.votes(layer, seen[layer]["query"]), **rule)
            assert np.allclose(scores[layer][b].numpy(), want, atol=1e-12)
            assert all(kept(made, b)[layer, h] == best(want[h], KEEP, HELD) for h in (0, 1))


# -- KVzip ----------------------------------------------------------------------------------------------------------


def repeated(brute, prompt, chunk, overlap, sinks):
    """layer -> [hkv n]: every chunk is asked for in words and repeated; the largest attention over sinks, chunk and what was fed."""
    words, out = Words(), {layer: np.zeros((2, len(prompt))) for layer in (0, 1)}
    for start in range(sinks, len(prompt), chunk):
        stop = min(len(prompt), start + chunk)
        asked = words("\n\nRepeat the previous context exactly.").input_ids if start == sinks else (
            words("\n\nRepeat the part of the previous context exactly, starting with").input_ids + prompt[max(0, start - overlap) : start])
        fed = asked + prompt[start:stop]
        _, seen = brute.feed(fed, {}, spare=True)
        for layer, x in seen.items():
            for h in range(4):
                keys = x["key"][h // GROUP]
                for t, q in enumerate(x["query"][h]):
                    shown = np.concatenate([keys[:sinks], keys[start:stop], keys[len(prompt) : len(prompt) + t + 1]])
                    a = softmax(shown @ q * len(q) ** -0.5)[sinks : sinks + stop - start]
                    out[layer][h // GROUP, start:stop] = np.maximum(out[layer][h // GROUP, start:stop], a)
    for x in out.values():
        x[:, :sinks] = 1
    return out


@pytest.mark.parametrize("options", [{}, dict(chunk=2048), dict(across="layer"), dict(across="head", n_sink=0), dict(n_sink=2, overlap=0), dict(chunk=7, overlap=30)], ids=str)
def test_kvzip(llama, ids, options):
    """Scores, and budgets: the best of all heads and layers together, of a layer's heads, or of each head; totals are exact."""
    options = OPTIONS["kvzip"] | options
    made, scores = run(llama, ids, "kvzip", rows=2, **options)
    across = options.get("across", "model")
    for b in range(2):
        prompt = ids[b, :N].tolist()
        want = repeated(Brute(llama[1], prompt), prompt, options["chunk"], options["overlap"], options.get("n_sink", 4))
        for layer in (0, 1):
            assert np.allclose(scores[layer][b].numpy(), want[layer], atol=1e-12)
        shares = {"model": [SITES], "layer": [SITES[:2], SITES[2:]], "head": [[site] for site in SITES]}[across]
        for sites in shares:
            free = sorted(((want[layer][h, p], p, -layer, -h) for layer, h in sites for p in range(N) if p not in HELD), reverse=True)
            stay = free[: len(sites) * (KEEP - len(HELD))]
            for layer, h in sites:
                assert kept(made, b)[layer, h] == sorted([*HELD, *(p for _, p, i, k in stay if (-i, -k) == (layer, h))])
            assert sum(len(kept(made, b)[site]) for site in sites) == len(sites) * KEEP
    assert across == "head" or len({len(x) for x in kept(made).values()}) > 1, "a test of budgets that differ"


def test_kvzip_never_holds_all_its_queries_at_once(llama, ids, monkeypatch):
    want = run(llama, ids, "kvzip", **OPTIONS["kvzip"])[1]
    monkeypatch.setattr(kvprobe.attention, "BLOCK_BYTES", 8 * 4 * 90 * 3)
    got = run(llama, ids, "kvzip", **OPTIONS["kvzip"])[1]
    assert all(torch.allclose(got[layer], want[layer], atol=1e-14) for layer in (0, 1))


def test_kvzip_asks_in_words(llama, ids):
    with pytest.raises(ValueError, match="kvzip.*has no tokenizer"):
        compress(llama[0], ids[:1, :N], policy="kvzip", keep=KEEP)


# -- GVote-like -----------------------------------------------------------------------------------------------------


def voted(brute, stock, ids, instance, of):
    """layer -> (votes [hkv n], mean attention [hkv n]): hidden states drawn from their Gaussian, projected, turned, asked."""
    hidden: dict = {}
    hooks = [layer.self_attn.q_proj.register_forward_pre_hook(lambda m, x, _i=i: hidden.__setitem__(_i, x[0][0])) for i, layer in enumerate(stock.model.layers)]
    with torch.no_grad():
        stock(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    out = {}
    for layer, x in hidden.items():
        x, first = x[-of.window :], max(0, len(ids) - of.window)
        votes, mean = np.zeros((2, len(ids))), np.zeros((2, len(ids)))
        key = draws.key(5, *(torch.tensor(v) for v in (instance, layer, -1, 0)))
        for s in range(of.samples):
            u = draws.uniform(key, s * 2**32 + torch.arange(first, len(ids)))
            h = x.mean(0) + torch.special.ndtri(u) @ (x - x.mean(0)) / (len(x) - 1) ** 0.5
            q = (stock.model.layers[layer].self_attn.q_proj(h)).view(1, 4, 1, 8)
            cos, sin = stock.model.rotary_emb(h[None, None], torch.tensor([[len(ids) + s]]))
            q = apply_rotary_pos_emb(q, q, cos, sin)[0][0].numpy()
            a = brute.votes(layer, q)[:, 0]
            for head in range(4):
                now = np.sort(brute.prompt[layer]["weights"][head, -1])[::-1]
                size = next(i for i in range(1, len(now) + 1) if now[:i].sum() >= of.nucleus)
                votes[head // GROUP, np.argsort(-a[head])[:size]] += 1
                mean[head // GROUP] += a[head] / (of.samples * GROUP)
        out[layer] = votes, mean
    return out


@pytest.mark.parametrize("options", [{}, dict(capped=True, nucleus=0.9), dict(window=500, samples=1), dict(nucleus=0.05)], ids=str)
def test_gvote(llama, ids, options):
    """What is kept is the union of the votes and the pins, at its own count, or no more than keep."""
    made, scores = run(llama, ids, "gvote", rows=2, **(OPTIONS["gvote"] | options))
    counts = set()
    for b in range(2):
        found = voted(Brute(llama[1], ids[b, :N].tolist()), llama[1], ids[b, :N].tolist(), b, made.policy.inner)
        for layer, (votes, mean) in found.items():
            assert np.allclose(scores[layer][b].numpy(), votes + mean / 2, atol=1e-5)  # the model's own rotary angles are float32
            for h in (0, 1):
                union = sorted({*HELD, *np.flatnonzero(votes[h]).tolist()})
                counts.add(len(union))
                if options.get("capped") and len(union) > KEEP:
                    union = best(votes[h] + mean[h] / 2, KEEP, HELD)
                assert kept(made, b)[layer, h] == union
    assert max(counts) > KEEP if options.get("capped") else min(counts) < N and len(counts) > 1


def test_gvote_draws_by_the_seed(llama, ids):
    a, b, c = (compress(llama[0], ids[:1, :N], policy="gvote", keep=KEEP, protect_window=W, seed=seed, **OPTIONS["gvote"]) for seed in (1, 1, 2))
    assert kept(a) == kept(b) != kept(c)


def test_gvote_draws_have_the_covariance_of_the_prompt(llama, ids):
    """Many draws: mean and covariance of the queries they were fitted to, before RoPE."""
    spy = []
    policy = make_policy("gvote", dict(samples=20000, window=N), llama[0])
    drawn = type(policy).drawn

    def note(self, view):
        spy.append((drawn(self, view), view))
        return spy[-1][0][:, :, :2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy), "drawn", note)
        compress(llama[0], ids[:1, :N], policy=policy, keep=KEEP, protect_window=W)
    got, view = spy[1]
    back = rotate(llama[0], 1, got, -(N + torch.arange(20000)).expand(1, 4, -1))[0]
    seen = rotate(llama[0], 1, view.queries, -torch.arange(N).expand(1, 4, -1))[0]
    for head in range(4):
        scale = float(torch.cov(seen[head].T).diagonal().mean())
        assert torch.allclose(back[head].mean(0), seen[head].mean(0), atol=0.05 * scale**0.5)
        assert torch.allclose(torch.cov(back[head].T), torch.cov(seen[head].T), atol=0.06 * scale)


# -- controls of LORE -----------------------------------------------------------------------------------------------


def test_controls_of_lore(llama, ids):
    """One continuation is lore's first, at weight 1; the window alone is lore with m = 0."""
    def of(name, **options):
        return kept(compress(llama[0], ids[:1, :N], policy=name, keep=KEEP, protect_window=W, seed=5, window=6, **options))

    single = of("single_continuation", t=3)
    assert single == of("lore", m=1, t=3) == of("lore", m=1, t=3, beta=0.0, gamma=0.0) != of("lore", m=2, t=3)
    assert of("window_only") == of("lore", m=0) == of("lore", lam_l=0.0) != single
    assert make_policy("single_continuation").chunk == make_policy("window_only").chunk == make_policy("lore").chunk


# -- what all of them owe -------------------------------------------------------------------------------------------

ALL = [*tiny.AHEAD, "lore", "single_continuation"]


def test_all_of_them_are_known():
    assert set(tiny.AHEAD) == {"dapq", "gvote", "kvzip", "laq", "laq_plus"} and set(ALL) == set(OPTIONS)


@pytest.mark.parametrize("name", ALL)
def test_padded_prompts_are_compressed_as_alone(llama, ids, name):
    """Rows of a batch, in any order, one of them too short to lose anything: sets, and what is written on."""
    rows = [ids[0, :N].tolist(), ids[1, : N - 9].tolist(), ids[2, :12].tolist(), ids[1, 3 : N - 17].tolist()]
    both = compress(spoken(llama), rows, policy=name, keep=KEEP, protect_window=W, seed=5, **OPTIONS[name])
    for b, row in enumerate(rows):
        one = compress(spoken(llama), [row], policy=name, keep=KEEP, protect_window=W, seed=5, instances=[b], **OPTIONS[name])
        assert kept(one) == kept(both, b)
    assert kept(both, 2) == {site: list(range(12)) for site in SITES}


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3.5", "qwen3"])
@pytest.mark.parametrize("name", ["laq_plus", "dapq", "kvzip", "gvote"])
def test_architectures(name, kind, ids):
    """Hybrids, with padding, which layers left to transformers must be told of: growing layers alone are scored, rows as alone."""
    model = dataclasses.replace(tiny.pair(kind)[0], tokenizer=Words())
    rows = [ids[0, :N].tolist(), ids[1, :20].tolist()]
    if kind == "gemma3":
        rows[1] = rows[1][:17]
    both = compress(model, rows, policy=name, keep=KEEP, protect_window=W, **OPTIONS[name])
    one = compress(model, rows[1:], policy=name, keep=KEEP, protect_window=W, instances=[1], **OPTIONS[name])
    assert kept(one) == kept(both, 1) and set(kept(one)) == {(layer, h) for layer in model.geometry.kv_layers for h in range(model.geometry.n_kv)}
    if name != "gvote":
        assert bool((both.kept.sum((0, 2)) == KEEP * both.kept[:, 0].numel()).all())


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_sampled_futures_of_padded_hybrids(kind, ids):
    """A prompt shorter than its neighbours' sliding window: padding is hidden from layers that are left to transformers."""
    model = tiny.pair(kind)[0]
    rows = [ids[0, :23].tolist(), ids[1, :5].tolist()]
    made, alone = (compress(model, r, policy="random", keep=1000, instances=i) for r, i in ((rows, [0, 1]), (rows[1:], [1])))
    both, one = (lookahead.sample(model, c.cache, c.logits, 2, 5, seed=1) for c in (made, alone))
    assert torch.equal(both.tokens[1], one.tokens[0])
    assert all(torch.allclose(both.queries[i][1], one.queries[i][0], atol=1e-9) for i in one.queries)


@pytest.mark.parametrize("name", [n for n in ALL if n != "gvote"])  # which looks at the prompt's own queries
def test_nothing_stays_in_the_prompts_cache(llama, ids, name, monkeypatch):
    """States, counts and positions are as before; whatever writes into the cache itself is caught."""
    model = spoken(llama)
    policy = make_policy(name, OPTIONS[name], model)
    cache = EvictionCache(model.model.config, model.geometry, Plan(KEEP, 0, schedule="prompt_end"), policy)
    cache.hold()
    with torch.no_grad():
        logits = model.model(ids[:2, :N], cache=cache, use_cache=True).logits[:, -1]
        engine = Engine(model, cache, logits, 5, tuple(map(tuple, ids[:2, :N].tolist())))
        before = [x.clone() for i in (0, 1) for x in (cache.layers[i].keys, cache.layers[i].values, cache.layers[i].queries if cache.window else cache.layers[i].keys)]
        policy.queries(engine)
        after = [x for i in (0, 1) for x in (cache.layers[i].keys, cache.layers[i].values, cache.layers[i].queries if cache.window else cache.layers[i].keys)]
        assert all(torch.equal(a, b) for a, b in zip(before, after)) and cache.seen == [N, N] and cache.keep_log.fired == ((), ()) and cache.holding
        step = lookahead.step

        def leaky(*given):
            out = step(*given)
            cache.layers[1].keys.mul_(1.0)
            return out

        monkeypatch.setattr(lookahead, "step", leaky)
        with pytest.raises(RuntimeError, match="has changed the prompt's cache"):
            policy.queries(engine)


@pytest.mark.parametrize("name", ALL)
def test_none_of_them_is_for_rounds(llama, ids, name):
    """By name and before any work, in a cache of its own and on a branch."""
    model = spoken(llama)
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        kvprobe.cache(model, policy=name, keep=KEEP, buffer=4, **OPTIONS[name])
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        kvprobe.generate(model, torch.arange(9), policy=name, keep=KEEP, buffer=4, **OPTIONS[name])
    prefix = kvprobe.cache(model, policy="snapkv", window=8, keep=KEEP, buffer=4)
    kvprobe.force(model, prefix, ids[:1, :10])
    with pytest.raises(ValueError, match=f"^{name} looks ahead"):
        prefix.branch(1, policy=make_policy(name, OPTIONS[name], model))


@pytest.mark.parametrize("name", [n for n in ALL if n != "gvote"])
def test_only_compress_lets_them_look_ahead(llama, ids, name):
    cache = kvprobe.cache(spoken(llama), policy=name, keep=KEEP, schedule="prompt_end", **OPTIONS[name])
    with pytest.raises(ValueError, match=f"{name} looks ahead from the whole prompt"):
        kvprobe.force(llama[0], cache, ids[:1, :N])


@pytest.mark.parametrize("name, bad, say", [
    ("laq", dict(t=0), "t=0"), ("laq", dict(w2=-1), "w2=-1"), ("laq", dict(kernel=4), "kernel=4"), ("laq", dict(window=0), "window=0"), ("laq", dict(window=-1), "window=-1"),
    ("dapq", dict(prefix=0, suffix=0), "prefix=0"), ("dapq", dict(suffix=-1), "suffix=-1"), ("dapq", dict(kernel=0), "kernel=0"),
    ("kvzip", dict(chunk=0), "chunk=0"), ("kvzip", dict(overlap=-1), "overlap=-1"), ("kvzip", dict(across="token"), "across"),
    ("gvote", dict(samples=0), "samples=0"), ("gvote", dict(nucleus=0.0), "nucleus=0.0"), ("gvote", dict(window=-1), "window=-1")])
def test_what_cannot_be_is_refused(name, bad, say):
    with pytest.raises(ValueError, match=say):
        make_policy(name, bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_finite(dtype, ids):
    model = dataclasses.replace(tiny.pair("llama", dtype)[0], tokenizer=Words())
    for name in tiny.AHEAD:
        made = compress(model, ids[:1, :N], policy=name, keep=KEEP, protect_window=W, **OPTIONS[name])
        assert all(set(HELD) <= set(held) for held in kept(made).values())
