"""Fixtures: random tiny models in float64, no downloads, one thread."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch

import tiny
from kvprobe import calibration


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """More threads than cores spin, and sums in another order would hide what the tests compare."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama():
    """A pair (kvprobe Model, stock twin with the same weights): 2 layers, 4 query heads, 2 KV heads, float64."""
    return tiny.pair("llama")


@pytest.fixture(scope="session")
def calibrated(llama, tmp_path_factory):
    """Options by policy that let it run on `llama`, which has no tokenizer to calibrate with on text."""
    path = tmp_path_factory.mktemp("calibrated") / "triattention.safetensors"
    ids = torch.randint(0, tiny.VOCABULARY, (200,), generator=torch.Generator().manual_seed(11))
    calibration.save(calibration.make(llama[0], ids, "random ids"), path)
    return {"triattention": dict(statistics=str(path)), **tiny.WINDOW_ONLY}


@pytest.fixture(scope="session")
def ids():
    """Token ids [3 80]."""
    return torch.randint(0, tiny.VOCABULARY, (3, 80), generator=torch.Generator().manual_seed(7))
