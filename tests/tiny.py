"""Random tiny models of several architectures, built from configs."""

from __future__ import annotations

import copy

import torch
import transformers

import kvprobe
from kvprobe import registry

VOCABULARY = 97
BASE = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
            initializer_range=0.25)  # wide, so that attention is far from uniform and greedy text is not constant
SLIDING = dict(sliding_window=8, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
LINEAR = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
              linear_key_head_dim=8, linear_value_head_dim=8)
SHARED = dict(sliding_window=8, num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=1,
              global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)
AHEAD = sorted(n for n in registry.names("policy") if getattr(registry.find("policy", n).POLICY, "looks_ahead", False) is True)
"""Policies that score from the end of a whole prompt alone: only kvprobe.compress lets them run."""
WINDOW_ONLY = {n: dict(m=0, window=4) for n in ("lore", "single_continuation", "window_only")}
"""Options of those that may look ahead, outside kvprobe.compress."""
KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=None)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=None)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", SLIDING | dict(query_pre_attn_scalar=8)),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", LINEAR),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", SHARED),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", dict(sliding_window=None)),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", LINEAR | dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "glm": ("GlmConfig", "GlmForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", dict(num_local_experts=2, num_experts_per_tok=1)),
}


def build(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    """A stock transformers model with random weights."""
    config, model, own = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, model)(getattr(transformers, config)(**(BASE | own | changes)))
    return made.to(dtype).eval().requires_grad_(False)


def pair(kind: str, dtype: torch.dtype = torch.float64, **changes):
    """(kvprobe Model, stock twin that kvprobe never touched)."""
    stock = build(kind, dtype, **changes)
    return kvprobe.prepare(copy.deepcopy(stock)), stock
