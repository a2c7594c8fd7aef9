"""Importing kvprobe loads nothing heavy and sets nothing."""

import subprocess
import sys

import kvprobe


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_neither_torch_nor_transformers():
    heavy = "torch transformers nnsight transformer_lens matplotlib seaborn pandas numpy scipy".split()
    assert run(f"import sys, kvprobe; kvprobe.__version__; print([m for m in {heavy!r} if m in sys.modules])") == "[]"


def test_listing_loads_no_torch():
    assert run("import sys; from kvprobe import cli; cli.main(['list']); print('torch' in sys.modules)").endswith("False")


def test_every_public_name_resolves():
    for name in kvprobe.__all__:
        assert getattr(kvprobe, name) is not None


def test_version_matches_the_package():
    from importlib.metadata import version

    assert kvprobe.__version__ == version("kvprobe")


def test_unknown_names_are_attribute_errors():
    try:
        kvprobe.nothing
    except AttributeError as error:
        assert "nothing" in str(error)
    else:
        raise AssertionError("an unknown attribute was found")


def test_metrics_by_subject_are_found_from_the_package():
    assert run("import kvprobe.metrics as m, sys; print('torch' in sys.modules, [m.__dict__.get(n, getattr(m, n)).__name__ for n in m._MODULES][0], 'torch' in sys.modules)") == "False kvprobe.metrics.coverage True"
