"""Every notebook runs at smoke scale on the tiny model, shows its figures, and holds prose around library calls only."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_shows_its_figures(path, tmp_path, monkeypatch):
    """I02: the inline backend shows what library functions return, without the library setting a backend."""
    monkeypatch.setenv("KVPROBE_MODEL", "tiny")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(shown) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_committed_with_its_figures_and_holds_no_loop_or_definition(path):
    notebook = nbformat.read(path, 4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    for cell in code:
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.comprehension), cell.source
    outputs = [o for c in code for o in c.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)  # warnings name paths of a machine


def test_importing_sets_no_plot_backend():
    import subprocess
    import sys

    code = ("import os; os.environ.pop('MPLBACKEND', None); import kvprobe, kvprobe.inside.draw, kvprobe.figures.head_pooling\n"
            "[getattr(kvprobe, n) for n in kvprobe.__all__]; import matplotlib; print(matplotlib.rcParams._get_backend_or_none())")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "None"
