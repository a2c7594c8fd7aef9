"""Calibration statistics of a model: mean and mean length of every query head's pre-RoPE queries, as a file that knows its model."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from . import rotary
from .attention_function import listening
from .embedded import cache_folder
from .models import Model

PASSAGE = 1024
"""Tokens per forward."""
AUTOMATIC = 2048
"""Tokens of a calibration that nobody asked for."""


@dataclass(frozen=True)
class Table:
    """One layer: mean [hq f] complex128 of the rotary pairs of pre-RoPE queries (after a q-norm, where there is one), norm [hq f]
    their mean length, and the layer's rotary embedding."""

    mean: Tensor
    norm: Tensor
    rotary: rotary.Rotary


@dataclass(frozen=True)
class Statistics:
    """Tables by layer, and what they were made of."""

    tables: dict[int, Table]
    about: dict
    _moved: dict = field(default_factory=dict, compare=False, repr=False)

    def of(self, layer: int, device: torch.device) -> Table:
        """The table of a layer on a device."""
        if (layer, device) not in self._moved:
            t = self.tables[layer]
            self._moved[layer, device] = Table(t.mean.to(device), t.norm.to(device), t.rotary.to(device))
        return self._moved[layer, device]


@torch.no_grad()
def make(model: Model, ids: Tensor, source: str, tick=lambda tokens: None) -> Statistics:
    """Statistics over token ids [n], read in passages of PASSAGE tokens.

    Queries are taken as attention sees them and turned back by their positions, so that whatever the model does before
    RoPE (a norm of queries) is in them. Raises ValueError for rotary embeddings that depend on the text's length.
    """
    layers = model.geometry.kv_layers
    turns = {layer: rotary.read(model, layer) for layer in layers}
    mean, norm, count = {}, {}, 0

    def listen(module, query, key, value, mask, scaling, out) -> None:
        layer = module.layer_idx
        if layer in turns:
            turn, here = turns[layer], torch.arange(query.shape[2])
            back = turn.pairs(query[0].cpu()) * turn.phase(here).conj() / turn.scale  # [hq n f]
            mean[layer] = mean.get(layer, 0) + back.sum(1)
            norm[layer] = norm.get(layer, 0) + back.abs().sum(1)

    with listening(listen):
        for passage in ids.split(PASSAGE):
            model.model(input_ids=passage[None].to(model.device), use_cache=False, logits_to_keep=1)
            count += len(passage)
            tick(len(passage))
    about = _identity(model, turns[layers[0]]) | {"tokens": count, "source": source}
    return Statistics({layer: Table(mean[layer] / count, norm[layer] / count, turns[layer]) for layer in layers}, about)


def _identity(model: Model, turn: rotary.Rotary) -> dict:
    """What statistics and model must agree on."""
    g, config = model.geometry, model.model.config.get_text_config(decoder=True)
    rope = json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True, default=str)
    return {"fingerprint": model.fingerprint, "rope": rope, "layout": turn.layout, "rotated": int((turn.omega > 0).sum()), "query_heads": g.n_q,
            "kv_heads": g.n_kv, "head_size": g.d_head, "layers": list(g.kv_layers)}


def from_filler(model: Model, filler: str = "builtin", tokens: int = AUTOMATIC, tick=lambda tokens: None) -> Statistics:
    """Statistics over the first `tokens` tokens of a filler: the kind of text that scripts are made of. Raises ValueError without a tokenizer."""
    from .needles import Filler

    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: calibrate on ids with kvprobe.calibration.make, and pass the saved file as statistics=")
    text = Filler(filler, model.tokenizer)
    if tokens < 1 or tokens > len(text.ids):
        raise ValueError(f"tokens={tokens} must be in 1..{len(text.ids)}: that is what filler {filler!r} has")
    return make(model, torch.as_tensor(text.ids[:tokens]), f"first {tokens} tokens of filler {filler} ({text.sha256[:16]})", tick)


def automatic(model: Model) -> Statistics:
    """Statistics on the built-in filler, made on first use and kept in the cache folder."""
    rope = getattr(model.model.config.get_text_config(decoder=True), "rope_parameters", None)  # the same weights may turn otherwise
    name = hashlib.sha256(f"{model.fingerprint} {rope}".encode()).hexdigest()[:16]
    path = cache_folder() / f"triattention-{name}-{AUTOMATIC}.safetensors"
    if path.is_file():
        try:
            return load(path, model)
        except ValueError:
            pass  # made by another version: made again
    found = from_filler(model)
    save(found, path)
    return found


def save(statistics: Statistics, path: str | os.PathLike) -> None:
    """Write as safetensors, whole or not at all."""
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, t in statistics.tables.items():
        tensors |= {f"{layer}.mean.real": t.mean.real.contiguous(), f"{layer}.mean.imag": t.mean.imag.contiguous(), f"{layer}.norm": t.norm.contiguous()}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file(tensors, part, metadata={"kvprobe": json.dumps(statistics.about)})
    os.replace(part, path)


def load(path: str | os.PathLike, model: Model) -> Statistics:
    """Read what `save` wrote for this model. Raises ValueError naming the fields that differ, or a file that is none."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["kvprobe"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:
        raise ValueError(f"{path} holds no calibration statistics of kvprobe: {error}") from error
    turns = {layer: rotary.read(model, layer) for layer in model.geometry.kv_layers}
    want = _identity(model, turns[model.geometry.kv_layers[0]])
    differ = [f"{name} (file {str(about.get(name))[:60]}, model {str(value)[:60]})" for name, value in want.items() if about.get(name) != value]
    if differ:
        raise ValueError(f"{path} was calibrated for another model than {model.name}; they differ in {', '.join(differ)}")
    for layer, turn in turns.items():
        want = (model.geometry.n_q, len(turn.omega))
        for name in (f"{layer}.mean.real", f"{layer}.mean.imag", f"{layer}.norm"):
            if name not in tensors or tensors[name].shape != want:
                raise ValueError(f"{path} holds no calibration statistics of kvprobe: it lacks {name} {list(want)}")
    tables = {layer: Table(torch.complex(tensors[f"{layer}.mean.real"], tensors[f"{layer}.mean.imag"]), tensors[f"{layer}.norm"], turn)
              for layer, turn in turns.items()}
    return Statistics(tables, about)


@dataclass(frozen=True)
class Settings:
    """Settings of `kvprobe calibrate`."""

    policy: str
    """the policy, e.g. triattention"""
    out: str
    """file to write (.safetensors)"""
    model: str = "smollm2"
    """smollm2 (embedded), tiny (random weights), a local folder, a .gguf file, or a hub id"""
    filler: str = "builtin"
    """text: builtin, a .jsonl file of `kvprobe traces`, or a text file"""
    tokens: int = 8192
    """tokens read"""
    device: str | None = None
    """torch device, e.g. cuda; default cpu"""
    device_map: str | None = None
    """accelerate device map, e.g. auto, instead of device"""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; default float32 on a CPU, else the checkpoint's"""
    threads: int = 0
    """torch threads; 0 leaves torch's default"""


def command(settings: Settings, say=lambda text: None) -> str:
    """Calibrate and write. Raises ValueError for a policy that takes no statistics, before any work."""
    from tqdm import tqdm

    from . import registry
    from .models import load as load_model

    policy = registry.find("policy", settings.policy)
    if not hasattr(policy, "calibrate"):
        can = [name for name in registry.available("policy") if hasattr(registry.find("policy", name), "calibrate")]
        raise ValueError(f"policy {settings.policy!r} takes no calibration; those that do: {', '.join(can)}")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_model(settings.model, device=settings.device, dtype=settings.dtype, device_map=settings.device_map)
    with tqdm(total=settings.tokens, unit="tok", desc="calibrate") as bar:
        found = policy.calibrate(model, settings.filler, settings.tokens, bar.update)
    save(found, settings.out)
    spread = torch.stack([t.mean.abs().sum(-1) / t.norm.sum(-1) for t in found.tables.values()])
    return (f"{settings.out}: {found.about['tokens']} tokens of {found.about['source']}, {model.name} {model.fingerprint}\n"
            f"concentration |mean q| / mean |q| over layers and heads: {spread.min():.2f} to {spread.max():.2f}, mean {spread.mean():.2f}")
