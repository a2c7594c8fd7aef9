"""Tables and figures of keep logs: which positions heads hold after each round, survival by age, coverage by round.

For one text, to be read; the `keep_log` probe measures the same over many, with intervals. Logs are given by name, and one row of each is looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from . import plotting, retention
from .keeplog import ALIVE, KeepLog

if TYPE_CHECKING:
    import pandas as pd

STATES = {"evicted": "#f4e8c1", "held": "#21618c", "not yet read": "#bdbdbd"}
"""What a position is after a round, with its colour."""


def states(log: KeepLog, layer: int, row: int = 0) -> np.ndarray:
    """int8 [hkv rounds p]: what each position is right after each round in each KV head of a layer: 0 evicted, 1 held, 2 not yet read.

    Raises ValueError for a layer that was not logged or a row without rounds.
    """
    _given({"": log}, row)
    if layer not in log.layers:
        raise ValueError(f"layer {layer} was not logged: {', '.join(map(str, log.layers))}")
    held = np.stack([log.held(row, n)[log.layers.index(layer)] for n in range(log.rounds(row))], axis=1)[..., : log.length[row]]
    unread = np.arange(held.shape[-1]) >= np.array(log.fired[row])[:, None]
    return np.where(unread, 2, held).astype(np.int8)


def rounds_map(log: KeepLog, layer: int, row: int = 0, title: str = "", footer: str = ""):
    """A matplotlib Figure: a panel per KV head of a layer; position across, rounds downwards, held or not as colour."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    found = states(log, layer, row)
    heads, rounds, n = found.shape
    figure, axes = plotting.grid(9.2, min(11, 1.5 + 1.7 * heads), heads, 1, sharex=True)
    for head, (ax,) in enumerate(axes):
        ax.imshow(found[head], cmap=ListedColormap(list(STATES.values())), vmin=0, vmax=2, aspect="auto", interpolation="nearest",
                  extent=(0, n, rounds + 0.5, 0.5))
        ax.grid(False)
        ax.set_ylabel(f"KV head {head}\nafter round")
    axes[-1][0].set_xlabel("position in the text [tokens]")
    figure.legend(handles=[Patch(color=color, label=name) for name, color in STATES.items()], loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(title or f"What each KV head of layer {layer} holds after each round", fontsize=11)
    plotting.footer(figure, f"layer {layer}, one text (n = 1) of {n} tokens, {rounds} rounds, K = {log.keep} and r = {log.buffer} entries per KV head"
                    + (f"\n{footer}" if footer else ""))
    return figure


def coverage(logs: Mapping[str, KeepLog], row: int = 0) -> pd.DataFrame:
    """One line per log and round: slots and positions that some head still holds, and decorrelation (`retention.Coverage`), means over layers."""
    import pandas as pd

    return pd.DataFrame([dict(policy=name, round=n + 1, slots=found.slots, positions=found.positions, decorrelation=found.decorrelation)
                         for name, log in _given(logs, row).items() for n in range(log.rounds(row)) for found in [retention.coverage(log, row, only=[n])]])


def draw_coverage(table: pd.DataFrame, log: KeepLog, footer: str = "", row: int = 0, pinned: int = 0):
    """A matplotlib Figure of `coverage`: by slot index and by position; the first with the closed forms of independent and of shared uniform draws.

    log: any of the table's, with the same row, for budgets and heads: the table does not say them. pinned: as in `survival`.
    """
    candidates = _candidates(_given({"": log}, row)[""], row, pinned)
    figure, axes = plotting.grid(11.6, 4.0, 1, 2)
    (slots, positions), heads = axes[0], log.died.shape[2]
    free = (log.keep - pinned) / (candidates - pinned)
    some, one = ((pinned + (candidates - pinned) * share) / candidates for share in (1 - (1 - free) ** heads, free))
    for ax, column, label in ((slots, "slots", "slot indices that some head keeps"), (positions, "positions", "positions that some head keeps")):
        for (name, part), marker in zip(table.groupby("policy", sort=False), "osD^vPX" * 9):
            ax.plot(part["round"], part[column], color=plotting.colors(table.policy)[name], marker=marker, ms=3, lw=1, label=name)
        ax.set(xlabel="round", ylabel=f"{label}\n[fraction of the candidates]")
    for values, style, what in ((some, "--", f"{heads} independent uniform draws"), (one, ":", "one shared uniform draw")):
        if (values == values[0]).all():
            slots.axhline(values[0], color="0.1", ls=style, lw=1, label=what)
        else:  # a first round over a long prompt chooses from more
            slots.plot(np.arange(len(values)) + 1, values, color="0.1", ls=style, lw=1, label=what)
    positions.set_ylim(slots.set_ylim(min(table.slots.min(), table.positions.min(), one.min()) - 0.02, 1.01))
    plotting.plain(figure.legend(*slots.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False))
    figure.suptitle("What is left of each round's candidates over all heads together", fontsize=11)
    plotting.footer(figure, f"one text (n = 1), K = {log.keep}, r = {log.buffer} entries per KV head, means over {len(log.layers)} layers, "
                    f"{heads} KV heads; lines without marks: closed forms 1 - (1 - q)^heads and q, q = {_share(candidates, log, pinned)}{_unpinned(log, row, pinned)}"
                    + (f"\n{footer}" if footer else ""))
    return figure


def survival(logs: Mapping[str, KeepLog], row: int = 0, first: int = 0, bands: int = 16, pinned: int = 0) -> pd.DataFrame:
    """One line per log and age band (low <= age < high [tokens]): share held per head, by any head, and what uniform draws predict for both.

    first: the first position looked at. bands: of equal width up to the oldest. pinned: entries of a protected prompt, the first of the
    text, inside K; give it wherever the prompt was protected, a log does not say so (a warning does where no site of any log
    evicted the first positions). Means over rounds, layers and positions
    (`retention.ages`). uniform: each round of C candidates spares (K - pinned) / (C - pinned); uniform_union: of heads that draw
    independently of each other. Raises ValueError for a row without rounds, for what is pinned or looked at beyond it, and for
    pinned entries that were evicted.
    """
    import pandas as pd

    out, stayed = [], min(_outlived(log, row) for log in _given(logs, row).values())
    if stayed and not pinned:
        warnings.warn(f"the columns uniform and uniform_union know of no protected entries, and {_suspected(stayed)}", stacklevel=2)
    for name, log in _given(logs, row).items():
        if not 0 <= first < log.fired[row][-1] or bands < 1:
            raise ValueError(f"first={first} must be in 0..{log.fired[row][-1] - 1}, the positions seen at the last round, and bands={bands} at least 1")
        sums = retention.ages(log, row, first)
        expected = _uniform(log, row, first, pinned)
        edges = np.unique(np.linspace(0, len(sums.count), bands + 1).round().astype(int))
        for a, z in zip(edges.tolist(), edges[1:].tolist()):
            if shares := retention.band(sums, a, z):
                one, some = (float(x[a:z].sum() / sums.count[a:z].sum()) for x in expected)
                out.append(dict(policy=name, low=a, high=z) | shares | {"uniform": one, "uniform_union": some})
    return pd.DataFrame(out)


def _candidates(log: KeepLog, row: int, pinned: int) -> np.ndarray:
    """[rounds]: entries that each round of a row chooses K from: K + r, but all of a prompt that was read at once at the first."""
    if not 0 <= pinned <= log.keep:
        raise ValueError(f"pinned={pinned} must be in 0..{log.keep}: protected entries count inside K")
    if pinned > (stayed := _outlived(log, row)):
        raise ValueError(f"pinned={pinned}, but position {stayed} was evicted: at most the first {stayed} can have been protected")
    ends = np.array(log.fired[row]) - log.buffer
    return np.diff(ends, prepend=0) + np.where(np.arange(len(ends)), log.keep, 0)


def _outlived(log: KeepLog, row: int) -> int:
    """How many of the first positions no site evicted in any round, of those that were candidates."""
    gone = (log.died[:, row, :, : log.fired[row][-1] - log.buffer] != ALIVE).any((0, 1))
    return int(gone.argmax()) if gone.any() else len(gone)


def _suspected(stayed: int) -> str:
    return f"no site evicted any of the first {stayed} positions: if the prompt was protected, give its length as pinned, at most {stayed}"


def _unpinned(log: KeepLog, row: int, pinned: int) -> str:
    """What a footer says of closed forms that know of no protected prompt."""
    if pinned:
        return ""
    stayed = _outlived(log, row)
    return "; without protected entries" + (f"\n{_suspected(stayed)}" if stayed else "")


def _share(candidates: np.ndarray, log: KeepLog, pinned: int) -> str:
    """What a uniform round spares, as it is written in a footer."""
    less = f" - {pinned} protected" if pinned else ""
    many = "K + r" if (candidates == log.keep + log.buffer).all() else f"{candidates[0]} candidates" + (" at first, then K + r" if len(candidates) > 1 else "")
    return f"{f'(K{less})' if less else 'K'} / ({many}{less})"


def _uniform(log: KeepLog, row: int, first: int, pinned: int) -> tuple[np.ndarray, np.ndarray]:
    """Per age (index), summed over rounds: the chance that a head, and that some head, still holds a position when every head draws uniformly and by itself."""
    candidates, fired, heads = _candidates(log, row, pinned), np.array(log.fired[row]), log.died.shape[2]
    spared = (log.keep - pinned) / np.maximum(candidates - pinned, 1)
    one, some = np.zeros(fired[-1] + 1), np.zeros(fired[-1] + 1)
    for n, length in enumerate(fired):
        at = np.arange(first, length)
        entered = np.minimum(np.searchsorted(fired - log.buffer, at, side="right"), n + 1)  # rounds before it was a candidate
        chance = np.array([spared[e : n + 1].prod() for e in range(n + 2)])[entered]
        chance[at < pinned] = 1
        one[length - at] += chance
        some[length - at] += 1 - (1 - chance) ** heads
    return one, some


def draw_survival(table: pd.DataFrame, log: KeepLog, footer: str = "", row: int = 0, pinned: int = 0):
    """A matplotlib Figure of `survival`: per head and by any head, with the uniform draw's closed form. log: any of the table's; row, pinned: the table's."""
    share = _share(_candidates(_given({"": log}, row)[""], row, pinned), log, pinned)
    figure, axes = plotting.grid(11.0, 4.2, 1, 2, sharey=True)
    heads = log.died.shape[2]
    for ax, column, label in zip(axes[0], ("head", "union"), ("held by a head", "held by any head")):
        for (name, part), marker in zip(table.groupby("policy", sort=False), "osD^vPX" * 9):
            ax.plot((part.low + part.high) / 2, part[column], color=plotting.colors(table.policy)[name], marker=marker, ms=3.5, lw=1.2, label=name)
        part = table[table.policy == table.policy.iloc[0]]
        ax.plot((part.low + part.high) / 2, part["uniform" if column == "head" else "uniform_union"], color="0.1", lw=1.4, ls="--",
                label="uniform draw, closed form", zorder=5)
        ax.set(xlabel="age [tokens]", ylabel=f"{label} [fraction of positions]", ylim=(0, 1.03))
    plotting.plain(figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False))
    figure.suptitle("What is still held of a text's past", fontsize=11)
    plotting.footer(figure, f"one text (n = 1), means over rounds, {len(log.layers)} layers and bands of age; "
                    f"K = {log.keep}, r = {log.buffer} entries per KV head, {heads} KV heads;\n"
                    f"closed form: {share}, multiplied over its rounds as a candidate; by any head: of heads that draw independently{_unpinned(log, row, pinned)}"
                    + (f"\n{footer}" if footer else ""))
    return figure


def _given(logs, row: int) -> Mapping[str, KeepLog]:
    if not isinstance(logs, Mapping) or not logs or not all(isinstance(log, KeepLog) for log in logs.values()):
        raise ValueError("logs must be keep logs by name, e.g. {'random': cache.keep_log}")
    if len({(log.keep, log.buffer, log.died.shape[2]) for log in logs.values()}) > 1:
        raise ValueError("these logs have other budgets or heads: only logs of one K, one r and as many KV heads compare")
    for log in logs.values():
        if not 0 <= row < len(log.fired):
            raise ValueError(f"row {row} does not exist: rows 0..{len(log.fired) - 1} were logged")
        if not log.rounds(row):
            raise ValueError(f"row {row} had no round: nothing was evicted, there is nothing to show")
    return logs
