"""What the adapters rely on in their libraries (J01, J04): these fail first when a version changes underneath."""

import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache

import tiny
from kvprobe import versions


def test_the_cache_argument_is_called_cache():
    assert "cache" in inspect.signature(transformers.LlamaModel.forward).parameters


def test_update_is_handed_the_arguments_of_the_attention_call():
    seen = {}

    class Spy(DynamicCache):
        def update(self, k, v, layer_idx, *args, **kwargs):
            kwargs["kwargs"]["note"] = layer_idx
            return super().update(k, v, layer_idx)

    def attention(module, q, k, v, mask, note=None, scaling=None, **kwargs):
        seen[module.layer_idx] = note
        return q.transpose(1, 2), None

    transformers.AttentionInterface.register("spy", attention)
    transformers.AttentionMaskInterface.register("spy", transformers.masking_utils.sdpa_mask)
    model = tiny.build("llama")
    model.set_attn_implementation("spy")
    model(torch.arange(5)[None], cache=Spy(config=model.config))
    assert seen == {0: 0, 1: 1}


def test_mask_sizes_are_asked_of_the_cache():
    asked = []

    class Spy(DynamicCache):
        def get_mask_sizes(self, query_length, layer_idx):
            asked.append(query_length)
            return super().get_mask_sizes(query_length, layer_idx)

    model = tiny.build("llama")
    cache = Spy(config=model.config)
    model(torch.arange(5)[None], cache=cache)
    model(torch.arange(3)[None], cache=cache)
    assert asked == [5, 3] and cache.get_seq_length() == 8


def test_nnsight_names_the_attention_call():
    from kvprobe.inside import sites

    model = tiny.build("llama")
    wrapper = sites.wrap(model)
    names = sites.envoy(wrapper, "model.layers.0.self_attn").source.names
    assert [n for n in names if n.startswith("attention_interface")] == ["attention_interface_0", "attention_interface_1"]


def test_transformer_lens_has_the_hooks():
    from kvprobe.inside.with_lens import NAMES, bridge

    lens = bridge(tiny.pair("llama")[0])
    assert {f"blocks.0.{n}" for n in NAMES.values()} <= set(lens.hook_dict)


@pytest.mark.parametrize("name", versions.ADAPTERS)
def test_other_versions_are_refused_by_name(name, monkeypatch):
    versions.require(name)
    monkeypatch.setattr(versions.metadata, "version", lambda n: "3.0")
    with pytest.raises(ImportError, match=f"{name} >="):
        versions.require(name)
