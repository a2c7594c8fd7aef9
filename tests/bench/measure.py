"""How everything here is timed: variants round-robin in one process, and the ratio inside each round, so that whatever
else the machine does hits numerator and denominator alike.

The clock is the CPU time of the process with one thread, which leaves out the waiting for a core; with more threads it
is the wall clock, because threads that spin while they wait would be charged.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def spend(work: Callable[[], object]) -> float:
    """Seconds one call takes, with the garbage collector off."""
    gc.disable()
    try:
        start = clock()
        work()
        return clock() - start
    finally:
        gc.enable()


@dataclass(frozen=True)
class Result:
    """One line of the table.

    ratios: one per round. goal: the number the median must reach; more: whether more is better. slack: the median may
    reach this instead when the range covers the goal. note: what has to be known to read the number.
    """

    item: str
    ratios: tuple[float, ...]
    goal: float | None = None
    more: bool = False
    slack: float | None = None
    note: str = ""
    form: str = ".2f"

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """None without a goal."""
        if self.goal is None:
            return None
        if self.more:
            return self.median >= self.goal
        covered = self.slack is not None and min(self.ratios) <= self.goal and self.median <= self.slack
        return self.median <= self.goal or covered

    def row(self) -> str:
        low, high = (format(x, self.form) for x in (min(self.ratios), max(self.ratios)))
        goal = "" if self.goal is None else f"{'>=' if self.more else '<='} {self.goal:g}"
        met = {None: "", True: "met", False: "NOT MET"}[self.met]
        return f"{self.item:<68} {self.median:>9{self.form}}  [{low}, {high}]".ljust(104) + f"{len(self.ratios):>3}  {goal:<9} {met}"

    def json(self) -> dict:
        return dict(item=self.item, median=self.median, ratios=list(self.ratios), n=len(self.ratios), goal=self.goal,
                    better="more" if self.more else "less", slack=self.slack, met=self.met, note=self.note)


HEADER = f"{'item':<68} {'median':>9}  {'[min, max]'}".ljust(104) + "  n  goal"


def rounds(n: int, variants: Sequence[tuple[str, Callable[[], float]]], say: Callable[[str], None] = lambda line: None) -> dict[str, list[float]]:
    """Seconds of every variant in n rounds; each round starts with the next variant, so that none always follows another."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in variants}
    for i in range(n):
        gc.collect()
        for j in range(len(variants)):
            name, measured = variants[(i + j) % len(variants)]
            seconds[name].append(measured())
        say(f"  round {i + 1}/{n}: " + ", ".join(f"{name} {s[-1]:.3g} s" for name, s in seconds.items()))
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(numerator, denominator, strict=True))
