"""The future-query oracle on one prompt, one layer and one query head, in steps that can be looked at (LORE sec. 4.5, app. F; protocols 6).

`read` takes a prompt through the pass of the oracle suite (its criteria, its scores) and keeps one head of it. All numbers are of
one example: n = 1. For n prompts and intervals there is the probe `oracle_suite`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from . import allocation, deletion, oracle, plotting
from .attention import weights
from .inside.intervene import kv_head
from .inside.sites import head_weights
from .metrics import coverage, fidelity, ranking
from .models import Model
from .prompting import CHANCE, COMMON
from .suite import drawing, orders
from .tasks import Task
from .walking import Walking

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (orders.ORACLE, orders.LORE_E, orders.WINDOW_ONLY, orders.RANDOM)
"""The criteria of an example: the ceiling, window and continuations, the window alone, the floor."""
AGREE = {(False, False): ("kept by neither", "0.75"), (True, False): ("only by the criterion", "tab:orange"), (False, True): ("only by the oracle", "tab:red"),
         (True, True): ("kept by both", "tab:green")}
"""(kept by a criterion, kept by the oracle) -> label, colour."""
SETS = {"window": ("tab:orange", "o"), "continuations": ("tab:blue", "s"), "future": ("tab:red", "*")}


@dataclass(frozen=True)
class CONFIG(COMMON):
    """Settings of an example beside those of every prompt-time session."""

    budget: int = 64
    """entries kept where one budget is shown, the protected ones inside (B)"""
    m: int = 4
    """continuations of a draw (M)"""
    t: int = 8
    """tokens of each (T)"""


@dataclass(frozen=True)
class Example:
    """One head of one prompt of n tokens, in float64. n: what is compressed, task.ids up to the answer, or up to an unseen question.

    window [w d], continuations [m t' d] of the first draw with written [m t'], future [t d]: post-RoPE queries of the query head; continued
    [m t'] and ahead [t] are the tokens they belong to. keys, values [n d] of the KV head that it reads; output [d e]: what a head's output z
    adds to the residual stream is z @ output. scores {criterion: [r n]} of the KV head, one row per sampling seed, protected bool [n].
    """

    model: Model
    task: Task
    config: CONFIG
    layer: int
    q_head: int
    kv_head: int
    ahead: Tensor
    continued: Tensor
    written: Tensor
    window: Tensor
    continuations: Tensor
    future: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    scaling: float
    scores: Mapping[str, Tensor]
    protected: Tensor

    def __repr__(self) -> str:
        held, (m, t) = int(self.protected.sum()), self.continued.shape
        return f"{', '.join(self._title)}; {held} entries protected, a future of {len(self.ahead)} tokens, {m} continuations of at most {t}"

    @property
    def n(self) -> int:
        """Tokens of the prompt that is compressed."""
        return len(self.keys)

    @property
    def _title(self) -> tuple[str, str]:
        """Two lines: a legend beside them leaves no room for one."""
        return (f"{self.model.name}, layer {self.layer}, query head {self.q_head} (KV head {self.kv_head})",
                f"prompt of {self.n} tokens, question {self.config.question}, n = 1")

    # -- the queries -------------------------------------------------------------------------------------------------------

    def queries(self) -> pd.DataFrame:
        """The sets of queries: how many, at which positions, and the text whose tokens they belong to."""
        import pandas as pd

        n, w, stop = self.n, len(self.window), len(self.task.ids)  # the future begins behind the question
        out = [("window", w, f"{n - w}..{n - 1}", self._text(self.task.ids[n - w : n]))]
        for k, (ids, written) in enumerate(zip(self.continued, self.written)):
            out.append((f"continuation {k + 1}", int(written.sum()), f"{n}..{n + int(written.sum()) - 1}", self._text(ids[written])))
        out.append(("future", len(self.ahead), f"{stop}..{stop + len(self.ahead) - 1}", self._text(self.ahead)))
        return pd.DataFrame(out, columns=["set", "queries", "positions", "text"])

    def coverage(self) -> pd.DataFrame:
        """Coverage of the future's queries (eq. 13, this head alone): the window, the first M continuations, and both; mixture and union.
        M: powers of two, and all."""
        import pandas as pd

        ahead, window, looked = ({self.layer: x} for x in (self.future[None, None], self.window[None, None], self.continuations[None, :, None]))
        near = coverage.measure(ahead, torch.ones(1, len(self.future), dtype=torch.bool), window, None, looked, self.written[None])
        out = [("window", 0, *[float(near.coverage("window"))] * 2)]
        for m in sorted({2**i for i in range(len(self.continued).bit_length())} | {len(self.continued)}):
            out += [(s, m, *(float(near.coverage(s, form, m)) for form in ("mixture", "union"))) for s in ("continuations", "both")]
        return pd.DataFrame(out, columns=["covered by", "M", "mixture", "union"])

    def plane(self):
        """Figure: the unit-normalised queries in their first two principal components (after LORE Fig. 1a)."""
        from sklearn.decomposition import PCA

        sets = dict(zip(SETS, (self.window, self.continuations[self.written], self.future)))
        sets = {name: torch.nn.functional.normalize(x, dim=-1).numpy() for name, x in sets.items()}
        fitted = PCA(2, svd_solver="full").fit(np.concatenate(list(sets.values())))
        figure, ax = plotting.picture(8.2, 4.8)
        for name, (color, marker) in SETS.items():
            at = fitted.transform(sets[name])
            size = 80 if marker == "*" else 30
            ax.scatter(at[:, 0], at[:, 1], color=color, marker=marker, s=size, alpha=0.75, lw=0, label=f"{name} ({len(at)} queries)")
        x, y = fitted.explained_variance_ratio_
        ax.set(xlabel=f"first component of unit queries ({x:.0%} of variance)", ylabel=f"second component ({y:.0%} of variance)")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return self._finish(figure, "Queries of the window, of continuations, and of the future")

    # -- what deleting an entry does ---------------------------------------------------------------------------------------

    def attention(self) -> Tensor:
        """[t n]: softmax of the future's queries over the prompt's keys."""
        return weights(self.future[None, None], self.keys[None, None], None, self.scaling).reshape(len(self.future), self.n)

    def costs(self, eps: float = oracle.ANALYSIS.eps) -> Tensor:
        """[t n]: what deleting each entry costs each query of the future in this head, by the closed form of eq. 12.

        In norms of what the head adds to the residual stream.
        """
        sets = {str(i): own for i, own in enumerate(torch.eye(len(self.future), dtype=torch.bool))}
        ask, keys, values = (x[None, None] for x in (self.future, self.keys, self.values))
        found = deletion.by_set(ask, keys, values, self.scaling, sets, deletion.gram(self.output[None]), cost=replace(oracle.ANALYSIS, eps=eps))
        return torch.stack([found[name][0, 0] for name in sets])

    def deleted(self, step: int = 0, top: int = 6) -> pd.DataFrame:
        """The entries that a query of the future attends to most, each deleted by itself: the change of what the head adds to the residual stream.

        Computed directly (leave it out, renormalise, project, take the norm of the difference) and by the closed form
        a / (1 - a + eps) |(v - o) W_O|, with eps = 0 (the paper's 1e-6 guards an entry that has all attention). The last column is the
        change over the norm of the head's whole output. Raises ValueError for a step that the future does not have.
        """
        import pandas as pd

        if not 0 <= _whole("step", step) < len(self.future):
            raise ValueError(f"step={step}: the future has {len(self.future)} queries, 0..{len(self.future) - 1}")
        a, closed, out = self.attention()[step], self.costs(eps=0.0)[step], []
        full = a @ self.values @ self.output
        for i in a.argsort(descending=True)[: _whole("top", top)].tolist():
            rest = a.clone()
            rest[i] = 0.0
            direct = float((rest / rest.sum() @ self.values @ self.output - full).norm())
            out.append((i, self._token(i), float(a[i]), direct, float(closed[i]), abs(float(closed[i]) / direct - 1), direct / float(full.norm())))
        columns = ["position", "token", "attention", "directly", "closed form", "relative difference", "over the output's norm"]
        return pd.DataFrame(out, columns=columns)

    def attention_figure(self):
        """Figure: attention of every query of the future over the prompt, and below it, by position, its mean and the mean cost of deletion."""
        from matplotlib.colors import LogNorm

        a, costs = self.attention(), self.costs()
        figure, (top, low) = plotting.picture(11, 8.4, 2, sharex=True, height_ratios=(5, 3))
        image = top.imshow(a.clamp(min=1e-4).numpy(), aspect="auto", norm=LogNorm(1e-4, 1), cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=top, label="attention [share, 1e-4 and less dark]", pad=0.01)
        top.grid(visible=False)
        top.set_yticks(range(len(self.ahead)), [self._shown(i) for i in self.ahead.tolist()], fontsize=7, **plotting.PLAIN)
        top.set(ylabel="query of the future: its token")
        low.plot(a.mean(0), color="tab:green", lw=0.9, label="attention [share]")
        low.plot(costs.mean(0), color="0.1", lw=0.9, label="cost of deletion [norm in the residual stream]")
        low.set(yscale="log", xlabel="position in the prompt [tokens]", ylabel="mean over the future's queries", xlim=(-0.5, self.n - 0.5), ylim=(1e-6, None))
        marked = [(self._asked, "tab:red", span) for span in self.task.spans["evidence"]] + [("window (protected)", "tab:orange", (self.n - len(self.window), self.n))]
        for name, color, (first, stop) in marked:
            low.axvspan(first - 0.5, stop - 0.5, color=color, alpha=0.2, lw=0, label=name)
        named = {name: handle for handle, name in zip(*low.get_legend_handles_labels())}
        figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        return self._finish(figure, "What the future reads in the prompt")

    # -- the order of the entries ------------------------------------------------------------------------------------------

    def ranking(self, top: int = 12) -> pd.DataFrame:
        """The candidates of highest oracle score: this head's mean cost, S* (the mean over the query heads that share the KV head), and ranks.

        A rank is the place among the candidates by a criterion, 0 first, under the first draw of those that draw.
        """
        import pandas as pd

        own, score = self.costs().mean(0), self.scores[orders.ORACLE][0]
        ranks = {name: self._ranks(name)[0] - int(self.protected.sum()) for name in SHOWN}
        best = ranks[orders.ORACLE].masked_fill(self.protected, self.n).argsort()[: max(0, min(_whole("top", top), int((~self.protected).sum())))].tolist()
        rows = [{"position": i, "token": self._token(i), "this head": float(own[i]), "S*": float(score[i])} for i in best]
        return pd.DataFrame([row | {f"rank: {name}": int(ranks[name][row["position"]]) for name in SHOWN} for row in rows])

    def order_figure(self):
        """Figure: every candidate's oracle score against its scores by the window alone and by LORE /E, with what each keeps, and Spearman's rho."""
        kept, keep = self.kept(), self.config.budget
        figure, axes = plotting.grid(10.5, 4.8, 1, 2, sharey=True)
        truth, free = self.scores[orders.ORACLE][0].clamp(min=1e-12), ~self.protected
        for ax, name in zip(axes[0], (orders.WINDOW_ONLY, orders.LORE_E)):
            mine = self.scores[name][0].clamp(min=1e-12)
            for (by_it, by_oracle), (label, color) in AGREE.items():
                at = free & (kept[name] == by_it) & (kept[orders.ORACLE] == by_oracle)
                ax.scatter(mine[at], truth[at], s=16, color=color, lw=0, label=label if name == orders.LORE_E else None)
            rho = float(ranking.spearman(mine, truth, self.protected))
            ax.set(xscale="log", yscale="log", xlabel=f"score by {name} [norm in the residual stream]")
            ax.set_title(f"{name}: Spearman's rho {rho:.2f}", fontsize=10)
        axes[0][0].set_ylabel("oracle score S* [norm in the residual stream]")
        said = f"scores of the KV head (mean over its query heads), first draw of continuations, below 1e-12 drawn there; kept at B = {keep}, protected entries left out"
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8, title=said, title_fontsize=8)
        return self._finish(figure, f"{int(free.sum())} candidates by what their deletion costs")

    # -- what is kept, and what that does to the output --------------------------------------------------------------------

    def kept(self, keep: int | None = None) -> dict[str, Tensor]:
        """{criterion: bool [n]}: what each keeps under the first sampling seed, `keep` entries with the protected ones (None: the main budget).

        Raises ValueError for a budget that cannot hold the protected entries, or evicts nothing.
        """
        return {name: x[0] for name, x in self._kept(self.config.budget if keep is None else keep).items()}

    def kept_text(self, keep: int | None = None) -> str:
        """What each criterion keeps beside the protected entries, dots for all that stands between; and how much of the evidence: of the statement
        asked for, or of all that lead to the answer."""
        lines, inside = [], torch.zeros(self.n, dtype=torch.bool)
        for a, z in self.task.spans["evidence"]:
            inside[a:z] = True
        for name, mask in self.kept(keep).items():
            free = mask & ~self.protected
            text = "".join(self._said(i) if free[i] else "…" * int(i == 0 or bool(free[i - 1])) for i in range(self.n))
            lines.append(f"{name} ({int(mask[inside].sum())} of the {int(inside.sum())} tokens of the {self._asked})\n    {text}")
        return "\n".join(lines)

    def recall(self, budgets: Sequence[int]) -> pd.DataFrame:
        """Recall@B (eq. 14) by criterion and budget, over all B entries and over the free slots: means over draws, and a uniform draw's by closed form."""
        import pandas as pd

        out = {}
        for keep in _budgets(budgets):
            kept = self._kept(keep)
            best = kept[orders.ORACLE]
            both = {name: [float(x.mean()) for x in fidelity.recall(mask, best, self.protected)] for name, mask in kept.items()}
            both[CHANCE] = list(fidelity.random_recall(self.n, keep, int(self.protected.sum())))
            out |= {(f"B = {keep}", over): {name: pair[i] for name, pair in both.items()} for i, over in enumerate(("all", "free slots"))}
        return pd.DataFrame(out)

    def errors(self, budgets: Sequence[int]) -> pd.DataFrame:
        """arm, keep, value: output error (eq. 15, 1 - mean cosine over the future's queries) of this head, the mean over draws; low, high: their range."""
        import pandas as pd

        ask, own, out = self.future[None, None], (self.keys[None, None], self.values[None, None], self.scaling), []
        full = fidelity.outputs(ask, *own)
        for keep in _budgets(budgets):
            for name, mask in self._kept(keep).items():
                made = torch.stack([fidelity.output_error(fidelity.outputs(ask, *own, one[None, None, None]), full)[0, 0] for one in mask])
                out.append(dict(arm=name, keep=keep, value=float(made.mean()), low=float(made.min()), high=float(made.max()), draws=len(made)))
        return pd.DataFrame(out)

    def error_figure(self, budgets: Sequence[int]):
        """Figure: `errors` over the budgets, a curve per criterion; bands are ranges over draws, no intervals."""
        budgets = _budgets(budgets)
        table = self.errors(budgets)
        figure, ax = plotting.picture(8.6, 4.8)
        for name in SHOWN:
            drawing.curve(ax, table[table.arm == name], "keep", name)
        drawing.budget_axis(ax, budgets)
        ax.set(ylabel="output error [1 - cosine]", ylim=(0, None))
        drawing.legend(figure, SHOWN)
        over = f"mean over the {len(self.future)} queries of the greedy future"
        drew = f"{orders.LORE_E} and {orders.RANDOM}: mean and range of {int(table.draws.max())} draws"
        plotting.footer(figure, f"{int(self.protected.sum())} protected entries inside B; {over}; {drew}")
        return self._finish(figure, "Output error of what each criterion keeps")

    # -- helpers -----------------------------------------------------------------------------------------------------------

    @property
    def _asked(self) -> str:
        return "statement asked for" if len(self.task.spans["evidence"]) == 1 else "statements that lead to the answer"

    def _ranks(self, name: str) -> Tensor:
        return allocation.ranks(self.scores[name].masked_fill(self.protected, torch.inf))

    def _kept(self, keep: int) -> dict[str, Tensor]:
        """{criterion: bool [r n]}"""
        if not int(self.protected.sum()) <= _whole("keep", keep) < self.n:
            raise ValueError(f"keep={keep} must hold the {int(self.protected.sum())} protected entries and be below the {self.n} tokens of the prompt")
        return {name: self._ranks(name) < keep for name in SHOWN}

    def _text(self, ids) -> str:
        return self.model.tokenizer.decode([int(i) for i in ids])

    def _said(self, position: int) -> str:
        return self._text([self.task.ids[position]]).replace("\n", "⏎")

    def _token(self, position: int) -> str:
        return repr(self._text([self.task.ids[position]]))

    def _shown(self, token: int) -> str:
        return repr(self._text([token]))

    def _finish(self, figure, said: str):
        figure.suptitle("\n".join((said, *self._title)), fontsize=10.5)
        return figure


def read(model: Model, task: Task, layer: int, q_head: int, *, budget: int = 64, window: int = 32, m: int = 4, t: int = 8, future: int = 32,
         draws: int = 3, seed: int = 0, question: Literal["seen", "unseen"] = "seen") -> Example:
    """Read a prompt once, let the full cache write its greedy future and `draws` times m continuations of t tokens, and score every entry by each criterion.

    draws: sampling seeds of what samples or draws; the first one is shown where one is. Settings are the oracle suite's: cost by its
    magnitude (eq. 12), single tokens, as many entries at each site. question: whether what is compressed ends behind the question
    or before it; before it, window and continuations do not know the question, which is fed after them, ahead of the future.
    Raises ValueError for what is no model or task, a layer or head that does not exist and budgets that do not fit the prompt,
    before any work.
    """
    if not isinstance(model, Model):
        raise ValueError(f"model must be a loaded one, kvprobe.load('smollm2'), not {type(model).__name__}")
    if not isinstance(task, Task):
        raise ValueError(f"task must be one of tasks.build(model.tokenizer, 'needles', [0]), which say where everything stands, not {type(task).__name__}")
    layer, q_head, budget, window, m, t, future, draws, seed = (_whole(name, value) for name, value in dict(
        layer=layer, q_head=q_head, budget=budget, window=window, m=m, t=t, future=future, draws=draws, seed=seed).items())
    if m < 1 or draws < 1:
        raise ValueError(f"m={m} and draws={draws} must be at least 1: LORE /E is among the criteria")
    if layer not in model.geometry.kv_layers or not 0 <= q_head < model.geometry.n_q:
        raise ValueError(f"layer={layer}, q_head={q_head}: layers with a growing cache are {list(model.geometry.kv_layers)}, query heads 0..{model.geometry.n_q - 1}")
    config = CONFIG(model=model.name, budget=budget, keeps=str(budget), window=window, m=m, t=t, future=future, sampling_seeds=draws, seed=seed,
                    question=question)
    session = Walking(config, model, [task], [a for a in orders.arms(config, model) if a.name in SHOWN])
    prompt = session.read(0)
    place, head = model.geometry.kv_layers.index(layer), kv_head(model, q_head)
    ranked = orders.ranked(session, prompt).orders
    scores = {name: _own(torch.cat([o.score[place, :, head] for o in ranked if o.arm.name == name])) for name in SHOWN}
    held, truth, found = prompt.cache.layers[layer], prompt.truth, prompt.draws[0]
    real = truth.ahead.valid[0]
    window, looked, future_ = held.queries[0, q_head], found.queries[layer][0, :, q_head], truth.ahead.queries[layer][0, q_head][real]
    return Example(
        model, task, config, layer, q_head, head, truth.ahead.tokens[0][real].cpu(), found.tokens[0].cpu(), found.valid[0].cpu(),
        _own(window), _own(looked), _own(future_), _own(held.keys[0, head]), _own(held.values[0, head]), _own(head_weights(model, "O", layer)[q_head]),
        held.scaling, scores, truth.protected[place, 0, head].cpu())


def _own(x: Tensor) -> Tensor:
    return x.detach().double().cpu()


def _whole(name: str, value) -> int:
    """Raises ValueError for anything but a whole number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number") from None


def _budgets(budgets) -> list[int]:
    """Raises ValueError for anything but some whole numbers."""
    try:
        found = list(() if isinstance(budgets, str) else budgets)
    except TypeError:
        found = []
    if not found:
        raise ValueError(f"budgets={budgets!r} must be at least one number of entries, e.g. (48, 64)")
    return [_whole("keep", keep) for keep in found]
