"""The README's Python runs as written, in order, on the embedded model; its commands exist."""

import re
from pathlib import Path

import pytest

from kvprobe import cli, registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(section: str) -> str:
    """The indented code of a section."""
    body = README.split(section, 1)[1].split("\n## ", 1)[0]
    return "\n".join(line[4:] for line in body.splitlines() if line.startswith("    ") or not line.strip())


@pytest.mark.model
def test_its_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = blocks("## In Python").replace("max_new_tokens=200", "max_new_tokens=40")
    assert "kvprobe.capture" in code and "kvprobe.cache" in code and "max_new_tokens=40" in code
    space: dict = {}
    exec(compile(code, "README.md", "exec"), space)
    assert space["cache"].plan.keep == 256 and space["c"].q[3].shape[1] == 2


def test_its_commands_exist():
    for command in re.findall(r"^\| `kvprobe (\w+)", README, flags=re.M):
        assert f"  {command} " in cli.USAGE
    for name in registry.available("policy"):
        assert f"| `{name}` |" in README
    for name in registry.available("probe"):
        assert f"| `{name}` |" in README
    for name in registry.available("figure"):
        assert f"`{name}`" in README
    for target in ("make demo", "make test", "make bench"):
        assert target in README and f"\n{target[5:]}:" in (ROOT / "Makefile").read_text()


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"[A-Z]+_TABLE|^[A-Z]+$", README + (ROOT / "RESULTS.md").read_text(encoding="utf-8"), flags=re.M)
