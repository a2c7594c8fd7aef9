"""A compressed prompt in a file: what survived, the states of the other layers, the keep log, and what it was made with."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .eviction_cache import EvictionCache
from .eviction_layer import EvictionLayer
from .keeplog import Recorder
from .models import Model, prepare
from .pins import PinTable
from .types import Plan

GATHERED = ("columns", "state", "queries")
"""What a layer holds for scoring, which is over."""


def save(made, path: str | os.PathLike) -> None:
    """Write a `Compressed` as safetensors, whole or not at all; the look ahead has a `save` of its own. Raises ValueError for what has gone on."""
    from safetensors.torch import save_file

    cache, path = made.cache, Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"folder {path.parent} does not exist")
    if cache.step is None or cache.seen != [len(p) for p in made.prompts]:
        raise ValueError("this cache has read on behind its prompt: save what compress returned, before its cache is used")
    tensors = {"logits": made.logits, "mask": made.mask, "prompts": torch.tensor([i for p in made.prompts for i in p]), "died": cache.recorder.died}
    tensors |= {"count": torch.from_numpy(cache.count), **({} if cache.kept is None else {"kept": cache.kept}), **{f"tail.{i}": t for i, t in enumerate(cache.tail)}}
    layers = [_taken(layer, f"layer.{i}", tensors) for i, layer in enumerate(cache.layers)]
    policy = made.policy
    facts = dict(what="compressed", model=made.model.name, fingerprint=made.model.fingerprint, plan=dataclasses.asdict(cache.plan), seed=cache.seed, instances=cache.instances,
                 policy=type(policy).__module__.rsplit(".", 1)[-1], options={f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)},
                 pins=[[repr(p) for p in (*cache.common_pins, *own)] for own in cache.row_pins], prompts=[len(p) for p in made.prompts], fired=cache.recorder.fired,
                 ragged=cache.ragged, seconds=made.seconds, layers=layers)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, part, metadata={"kvprobe": json.dumps(facts, default=repr)})
    os.replace(part, path)


def _taken(layer, name: str, tensors: dict[str, Tensor]) -> dict:
    """Put a layer's tensors under its name and return its plain values."""
    plain = {}
    for key, x in vars(layer).items():
        if isinstance(layer, EvictionLayer) and key in GATHERED:
            continue
        if isinstance(x, Tensor):
            tensors[f"{name}.{key}"] = x
        elif isinstance(x, dict):
            tensors |= {f"{name}.{key}.{i}": t for i, t in x.items() if isinstance(t, Tensor)}
            plain[key] = {str(i): v for i, v in x.items() if isinstance(v, (bool, int, float))}
        elif isinstance(x, (bool, int, float)):
            plain[key] = x
    return plain


def load(model, path: str | os.PathLike):
    """The `Compressed` that was saved, for the same model (by its weights). Raises ValueError for another model or another kind of file."""
    from safetensors import safe_open

    from .compression import Compressed

    model = model if isinstance(model, Model) else prepare(model)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = json.loads((file.metadata() or {})["kvprobe"])
            if facts.get("what") != "compressed":
                raise ValueError("it holds something else")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:
        raise ValueError(f"{path} holds no compressed prompt of kvprobe: {error}") from error
    if facts["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path} was made with {facts['model']} (fingerprint {facts['fingerprint']}), this is {model.name} ({model.fingerprint})")
    cache, lengths = _cache(model, facts, tensors), facts["prompts"]
    prompts = tuple(tuple(p.tolist()) for p in tensors["prompts"].split(lengths))
    return Compressed(model, cache, prompts, tensors["mask"].to(model.device), tensors["logits"].to(model.device), _policy(facts), None, facts["seconds"])


def _policy(facts: dict):
    """The policy by its file's name and options; where there is none of that name any more, what is known of it."""
    from . import registry

    try:
        return registry.make_policy(facts["policy"], facts["options"])
    except ValueError:
        return f"{facts['policy']} {facts['options']}"


def _cache(model: Model, facts: dict, tensors: dict[str, Tensor]) -> EvictionCache:
    """A cache at the prompt's end that evicts no more."""
    from .policies import random
    from .seeing import Step

    cache = EvictionCache(model.model.config, model.geometry, Plan(**facts["plan"]), random.POLICY(), instances=facts["instances"], seed=facts["seed"])
    for i, (layer, plain) in enumerate(zip(cache.layers, facts["layers"], strict=True)):
        _give(layer, plain, {name[len(f"layer.{i}.") :]: t for name, t in tensors.items() if name.startswith(f"layer.{i}.")}, model)
    device, rows = cache.layers[cache._first].keys.device, len(facts["prompts"])
    cache._start(rows, device)
    cache.recorder = Recorder(model.geometry.kv_layers, rows, model.geometry.n_kv, device)
    cache.recorder.died, cache.recorder.fired = tensors["died"].to(device), [list(f) for f in facts["fired"]]
    cache.count, cache.seen, cache.prompt, cache.ragged, cache.closed = tensors["count"].numpy().astype(np.int64), list(facts["prompts"]), list(facts["prompts"]), facts["ragged"], True
    cache.most = cache._fullest(cache.count)
    cache.kept = tensors["kept"].to(device) if "kept" in tensors else None
    cache.tail = [tensors[name].to(device) for name in sorted((n for n in tensors if n.startswith("tail.")), key=lambda n: int(n[5:]))]
    cache.pins = PinTable([()] * rows, model.geometry, device)
    cache.step = Step(0, padded=False, done=True)
    return cache


def _give(layer, plain: dict, tensors: dict[str, Tensor], model: Model) -> None:
    """The other way round from `_taken`; tensors go to the model's dtype of states only where they came from it."""
    for key, x in plain.items():
        setattr(layer, key, {int(i): v for i, v in x.items()} if isinstance(x, dict) else x)
    for name, t in tensors.items():
        key, _, index = name.partition(".")
        t = t.to(model.device)
        if index:
            setattr(layer, key, (getattr(layer, key, None) or {}) | {int(index): t})
        else:
            setattr(layer, key, t)
    keys = getattr(layer, "keys", None)
    if keys is not None:
        layer.dtype, layer.device = keys.dtype, keys.device
