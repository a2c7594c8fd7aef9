"""Retrieval and log p of a passcode as a table: best in bold, significantly worse than random eviction in grey (Random Attention Tables 1 and 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.probes.passcode import comparison

if TYPE_CHECKING:
    import pandas as pd

READS = "passcode"


def reduce(rows: pd.DataFrame, manifest: dict):
    """The comparison of all arms with the random policy."""
    return comparison(rows, manifest)


def draw(table, manifest: dict):
    """A matplotlib Figure."""
    plan, m = manifest["plan"], manifest["model"]
    return table.figure(title=f"Passcode retrieval and log p [nats] by rounds since it was stated: {m['name']}, K = {plan['keep']}, r = {plan['buffer']}")
