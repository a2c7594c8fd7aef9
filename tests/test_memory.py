"""Bytes of a cache from the config alone: methods R5, and what real caches of tiny models hold."""

import json

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvprobe
import tiny
from kvprobe import cli, embedded, memory

BIG = transformers.LlamaConfig(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, hidden_size=8192)
TOKENS, ROWS = 20, 3
KINDS = {
    "llama": {}, "qwen3": {}, "phi3": {}, "gemma3": {}, "gemma4": {}, "qwen3.5": {},
    "gemma4, K=V": dict(attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=16, num_kv_shared_layers=0),
    "gemma4, K=V and shared": dict(attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=16, num_kv_shared_layers=2),
    "mistral": dict(sliding_window=8),
}


def held(cache: DynamicCache) -> list[int]:
    """Bytes of the tensors of each layer of a real cache."""
    found = []
    for layer in cache.layers:
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
        found.append(sum(t.numel() * t.element_size() for t in tensors if t is not None))
    return found


def test_the_papers_number():
    """Methods R5: 2 * 80 layers * 8 KV heads * d 128 * 131072 tokens * 2 bytes."""
    assert memory.cache_bytes(BIG, 131072, dtype="bfloat16").full == 42_949_672_960


def test_compressed_by_hand():
    made = memory.cache_bytes(BIG, 131072, keep=1024, batch=2, dtype="float32")
    assert made.full == 4 * 42_949_672_960 and made.compressed == made.full // 128
    assert memory.cache_bytes(BIG, 500, keep=1024).compressed == memory.cache_bytes(BIG, 500).full == memory.cache_bytes(BIG, 500).compressed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_equals_the_tensors_of_a_real_cache(name, dtype):
    """Layer kind by layer kind, in several dtypes: also the recurrent states, which stay in float32."""
    model = tiny.build(name.split(",")[0], dtype, **KINDS[name])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % tiny.VOCABULARY, cache=cache, use_cache=True)
    made, real = memory.cache_bytes(model.config, TOKENS, batch=ROWS, dtype=dtype), held(cache)
    assert sum(real) == made.full > 0
    for row in made.rows:
        assert sum(real[layer] for layer in row.layers) == row.bytes, row
    assert sorted(layer for row in made.rows for layer in row.layers) == list(range(len(real)))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4", "qwen3.5"])
def test_the_compressed_part_is_what_kvprobe_evicts(kind):
    """E11: the layers that shrink are those of the geometry; every other kind of layer keeps its bytes."""
    model, stock = tiny.pair(kind)
    made = memory.cache_bytes(stock.config, TOKENS, keep=6, batch=ROWS, dtype="float64")
    assert tuple(layer for row in made.rows if row.evicted for layer in row.layers) == model.geometry.kv_layers
    cache = kvprobe.cache(model, keep=4, buffer=2)
    with torch.no_grad():
        model.model(torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % tiny.VOCABULARY, cache=cache)
    assert cache.physical == 6 and sum(held(cache)) == made.compressed < made.full


def test_a_sliding_layer_that_is_not_full_yet():
    config = tiny.build("gemma3").config
    assert memory.cache_bytes(config, 3, dtype="float64").full == 4 * 3 * 2 * 2 * 8 * 8


def test_rows_say_which_layers(capsys):
    made = memory.cache_bytes(tiny.build("gemma4").config, 100, keep=10)
    kinds = {row.kind: row.layers for row in made.rows}
    assert kinds == {"sliding, window 8": (0, 2, 4), "full": (1,), "full, shared with later layers": (3,), "reuses an earlier layer's": (5,)}
    assert made.frame.bytes.sum() == made.full and [row.kept for row in made.rows] == [7, 10, 100, 0]


def test_multimodal_configs_count_their_text_decoder():
    text = tiny.build("gemma3").config
    whole = transformers.Gemma3Config(text_config=text.to_dict())
    assert memory.cache_bytes(whole, 50, dtype="float32").full == memory.cache_bytes(text, 50, dtype="float32").full


@pytest.mark.parametrize("config, says", [
    (transformers.DeepseekV3Config(num_hidden_layers=2), "latent attention"),
    (transformers.T5Config(), "encoder-decoder"),
    (transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "kind 'conv'"),
])
def test_what_is_not_known_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        memory.cache_bytes(config, 10)


@pytest.mark.parametrize("fields", [dict(context=0), dict(context=5, keep=0), dict(context=5, batch=0)])
def test_numbers_are_checked(fields):
    with pytest.raises(ValueError, match="at least 1"):
        memory.cache_bytes(BIG, **fields)


def call(capsys, *argv):
    code = cli.main(["memory", *map(str, argv)])
    return (code, *capsys.readouterr())


def test_the_command(capsys, tmp_path):
    BIG.save_pretrained(tmp_path)
    for where in (tmp_path, tmp_path / "config.json"):
        code, out, _ = call(capsys, "--model", where, "--context", 131072, "--keep", 1024, "--dtype", "bfloat16")
        assert code == 0 and "42,949,672,960 bytes (42.95 GB)" in out and "335,544,320" in out
    code, out, _ = call(capsys, "--model", "tiny", "--context", 100)
    assert code == 0 and f"{2 * 2 * 2 * 16 * 100 * 4:,}" in out and "compressed" not in out
    code, out, _ = call(capsys, "--model", "smollm2", "--context", 9000, "--keep", 128)
    assert code == 0 and f"{2 * 30 * 3 * 64 * 9000 * 4:,}" in out and "made for 8192 tokens" in out


@pytest.mark.parametrize("argv, says", [
    (["--model", "nope", "--context", "5"], "allowed: 'smollm2'"),
    (["--model", "tiny", "--context", "0"], "context=0 must be at least 1"),
    (["--model", "tiny", "--context", "5", "--dtype", "int3"], "'float32', 'bfloat16'"),
    (["--model", "tiny"], "--context"),
])
def test_bad_input_is_refused_with_what_is_allowed(capsys, argv, says):
    code, out, err = call(capsys, *argv)
    assert code == 1 and says in out + err and "Traceback" not in err


def test_a_damaged_config_is_named(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    code, _, err = call(capsys, "--model", tmp_path, "--context", 5)
    assert code == 1 and "could not be read" in err


@pytest.mark.model
def test_the_embedded_models_config_is_as_stated():
    stated, real = memory.read_config("smollm2"), transformers.AutoConfig.from_pretrained(embedded.embedded_folder())
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    assert [getattr(stated, n) for n in names] == [getattr(real, n) for n in names]
