"""The arms of a comparison: a policy with its options, with or without the prompt protected, under one eviction seed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import registry

PROTECTION = ("with", "without", "both")
FULL = "full"
"""Name of the arm that evicts nothing."""


@dataclass(frozen=True)
class Arm:
    """name: the policy as it was written, e.g. "random(shared=True)". draw: which of the fresh eviction seeds."""

    name: str
    policy: object
    protect: bool
    draw: int = 0

    @property
    def evicts(self) -> bool:
        return self.policy is not None

    @property
    def label(self) -> str:
        return self.name + (" + prompt" if self.protect and self.evicts else "")


def split(text: str) -> list[str]:
    """ "a,b(x=1,y=2)" -> ["a", "b(x=1,y=2)"]; "all" stands for every installed policy and the shared draw."""
    parts = [p.strip() for p in re.split(r",(?![^(]*\))", text) if p.strip()]
    every = [*(n for n in registry.names("policy") if not _looks_ahead(n)), "random(shared=True)"]
    out = [name for part in parts for name in (every if part == "all" else [part])]
    if not out:
        raise ValueError(f"policies={text!r} names no policy; known: {', '.join(registry.names('policy'))}, or all")
    return list(dict.fromkeys(out))


def _looks_ahead(name: str) -> bool:
    return hasattr(registry.find("policy", name).POLICY, "looks_ahead")


def policy_of(name: str, model=None):
    """The policy of "name" or "name(field=value,...)". Raises ValueError for what does not exist."""
    found = re.fullmatch(r"([^()]+)(?:\((.*)\))?", name)
    if not found:
        raise ValueError(f"policy {name!r} is not understood: write name or name(field=value,...)")
    options = {}
    for part in filter(None, (found[2] or "").split(",")):
        key, eq, value = part.partition("=")
        if not eq:
            raise ValueError(f"policy {name!r}: {part!r} is not field=value")
        options[key.strip()] = _value(value.strip())
    plain, given = registry.alias(found[1].strip())
    if given:
        raise ValueError(f"{found[1]} is {plain} with the prompt protected: name {plain} and protection with")
    return registry.make_policy(plain, options, model)


def _value(text: str):
    import ast

    try:
        return ast.literal_eval(text[:1].upper() + text[1:] if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def make(names: Iterable[str], protection: str, seeds: int, model=None, full: bool = True) -> list[Arm]:
    """Every arm of a comparison, the full cache first; policies that draw once per eviction seed, the others once."""
    if protection not in PROTECTION:
        raise ValueError(f"protection={protection!r} is unknown; known: {', '.join(PROTECTION)}")
    if seeds < 1:
        raise ValueError(f"eviction_seeds={seeds} must be at least 1")
    out = [Arm(FULL, None, False)] if full else []
    for name in names:
        policy = policy_of(name, model)
        if getattr(policy, "looks_ahead", False):
            raise ValueError(f"policy {name!r} looks ahead at the end of a prompt: it is none for rounds while text is written")
        for protect in {"with": [True], "without": [False], "both": [False, True]}[protection]:
            out += [Arm(name, policy, protect, draw) for draw in range(seeds if policy.needs.draws else 1)]
    return out
