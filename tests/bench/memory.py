"""Peak memory of forcing, over the loaded model: one fresh process per variant.

    python tests/bench/memory.py VARIANT BATCH LENGTH THREADS MODEL      VARIANT: prefill, or ours-R with a round every R

The peak is the kernel's high-water mark of resident memory, set back after the model is loaded and has run once, so
that neither loading nor buffers made on first use count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys

from measure import Result, ratio


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process [bytes]."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def _measure(variant: str, batch: int, length: int, threads: int, name: str) -> dict:
    import forcing
    import torch
    from stock import pair

    torch.set_num_threads(threads)
    model, stock = pair(name)
    ids = forcing.script(model, batch, length)
    if variant.startswith("capture"):
        run = _captures(variant, model)
    elif variant == "plain":
        run = lambda ids: stock(input_ids=ids, use_cache=False, logits_to_keep=1)  # noqa: E731
    elif variant == "prefill":
        run = lambda ids: forcing.prefill(stock, ids)  # noqa: E731
    else:
        run = lambda ids: forcing.ours(model, ids, int(variant.removeprefix("ours-")))  # noqa: E731
    torch.set_grad_enabled(False)
    run(ids[:1, :32])
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from here
    before = _resident("VmRSS")
    result = run(ids)
    return dict(before=before, peak=_resident("VmHWM") - before, bytes=getattr(result, "nbytes", 0))


def _captures(variant: str, model):
    """capture-BACKEND: q, k, v of everything; capture-BACKEND-window: queries of the last 64 tokens only."""
    import kvprobe

    backend, *window = variant.removeprefix("capture-").split("-")
    asked = dict(what="q", positions=slice(-64, None)) if window else {}
    return lambda ids: kvprobe.capture(model, ids, backend=backend, **asked)


def _fresh(variant: str, batch: int, length: int, threads: int, name: str) -> dict:
    command = [sys.executable, __file__, variant, str(batch), str(length), str(threads), name]
    # freed memory goes back at once, so that the peak is what lives and not what the allocator's holes add to it
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peaks(say, name: str, threads: int, batch: int, n: int, length: int = 1000, buffers=(64, 16)) -> list[Result]:
    variants = ["prefill", *(f"ours-{r}" for r in buffers)]
    peak: dict[str, list[float]] = {v: [] for v in variants}
    for i in range(n):
        for variant in variants:
            peak[variant].append(_fresh(variant, batch, length, threads, name)["peak"])
        say(f"  round {i + 1}/{n}: " + ", ".join(f"{v} +{p[-1] / 2**20:.1f} MiB" for v, p in peak.items()))
    return [Result(f"memory: peak over the model, ours / one plain prefill, batch {batch}, r={r}", ratio(peak[f"ours-{r}"], peak["prefill"]), 0.5)
            for r in buffers]


def captures(say, name: str, threads: int, n: int, length: int = 1000) -> list[Result]:
    """Peak memory of captures over a plain forward: against the bytes asked for, and of a query window in MB."""
    backends = ("nnsight", "attention_function")
    variants = ["plain", *(f"capture-{b}{w}" for b in backends for w in ("", "-window"))]
    found: dict[str, list[dict]] = {v: [] for v in variants}
    for i in range(n):
        for variant in variants:
            found[variant].append(_fresh(variant, 1, length, threads, name))
        say(f"  round {i + 1}/{n}: " + ", ".join(f"{v} +{f[-1]['peak'] / 1e6:.1f} MB" for v, f in found.items()))
    plain = [f["peak"] for f in found["plain"]]
    results = []
    for b in backends:
        whole, window = found[f"capture-{b}"], found[f"capture-{b}-window"]
        asked = f"{whole[0]['bytes'] / 1e6:.0f} MB asked for"
        results.append(Result(f"memory: capture q, k, v over plain / bytes asked for, {b}", tuple((f["peak"] - p) / f["bytes"] for f, p in zip(whole, plain)), 1.15, note=asked))
        results.append(Result(f"memory: capture of a 64-query window over plain [MB], {b}", tuple((f["peak"] - p) / 1e6 for f, p in zip(window, plain)), 10, form=".1f"))
    return results


if __name__ == "__main__":
    _variant, _batch, _length, _threads, _name = sys.argv[1:]
    print(json.dumps(_measure(_variant, int(_batch), int(_length), int(_threads), _name)))
