"""The built wheel in an empty folder: what a user without the repository gets."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Python of an environment that holds the wheel, and everything else from the environment of the tests."""
    where = tmp_path_factory.mktemp("wheel")
    source = where / "source"  # a copy: building in place would leave, and next time reuse, a build folder
    for name in ("kvprobe", "probes", "figures"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", where, source], check=True)
    venv.create(where / "env", with_pip=False)
    python = where / "env/bin/python"
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True).stdout.strip()
    wheel = next(where.glob("kvprobe-*.whl"))
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel], check=True)
    # a path line makes the packages importable without running their own .pth files, so that no editable install shines through
    Path(site, "rest.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def run(python: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([python, "-m", "kvprobe", *argv], cwd=folder, env=environment, capture_output=True, text=True)


def test_list_and_a_smoke_run_work_from_the_wheel(installed, tmp_path):
    where = subprocess.run([installed, "-c", "import kvprobe; print(kvprobe.__file__)"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert str(ROOT) not in where
    listed = run(installed, tmp_path, "list")
    assert "planted_fact" in listed.stdout and "head_pooling" in listed.stdout and "h2o" in listed.stdout, listed.stderr
    done = run(installed, tmp_path, "run", "planted_fact", "--preset", "smoke", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/figures/head_pooling.pdf").exists()
