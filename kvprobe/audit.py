"""Replay a run by an independent path: one forward over the whole script on the full cache, with a mask per KV head
rebuilt from the keep log, and no eviction code at all. What differs is what eviction got wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import registry
from .keeplog import KeepLog
from .models import Model
from .results import RunFolder, read_manifest

REPLAY = "kvprobe-replay"
_MASKS: dict[int, Tensor] = {}  # layer -> bool [b hkv t p], while a replay is under way


def _replay_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Plain softmax attention in which every KV head sees what the log says it held."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = _MASKS.get(module.layer_idx)
    if mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    keys, values, seen = (x.repeat_interleave(group, dim=1) for x in (key, value, mask.to(query.device)))
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _masks(model: Model, masks: dict[int, Tensor]) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(REPLAY, _replay_attention)
    AttentionMaskInterface.register(REPLAY, sdpa_mask)
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation(REPLAY)
    _MASKS.update(masks)
    try:
        yield
    finally:
        _MASKS.clear()
        model.model.set_attn_implementation(before)


@torch.no_grad()
def replay(model: Model, ids: Tensor, log: KeepLog, row: int, first: int) -> Tensor:
    """Log p [k] of ids[first:] (ids [n]) when each token attends to exactly what the log's row held then."""
    fed = ids[None, :-1].to(model.device)
    seen = torch.from_numpy(log.visible(row))  # [l hkv t p]
    if seen.shape[-1] != fed.shape[1]:
        raise ValueError(f"the log is of {seen.shape[-1]} tokens, the script feeds {fed.shape[1]}")
    with _masks(model, {layer: seen[i][None] for i, layer in enumerate(log.layers)}):
        rows = torch.arange(first - 1, fed.shape[1], device=fed.device)
        logits = model.model(input_ids=fed, use_cache=False, logits_to_keep=rows).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(-1, ids[first:, None].to(logits.device)).squeeze(-1).cpu()


@dataclass(frozen=True)
class Audit:
    """Result of a replay. differences [nats]: one per scored token."""

    differences: np.ndarray
    rows: int
    worst: str
    threshold: float | None

    @property
    def ok(self) -> bool:
        return self.threshold is None or bool(self.differences.max(initial=0.0) <= self.threshold)

    def text(self) -> str:
        limit = "not judged in half precision" if self.threshold is None else f"wanted: <= {self.threshold:g} nats: {'ok' if self.ok else 'FAIL'}"
        return (f"replayed {self.rows} forced rows ({len(self.differences)} scored tokens) on the full cache with per-head masks\n"
                f"largest difference in log p {self.differences.max(initial=0.0):.2e} nats, median {np.median(self.differences):.2e} ({limit})\n"
                f"worst: {self.worst}")


def audit_run(path: str | os.PathLike, limit: int | None = None, progress: bool = True) -> Audit:
    """Replay the stored rows of a run's folder (the first `limit` of each batch) and compare their log p."""
    from tqdm import tqdm

    from .models import load
    from .runner import config_of

    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 row of each batch")
    manifest = read_manifest(path)
    settings = dict(manifest["settings"])
    module = registry.find("probe", settings.pop("probe"))
    settings.pop("preset")
    config = config_of(module, settings)
    if getattr(config, "positions", "original") != "original":
        raise ValueError("the run renumbered positions after each round: no mask on the full cache can replay that")
    folder = RunFolder(path, manifest["settings"])
    folder.read()
    if folder.said:
        raise ValueError(f"{folder.said[0]}. Nothing was audited")
    rows, logs = folder.rows(), list(folder.logs())
    if not logs:
        raise ValueError(f"{path} holds no keep log yet: nothing to audit")
    if not (rows.metric == "logp_token").any():
        raise ValueError(f"probe {manifest['settings']['probe']!r} asks branches of the cache, whose logs are not kept: `kvprobe audit` replays runs of planted_fact")
    model = load(config.model, device=config.device, dtype=config.dtype, device_map=config.device_map)
    if model.fingerprint != manifest["model"]["fingerprint"]:
        raise ValueError(f"the run used a model of fingerprint {manifest['model']['fingerprint']}, {model.name} has {model.fingerprint}")
    scripts = module.start(config, model).scripts
    wanted = rows[rows.metric == "logp_token"].set_index(["batch", "instance", "condition", "token"]).value.sort_index()
    jobs = [(batch, log, k, member) for batch, log, members in logs for k, member in enumerate(members[:limit])]
    differences, worst = [], (-1.0, "")
    for batch, log, k, (instance, condition) in tqdm(jobs, desc="audit", disable=not progress, mininterval=0.5):
        script = scripts[instance]
        got = replay(model, torch.from_numpy(script.ids), log, k, script.answer[0]).numpy()
        off = np.abs(got - wanted.loc[batch, instance, condition].to_numpy())
        differences.append(off)
        worst = max(worst, (float(off.max()), f"instance {instance}, condition {condition}, {off.max():.2e} nats"))
    exact = model.model.dtype.itemsize >= 4
    return Audit(np.concatenate(differences), len(jobs), worst[1], config.check_forcing if exact else None)
