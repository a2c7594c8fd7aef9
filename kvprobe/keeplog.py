"""The keep log: for every row, layer, KV head and position the round in which it was evicted.

Eviction never brings an entry back, so that one number per entry rebuilds every keep-set after every round exactly,
whatever the number of rounds (Random Attention app. D logs whole keep-sets).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .pins import Pin, WindowPin

ALIVE = np.iinfo(np.int32).max
"""Round of an entry that was never evicted."""


@dataclass(frozen=True)
class KeepLog:
    """What a cache kept.

    died [l b hkv p]: the round (0-based, of the row) that evicted the position; ALIVE if none did. Positions beyond a
    row's length are ALIVE and mean nothing.
    fired: per row the row's length in tokens when each of its rounds fired.
    length: tokens each row has seen. layers: the model's numbers of the l axis. keep, buffer: entries per KV head.
    """

    died: np.ndarray
    fired: tuple[tuple[int, ...], ...]
    length: tuple[int, ...]
    layers: tuple[int, ...]
    keep: int
    buffer: int

    def rounds(self, row: int, before: int | None = None) -> int:
        """Rounds of a row; with `before`, those that fired before the token at that position was fed."""
        return len(self.fired[row]) if before is None else sum(length <= before for length in self.fired[row])

    def held(self, row: int, round_: int) -> np.ndarray:
        """bool [l hkv p]: the keep-sets of a row right after its round `round_`, the buffer included."""
        if not self.fired[row]:
            raise ValueError(f"row {row} had no round: nothing was evicted from it")
        if not 0 <= round_ < len(self.fired[row]):
            raise ValueError(f"row {row} had rounds 0..{len(self.fired[row]) - 1}, not {round_}")
        return (self.died[:, row] > round_) & (np.arange(self.died.shape[-1]) < self.fired[row][round_])

    def visible(self, row: int) -> np.ndarray:
        """bool [l hkv t p]: which position each token t of the row could attend to; the causal future is False."""
        t = np.arange(self.length[row])
        done = np.searchsorted(np.asarray(self.fired[row], dtype=np.int64), t, side="right")  # rounds before token t
        alive = self.died[:, row, :, None, : self.length[row]] >= done[None, None, :, None]
        return alive & (t[None, :] <= t[:, None])

    def select(self, rows: Sequence[int]) -> KeepLog:
        """The log of some rows."""
        rows = list(rows)
        return KeepLog(self.died[:, rows], tuple(self.fired[b] for b in rows), tuple(self.length[b] for b in rows),
                       self.layers, self.keep, self.buffer)

    def save(self, path: str | os.PathLike) -> None:
        """Write a compressed .npz, through a temporary file so that a killed run leaves no half log."""
        path = Path(path)
        small = np.where(self.died == ALIVE, -1, self.died)
        if small.max(initial=0) < np.iinfo(np.int16).max:
            small = small.astype(np.int16)
        head = dict(fired=self.fired, length=self.length, layers=self.layers, keep=self.keep, buffer=self.buffer)
        part = path.with_suffix(".part")
        with open(part, "wb") as out:
            np.savez_compressed(out, died=small, head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike) -> KeepLog:
        """Read what `save` wrote. Raises ValueError when the file is not a whole keep log."""
        try:
            with np.load(path) as data:
                died = data["died"].astype(np.int32)
                head = json.loads(data["head"].tobytes())
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path} is not a whole keep log: {error}") from error
        died[died == -1] = ALIVE
        return KeepLog(died, tuple(map(tuple, head["fired"])), tuple(head["length"]), tuple(head["layers"]),
                       head["keep"], head["buffer"])


class Recorder:
    """Grows a KeepLog while a cache runs; lives on the cache's device so that a round costs one scatter."""

    def __init__(self, layers: Sequence[int], batch: int, heads: int, device: torch.device):
        self.layers = tuple(layers)
        self.died = torch.full((len(self.layers), batch, heads, 0), ALIVE, dtype=torch.int32, device=device)
        self.fired: list[list[int]] = [[] for _ in range(batch)]

    def reserve(self, positions: int) -> None:
        """Make room for positions below `positions`, doubling so that long runs do not copy each round."""
        have = self.died.shape[-1]
        if positions > have:
            room = torch.full((*self.died.shape[:-1], max(positions, 2 * have) - have), ALIVE, dtype=torch.int32, device=self.died.device)
            self.died = torch.cat([self.died, room], dim=-1)

    def record(self, gone: torch.Tensor, positions: torch.Tensor, round_of_row: torch.Tensor) -> None:
        """gone, positions [l b hkv s]: write each evicted position's round; round_of_row [b]."""
        flat = gone.reshape(-1).nonzero().squeeze(-1)
        row = flat // gone.shape[-1]  # index over (l, b, hkv)
        where = row * self.died.shape[-1] + positions.reshape(-1)[flat]
        heads, batch = gone.shape[2], gone.shape[1]
        self.died.view(-1)[where] = round_of_row.to(torch.int32)[(row // heads) % batch]

    def index(self, rows: torch.Tensor) -> None:
        """Take, repeat or reorder batch rows."""
        self.died = self.died.index_select(1, rows.to(self.died.device))
        self.fired = [list(self.fired[int(b)]) for b in rows]

    def copy(self) -> Recorder:
        new = Recorder(self.layers, 0, 0, self.died.device)
        new.died, new.fired = self.died.clone(), [list(f) for f in self.fired]
        return new

    def log(self, length: Sequence[int], keep: int, buffer: int) -> KeepLog:
        self.reserve(max(length, default=0))
        died = self.died[..., : max(length, default=0)].cpu().numpy().copy()
        return KeepLog(died, tuple(map(tuple, self.fired)), tuple(length), self.layers, keep, buffer)


def gone_by(log: KeepLog, row: int, pin: Pin) -> dict[tuple[int, int], int]:
    """Per banned site the last round (0-based) that took a position of the pin's span: by then it was gone."""
    start, stop = pin.interval(0, log.length[row])
    return {(layer, head): int(log.died[i, row, head, start:stop].max())
            for i, layer in enumerate(log.layers) for head in range(log.died.shape[2])
            if pin.sites is not None and (layer, head) not in pin.sites and pin.elsewhere == "ban"}


def audit(log: KeepLog, row: int, pins: Sequence[Pin], prompt: int = 0) -> list[str]:
    """Check a row's log against its pins; returns what is wrong, [] if nothing.

    Held positions must never die. Banned positions go first: a round that leaves a banned candidate alive must have
    taken nothing but banned ones.
    """
    wrong = []
    for i, layer in enumerate(log.layers):
        for head in range(log.died.shape[2]):
            died = log.died[i, row, head]
            banned = np.zeros(len(died), dtype=bool)  # by any pin: two banned spans take turns, oldest first
            for pin in pins:
                if isinstance(pin, WindowPin):
                    continue  # moves with the text: the round itself refuses to evict it
                start, stop = pin.interval(prompt, log.length[row])
                if pin.sites is None or (layer, head) in pin.sites:
                    lost = np.flatnonzero(died[start:stop] != ALIVE) + start
                    if lost.size:
                        wrong.append(f"row {row}: position {lost[0]} is pinned at layer {layer} KV head {head} but died in round {died[lost[0]]}")
                elif pin.elsewhere == "ban":
                    banned[start:stop] = True
            late = _late_ban(log, row, died, banned)
            if late is not None:
                wrong.append(f"row {row}: a banned position outlived round {late} at layer {layer} KV head {head} although others were evicted")
    return wrong


def _late_ban(log: KeepLog, row: int, died: np.ndarray, banned: np.ndarray) -> int | None:
    """The first round that took others while it left a banned candidate alive."""
    if not banned.any():
        return None
    for round_, length in enumerate(log.fired[row]):
        candidate = np.arange(len(died)) < length - log.buffer
        if (banned & candidate & (died > round_)).any() and (died[~banned] == round_).any():
            return round_
    return None
