"""From rows of prompt-time eviction to numbers per prompt and per sampling seed."""

from __future__ import annotations

import numpy as np


def per_prompt(rows, metric: str, **where) -> np.ndarray:
    """[prompts]: a metric of the rows that match, the mean over sampling seeds, in the order of the prompts."""
    part = rows[rows.metric == metric]
    for column, value in where.items():
        part = part[part[column] == value]
    return part.groupby("instance").value.mean().sort_index().to_numpy()


def seed_spread(rows, metric: str, **where) -> float | None:
    """Standard deviation over sampling seeds of the mean over prompts; None with one seed."""
    part = rows[rows.metric == metric]
    for column, value in where.items():
        part = part[part[column] == value]
    means = part.groupby("draw").value.mean()
    return float(means.std(ddof=1)) if len(means) > 1 else None
