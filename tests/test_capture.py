"""Capture: three independent ways agree; slices, batches, steps, limits, storage (known_faults A, E02, G01, I01)."""

import subprocess
import sys
import tracemalloc

import pytest
import torch

import kvprobe
import tiny
from kvprobe.inside import sites

ALL = ("q", "k", "v", "attn", "out")


def same(a, b, what=ALL, atol=1e-12):
    for name in what:
        for layer in a.layers:
            torch.testing.assert_close(getattr(a, name)[layer], getattr(b, name)[layer], rtol=0, atol=atol, msg=f"{name} of layer {layer}")


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "gemma3", "qwen3.5"])
def model(request):
    return tiny.pair(request.param)[0]


def test_nnsight_equals_the_cores_attention_function(model, ids):
    same(kvprobe.capture(model, ids, what=ALL), kvprobe.capture(model, ids, what=ALL, backend="attention_function"), atol=0)


def test_nnsight_equals_transformer_lens_on_eager(model, ids):
    model.model.set_attn_implementation("eager")
    try:
        mine = kvprobe.capture(model, ids, what=("q", "k", "v"))
        theirs = kvprobe.capture(model, ids, what=("q", "k", "v"), backend="transformer_lens")
    finally:
        model.model.set_attn_implementation("kvprobe")
    same(mine, theirs, ("q", "k", "v"), atol=0)


def test_weights_equal_eager_ones(model, ids):
    """A03: weights asked from a model that runs sdpa."""
    mine = kvprobe.capture(model, ids, what="attn")
    model.model.set_attn_implementation("eager")
    try:
        theirs = model.model(ids, output_attentions=True).attentions
    finally:
        model.model.set_attn_implementation("kvprobe")
    theirs = [t for t in theirs if t is not None]
    assert len(theirs) == len(mine.layers)
    for layer, want in zip(mine.layers, theirs):
        torch.testing.assert_close(mine.attn[layer], want, rtol=0, atol=1e-6)  # eager's softmax is float32 whatever the model


def test_outputs_are_weights_times_values(model, ids):
    c = kvprobe.capture(model, ids, what=("attn", "v", "out"))
    group = model.geometry.group
    for i in c.layers:
        want = torch.einsum("bhnp,bhpd->bhnd", c.attn[i], c.v[i].repeat_interleave(group, 1))
        torch.testing.assert_close(c.out[i], want, rtol=0, atol=1e-12)


def test_queries_are_rotated_and_normed_like_the_models_own(ids):
    """E02: rebuilt from the hidden states with the model's own projection, q-norm and rotary."""
    model = tiny.pair("qwen3")[0]
    c = kvprobe.capture(model, ids, what=("q", "k"))
    decoder = model.model.model
    hidden = decoder.embed_tokens(ids)
    layer = decoder.layers[0]
    x = layer.input_layernorm(hidden)
    attention = layer.self_attn
    q = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, 8))).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).unflatten(-1, (-1, 8))).transpose(1, 2)
    cos, sin = decoder.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    q, k = sites.modeling(attention).apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(c.q[0], q, rtol=0, atol=1e-12)
    torch.testing.assert_close(c.k[0], k, rtol=0, atol=1e-12)


def test_slices_are_the_slices_of_everything(llama, ids):
    whole = kvprobe.capture(llama[0], ids, what=ALL)
    part = kvprobe.capture(llama[0], ids, what=ALL, layers=1, q_heads=[3], positions=slice(70, 75))
    assert part.layers == (1,) and part.kv_heads == (1,) and part.kv_of_q == {3: 1}
    torch.testing.assert_close(part.q[1], whole.q[1][:, [3], 70:75])
    torch.testing.assert_close(part.k[1], whole.k[1][:, [1], 70:75])
    torch.testing.assert_close(part.attn[1], whole.attn[1][:, [3], 70:75])
    same(part, whole.select(layers=1, q_heads=[3], kv_heads=[1], positions=list(range(70, 75))), atol=1e-15)
    assert part.q_positions.tolist() == [[70, 71, 72, 73, 74]] * 3


@pytest.mark.parametrize("asked, says", [
    (dict(layers=[2]), r"layers 0\.\.1"), (dict(q_heads=[4]), r"query heads 0\.\.3"), (dict(kv_heads=[-1]), r"KV heads 0\.\.1"),
    (dict(positions=[80]), r"positions 0\.\.79"), (dict(what=("q", "z")), "known: q, k, v"), (dict(backend="magic"), "known: nnsight"), (dict(steps=-1), "negative")])
def test_what_the_model_does_not_have_is_refused_with_the_valid_range(llama, ids, asked, says):
    with pytest.raises(ValueError, match=says):
        kvprobe.capture(llama[0], ids, **asked)


def test_memory_is_known_before_and_refused_above_the_limit(llama, ids):
    for what in (("q",), ("k", "v"), ALL):
        assert kvprobe.estimate(llama[0], ids, what=what) == kvprobe.capture(llama[0], ids, what=what).nbytes
    with pytest.raises(ValueError, match="raise limit_bytes"):
        kvprobe.capture(llama[0], ids, what=ALL, limit_bytes=1000)


def test_a_slice_does_not_keep_the_whole_tensor_alive(llama, ids):
    """A13, G01: every captured tensor owns just its own bytes."""
    c = kvprobe.capture(llama[0], ids, what=ALL, positions=[-1])
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for name in ALL for t in getattr(c, name).values()}
    assert sum(blocks.values()) == c.nbytes


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_whole_capture_owns_nothing_else(kind, ids):
    """Phi3 cuts values out of a fused projection: keeping the cut would keep the projection."""
    c = kvprobe.capture(tiny.pair(kind)[0], ids, what=("q", "k", "v"))
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for name in ("q", "k", "v") for t in getattr(c, name).values()}
    assert sum(blocks.values()) == c.nbytes


def test_a_capture_shares_no_memory_with_the_cache(llama, ids):
    from transformers import DynamicCache

    cache = DynamicCache(config=llama[0].model.config)
    c = kvprobe.capture(llama[0], ids, what=("k", "v"), cache=cache)
    before = c.k[1].clone()
    cache.layers[1].keys.zero_()
    assert torch.equal(c.k[1], before)


def test_left_padding_gives_what_single_runs_give(model):
    """D01: no position ids passed by hand, rows of 12 and 5 tokens."""
    rows = [torch.arange(3, 15)[None], torch.arange(40, 45)[None]]
    batch = torch.zeros(2, 12, dtype=torch.int64)
    batch[0], batch[1, 7:] = rows[0], rows[1]
    mask = torch.ones_like(batch)
    mask[1, :7] = 0
    both = kvprobe.capture(model, batch, what=ALL, attention_mask=mask)
    for b, row in enumerate(rows):
        alone = kvprobe.capture(model, row, what=ALL)
        n = row.shape[1]
        assert both.q_positions[b, -n:].tolist() == list(range(n)) and (both.q_positions[b, :-n] == -1).all()
        for i in both.layers:
            for name in ("q", "out", "k", "v"):
                torch.testing.assert_close(getattr(both, name)[i][b, :, -n:], getattr(alone, name)[i][0], rtol=0, atol=1e-5 if model.geometry.skipped else 1e-10)
                assert (getattr(both, name)[i][b, :, :-n] == 0).all()
            torch.testing.assert_close(both.attn[i][b, :, -n:, :n], alone.attn[i][0], rtol=0, atol=1e-5)


def test_strings_are_padded_on_the_left_without_a_padding_token():
    """D06."""
    lm = kvprobe.load("tiny", dtype="float64")
    lm.tokenizer.pad_token = None
    both = kvprobe.capture(lm, ["abcdef", "xy"], what="q")
    alone = kvprobe.capture(lm, "xy", what="q")
    torch.testing.assert_close(both.q[1][1, :, -2:], alone.q[1][0])


def test_generated_steps_equal_one_forward_over_the_same_text(llama, ids):
    """A06, A09: prompt and steps in one object, with positions."""
    steps = kvprobe.capture(llama[0], ids, what=ALL, steps=6)
    assert steps.steps == 6 and steps.prompt == 80 and steps.q_positions[0].tolist() == list(range(86))
    same(steps, kvprobe.capture(llama[0], steps.tokens, what=ALL), atol=1e-12)
    want = llama[1].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert (steps.tokens == want).all()
    some = kvprobe.capture(llama[0], ids, what=("q",), steps=6, positions=[81, 83])
    torch.testing.assert_close(some.q[1], steps.q[1][:, :, [81, 83]])


def test_a_text_that_ends_early_is_captured_as_far_as_it_goes(llama, ids):
    """A02: the third generated token of row 0 is made the end of text."""
    model = llama[0]
    free = kvprobe.capture(model, ids[:1], what="q", steps=8)
    end = int(free.tokens[0, 82])
    first = free.tokens[0, 80:].tolist().index(end) + 1
    model.model.generation_config.eos_token_id = end
    try:
        c = kvprobe.capture(model, ids[:1], what="q", steps=8)
    finally:
        model.model.generation_config.eos_token_id = None
    assert c.stopped == (first,) and c.steps == first - 1 and c.q[0].shape[2] == 80 + first - 1
    torch.testing.assert_close(c.q[0], free.q[0][:, :, : 80 + first - 1])


def test_rows_that_end_early_do_not_stop_the_others(llama, ids):
    model = llama[0]
    free = kvprobe.capture(model, ids, what="q", steps=4)
    end = int(free.tokens[0, 81])
    others = [b for b in (1, 2) if end not in free.tokens[b, 80:].tolist()]
    model.model.generation_config.eos_token_id = end
    try:
        c = kvprobe.capture(model, ids, what="q", steps=4)
    finally:
        model.model.generation_config.eos_token_id = None
    assert c.stopped[0] is not None and others
    for b in others:
        torch.testing.assert_close(c.q[1][b], free.q[1][b])
    assert (c.q_positions[0, 80 + c.stopped[0] - 1 :] == -1).all()


def test_a_chunk_on_a_cache(llama, ids):
    from transformers import DynamicCache

    whole = kvprobe.capture(llama[0], ids, what=ALL)
    cache = DynamicCache(config=llama[0].model.config)
    kvprobe.capture(llama[0], ids[:, :64], what="q", cache=cache)
    chunk = kvprobe.capture(llama[0], ids[:, 64:], what=ALL, cache=cache)
    for i in chunk.layers:
        torch.testing.assert_close(chunk.q[i], whole.q[i][:, :, 64:], rtol=0, atol=1e-12)
        torch.testing.assert_close(chunk.k[i], whole.k[i], rtol=0, atol=1e-12)
        torch.testing.assert_close(chunk.attn[i], whole.attn[i][:, :, 64:], rtol=0, atol=1e-12)
    assert chunk.q_positions[0].tolist() == list(range(64, 80))


def test_an_evicting_cache_shows_what_its_heads_still_hold(llama, ids):
    cache = kvprobe.cache(llama[0], keep=16, buffer=4)
    kvprobe.prefill(llama[0], cache, ids)
    before = cache.positions
    c = kvprobe.capture(llama[0], ids[:, :3], what=ALL, cache=cache)
    whole = kvprobe.capture(llama[0], ids, what=("k",))
    for i in c.layers:
        where = c.k_positions[i]
        assert (where[..., :-3] == before[i]).all() and (where[..., -3:] == torch.tensor([80, 81, 82])).all()
        for b in range(3):
            for h in range(2):
                torch.testing.assert_close(c.k[i][b, h, :-3], whole.k[i][b, h, before[i, b, h].long()], rtol=0, atol=1e-12)
                gone = sorted(set(range(80)) - set(before[i, b, h].tolist()))
                assert (c.attn[i][b, 2 * h, :, gone] == 0).all()
        torch.testing.assert_close(c.attn[i].sum(-1), torch.ones(3, 4, 3, dtype=torch.float64))


def test_a_capture_is_the_same_twice_and_with_another_between(llama, ids):
    """A08."""
    first = kvprobe.capture(llama[0], ids, what=ALL)
    kvprobe.capture(llama[0], ids[:, :7], what="q", layers=1)
    same(first, kvprobe.capture(llama[0], ids, what=ALL), atol=0)


def test_saved_and_loaded(llama, ids, tmp_path):
    c = kvprobe.capture(llama[0], ids, what=ALL, steps=2)
    c.save(tmp_path / "c.safetensors")
    again = kvprobe.Capture.load(tmp_path / "c.safetensors")
    same(c, again, atol=0)
    assert again.geometry == c.geometry and again.stopped == c.stopped and (again.tokens == c.tokens).all() and again.fingerprint == c.fingerprint
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a capture"):
        kvprobe.Capture.load(tmp_path / "bad.safetensors")


def test_it_works_wherever_python_runs(tmp_path):
    """I01: python -c, exec, a nested function, a lambda; the trace block lives in the library."""
    code = ("import torch, kvprobe; torch.set_num_threads(1); lm = kvprobe.load('tiny'); space = {'kvprobe': kvprobe, 'lm': lm}\n"
            "exec('a = kvprobe.capture(lm, \"abc\").q[0].shape', space)\n"
            "def outer():\n    def inner(): return kvprobe.capture(lm, 'abc').q[0].shape\n    return inner()\n"
            "assert space['a'] == outer() == (lambda: kvprobe.capture(lm, 'abc').q[0].shape)(); print('fine')")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path).stdout.strip() == "fine"
    run = subprocess.run([sys.executable], input=code, capture_output=True, text=True, cwd=tmp_path)
    assert run.stdout.strip() == "fine", run.stderr


def test_a_model_without_the_call_is_told_what_it_has(llama, monkeypatch):
    monkeypatch.setattr(sites, "attention_modules", lambda model: {0: "model.layers.0.mlp"})
    with pytest.raises(LookupError, match=r"LlamaForCausalLM.*nnsight 0\.8.*it has"):
        kvprobe.capture(llama[0], torch.arange(4)[None], layers=0)


def test_an_nnsight_wrapper_is_taken_as_the_model(ids):
    from nnsight import NNsight

    stock = tiny.build("llama")
    direct = kvprobe.capture(stock, ids, what="q")
    same(direct, kvprobe.capture(NNsight(tiny.build("llama")), ids, what="q"), ("q",), atol=0)


def test_remote_execution_is_passed_through():
    """nnsight's local dry run serialises the block and runs it here."""
    from nnsight import NNsight, TransformersModel

    lm = kvprobe.load("tiny")
    text = torch.arange(20)[None]
    named = TransformersModel(lm.model, tokenizer=lm.tokenizer)
    same(kvprobe.capture(lm, text, what=("q", "k")), kvprobe.capture(named, text, what=("q", "k"), remote="local"), ("q", "k"), atol=0)
    with pytest.raises(ValueError, match="TransformersModel"):
        kvprobe.capture(NNsight(lm.model), text, remote="local")


def test_ten_captures_leave_memory_flat(llama, ids):
    """G04: Python-side memory after the second capture and after the tenth."""
    for _ in range(2):
        kvprobe.capture(llama[0], ids, what=ALL)
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    for _ in range(8):
        kvprobe.capture(llama[0], ids, what=ALL)
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert grown < 500_000


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3"])
def test_head_weights_agree_between_backends(kind):
    model = tiny.pair(kind)[0]
    for which in "OQKV":
        torch.testing.assert_close(kvprobe.head_weights(model, which, 1), kvprobe.head_weights(model, which, 1, "transformer_lens"), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "phi3", "gemma3"])
def test_outputs_through_w_o_are_the_attention_blocks_output(kind, ids):
    model = tiny.pair(kind)[0]
    c = kvprobe.capture(model, ids, what=("out",))
    seen = {}
    name = sites.attention_modules(model.model)[1]
    hook = model.model.get_submodule(name).register_forward_hook(lambda m, a, o: seen.update(y=o[0]))
    model.model(ids)
    hook.remove()
    torch.testing.assert_close(torch.einsum("bhnd,hde->bne", c.out[1], kvprobe.head_weights(model, "O", 1)), seen["y"], rtol=0, atol=1e-10)


def test_sites_are_listed_with_shapes_and_reasons():
    """K06, E11."""
    table = kvprobe.list_sites(tiny.pair("gemma3")[0])
    assert table.evicted.tolist() == [False, True, False, True] and "sliding" in table["why not"][0]
