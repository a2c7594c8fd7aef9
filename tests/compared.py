"""The probes that compare policies, each run once at smoke scale in float64: what test_probes_compare_*.py share.

Every one of those files names the fixtures it needs, `cheap = compared.cheap` and so on; the runs themselves are made once in a process."""

import functools
from types import SimpleNamespace

import pytest
import torch

import kvprobe
from kvprobe import needles, registry, results, runner
from kvprobe.models import load, tiny

SMALL = {  # what the smoke presets are, with fewer repetitions
    "keep_log": dict(instances=2, eviction_seeds=2), "passcode": dict(instances=2, eviction_seeds=2), "blocks": dict(instances=2),
    "distance": {}, "protection": dict(instances=2, batch_size=1), "fork": {}}
FAR = 1_000_003  # between eviction seeds
SEEDS = (0, FAR)
_fillers: dict = {}
_made: dict = {}


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """Figures have tests of their own, and encoding filler, age bands and the first lines of docstrings take longer than the models."""
    real = needles.Filler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_figures", lambda run, names=None: [])
        patch.setattr(registry, "_first_line", lambda name, package: "")
        patch.setattr(registry.find("probe", "keep_log"), "BANDS", 5)
        patch.setattr(needles, "Filler", lambda source, tokenizer: _fillers.get(source) or _fillers.setdefault(source, real(source, tokenizer)))
        yield


@functools.cache
def model():
    return load("tiny", dtype="float64")


@pytest.fixture(scope="module")
def lm():
    return model()


@pytest.fixture(scope="module")
def stock():
    return tiny(torch.float64)[0].eval()


@pytest.fixture(scope="module")
def done(tmp_path_factory, lm):
    """probe -> its finished run, its session and its keep logs by member (instance, label, draw), made once."""

    def get(probe: str) -> SimpleNamespace:
        if probe not in _made:
            run = kvprobe.run(probe, preset="smoke", out=tmp_path_factory.mktemp("runs") / probe, progress=False, dtype="float64", **SMALL[probe])
            module = registry.find("probe", probe)
            config = runner.config_of(module, {k: v for k, v in run.manifest["settings"].items() if k not in ("probe", "preset")})
            folder = results.RunFolder(run.path, run.manifest["settings"])
            folder.read()
            logs = {tuple(member): (log, k) for _, log, members in folder.logs() for k, member in enumerate(members)}
            _made[probe] = SimpleNamespace(run=run, rows=run.rows, manifest=run.manifest, module=module, config=config, session=module.start(config, lm), logs=logs)
        return _made[probe]

    return get


def pick(rows, **where):
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return rows


def value(rows, **where) -> float:
    found = pick(rows, **where)
    assert len(found) == 1, (len(found), where)
    return float(found.value.iloc[0])
