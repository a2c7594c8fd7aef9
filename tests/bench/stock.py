"""One set of weights behind two models: ours, and a stock one with transformers' own sdpa attention."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvprobe
from kvprobe.attention_function import ATTENTION
from kvprobe.models import Model


def pair(name: str) -> tuple[Model, torch.nn.Module]:
    model = kvprobe.load(name)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(copy.deepcopy(model.model.config), attn_implementation="sdpa", dtype=model.model.dtype)
    stock.load_state_dict(model.model.state_dict(), assign=True)
    stock.tie_weights()
    for name, buffer in model.model.named_buffers():  # rotary frequencies are in no state dict
        owner, _, leaf = name.rpartition(".")
        stock.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    assert stock.config._attn_implementation == "sdpa"
    assert model.model.config._attn_implementation == ATTENTION
    return model, stock.eval().requires_grad_(False)


def stock_cache(stock: torch.nn.Module) -> DynamicCache:
    return DynamicCache(config=stock.config)
