"""Checks of the instrument that probes of a planted fact print: the audit, the rounds, and the distance between the endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import keeplog

NATS_APART, NATS_BELOW = 3.0, 0.5
"""Least distance between the endpoints, and how far the fact kept everywhere may fall below the full cache, in mean log p [nats]."""


def audit_check(logged: Iterable, before: int):
    """Whether logs show the spans in exactly the named sites. logged: (log, row, pins); before: the position of the token whose logits
    give the first value that is asked for, by which banned spans must be gone."""
    from .runner import Check

    wrong, count, last = [], 0, 0
    for log, k, pins in logged:
        wrong += keeplog.audit(log, k, pins)
        gone = [round_ for pin in pins for round_ in keeplog.gone_by(log, k, pin).values()]
        last, count = max([last, *(g + 1 for g in gone)]), count + log.rounds(k)
        if any(g >= log.rounds(k, before=before) for g in gone):
            wrong.append(f"row {k}: the banned box was not gone before the value was asked for")
    told = f"{len(wrong)} breaches in {count} row-rounds" + (f", first: {wrong[0]}" if wrong else f"; banned boxes gone by round {last}")
    return Check("audit: the log shows the box in exactly the named sites at every round", not wrong, told, "no breach")


def rounds_check(told: Mapping[str, list[int]]):
    """told: per question, named after its rounds, the counts that the keep logs gave."""
    from .runner import Check

    return Check("rounds before the value, counted from the keep log, are those asked for", all(v == [int(k.split()[0])] for k, v in told.items()), str(dict(told)), "as named")


def near_check(value: float, told: str, n: int, applies: bool, least: float = NATS_BELOW):
    """value: kept - full, in mean log p [nats]."""
    from .runner import Check

    return Check("the fact kept everywhere under eviction is worth about the full cache", value >= -least if applies else None, f"{told} nats, n={n}", f">= {-least:g} nats")


def far_check(value: float, told: str, n: int, applies: bool, least: float = NATS_APART):
    """value: kept - deleted, in mean log p [nats], the least of several."""
    from .runner import Check

    return Check("the endpoints kept and deleted are far apart", value >= least if applies else None, f"{told} nats, n={n}", f">= {least:g} nats")
