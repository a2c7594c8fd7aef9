"""Does it matter how sampled futures are weighted: presets, the (beta, gamma, lambda_D) plane, each signal against utility (LORE App. F.4, G, D)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe import reliability, stats
from kvprobe.policies import lore
from kvprobe.prompt_reading import Prompt
from kvprobe.prompt_settings import COMMON, build_tasks
from kvprobe.prompt_tables import per_prompt
from kvprobe.prompting import CHANCE, METRICS, Arm, Prompting, arm
from kvprobe.reliability import PRESETS as WEIGHTINGS
from kvprobe.weighing_tables import COVERAGE, PARTICLE, PLANE, SPREAD, report_table  # noqa: F401

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.weighing import Walk


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the reliability plane probe."""

    m: int = 4
    """continuations that are weighted (M), the first ones of a draw"""
    t: int = 8
    """tokens of each (T)"""
    particles: int = 8
    """continuations of a draw, whose signals are set against their utility; at least m"""
    betas: str = "0,1,2"
    """weights of typicality in the plane"""
    gammas: str = "0,0.5,1,1.3,2"
    """weights against entropy in the plane"""
    disagreements: str = "0,0.3,1"
    """weights against disagreement in the plane (lambda_D)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.m <= self.particles or self.t < 1:
            raise ValueError(f"m={self.m} must be in 2..particles={self.particles}, t={self.t} at least 1")
        if len(self.budgets) > 1:
            raise ValueError(f"keeps={self.keeps!r}: this probe sweeps the weights at one budget")
        self.plane

    @property
    def keep(self) -> int:
        return self.budgets[0]

    @property
    def plane(self) -> list[reliability.Weighting]:
        axes = [decimals(name, getattr(self, name)) for name in ("betas", "gammas", "disagreements")]
        return [reliability.Weighting(b, g, d) for d in axes[2] for g in axes[1] for b in axes[0]]


def decimals(name: str, text: str) -> list[float]:
    """ "0,1.3" -> [0.0, 1.3]. Raises ValueError for anything but different numbers of at least 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= x < float("inf") for x in found) or len(set(found)) < len(found):
        raise ValueError(f"{name}={text!r} must be different numbers of at least 0, e.g. 0,1,1.3")
    return found


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=2, length=480, keeps="96", window=8, future=5, m=3, t=2, particles=4, betas="0,1", gammas="0,1,1.3", disagreements="0,0.3", sampling_seeds=2, kinds="needles", threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(instances=100, length=900, kinds="needles,variables,passages"),
}


def start(config: CONFIG, model) -> Session:
    """Build prompts and arms, and refuse what cannot work, before anything is computed."""
    return Session(config, model, build_tasks(config, model), arms(config, model))


def arms(config: CONFIG, model) -> list[Arm]:
    """Marks, then every preset, the worst left out (softly weighted, and not), one left out at random, one alone, none."""
    from kvprobe.oracle import Given
    from kvprobe.weighing import Hard

    base, none = dict(window=config.window, t=config.t, form=config.form, chunk=1), dict(beta=None, gamma=None, lam_d=None, particle=None)
    out = [Arm("full", None, columns=none), Arm("oracle", Given(), config.keep, columns=none), *arm("random", "random", config.keep, config, model, none)]

    def add(name: str, by: reliability.Weighting, m: int = config.m, kind=lore.POLICY, **more) -> None:
        at = dict(beta=by.beta, gamma=by.gamma, lam_d=by.disagreement)
        out.extend(arm(name, kind(m=m, normalised=by.normalised, **at, **base, **more), config.keep, config, model, none | at))

    for name, by in WEIGHTINGS.items():
        add(name, by)
    add("/E, normalised c", dataclasses.replace(WEIGHTINGS["/E"], normalised=True))
    for name in ("/E", "/D"):
        add(f"{name}, worst left out", WEIGHTINGS[name], drop_worst=1)
        add(f"{name} leaves the worst out, rest alike", WEIGHTINGS[name], kind=Hard)
    add("uniform, one left out at random", WEIGHTINGS["uniform"], config.m - 1)
    add("a single one", WEIGHTINGS["uniform"], 1)
    add("window only", WEIGHTINGS["uniform"], 0)
    return out


class Session(Prompting):
    """Weights change only how a draw's scores are mixed: they are made once, and every arm and every point of the plane mixes them anew."""

    def __init__(self, *args):
        super().__init__(*args)
        self.particles = self.config.particles
        self._walks: dict[int, Walk] = {}

    @property
    def bytes_needed(self) -> int:
        c = self.config
        return super().bytes_needed + 250 * c.instances * c.sampling_seeds * (4 * len(c.plane) + 10 * c.particles + 4 * len(self.arms))

    def read(self, batch: int) -> Prompt:
        from kvprobe.weighing import walk

        self._walks, self._prompt = {}, None  # frees the old ones first
        prompt = super().read(batch)
        policy = next(a.policy for a in self.arms if a.ahead)
        self._prompt, self._walks = prompt, {d: walk(policy, prompt, found) for d, found in prompt.draws.items()}
        return prompt

    def evicted(self, a: Arm, prompt: Prompt):
        """As the arm's policy would, from the draw's walk: chunk 1 and uniform budgets leave nothing but the scores to choose by."""
        from kvprobe.oracle import Given

        if not a.ahead:
            return super().evicted(a, prompt)
        mixed = self._walks[a.draw].mixed(a.policy.weigh(prompt.draws[a.draw]).weights[0], a.policy.lam_l)
        return self.evict(prompt.cache, a, Given(), dict(zip(prompt.cache.geometry.kv_layers, mixed)))

    def rows_of(self, a: Arm, prompt: Prompt, found) -> list[dict]:
        """With the spread of the weights and the coverage of the future's queries."""
        from kvprobe.weighing import spread

        out = super().rows_of(a, prompt, found)
        if not a.ahead:
            return out
        base = self._base(prompt) | dict(arm=a.name, keep=a.keep, draw=a.draw) | a.columns
        weights = a.policy.weigh(prompt.draws[a.draw]).weights[0]
        cosines = self._walks[a.draw].cosines[: len(weights)]
        found = spread(weights) | {"coverage_mixture": float((weights.double() @ cosines).mean()), "coverage_union": float(cosines[weights > 0].amax(0).mean())}
        return out + [base | dict(metric=k, value=v, unit=(SPREAD | COVERAGE)[k]) for k, v in found.items()]

    def compute(self, batch, rows, tick):
        out, log, members = super().compute(batch, rows, tick)
        for draw in self._walks:
            out += self._plane(draw) + self._particles(draw)
        return out, log, members

    def _signals(self, draw: int, m: int) -> reliability.Reliability:
        return lore.POLICY(m=m, t=self.config.t).weigh(self._prompt.draws[draw]).reliability

    def _recall(self, scores) -> list[dict[str, float]]:
        """Recall of the entries that each of scores [x l 1 hkv n] keeps beside the protected ones."""
        from kvprobe import oracle

        truth, keep, out = self._prompt.truth, self.config.keep, []
        for score in scores:
            pair = truth.recall(oracle.top(score, keep, truth.protected), keep)
            out.append({name: float(x.mean()) for name, x in zip(("recall", "recall_free"), pair)})
        return out

    def _plane(self, draw: int) -> list[dict]:
        from kvprobe.weighing import spread

        signals, found = self._signals(draw, self.config.m), self._walks[draw]
        weights = [signals.weights(by)[0] for by in self.config.plane]
        out, units = [], METRICS | SPREAD
        for by, w, recall in zip(self.config.plane, weights, self._recall(found.mixed(w) for w in weights)):
            base = self._base(self._prompt) | dict(arm=PLANE, keep=self.config.keep, draw=draw, beta=by.beta, gamma=by.gamma, lam_d=by.disagreement, particle=None)
            out += [base | dict(metric=k, value=v, unit=units[k]) for k, v in (recall | spread(w)).items()]
        return out

    def _particles(self, draw: int) -> list[dict]:
        """Signals and utility, Recall@B by its own score alone, of every continuation of a draw."""
        s, out = self._signals(draw, self.config.particles), []
        signals = dict(typicality=s.typicality, normalised=s.normalised, entropy=s.entropy, varentropy=s.varentropy, disagreement=s.disagreement) | {n: s.score(WEIGHTINGS[n]) for n in ("/E", "/D")}
        units = dict(typicality="nats", normalised="standard errors", entropy="nats", varentropy="nats^2", disagreement="1 - cosine") | METRICS
        for k, recall in enumerate(self._recall(self._walks[draw].each)):
            base = self._base(self._prompt) | dict(arm=PARTICLE, keep=self.config.keep, draw=draw, beta=None, gamma=None, lam_d=None, particle=k)
            found = {name: float(x[0, k]) for name, x in signals.items()} | recall | {"coverage_mixture": float(self._walks[draw].cosines[k].mean())}
            out += [base | dict(metric=name, value=v, unit=units.get(name, "cosine" if name.startswith("coverage") else "nats")) for name, v in found.items()]
        return out

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe import weighing_tables as tables
        from kvprobe.runner import Check, Report

        title = f"reliability plane, {self.model.name}, B={self.config.keep}, M={self.config.m}, T={self.config.t}, n={self.config.instances}"
        chance = stats.difference(*(per_prompt(rows, "recall", arm=name) for name in ("random", CHANCE)), self.config.seed)
        ceiling = rows[(rows.metric == "recall") & (rows.arm == "oracle")].value.min()
        even = rows[(rows.metric == "effective") & (rows.arm == "uniform")].value
        apart, points = _apart(rows)
        checks = [Check("arms that were evicted meet the oracle's set as often as their points of the plane say", apart <= 1e-9 if points else None, f"{points} presets, off by {apart:.1e} at most", "the same"),
                  Check("uniform weights are as many continuations as there are", bool(abs(even - self.config.m).max() < 1e-6), f"{even.min():.4f} at least", f"{self.config.m}"),
                  Check("the oracle keeps its own set", bool(ceiling == 1), f"recall {ceiling:.3f} at least", "1"),
                  Check("random eviction meets the oracle's set as often as the closed form says", None if self.config.model == "tiny" else abs(chance.value) <= 0.01, f"off by {chance.text(4)}", "within .01")]
        manifest = {"title": title, "correlations": tables.correlations(rows, folder.manifest).to_dict("records"),
                    "contrasts": {name: {m: [e.value, e.low, e.high, e.n] for m, e in by.items()} for name, by in tables.contrasts(rows, folder.manifest).items()}}
        return Report(title, report_table(rows, folder.manifest), tables.text(rows, folder.manifest), checks, manifest)


def _apart(rows: pd.DataFrame) -> tuple[float, int]:
    """(largest difference in recall, presets): arms against the points of the plane with their weights."""
    part = rows[rows.metric == "recall"].set_index(["instance", "draw"])
    gaps = []
    for name in WEIGHTINGS:
        mine = part[part.arm == name]
        point = part[(part.arm == PLANE) & (part.beta == mine.beta.iloc[0]) & (part.gamma == mine.gamma.iloc[0]) & (part.lam_d == mine.lam_d.iloc[0])]
        gaps += [float((mine.value - point.value).abs().max())] if len(point) else []
    return max(gaps, default=0.0), len(gaps)
