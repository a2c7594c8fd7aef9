"""Prompt-time eviction end to end: counts, protection, equality with masks on the full cache, questions asked of one cache."""

from types import SimpleNamespace

import pytest
import torch

import kvprobe
import tiny
from kvprobe import compression as module
from kvprobe.compression import compress, structural

N = 40


def kept(made, b=0):
    """{(layer, head): positions} of a row."""
    positions = made.cache.positions
    return {(layer, h): [p for p in positions[i, b, h].tolist() if p >= 0] for i, layer in enumerate(made.cache.geometry.kv_layers) for h in range(positions.shape[2])}


@torch.no_grad()
def masked(model, ids, sets, question):
    """Logits [q v] of a question on the full cache where every KV head sees its kept set only: an independent path."""
    hidden = {site: sorted(set(range(N)) - set(held)) for site, held in sets.items()}
    text = torch.cat([ids[:N], question])[None]
    from transformers import DynamicCache

    cache = DynamicCache(config=model.model.config)
    model.model(input_ids=text[:, :N], cache=cache, use_cache=True)
    return kvprobe.intervene(model, text[:, N:], kvprobe.head_masks(hidden), cache=cache, all_logits=True).logits[0]


@pytest.mark.parametrize("policy, options", [("random", {}), ("snapkv", dict(window=8)), ("keydiff", {}), ("h2o", {})])
def test_counts_and_protection(llama, ids, policy, options):
    """Exactly B entries per head, the first and the newest among them."""
    made = compress(llama[0], ids[:2, :N], policy=policy, keep=18, protect_window=6, **options)
    assert bool((made.kept == 18).all()) and made.keep_log.fired == ((N,), (N,))
    for b in range(2):
        for held in kept(made, b).values():
            assert held == sorted(held) and held[0] == 0 and held[-6:] == list(range(N - 6, N))
    assert list(made.seconds) == ["prefill", "scoring", "gather"]


@pytest.mark.parametrize("policy", ["random", "keydiff"])
def test_equals_masks_on_the_full_cache(llama, ids, policy):
    """Forced and greedy text after compression == the same keep-sets imposed on the full cache, in float64."""
    made = compress(llama[0], ids[:1, :N], policy=policy, keep=14, protect_window=4)
    question = ids[1, :5]
    want = masked(llama[0], ids[0], kept(made), question)
    branch = made.cache.branch(1)
    with torch.no_grad():
        got = llama[0].model(input_ids=question[None], position_ids=torch.arange(N, N + 5)[None], cache=branch, use_cache=True).logits[0]
    assert torch.allclose(got, want, atol=1e-10)


def test_everything_kept_is_the_full_cache(llama, ids):
    """B >= n: bit for bit, and nothing is looked ahead at."""
    made = compress(llama[0], ids[:2, :N], policy="random", keep=N)
    want = llama[1].generate(ids[:2, :N], max_new_tokens=8, do_sample=False)[:, N:]
    assert torch.equal(torch.stack(made.ask(max_new_tokens=8).tokens), want)
    with torch.no_grad():
        assert torch.equal(made.logits, llama[1](ids[:2, :N], logits_to_keep=1).logits[:, -1])
    assert made.keep_log.fired == ((), ())


@pytest.mark.parametrize("length", [1, 5, 12, 13, 40])
def test_prompt_lengths(llama, ids, length):
    """One token, shorter than the window, of B, of B + 1."""
    made = compress(llama[0], ids[:1, :length], policy="snapkv", window=8, keep=12, protect_window=8)
    assert bool((made.kept == min(length, 12)).all())
    made.ask(max_new_tokens=3)


def test_questions_leave_the_cache_as_it_is(llama, ids):
    made = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4)
    first = made.ask(max_new_tokens=5).tokens[0]
    made.ask(max_new_tokens=9, temperature=1.0, seed=4)
    assert torch.equal(made.ask(max_new_tokens=5).tokens[0], first) and made.cache.seen == [N]


def test_model_generate_goes_on(llama, ids):
    """transformers' own generate continues from a branch."""
    made = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4)
    mine = made.ask(max_new_tokens=6).tokens[0]
    text = torch.cat([ids[:1, :N], mine[None, :1]], dim=1)
    theirs = llama[0].model.generate(text, attention_mask=torch.ones_like(text), cache=made.cache.branch(1), max_new_tokens=5, do_sample=False)
    assert torch.equal(theirs[0, N:], mine)


def test_unequal_prompts(llama, ids):
    """Rows of a padded batch are compressed and go on as alone."""
    rows = [ids[0, :N].tolist(), ids[1, : N - 9].tolist()]
    both = compress(llama[0], rows, policy="random", keep=14, protect_window=4)
    for b, row in enumerate(rows):
        one = compress(llama[0], [row], policy="random", keep=14, protect_window=4, instances=[b])
        assert kept(one) == kept(both, b)
        assert torch.equal(one.ask(max_new_tokens=6).tokens[0], both.ask(max_new_tokens=6).tokens[b])


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5", "gemma4", "qwen3_next", "ministral3", "phi3", "qwen3"])
@pytest.mark.parametrize("policy, options", [("random", {}), ("lore", dict(m=2, t=3, window=4)), ("adakv", {})])
def test_models(kind, policy, options, ids):
    """Only growing layers are evicted, the others are named as skipped; compressed == masked on the full cache."""
    exact = {"qwen3.5": 1e-5, "qwen3_next": 1e-3}.get(kind, 1e-10)  # linear layers compute in float32; mixtures of experts know no float64
    model, _ = tiny.pair(kind, torch.float32 if kind == "qwen3_next" else torch.float64)
    made = compress(model, ids[:1, :N], policy=policy, keep=14, protect_window=4, **options)
    layers = model.geometry.kv_layers
    assert bool((made.kept.sum(-1) == 28).all()) and made.kept.shape[0] == len(layers) and set(model.geometry.skipped) == set(range(model.geometry.n_layers)) - set(layers)
    question = ids[1, :5]
    want = masked(model, ids[0], kept(made), question)
    with torch.no_grad():
        got = model.model(input_ids=question[None], position_ids=torch.arange(N, N + 5)[None], cache=made.cache.branch(1), use_cache=True).logits[0]
    assert float((got - want).abs().max()) < exact
    assert len(made.ask(max_new_tokens=4).tokens[0]) == 4


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3.5", "gemma4"])
@pytest.mark.parametrize("policy, keep", [("adakv", 14), ("random", 60)])
def test_saved_and_loaded(kind, policy, keep, ids, tmp_path):
    """In another process it would go on as it would have here: rows of different lengths, ragged heads, layers of every kind."""
    model, _ = tiny.pair(kind)
    made = compress(model, [ids[0, :N].tolist(), ids[1, : N - 7].tolist()], policy=policy, keep=keep, protect_window=4, seed=3)
    made.save(tmp_path / "x.safetensors")
    again = kvprobe.Compressed.load(tiny.pair(kind)[0], tmp_path / "x.safetensors")
    assert again.prompts == made.prompts and again.policy == made.policy and again.seconds == made.seconds and list(tmp_path.iterdir()) == [tmp_path / "x.safetensors"]
    assert [kept(again, b) for b in (0, 1)] == [kept(made, b) for b in (0, 1)] and (again.keep_log.died == made.keep_log.died).all() and again.keep_log.fired == made.keep_log.fired
    a, z = (m.ask(max_new_tokens=8, ignore_eos=True) for m in (made, again))
    assert all(torch.equal(x, y) for x, y in zip(a.tokens, z.tokens)) and all(torch.equal(x, y) for x, y in zip(a.logp, z.logp))
    question = ids[2:, :5].expand(2, -1)
    mask = torch.cat([made.mask, torch.ones(2, 5, dtype=torch.long)], 1)
    with torch.no_grad():
        logits = [model.model(input_ids=question, attention_mask=mask, position_ids=torch.tensor([[N], [N - 7]]) + torch.arange(5), cache=m.cache.branch(1), use_cache=True).logits for m in (made, again)]
    assert torch.equal(*logits)


def test_generate_goes_on(llama, ids):
    """kvprobe.generate takes a compressed prompt in the model's place."""
    made = compress(llama[0], ids[:2, :N], policy="random", keep=14, protect_window=4)
    a, z = made.ask(max_new_tokens=6, temperature=1.0, seed=3), kvprobe.generate(made, "", max_new_tokens=6, temperature=1.0, seed=3)
    assert all(torch.equal(x, y) for x, y in zip(a.tokens, z.tokens))
    with pytest.raises(ValueError, match="compressed already"):
        kvprobe.generate(made, "", keep=20)


def test_what_cannot_be_loaded_is_refused(llama, ids, tmp_path):
    path = tmp_path / "x.safetensors"
    made = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4)
    made.save(path)
    with pytest.raises(ValueError, match="was made with LlamaForCausalLM .fingerprint"):
        kvprobe.Compressed.load(tiny.pair("llama", seed=1)[0], path)
    (tmp_path / "y").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no compressed prompt"):
        kvprobe.Compressed.load(llama[0], tmp_path / "y")
    kvprobe.force(llama[0], made.cache, ids[1:2, :3])
    with pytest.raises(ValueError, match="read on behind its prompt"):
        made.save(path)


def test_the_text_tower_of_an_image_model(ids, tmp_path):
    """Ministral 3's text decoder comes inside an image model: loaded from a folder, compressed, asked; the tower alone gives the same."""
    import transformers

    text = transformers.Ministral3Config(**(tiny.BASE | dict(sliding_window=None)))
    seeing = dict(model_type="pixtral", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, head_dim=8, image_size=28, patch_size=14)
    whole = transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text.to_dict() | dict(model_type="ministral3"), vision_config=seeing, image_token_index=0))
    whole.save_pretrained(tmp_path)
    alone = transformers.Ministral3ForCausalLM(text)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    both = [compress(m, ids[:1, :N].clamp(min=1), policy="lore", keep=18, protect_window=6, window=6, m=2, t=3) for m in (kvprobe.load(str(tmp_path)), kvprobe.prepare(alone))]
    assert both[0].model.geometry.kv_layers == (0, 1) and kept(both[0]) == kept(both[1])
    assert torch.equal(both[0].ask(max_new_tokens=5).tokens[0], both[1].ask(max_new_tokens=5).tokens[0])


class Words:
    """A tokenizer whose ids 3 and 9 are structural."""

    all_special_ids = [3]
    added_tokens_decoder = {9: "<tool>"}


def test_structural_tokens():
    model = SimpleNamespace(tokenizer=Words())
    assert structural(model, [3, 1, 9, 3, 2, 9]) == [(0, 1), (2, 4), (5, 6)]
    assert structural(model, [1, 2]) == [] and structural(SimpleNamespace(tokenizer=None), [3]) == []


def test_structural_tokens_stay(llama, ids, monkeypatch):
    monkeypatch.setattr(module, "structural", lambda model, row: [(7, 9), (20, 21)])
    made = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4)
    assert all({0, 7, 8, 20} <= set(held) for held in kept(made).values()) and bool((made.kept == 14).all())
    free = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4, pins_free=True)
    assert bool((free.kept == 14 + 8).all())


def test_protected_entries_that_overlap_are_counted_once(llama, ids, monkeypatch):
    """A chat's last delimiters stand in the protected window: what fits is refused by no sum."""
    monkeypatch.setattr(module, "structural", lambda model, row: [(7, 9), (N - 4, N - 1)])
    made = compress(llama[0], ids[:1, :N], policy="random", keep=7, protect_window=4)
    assert all(set(held) == {0, 7, 8, *range(N - 4, N)} for held in kept(made).values())
    with pytest.raises(ValueError, match="keep=6 cannot hold 7 pinned"):
        compress(llama[0], ids[:1, :N], policy="random", keep=6, protect_window=4)


@pytest.mark.model
def test_seen_and_unseen():
    """A question that scoring may see is inside the cut; one that it must not see cannot move what is kept."""
    lm = kvprobe.load("smollm2")
    text, question = "The key of the red box is 4821. " * 6, "\nWhat is the key of the red box?"
    unseen = compress(lm, text, policy="snapkv", window=8, keep=40, protect_window=8)
    seen = compress(lm, text, question=question, policy="snapkv", window=8, keep=40, protect_window=8)
    assert len(seen.prompts[0]) > len(unseen.prompts[0]) and seen.prompts[0][: len(unseen.prompts[0])] == unseen.prompts[0]
    assert len(unseen.ask(question, max_new_tokens=4, ignore_eos=True).tokens[0]) == len(seen.ask(max_new_tokens=4, ignore_eos=True).tokens[0]) == 4
    assert kept(unseen) == kept(compress(lm, text, policy="snapkv", window=8, keep=40, protect_window=8))


@pytest.mark.parametrize("bad, say", [
    (dict(keep=4, protect_window=8), "cannot hold"), (dict(keep=None), "keep"), (dict(keep=10, keep_ratio=0.5), "not both"), (dict(keep=10, policy="nonsense"), "unknown"),
    (dict(keep=10, question="?"), "texts"), (dict(keep=10, positions="x"), "positions"),
    (dict(keep=10, pins=[kvprobe.SpanPin(N - 2, N, frozenset({(0, 0)}))]), f"two pins disagree about position {N - 2} "), (dict(keep=10, pins=[kvprobe.PromptPin()]), f"cannot hold {N}")])
def test_refused_before_any_work(llama, ids, bad, say, monkeypatch):
    monkeypatch.setattr(llama[0].model, "forward", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(ValueError, match=say):
        compress(llama[0], ids[:1, :N], **(dict(policy="random", protect_window=4) | bad))


@pytest.mark.parametrize("policy", ["snapkv", "caote", "vase", "rkv"])
def test_the_protected_window_votes_where_a_policy_speaks_of_the_buffers(llama, ids, policy):
    """Decode-time policies at prompt end: window=-1 has no buffer to mean."""
    a, z = (compress(llama[0], ids[:2, :N], policy=policy, keep=14, protect_window=6, **extra) for extra in ({}, dict(window=6)))
    assert a.policy.window == 6 and kept(a) == kept(z)
    assert compress(llama[0], ids[:1, :N], policy=policy, keep=14, protect_window=0).policy.window == 32


def test_questions_are_checked(llama, ids):
    made = compress(llama[0], ids[:2, :N], policy="random", keep=14, protect_window=4)
    with pytest.raises(ValueError, match="3 questions for 2 prompts"):
        made.ask(["a", "b", "c"])


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "rkv", "criticalkv", "lore"])
def test_a_prompt_shorter_than_the_window_that_votes(llama, ids, policy):
    """B04: 17 tokens under a window of 64: what the 17 queries say, and nothing is evicted where nothing must be."""
    extra = dict(m=0) if policy == "lore" else {}
    made, plain = (compress(llama[0], ids[:1, :17], policy=policy, keep=10, protect_window=4, window=w, **extra) for w in (64, 17))
    assert kept(made) == kept(plain) and int(made.kept.sum()) == 40
    assert bool((compress(llama[0], ids[:1, :17], policy=policy, keep=20, protect_window=4, window=64, **extra).kept == 17).all())


def test_a_ratio_is_a_count(llama, ids):
    """K01: both forms give the same, and the count is on record."""
    text = torch.cat([ids.flatten(), ids[0, :16]])[None]
    a, z = (compress(llama[0], text, policy="keydiff", protect_window=4, **how) for how in (dict(keep=64), dict(keep_ratio=0.25)))
    assert text.shape[1] == 256 and kept(a) == kept(z) and a.cache.plan.keep == z.cache.plan.keep == 64


# -- what a sceptic found -------------------------------------------------------------------------------------------


def lore(llama, prompts, **options):
    return compress(llama[0], prompts, policy="lore", keep=18, protect_window=6, **(dict(window=6, m=3, t=4) | options))


@pytest.mark.parametrize("options", [dict(beta=0.0, gamma=0.0), dict(m=1), dict(t=1), dict(drop_worst=2), dict(m=0)], ids=str)
def test_a_result_given_back_is_weighed_anew(llama, ids, options):
    """The same as the policy's own draw: the look ahead is given, not what another policy made of it."""
    first, own = lore(llama, ids[:2, :N]), lore(llama, ids[:2, :N], **options)
    for future in (first.future, first.future.lookahead):
        again = lore(llama, ids[:2, :N], future=future, **options)
        assert [kept(again, b) for b in (0, 1)] == [kept(own, b) for b in (0, 1)]
        assert own.future is None and again.future is None or torch.equal(own.future.weights, again.future.weights)


def test_a_look_ahead_of_something_else_is_refused(llama, ids, tmp_path, monkeypatch):
    found = lore(llama, ids[:1, :N]).future
    found.lookahead.save(tmp_path / "x")
    from kvprobe.lookahead import Lookahead

    assert Lookahead.load(tmp_path / "x").source == found.lookahead.source != ""
    other, _ = tiny.pair("llama", num_hidden_layers=3)
    monkeypatch.setattr(llama[0].model, "forward", lambda *a, **k: pytest.fail("worked"))
    for model, prompt, policy, future, says in [
            (llama, ids[1:2, :N], "lore", found, "other prompts, or with another model"), (llama, ids[:1, : N - 1], "lore", found.lookahead, "other prompts"),
            ((other,), ids[:1, :N], "lore", found, "another model"), (llama, ids[:2, :N], "lore", Lookahead.load(tmp_path / "x"), "other prompts"),
            (llama, ids[:1, :N], "lore", 5, "is no look ahead"), (llama, ids[:1, :N], "snapkv", found, "takes no look ahead"), (llama, ids[:1, :N], "dapq", found, "takes no look ahead")]:
        with pytest.raises(ValueError, match=says):
            compress(model[0], prompt, policy=policy, keep=18, protect_window=6, future=future)


@pytest.mark.parametrize("policy", ["lore", "andpro", "snapkv", "criticalkv"])
def test_scores_that_are_not_finite_are_named(ids, policy):
    """F01: also where a policy turns its scores into a choice of its own."""
    model, _ = tiny.pair("llama")
    model.model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.inf
    model.model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.inf
    with pytest.raises((ValueError, FloatingPointError), match="not finite"):
        compress(model, ids[:1, :N], policy=policy, keep=18, protect_window=6, **(dict(m=0) if policy == "lore" else {}))


@pytest.mark.parametrize("policy, options", [("pyramidkv", {}), ("adakv", {}), ("andpro", {}), ("criticalkv", dict(adaptive=True)), ("defensivekv", {}), ("lore", dict(m=0, tau=1.0))], ids=str)
def test_shared_budgets_go_to_what_is_not_banned(llama, ids, policy, options):
    """A fact that only some heads may hold goes from the others, whoever has how much room."""
    ban = kvprobe.SpanPin(10, 22, sites=frozenset({(0, 1)}), elsewhere="ban")
    made = compress(llama[0], [ids[0, :N].tolist(), ids[1, :30].tolist()], policy=policy, keep=18, protect_window=4, pins=[ban], **options)
    for b in (0, 1):
        assert all(set(range(10, 22)) <= set(held) if site == (0, 1) else not set(range(10, 22)) & set(held) for site, held in kept(made, b).items())
        assert int(made.kept[:, b].sum()) == 4 * 18


def test_a_cache_that_has_read_on_answers_no_questions(llama, ids):
    made = compress(llama[0], ids[:1, :N], policy="random", keep=14, protect_window=4)
    kvprobe.force(llama[0], made.cache, ids[1:2, :3])
    with pytest.raises(ValueError, match="read on behind its prompt"):
        made.ask(max_new_tokens=3)


def test_the_window_is_pooled_into_no_neighbour(llama, ids):
    """What the protected window's queries pay each other says nothing about the tokens before it (methods 3: pooled over i < S - w)."""
    made = compress(llama[0], ids[:1, :N], policy="snapkv", keep=18, protect_window=6, kernel=7, pooling="max", window=6)
    seen = kvprobe.capture(llama[0], ids[:1, :N])
    for (layer, head), held in kept(made).items():
        q, k = seen.q[layer][0], seen.k[layer][0]
        score = 0
        for g in (0, 1):
            a = torch.stack([torch.cat([(k[head, : t + 1] @ q[2 * head + g, t] * 8**-0.5).softmax(0), torch.zeros(N - t - 1)]) for t in range(N - 6, N)]).mean(0)[: N - 6]
            score = score + torch.nn.functional.max_pool1d(a[None], 7, 1, 3)[0]
        want = sorted(range(1, N - 6), key=lambda p: (-float(score[p]), -p))[: 18 - 7]
        assert held == [0, *sorted(want), *range(N - 6, N)]


@pytest.mark.parametrize("bad, says", [
    (dict(keep_ratio="x", keep=None), "keep_ratio=x"), (dict(keep_ratio=True, keep=None), "keep_ratio=True"), (dict(protect_window=-1), "protect_window=-1"), (dict(protect_first=True), "protect_first=True"),
    (dict(protect_window="x"), "protect_window='x'"), (dict(protect_first=1.5), "protect_first=1.5"), (dict(question=[5]), "question="), (dict(pins=kvprobe.SpanPin(1, 2)), "list of pins"), (dict(pins=["a"]), "list of pins"),
    (dict(instances=5), "instances=5"), (dict(policy=5), "policy=5"), (dict(policy=None), "policy=None"), (dict(seed=1.5), "seed=1.5"), (dict(policy="lore", beta=float("nan")), "beta=nan"), (dict(policy="lore", lam_l=float("inf")), "lam_l=inf")])
def test_bad_types_are_sentences(llama, ids, bad, says, monkeypatch):
    monkeypatch.setattr(llama[0].model, "forward", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(ValueError, match=says):
        compress(llama[0], ids[:1, :N].tolist() if "question" not in bad else "text", **(dict(policy="random", keep=14, protect_window=4) | bad))


def test_an_instance_takes_no_options(llama, ids):
    from kvprobe.policies import snapkv

    with pytest.raises(ValueError, match="an instance already"):
        compress(llama[0], ids[:1, :N], policy=snapkv.POLICY(window=4), keep=14, protect_window=4, kernel=9)
    with pytest.raises(ValueError, match="is no model"):
        compress("tiny", ids[:1, :N], policy="random", keep=14)


@pytest.mark.parametrize("hook, says", [("allocate", "failed in allocate: TypeError|allocate returned"), ("select", "failed in select: ZeroDivisionError")])
def test_a_users_hook_that_fails_is_named(llama, ids, hook, says):
    from dataclasses import dataclass

    from kvprobe.policies import keydiff

    @dataclass(frozen=True)
    class Broken(keydiff.POLICY):
        pass

    setattr(Broken, hook, lambda self, *given: [1] if hook == "allocate" else 1 / 0)
    with pytest.raises((RuntimeError, ValueError), match=says):
        compress(llama[0], ids[:1, :N], policy=Broken(), keep=14, protect_window=4)
