"""Policies that ask with tokens behind the prompt, LAQ's and DapQ's, against slow plain versions over a stock model with attention written out."""

import dataclasses

import numpy as np
import pytest
import torch

from ahead import GROUP, HELD, KEEP, N, OPTIONS, W, Brute, best, grouped, kept, run
from kvprobe.compression import compress

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
