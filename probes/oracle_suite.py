"""One pass per prompt behind every figure against the future: criteria against the oracle at 12 budgets, coverage, classes, heads (LORE sec. 4.5, App. F)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe import stats, tasks
from kvprobe.prompt_reading import Prompt
from kvprobe.prompt_settings import COMMON, names, numbers
from kvprobe.prompt_tables import per_prompt
from kvprobe.suite.orders import FULL, ORACLE, RANDOM, Ranked, arms
from kvprobe.suite.tables import report_table  # noqa: F401
from kvprobe.walking import Walking

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of the oracle suite."""

    kinds: str = "needles,variables,passages"
    """kinds of prompts, taken in turn (kvprobe.tasks): needles, variables, passages"""
    instances: int = 24
    """prompts in all, each with its own names, values and filler"""
    length: int = 720
    """of a prompt, up to the answer, the middle one of three that are taken in turn [tokens]"""
    spread: int = 170
    """how much shorter and longer the other two are [tokens]"""
    keeps: str = "40,47,56,66,78,92,109,128,152,179,211,250"
    """budgets: entries kept per KV head, the protected ones inside (B)"""
    budget: int = 128
    """the main one of them: layers, heads, classes and orders are compared there"""
    answers: str = "66,128"
    """budgets at which the compressed cache also answers: log p, and KL along the future"""
    m: int = 4
    """continuations that LORE /E and /D score by (M)"""
    t: int = 8
    """tokens of each (T)"""
    ms: str = "1,2,4,8"
    """numbers of continuations whose coverage is measured, nested prefixes of one draw"""
    layers: str = "0,15,29"
    """layers whose queries are stored"""
    shown: str = "15,0"
    """layer and query head whose queries are drawn in a plane"""
    fidelity_over: str = "prompt"
    """keys that the future's queries see when outputs are compared: prompt, or all (with the generated ones, causally)"""
    deletions: int = 64
    """candidates of each prompt, evenly spaced, that are really deleted in all sites at once; 0 leaves the logit oracle's deletions out"""
    deletions_top: int = 16
    """candidates of highest oracle score beside them"""
    deletions_single: int = 16
    """deletions at single sites, in each KV head of one layer, half of them its highest"""
    deletion_layer: int = 15
    """that layer"""
    deletion_future: int = 16
    """tokens of the future that are forced after each deletion, at most [tokens]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("answers", "ms"):
            numbers(name, getattr(self, name))
        whole = all(x.isdigit() for x in [*names(self.layers), *names(self.shown)])
        if not whole or len(names(self.shown)) != 2 or not 0 <= self.spread < self.length:
            raise ValueError(f"layers={self.layers!r} and shown={self.shown!r} (layer,query head) take whole numbers from 0 on; spread={self.spread} must be in 0..length")
        if not {self.budget, *numbers("answers", self.answers)} <= set(self.budgets):
            raise ValueError(f"budget={self.budget} and answers={self.answers!r} must be among keeps={self.keeps!r}")
        if min(self.deletions, self.deletions_top, self.deletions_single) < 0 or self.deletion_future < 2:
            raise ValueError(f"deletions, deletions_top and deletions_single must not be negative, deletion_future={self.deletion_future} at least 2")
        if not 1 <= self.m <= max(numbers("ms", self.ms)) or self.t < 1 or self.fidelity_over not in ("prompt", "all"):
            raise ValueError(f"m={self.m} must be in 1..{max(numbers('ms', self.ms))} (the largest of ms), t={self.t} at least 1, fidelity_over={self.fidelity_over!r} prompt or all")


PRESETS = {
    "smoke": CONFIG(model="tiny", instances=2, length=500, spread=20, keeps="24,48,96", budget=48, answers="48", window=8, future=5, m=2, t=2, ms="1,2,3", layers="0,1", shown="1,0", deletions=12, deletions_top=4, deletions_single=4, deletion_layer=1, deletion_future=4, sampling_seeds=2, kinds="needles", threads=1),
    "demo": CONFIG(threads=1),
    "paper": CONFIG(instances=100, length=3000, spread=1000, keeps="64,90,128,181,256,362,512,724,1024", budget=128, answers="128,512"),
}
"""The demo's reckoning, CPU seconds per prompt of 720 tokens: prefill and future 7, three draws of 8 x 8 tokens 12, scoring 16 arms 4, 12 budgets x 16 arms of masked
outputs 22, answers and KL at 2 budgets 14, overlaps and correlations 3, 128 deletions x 15 tokens 15: about 75, measured with both threads of a core at work, so 24
prompts take half an hour there and less on a quiet core. At most about 2 GB of memory."""


def start(config: CONFIG, model) -> Session:
    """Build prompts and arms, and refuse what cannot work, before anything is computed."""
    return Session(config, model, build_tasks(config, model), arms(config, model))


def build_tasks(config: CONFIG, model) -> list[tasks.Task]:
    """The prompts: kinds in turn, and lengths in turn within a kind."""
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} came without a tokenizer: prompts of text need one")
    kinds, out = names(config.kinds), []
    for i in range(config.instances):
        length = config.length + config.spread * ((i // len(kinds)) % 3 - 1)
        out += tasks.build(model.tokenizer, kinds[i % len(kinds)], [i], length=length, seed=config.seed, filler=config.filler, context=model.context)
    return out


class Session(Walking):
    """Every prompt is read once; all arms' orders come first, then each budget is measured for all of them."""

    def __init__(self, config: CONFIG, model, prompts, arms):
        super().__init__(config, model, prompts, arms)
        self.particles, self.stored = max(numbers("ms", config.ms)), tuple(int(x) for x in names(config.layers))
        self._check_suite()

    def _check_suite(self) -> None:
        layers, (layer, head) = self.model.geometry.kv_layers, self.shown
        if not {*self.stored, layer, self.config.deletion_layer} <= set(layers) or head >= self.model.geometry.n_q:
            raise ValueError(f"layers={self.config.layers!r}, shown={self.config.shown!r}, deletion_layer={self.config.deletion_layer}: layers with a growing cache are {list(layers)}, query heads 0..{self.model.geometry.n_q - 1}")
        for task in self.tasks:
            ids = self._cut(task)[0]
            held = len(self._protected(ids))
            if min(self.config.budgets) <= held or max(self.config.budgets) >= len(ids):
                raise ValueError(f"keeps={self.config.keeps!r} must lie between the {held} protected entries of a prompt and its {len(ids)} tokens")
        longest = max(len(self._cut(t)[0]) for t in self.tasks)
        if 2 * max(self.config.budgets) > longest:
            raise ValueError(f"keeps={self.config.keeps!r}: curves over B take prompts of 2 x {max(self.config.budgets)} tokens or more, the longest has {longest}")

    @property
    def shown(self) -> tuple[int, int]:
        return tuple(int(x) for x in names(self.config.shown))

    @property
    def _deletions(self) -> int:
        c = self.config
        return (c.deletions + c.deletions_top + self.model.geometry.n_kv * c.deletions_single) if c.deletions else 0

    def tokens(self, batch: int) -> int:
        """Model tokens of a prompt, for the progress bar."""
        return super().tokens(batch) + self._deletions * min(self.config.deletion_future, self.config.future)

    @property
    def bytes_needed(self) -> int:
        from kvprobe.suite import pieces as suite_pieces

        g, longest = self.model.geometry, max(len(t.ids) for t in self.tasks)
        rows = len(self.arms) * len(g.kv_layers) * (2 * g.n_kv + 2) + 50 * len(self.arms) * len(self.config.budgets) + 5 * self._deletions + 50 * len(g.kv_layers) * self.config.sampling_seeds * self.particles
        piece = suite_pieces.size(longest, self.model, len(self.arms), self.config.sampling_seeds, self.particles, self.horizon, self.config.window, self.config.future, len(self.stored))
        return len(self.tasks) * (200 * rows + piece) + 10_000_000

    def _walk(self, p, prompt: Prompt, found):
        return super()._walk(p, prompt, None if found is None else found.first(self.config.m))

    def facts(self) -> dict:
        return super().facts() | {"draw": {"particles": self.particles, "horizon": self.horizon}}

    def compute(self, batch: int, rows, tick):
        """Rows and pieces of one prompt."""
        import torch

        from kvprobe.suite import answers as suite_answers, orders as suite_orders, pieces as suite_pieces

        with torch.no_grad():
            prompt = self.read(batch)
            ranked = suite_orders.ranked(self, prompt)
            said = suite_answers.full(self.model, prompt)
            out = [self._base(prompt) | r for r in self._measured(prompt, ranked, said)]
            pieces = suite_pieces.of(prompt, ranked, self.config.budget, self.stored)
        tick(self.tokens(batch))
        return self._chance(prompt) + out, pieces, [[a.name, a.draw] for a in ranked.arms]

    def _measured(self, prompt: Prompt, ranked: Ranked, said):
        from kvprobe.suite import answers as suite_answers, deletions as suite_deletions, rows as suite_rows

        c = self.config
        generated = said.cache if c.fidelity_over == "all" else None
        yield suite_rows.row("tokens", len(prompt.ids))
        yield suite_rows.row("future", int(prompt.truth.ahead.valid.sum()))
        for keep in c.budgets:
            yield from suite_rows.agreement(prompt, ranked, keep, keep == c.budget, generated)
            if keep in numbers("answers", c.answers):
                yield from suite_answers.answers(self, prompt, ranked, keep, said)
        yield from suite_answers.uncompressed(self, prompt, numbers("answers", c.answers))
        yield from suite_rows.likeness(prompt, ranked, c.budget)
        yield from suite_rows.composed(self.model, prompt, ranked, c.budget, c.window)
        yield from suite_rows.profiles(prompt, ranked)
        yield from suite_rows.covered(prompt, numbers("ms", c.ms), c.window)
        yield from suite_rows.energies(self.model, prompt, self._cost())
        if c.deletions:
            yield from suite_deletions.rows(self, prompt, said)
        if prompt.number == 0:
            yield from suite_rows.plane(prompt, *self.shown, c.window)

    def _cost(self):
        from kvprobe import oracle

        return dataclasses.replace(oracle.ANALYSIS, form=self.config.form)

    def _keeps(self) -> list[int]:
        return list(self.config.budgets)

    def report(self, rows: pd.DataFrame, folder):
        from kvprobe.suite import tables as suite_tables
        from kvprobe.prompting import CHANCE
        from kvprobe.runner import Check, Report

        c, small = self.config, self.config.model == "tiny"
        title = f"oracle suite, {self.model.name}, B={c.budget}, n={c.instances}"
        means = suite_tables.means_of(rows)
        chance = stats.difference(*(per_prompt(means, "recall", arm=name, keep=c.budget) for name in (RANDOM, CHANCE)), c.seed)
        ceiling = means[means.metric.isin(["recall", "recall_free"]) & (means.arm == ORACLE)].value
        error = means[(means.metric == "error") & (means.keep == c.budget)].groupby("arm").value.mean()
        best = error.drop(ORACLE)
        answered = means[(means.metric == "retrieved") & (means.arm == FULL) & (means.keep == min(numbers("answers", c.answers)))].value.mean()
        checks = [Check("the full cache answers the prompts", None if small else bool(answered >= 0.5), f"{answered:.2f} of them", "half of them at least: what it cannot answer no cache can"),
                  Check("random eviction meets the oracle's set as often as the closed form says", None if small else abs(chance.value) <= 0.01, f"off by {chance.text(4)}", "within .01"),
                  Check("the oracle keeps its own set", bool((ceiling == 1).all()), f"recall {ceiling.min():.3f} at least", "1"),
                  Check("no criterion has a lower output error than the oracle", None if small else bool(error[ORACLE] <= best.min()), f"{error[ORACLE]:.4f} against {best.min():.4f} ({best.idxmin()})", "the oracle's is lowest")]
        table = suite_tables.report_table(rows, folder.manifest)
        return Report(title, table, suite_tables.text(rows, folder.manifest), checks, {"title": title})
