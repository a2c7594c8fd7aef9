"""`make bench`: what kvprobe costs against stock transformers, as a table and as runs/bench/bench.json.

    python tests/bench/run.py [--quick] [--only forcing1 --only round ...] [--threads 1] [--model smollm2] [--out DIR]

Parts: step, generation, round, deletion, compress, memory1, memory8, forcing1, forcing8 (speed at batch 1 and 8), capture, memory-capture, exact. A full run takes about half an
hour of one core, --quick about ten minutes. Nothing else should run meanwhile; the load is printed with the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path

import compressing
import decode
import deleting
import eviction
import forcing
import looking
import memory
import numpy
import psutil
import torch
import transformers
from measure import HEADER
from stock import pair

import kvprobe


def machine() -> dict:
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return dict(cpu=cpu, cores=os.cpu_count(), memory_gib=round(psutil.virtual_memory().total / 2**30, 1), system=platform.platform(),
                torch_cpu_capability=torch.backends.cpu.get_cpu_capability())


def versions() -> dict:
    return dict(kvprobe=kvprobe.__version__, python=platform.python_version(), torch=torch.__version__,
                transformers=transformers.__version__, numpy=numpy.__version__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this part; may be given again")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; with more than one the wall clock is used")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    few, q = args.quick, lambda quick, full: quick if args.quick else full  # noqa: E731
    models = cache(lambda: pair(args.model))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    parts = {
        "step": lambda: decode.steps(*models(), say, n=q(5, 15)),
        "generation": lambda: decode.generation(*models(), say, n=q(2, 5)),
        "round": lambda: eviction.one_round(say, n=q(7, 21)),
        "deletion": lambda: deleting.scoring(say, n=q(3, 9)),
        "compress": lambda: compressing.speed(*models(), say, n=q(2, 7)),
        "memory1": lambda: memory.peaks(say, args.model, args.threads, batch=1, n=q(1, 3)),
        "memory8": lambda: memory.peaks(say, args.model, args.threads, batch=8, n=q(1, 2)),
        "forcing1": lambda: forcing.speed(*models(), say, batch=1, n=q(3, 7)),
        "forcing8": lambda: forcing.speed(*models(), say, batch=8, n=q(1, 3)),
        "capture": lambda: looking.speed(*models(), say, n=q(3, 7)),
        "memory-capture": lambda: memory.captures(say, args.model, args.threads, n=q(1, 3)),
        "exact": lambda: forcing.exact(models()[0], say, length=q(500, 1000)),
    }
    unknown = set(args.only or ()) - set(parts)
    if unknown:
        parser.error(f"no part named {', '.join(sorted(unknown))}; parts: {', '.join(parts)}")

    record = dict(made=time.strftime("%Y-%m-%dT%H:%M:%S"), quick=few, threads=args.threads, model=args.model,
                  clock="process CPU time" if args.threads == 1 else "wall", versions=versions(), machine=machine(), parts={})
    results = []
    for name in args.only or parts:
        say(f"{name} ...")
        before = os.getloadavg()[0]
        new = parts[name]()
        load = [round(before, 2), round(os.getloadavg()[0], 2)]
        say(f"  load average before and after: {load}")
        record["parts"][name] = dict(load=load, results=[r.json() for r in new])
        results += new
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")

    loads = [x for part in record["parts"].values() for x in part["load"]]
    print(f"\n{args.model}, {args.threads} thread(s), {record['clock']}, load average {min(loads)}..{max(loads)}; "
          f"medians and ranges of the ratios of interleaved rounds\n\n{HEADER}")
    for result in results:
        print(result.row())
    for note in dict.fromkeys(r.note for r in results if r.note):
        print(f"  {note}")
    print(f"\nwritten to {args.out / 'bench.json'}")
    return 1 if any(r.met is False for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
