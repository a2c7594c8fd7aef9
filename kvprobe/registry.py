"""Finds policies, probes and figures by scanning their folders; a user's own file is as good as one of ours."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import math
import pkgutil
import sys
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType

FOLDERS = {"policy": "kvprobe.policies", "probe": "kvprobe.probes", "figure": "kvprobe.figures"}
MARKS = {"policy": "POLICY", "probe": "CONFIG", "figure": "READS"}


def available(kind: str) -> dict[str, str]:
    """Names of the installed policies, probes or figures with the first line of their docstring."""
    return {name: _first_line(name, importlib.import_module(FOLDERS[kind])) for name in names(kind)}


def names(kind: str) -> list[str]:
    """Names of the installed policies, probes or figures."""
    package = importlib.import_module(FOLDERS[kind])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


ALIASES = {"prefix_sliding": ("recency", {"protect_prompt": True})}
"""Names of the literature for a policy under a switch of the run."""


def alias(name: str) -> tuple[str, dict]:
    """The policy behind a name, and the switches that come with it."""
    return ALIASES.get(name, (name, {}))


def _first_line(name: str, package: ModuleType) -> str:
    """Read without importing: `kvprobe list` should not load torch for a line of text."""
    import ast

    source = Path(next(iter(package.__path__)), name + ".py")
    doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return doc.splitlines()[0] if doc else ""


def find(kind: str, name: str) -> ModuleType:
    """The module of a policy, probe or figure by name, or of a user's own file by path (ending in .py).

    Raises ValueError naming what is allowed.
    """
    if name.endswith(".py"):
        return _from_file(kind, Path(name))
    if name not in names(kind):
        raise ValueError(f"{kind} {name!r} is unknown; {_elsewhere(name)}known: {', '.join(names(kind))}, or the path of a .py file")
    return importlib.import_module(f"{FOLDERS[kind]}.{name}")


def _elsewhere(name: str) -> str:
    """What a name is that was looked for in the wrong place: the figures of a suite are easily taken for probes."""
    kind = next((k for k in FOLDERS if name in names(k)), None)
    if kind == "figure":
        return f"it is a figure, which `kvprobe run {find('figure', name).READS}` draws; "
    return "" if kind is None else f"it is a {kind}; "


def _from_file(kind: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{kind} file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"kvprobe_user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{kind} file {path} does not load: {type(error).__name__}: {error}") from error
    if not hasattr(module, MARKS[kind]):
        raise ValueError(f"{kind} file {path} defines no {MARKS[kind]}")
    if kind == "policy" and not (is_dataclass(module.POLICY) and hasattr(module.POLICY, "needs") and callable(getattr(module.POLICY, "score", None))):
        raise ValueError(f"policy file {path}: POLICY must be a dataclass with `needs` and `score(view)`")
    return module


def source_hash(kind: str, name: str) -> str:
    """16 hex digits of the hash of the file that defines it."""
    return hashlib.sha256(Path(find(kind, name).__file__).read_bytes()).hexdigest()[:16]


@functools.cache
def code_hash() -> str:
    """16 hex digits of the hash of all of kvprobe's own files, probes and policies among them; figures only read rows and are left out."""
    made = hashlib.sha256()
    for name in ("kvprobe", FOLDERS["probe"]):
        root = Path(next(iter(importlib.import_module(name).__path__)))
        for path in sorted(root.rglob("*.py")):
            if name == "kvprobe" and path.relative_to(root).parts[0] in ("probes", "figures"):
                continue  # where they lie once installed
            made.update(f"{name}/{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return made.hexdigest()[:16]


def check_value(kind: type, name: str, value) -> bool:
    """True; raises ValueError when a dataclass field cannot take the value, naming what it takes."""
    from typeguard import TypeCheckError, check_type

    hint = typing.get_type_hints(kind)[name]
    try:
        if isinstance(value, bool) and hint in (int, float):
            raise TypeCheckError("a truth value is no number")
        if isinstance(value, float) and not math.isfinite(value):
            raise TypeCheckError("nan and inf are no settings")
        check_type(value, hint)
    except TypeCheckError:
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        takes = " or ".join(map(repr, choices)) if choices else hint.__name__ if isinstance(hint, type) else str(hint)
        raise ValueError(f"{name}={value!r} is not allowed; it takes {takes}") from None
    return True


def make_policy(name, options: dict | None = None, model=None):
    """A policy from its name or file and options; an instance is passed through. Raises ValueError for unknown options.

    model: given, a policy that needs to know its model (`bind`) is told, which may read or make a calibration.
    """
    if not isinstance(name, str) and (isinstance(name, type) or not hasattr(name, "needs") or not callable(getattr(name, "score", None))):
        raise ValueError(f"policy={name!r}: give a name ({', '.join(names('policy'))}), the path of a .py file, or an instance with `needs` and `score(view)`")
    if not isinstance(name, str) and options:
        raise ValueError(f"policy is an instance already: its options {', '.join(map(repr, options))} belong into it, or give its name")
    made = _made(name, options) if isinstance(name, str) else name
    return made.bind(model) if model is not None and hasattr(made, "bind") else made


def _made(name: str, options: dict | None):
    policy = find("policy", name).POLICY
    known = [f.name for f in fields(policy)]
    unknown = sorted(set(options or ()) - set(known))
    if unknown:
        has = f"its options are: {', '.join(known)}" if known else "it has none"
        raise ValueError(f"policy {name!r} has no option {', '.join(map(repr, unknown))}; {has}")
    required = [f.name for f in fields(policy) if f.default is MISSING and f.default_factory is MISSING and f.name not in (options or {})]
    if required:
        raise ValueError(f"policy {name!r} needs a value for {', '.join(required)}")
    for option, value in (options or {}).items():
        check_value(policy, option, value)
    return policy(**(options or {}))
