"""`kvprobe simulate`: the keep-set process of a policy that reads positions and draws only, through the same cache but without a model.

So that the papers' sizes (K=1024, r=64, 36 layers, 8 heads, 32k tokens) take seconds (Random Attention app. D; methods R1-R3).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import metrics, registry, retention
from .attention_function import ATTENTION
from .eviction_cache import EvictionCache
from .keeplog import KeepLog
from .pins import PromptPin
from .types import Geometry, Plan, Policy


def keep_log(n_layers: int, heads: int, plan: Plan, policy: Policy, *, tokens: int, prompt: int = 1, protect: bool = False, layers: Sequence[int] | None = None,
             instances: Sequence[int] = (0,), seed: int = 0, tick: Callable[[int], object] = lambda tokens: None) -> KeepLog:
    """What a cache of `heads` KV heads would hold while `tokens` tokens pass, the first `prompt` in one forward.

    Every instance is a row. Raises ValueError for a policy that scores by keys, values or attention.
    """
    if policy.needs.states or policy.needs.window or policy.needs.attn_mass:
        raise ValueError(f"{policy} reads keys, values or attention: only policies that need no model can be simulated (random, recency, streaming_llm)")
    if not 1 <= prompt <= tokens:
        raise ValueError(f"prompt={prompt} must be in 1..tokens={tokens}")
    chosen = tuple(range(n_layers) if layers is None else layers)
    geometry = Geometry(n_layers, heads, heads, 0, heads, chosen, {i: "not simulated" for i in range(n_layers) if i not in chosen})
    cache = EvictionCache(_config(n_layers, heads), geometry, plan, policy, pins=(PromptPin(),) if protect else (), instances=list(instances), seed=seed)
    at = 0
    while at < tokens:
        n = prompt if at == 0 else min(cache.room or tokens, tokens - at)
        cache.pass_tokens(n, len(instances))
        tick(n)
        at += n
    return cache.keep_log


def _config(n_layers: int, heads: int):
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=n_layers, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads, head_dim=1)
    config._attn_implementation = ATTENTION
    return config


def survival_by_rounds(log: KeepLog, first: int, upto: Sequence[int]) -> list[tuple[int, float, float, int]]:
    """(n, share per head, share held by any head, count) of body positions that outlived n rounds as candidates.

    first: the first body position. Positions whose n-th round lies beyond the log are left out.
    """
    fired = torch.tensor(log.fired[0])
    positions = torch.arange(first, log.length[0])
    entered = torch.searchsorted(fired - log.buffer, positions, right=True)  # rounds before it was a candidate
    died = torch.as_tensor(log.died)[..., first : log.length[0]]
    out = []
    for n in upto:
        whole = entered + n <= len(fired)
        if bool(whole.any()):
            alive = died[..., whole] >= (entered[whole] + n)
            out.append((n, float(alive.double().mean()), float(alive.any(2).double().mean()), int(whole.sum()) * alive[..., 0].numel() // alive.shape[2]))
    return out


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation; the defaults are the papers' sizes."""

    policy: str = "random"
    """random, recency, streaming_llm, with options in brackets: random(shared=True), random(block=16)"""
    keep: int = 1024
    """entries per KV head that survive a round, a protected prompt included, the buffer not (K); Random Attention's accuracy runs are 960"""
    buffer: int = 64
    """newest entries, never scored (r) [tokens]"""
    layers: int = 36
    """layers"""
    heads: int = 8
    """KV heads per layer"""
    tokens: int = 32768
    """length of the text"""
    prompt: int = 1
    """tokens of the prompt"""
    protect: bool = False
    """whether the prompt is pinned"""
    seed: int = 0
    """seed of the draws"""
    out: str | None = None
    """folder for rows.jsonl, manifest.json and the figure"""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "tokens", "prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        plan = Plan(self.keep, self.buffer)
        if self.tokens < plan.fires_at:
            raise ValueError(f"tokens={self.tokens}: nothing would be evicted before keep + 2 * buffer = {plan.fires_at}")
        if self.protect and self.prompt >= self.keep:
            raise ValueError(f"keep={self.keep} cannot hold the protected prompt of {self.prompt} tokens")

    @property
    def pinned(self) -> int:
        return self.prompt if self.protect else 0


ROUNDS = (1, 3, 10, 15, 20, 30, 39, 50, 57, 100, 200, 400)
"""Rounds at which survival is given (methods R1)."""
LOOKED = 24
"""Rounds whose coverage is measured."""


def simulate(settings: Settings, tick: Callable[[int], object] = lambda tokens: None) -> list[dict]:
    """Rows (metric, rounds, value, closed form of a uniform draw, n, unit): survival per head and by any head (methods R1), coverage (R2), rounds (R3)."""
    from .arms import policy_of

    s, plan = settings, Plan(settings.keep, settings.buffer)
    policy = policy_of(s.policy)
    log = keep_log(s.layers, s.heads, plan, policy, tokens=s.tokens, prompt=s.prompt, protect=s.protect, seed=s.seed, tick=tick)
    rows = [_row("rounds", None, log.rounds(0), rounds_until(plan, s.tokens, s.prompt), 1, "rounds")]
    one = metrics.survival(s.keep, s.buffer, 1, s.pinned)
    for n, head, union, count in survival_by_rounds(log, s.prompt, ROUNDS):
        rows += [_row("survival, per head", n, head, one**n, count * s.heads, "fraction"), _row("survival, any head", n, union, 1 - (1 - one**n) ** s.heads, count, "fraction")]
    total = log.rounds(0)
    found = retention.coverage(log, 0, only=set(np.linspace(total // 2, total - 1, LOOKED).astype(int).tolist()))
    rows.append(_row("slot coverage", None, found.slots, 1 - (1 - one) ** s.heads if not s.pinned else None, LOOKED, "fraction"))
    rows.append(_row("position coverage", None, found.positions, None, LOOKED, "fraction"))
    rows.append(_row("decorrelation", None, found.decorrelation, None, LOOKED, "fraction"))
    return rows


def _row(metric: str, rounds: int | None, value: float, closed: float | None, n: int, unit: str) -> dict:
    return dict(metric=metric, rounds=rounds, value=float(value), uniform=None if closed is None else float(closed), n=n, unit=unit)


def rounds_until(plan: Plan, tokens: int, prompt: int = 1) -> int:
    """Rounds that fire while `tokens` tokens pass, the first `prompt` in one forward (methods R3, for a row of its own count)."""
    if prompt >= plan.fires_at:
        return 1 + max(0, tokens - prompt) // plan.buffer
    return max(0, (tokens - plan.fires_at) // plan.buffer + 1)


def command(settings: Settings) -> str:
    """Run, write what `out` asks for, and return the table as text."""
    import pandas as pd
    from tqdm import tqdm

    if settings.out:
        _check_out(Path(settings.out), settings)
    with tqdm(total=settings.tokens, unit="tok", unit_scale=True, desc="simulate") as bar:
        rows = simulate(settings, bar.update)
    frame = pd.DataFrame(rows)
    shown = frame.assign(rounds=[("" if pd.isna(r) else int(r)) for r in frame.rounds], value=[f"{v:.6g}" for v in frame.value],
                         uniform=["" if pd.isna(u) else f"{u:.6g}" for u in frame.uniform]).rename(columns={"uniform": "uniform draw, closed form"})
    text = f"{settings.policy}, K={settings.keep}, r={settings.buffer}, {settings.layers} layers x {settings.heads} KV heads, {settings.tokens} tokens, {settings.pinned} pinned\n\n{shown.to_string(index=False)}"
    if settings.out:
        text += "\n\n" + "\n".join(map(str, _write(Path(settings.out), settings, rows)))
    return text


def _write(out: Path, settings: Settings, rows: list[dict]) -> list[Path]:
    from . import __version__
    from .results import write_atomically

    out.mkdir(parents=True, exist_ok=True)
    manifest = {"settings": {"command": "simulate"} | dataclasses.asdict(settings), "policy_sha256": registry.source_hash("policy", settings.policy.split("(")[0]),
                "versions": {"kvprobe": __version__, "torch": torch.__version__, "numpy": np.__version__}}
    write_atomically(out / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    write_atomically(out / "rows.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    figure = draw(rows, settings)
    for suffix in (".png", ".pdf"):
        figure.savefig(out / f"survival{suffix}", dpi=160)
    return [out / "rows.jsonl", out / "manifest.json", out / "survival.png"]


def _check_out(out: Path, settings: Settings) -> None:
    mine = {"command": "simulate"} | dataclasses.asdict(settings) | {"out": str(out)}
    if out.exists() and any(out.iterdir()) and _made_by(out) != mine:
        raise ValueError(f"{out} holds something else than this simulation: choose another --out")


def _made_by(out: Path) -> dict | None:
    """The settings of a folder's manifest, None where there is none to read."""
    try:
        return json.loads((out / "manifest.json").read_text(encoding="utf-8"))["settings"] | {"out": str(out)}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def draw(rows: list[dict], settings: Settings):
    """Survival by rounds, per head and by any head, with the uniform draw's closed form (Random Attention app. D)."""
    from . import __version__, plotting

    figure, ax = plotting.picture(7.0, 4.6)
    for metric, color in (("survival, per head", "#3b528b"), ("survival, any head", "#21918c")):
        some = [r for r in rows if r["metric"] == metric]
        x = [r["rounds"] for r in some]
        ax.plot(x, [max(r["value"], 1e-6) for r in some], "o", color=color, label=f"{metric.split(', ')[1]}, simulated")
        ax.plot(x, [max(r["uniform"], 1e-6) for r in some], color=color, lw=1, ls="--", label=f"{metric.split(', ')[1]}, uniform draw, closed form")
    ax.set(yscale="log", ylim=(max(5e-7, 0.3 * min(max(r["value"], 1e-6) for r in rows if r["rounds"])), 1.5), xlabel="rounds as a candidate", ylabel="fraction of positions still held")
    ax.legend(fontsize=8)
    figure.suptitle(f"What {settings.policy} keeps", fontsize=11)
    plotting.footer(figure, f"no model: K = {settings.keep}, r = {settings.buffer}, {settings.layers} layers, {settings.heads} KV heads, {settings.tokens} tokens, {settings.pinned} of the prompt pinned; "
                            f"shares under 1e-6 drawn there; seed {settings.seed}, kvprobe {__version__}")
    return figure
