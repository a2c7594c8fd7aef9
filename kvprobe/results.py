"""A run's folder: manifest, rows, keep logs, figures. Nothing already computed is ever lost.

    manifest.json   every setting, seed, version and hash; status "running" or "finished"
    rows.jsonl      long format, one number per line with its unit, instance and condition
    batches.jsonl   the ledger: a batch counts once its line here matches its rows and its log
    keeplogs/       one compressed keep log per batch
    figures/

A batch is the unit of resumption. Its log is written first, then its rows, then its line in the ledger; a run killed
anywhere in between computes that batch again and no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .keeplog import KeepLog


def canonical(data) -> str:
    """JSON with sorted keys, for hashes."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: str | os.PathLike) -> dict:
    """The manifest of a run's folder, or of the file itself. Raises ValueError when there is none to read."""
    path = Path(path)
    path = path / "manifest.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist: no run is there")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["settings"]["probe"], manifest["settings"]["preset"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest of kvprobe: {error!r}") from error
    return manifest


class RunFolder:
    """Opens a run's folder for writing, new or to resume.

    settings: everything the rows depend on. Raises ValueError when the folder belongs to a run with other settings
    (which are named), or holds something else; RuntimeError when another process writes to it.
    """

    def __init__(self, path: str | os.PathLike, settings: dict):
        self.path, self.settings = Path(path), settings
        self.said: list[str] = []  # what the user should know about what was found
        self.manifest: dict = {"settings": settings, "status": "new"}
        self.lines: dict[int, list[str]] = {}
        if self.path.exists():
            self._look()

    @property
    def finished(self) -> bool:
        return self.manifest.get("status") == "finished"

    def _look(self) -> None:
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; --out takes a folder")
        if not (self.path / "manifest.json").exists():
            # a run killed before its manifest leaves only these
            if any(p.name not in (".lock", "keeplogs", "figures", "manifest.json.part") for p in self.path.iterdir()):
                raise ValueError(f"folder {self.path} holds other files and no manifest; choose a new or empty folder")
            return
        self.manifest = read_manifest(self.path)
        theirs = self.manifest["settings"]
        if theirs != self.settings:
            other = [f"{k}: {theirs.get(k)!r} there, {self.settings.get(k)!r} now" for k in sorted({*theirs, *self.settings}) if theirs.get(k) != self.settings.get(k)]
            raise ValueError(f"folder {self.path} holds another run ({'; '.join(other)}); choose another --out")

    def open(self, need_bytes: int = 0) -> None:
        """Take the folder for this process and read what is done. Raises OSError when there is no room on the disk."""
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < need_bytes:
            raise OSError(f"{self.path} has {free / 1e6:.0f} MB free, the run needs about {need_bytes / 1e6:.0f} MB")
        self._lock = FileLock(str(self.path / ".lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise RuntimeError(f"another process is writing to {self.path}") from None
        (self.path / "keeplogs").mkdir(exist_ok=True)
        (self.path / "figures").mkdir(exist_ok=True)
        self._recover()

    def close(self) -> None:
        self._lock.release()

    def read(self) -> None:
        """Read what is whole, changing nothing; `said` names what is not."""
        self._recover(repair=False)

    def _recover(self, repair: bool = True) -> None:
        """Keep the batches whose rows and log are whole, drop the rest, and say so."""
        lines, broken = self._read_rows()
        ledger = self._read_ledger()
        good = {}
        for batch, entry in ledger.items():
            if batch in lines and entry["sha256"] == digest("".join(lines[batch])) and self._log_is_whole(batch, entry):
                good[batch] = lines[batch]
        lost = sorted((set(ledger) | set(lines)) - set(good))
        if broken or lost:
            kept = sum(map(len, good.values()))
            what = f"batches {lost} are computed again" if repair else f"batches {lost} are left out; the same `kvprobe run` command computes them again"
            self.said.append(f"{self.path / 'rows.jsonl'} was incomplete: kept {kept} rows of {len(good)} whole batches, {what} ({broken} unreadable lines)")
        self.lines, self.ledger = good, {b: ledger[b] for b in good}
        if repair and (broken or lost or list(good) != sorted(good)):
            self._rewrite()

    def _read_rows(self) -> tuple[dict[int, list[str]], int]:
        lines: dict[int, list[str]] = {}
        broken = 0
        path = self.path / "rows.jsonl"
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            try:
                batch = json.loads(line)["batch"]
                if not isinstance(batch, int):
                    raise ValueError
                lines.setdefault(batch, []).append(line.decode())
            except (ValueError, KeyError, TypeError):
                broken += 1
        return lines, broken

    def _read_ledger(self) -> dict[int, dict]:
        ledger = {}
        path = self.path / "batches.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
                ledger[int(entry["batch"])] = {"sha256": entry["sha256"], "log": entry["log"], "members": entry["members"]}
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the run was killed
        return ledger

    def _log_is_whole(self, batch: int, entry: dict) -> bool:
        if entry["log"] is None:
            return True
        path = self.log_path(batch)
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == entry["log"]

    def _ledger_line(self, batch: int) -> str:
        return canonical({"batch": batch} | self.ledger[batch]) + "\n"

    def _rewrite(self) -> None:
        order = sorted(self.lines)
        self.lines = {b: self.lines[b] for b in order}
        write_atomically(self.path / "rows.jsonl", "".join(line for b in order for line in self.lines[b]))
        write_atomically(self.path / "batches.jsonl", "".join(self._ledger_line(b) for b in order))

    def log_path(self, batch: int) -> Path:
        return self.path / "keeplogs" / f"batch-{batch:04d}.npz"

    def append(self, batch: int, rows: Iterable[dict], log: KeepLog | None, members: list) -> None:
        """Store one batch. members names the log's rows, e.g. [[instance, condition], ...]."""
        lines = [json.dumps({"batch": batch} | row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        log_hash = None
        if log is not None:
            log.save(self.log_path(batch))
            log_hash = hashlib.sha256(self.log_path(batch).read_bytes()).hexdigest()
        _append(self.path / "rows.jsonl", "".join(lines))
        self.lines[batch] = lines
        self.ledger[batch] = {"sha256": digest("".join(lines)), "log": log_hash, "members": members}
        _append(self.path / "batches.jsonl", self._ledger_line(batch))
        if list(self.lines) != sorted(self.lines):
            self._rewrite()

    def logs(self) -> Iterable[tuple[int, KeepLog, list]]:
        """(batch, keep log, members) of every batch that has one."""
        for batch, entry in sorted(self.ledger.items()):
            if entry["log"] is not None:
                yield batch, KeepLog.load(self.log_path(batch)), entry["members"]

    def write_manifest(self, **more) -> None:
        self.manifest = self.manifest | more
        write_atomically(self.path / "manifest.json", json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n")

    def rows(self):
        """All rows as a pandas DataFrame, in batch order."""
        import pandas as pd

        return pd.DataFrame([json.loads(line) for b in sorted(self.lines) for line in self.lines[b]])
