"""Which versions of the libraries the adapters were written for, checked when an adapter is first used."""

from __future__ import annotations

from importlib import metadata

ADAPTERS = {"transformers": ">=5.24,<5.40", "nnsight": ">=0.8,<0.9", "transformer-lens": ">=4.3,<5"}


def require(name: str) -> None:
    """Raise ImportError when a library has a version that its adapter was not written for."""
    from packaging.specifiers import SpecifierSet

    have = metadata.version(name)
    if not SpecifierSet(ADAPTERS[name]).contains(have, prereleases=True):
        raise ImportError(f"kvprobe's adapter for {name} is written for {name} {ADAPTERS[name]}, installed is {have}")
