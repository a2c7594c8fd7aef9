"""From settings to a finished run: config -> model -> session -> batches -> rows -> report -> figures."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from . import registry
from .results import RunFolder, canonical, digest, read_manifest

VERSIONS = ("kvprobe", "torch", "transformers", "tokenizers", "numpy", "scipy", "nnsight", "transformer-lens", "pandas", "seaborn")


@dataclass(frozen=True)
class Check:
    """One check of an instrument: what was measured, against which threshold. passed is None where it does not apply."""

    name: str
    passed: bool | None
    measured: str
    threshold: str

    def line(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "n/a "}[self.passed]
        return f"  [{mark}] {self.name}: {self.measured} (wanted: {self.threshold})"


@dataclass(frozen=True)
class Report:
    """What a probe prints when its rows are complete. table: one row per condition; manifest: facts to be kept."""

    title: str
    table: object
    text: str
    checks: list[Check] = field(default_factory=list)
    manifest: dict = field(default_factory=dict)


class Run:
    """A finished run: `rows` (DataFrame, long format), `table` (per condition), `checks`, `figure()`, `path`, `manifest`."""

    def __init__(self, path: Path, rows, manifest: dict):
        self.path, self.rows, self.manifest = Path(path), rows, manifest

    @staticmethod
    def read(path: str | os.PathLike) -> Run:
        """Open a run's folder; an unfinished run gives the rows it has. Damaged rows are left out and said."""
        manifest = read_manifest(path)
        folder = RunFolder(path, manifest["settings"])
        folder.read()
        for line in folder.said:
            print(f"kvprobe: {line}", file=sys.stderr)
        if not folder.lines:
            raise ValueError(f"{path} holds no whole batch yet: the same `kvprobe run` command goes on with it")
        return Run(Path(path), folder.rows(), manifest)

    @property
    def checks(self) -> list[Check]:
        return [Check(**c) for c in self.manifest.get("checks", [])]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(c.passed is not False for c in self.checks)

    @property
    def table(self):
        """One row per condition, as printed."""
        return registry.find("probe", self.manifest["settings"]["probe"]).report_table(self.rows, self.manifest)

    def figure(self, name: str | None = None):
        """A figure of the run as a matplotlib Figure; the first one that reads this probe unless named."""
        names = figures_of(self.manifest["settings"]["probe"])
        module = registry.find("figure", name or names[0])
        if module.READS != Path(self.manifest["settings"]["probe"]).stem:
            raise ValueError(f"figure {name!r} reads {module.READS!r}; figures of this run: {names}")
        return module.draw(module.reduce(self.rows, self.manifest), self.manifest)

    def __repr__(self) -> str:
        return f"Run({self.path}, {self.manifest.get('status')}, {len(self.rows)} rows)"


def figures_of(probe: str) -> list[str]:
    """Names of the installed figures that read a probe's rows."""
    return [n for n in registry.names("figure") if registry.find("figure", n).READS == Path(probe).stem]


def configure(probe: str, preset: str, given: dict):
    """The probe's config: the preset with `given` fields replaced. Raises ValueError naming unknown fields and presets."""
    module = registry.find("probe", probe)
    if preset not in module.PRESETS:
        raise ValueError(f"preset {preset!r} is unknown; known: {', '.join(module.PRESETS)}")
    known = [f.name for f in dataclasses.fields(module.CONFIG)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"probe {probe!r} has no field {', '.join(map(repr, unknown))}; its fields are: {', '.join(known)}")
    given = dict(given)
    if given.get("keep_ratio") is not None:
        given.setdefault("keep", None)  # the preset's keep gives way, a keep that was asked for does not
    if "policy" in given:
        given.setdefault("policy_options", {})
    return dataclasses.replace(module.PRESETS[preset], **{k: v for k, v in given.items() if registry.check_value(module.CONFIG, k, v)})


def config_of(module, settings: dict):
    """The config that a manifest describes. Raises ValueError for fields that this version does not have."""
    known = {f.name for f in dataclasses.fields(module.CONFIG)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(f"the manifest has settings that this version does not know: {', '.join(unknown)}")
    return module.CONFIG(**{k: v for k, v in settings.items() if registry.check_value(module.CONFIG, k, v)})


def settings_of(probe: str, preset: str, config) -> dict:
    return {"probe": probe, "preset": preset} | dataclasses.asdict(config)


def run(probe: str, *, preset: str = "demo", out: str | os.PathLike | None = None, progress: bool = True,
        say: Callable[[str], None] | None = None, **fields) -> Run:
    """Run a probe, or resume it, or return it if it is finished.

    probe: a name of `kvprobe list` or a .py file. preset: "smoke", "demo" or "paper"; fields replace the preset's.
    out: the folder; default runs/NAME-PRESET-HASH, where the hash is of all settings. Raises ValueError for bad input
    before any work.
    """
    say = say or (lambda text: None)
    config = configure(probe, preset, fields)
    settings = settings_of(probe, preset, config)
    name = f"{Path(probe).stem}-{preset}-{digest(canonical(settings))[:8]}"
    folder = RunFolder(out or Path("runs") / name, settings)
    if folder.finished:
        return _resume_finished(folder, say)
    return _compute(registry.find("probe", probe), config, folder, progress, say)


def _resume_finished(folder: RunFolder, say) -> Run:
    """Show what is there, unless a file of it was damaged since."""
    folder.open()
    try:
        whole = not folder.said and folder.manifest["batches"] == len(folder.lines)
        rows = folder.rows()
    finally:
        folder.close()
    if whole:
        _same_policies(folder)
        say(f"already finished: {folder.path}")
        return Run(folder.path, rows, folder.manifest)
    folder.manifest["status"] = "running"
    probe = folder.settings["probe"]
    module = registry.find("probe", probe)
    given = {k: v for k, v in folder.settings.items() if k not in ("probe", "preset")}
    return _compute(module, config_of(module, given), folder, True, say)


def _same_policies(folder: RunFolder) -> None:
    """Refuse to pass off a finished run as current whose policy files have changed since."""
    policies = folder.manifest.get("policies") or {}
    if "policy" in folder.manifest:
        policies = {folder.manifest["policy"]["name"]: folder.manifest["policy"]}
    for name, entry in policies.items():
        if "sha256" in entry and registry.source_hash("policy", name.split("(")[0].strip()) != entry["sha256"]:
            raise ValueError(f"{folder.path} was finished with another version of policy {name!r}: choose another --out, or `kvprobe show` it as it is")


def _compute(module, config, folder: RunFolder, progress: bool, say) -> Run:
    import torch
    from tqdm import tqdm

    from .models import load

    if config.threads:
        torch.set_num_threads(config.threads)
    started = time.time()
    model = load(config.model, device=config.device, dtype=config.dtype, device_map=config.device_map)
    session = module.start(config, model)
    facts = session.facts() | {"model": environment(model)["model"]}
    _same_input(folder, facts)
    folder.open(session.bytes_needed)
    try:
        for line in folder.said:
            say(line)
        missing = [i for i in range(session.n_batches) if i not in folder.lines]
        now = environment(model)
        _tell_versions(folder, now["versions"], missing, say)
        folder.write_manifest(status="running", batches=session.n_batches, **(now | facts))
        total = sum(session.tokens(i) for i in missing)
        with tqdm(total=total, unit="tok", unit_scale=True, desc=folder.path.name, disable=not progress or not missing,
                  mininterval=0.5 if sys.stderr.isatty() else 15) as bar:
            for i in missing:
                rows, log, members = session.compute(i, folder.rows, bar.update)
                folder.append(i, rows, log, members)
        rows = folder.rows()
        report = session.report(rows, folder)
        folder.write_manifest(checks=[dataclasses.asdict(c) for c in report.checks], **report.manifest,
                              rows_sha256=digest((folder.path / "rows.jsonl").read_text(encoding="utf-8")))
        _draw(folder, rows)
        folder.write_manifest(status="finished", seconds=round(folder.manifest.get("seconds", 0) + time.time() - started, 1))
        done = Run(folder.path, rows, folder.manifest)
    finally:
        folder.close()
    return done


def _tell_versions(folder: RunFolder, now: dict, missing: list[int], say) -> None:
    """Say it, and note it in the manifest, where a half-finished run goes on under other versions or other files of kvprobe."""
    then = folder.manifest.get("versions", now)
    other = [name for name in now if then.get(name) != now[name]]
    if other and missing and folder.lines:
        say(f"{folder.path} was begun under other versions ({', '.join(f'{n} {then.get(n)}, now {now[n]}' for n in other)}): its rows come from both")
        folder.manifest["earlier_versions"] = [*folder.manifest.get("earlier_versions", []), then]


def _draw(folder: RunFolder, rows) -> None:
    """Every figure of a run. One that fails leaves the others, the rows and the table whole, and is told as a failed check."""
    failed = {}
    for name in figures_of(folder.manifest["settings"]["probe"]):
        try:
            save_figures(Run(folder.path, rows, folder.manifest), [name])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    if failed:
        told = Check("every figure of the run is drawn", False, "; ".join(f"{k}: {v}" for k, v in failed.items()), f"draw again with `kvprobe figure NAME {folder.path}`")
        folder.write_manifest(checks=[*folder.manifest["checks"], dataclasses.asdict(told)])


def _same_input(folder: RunFolder, facts: dict) -> None:
    """Refuse to go on with rows that were made from another model, policy file or filler under the same name."""
    for name, now in json.loads(json.dumps(facts)).items():
        then = folder.manifest.get(name, now)
        if then != now:
            parts = [k for k in now if then.get(k) != now[k]] if isinstance(now, dict) else []
            raise ValueError(f"{folder.path} was begun with another {name} ({', '.join(parts)} differ): its rows cannot be continued, choose another --out")


def save_figures(run_: Run, names: list[str] | None = None) -> list[Path]:
    """Draw figures of a run into its folder as .png and .pdf."""
    saved = []
    for name in names or figures_of(run_.manifest["settings"]["probe"]):
        figure = run_.figure(name)
        stem = Path(name).stem
        for suffix in (".png", ".pdf"):
            path = run_.path / "figures" / (stem + suffix)
            figure.savefig(path, dpi=160)
            saved.append(path)
    return saved


def environment(model) -> dict:
    """Everything about model and machine that a number could depend on."""
    import torch

    g = model.geometry
    parameter = next(model.model.parameters())
    return {
        "versions": {name: _version(name) for name in VERSIONS} | {"python": platform.python_version(), "source": registry.code_hash()},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                    "device": str(model.device), "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None},
        "threads": torch.get_num_threads(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "attention_function": model.model.config._attn_implementation,
        "model": {"name": model.name, "class": type(model.model).__name__, "fingerprint": model.fingerprint, "layers": g.n_layers,
                  "query_heads": g.n_q, "kv_heads": g.n_kv, "head_size": g.d_head, "evicted_layers": len(g.kv_layers),
                  "skipped_layers": {str(k): v for k, v in g.skipped.items()}, "context": model.context},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def rerun(manifest_path: str | os.PathLike, *, out: str | os.PathLike, progress: bool = True, say=None) -> Run:
    """Run again what a manifest describes, into another folder, and say whether rows and versions are the same."""
    say = say or (lambda text: None)
    manifest = read_manifest(manifest_path)
    settings = dict(manifest["settings"])
    probe, preset = settings.pop("probe"), settings.pop("preset")
    for name, theirs in manifest.get("versions", {}).items():
        ours = {"python": platform.python_version(), "source": registry.code_hash()}.get(name) or _version(name)
        if ours != theirs and name == "source":
            say(f"kvprobe's files are others ({ours}) than the manifest's ({theirs})")
        elif ours != theirs:
            say(f"{name} is {ours} here, the manifest has {theirs}: rows may differ in their last digits")
    if manifest.get("threads") and not settings.get("threads"):
        import torch

        torch.set_num_threads(manifest["threads"])
    module = registry.find("probe", probe)
    config = config_of(module, settings)
    folder = RunFolder(out, settings_of(probe, preset, config))
    again = _resume_finished(folder, say) if folder.finished else _compute(module, config, folder, progress, say)
    if manifest.get("model", {}).get("fingerprint") not in (None, again.manifest["model"]["fingerprint"]):
        say("the model is another one: its fingerprint differs from the manifest's")
    if "rows_sha256" in manifest:
        same = manifest["rows_sha256"] == again.manifest["rows_sha256"]
        say("rows are identical to the manifest's" if same else "rows differ from the manifest's")
    return again
