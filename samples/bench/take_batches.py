#!/usr/bin/env python3
"""take_batches.cpp in Python, with PyTorch tensors: for everyday.py and python_stream.py.

    take_batches.py FILE[:NAME]... [--device D] [--batch N] [--order O] [--epochs N] [--leased N] [--legacy] [--stack]
                    [--threads N] [--digest] [--bare]

Takes the flags of take_batches except --route, and prints the fields of its JSON object that everyday.py reads.
--digest here checks the contents in a further epoch, which is not timed. --bare makes no tensors of PyTorch.
"""
import argparse
import glob
import json
import resource
import sys
import time
from collections import deque

import numpy as np
import torch

import pinflow

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("files", nargs="+")
parser.add_argument("--device", default="auto")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--order", default="sequential")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--leased", type=int, default=0)
parser.add_argument("--threads", type=int)
parser.add_argument("--legacy", action="store_true", help="ignored: PyTorch's first stream is the legacy one")
parser.add_argument("--stack", action="store_true")
parser.add_argument("--digest", action="store_true")
parser.add_argument("--bare", action="store_true")
options = parser.parse_args()


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


start = time.perf_counter()
sources = []
for name in options.files:
    if options.stack and any(each in name for each in "*?["):
        sources.append(pinflow.stack(sorted(glob.glob(name))))
    else:
        sources.append(pinflow.open(name))
open_seconds = time.perf_counter() - start
start = time.perf_counter()
loader = pinflow.Loader(*sources, batch=options.batch, order=options.order, device=options.device,
                        threads=options.threads)
make_seconds = time.perf_counter() - start
on_gpu = loader.device != "host"

seconds, cpu = [], []
leased = deque()
start, cpu_start = time.perf_counter(), cpu_seconds()
for _ in range(options.epochs):
    for batch in loader:
        if not options.bare:
            batch = tuple([each.torch() for each in batch])
        if options.leased:
            leased.append(batch)
            if len(leased) > options.leased:
                leased.popleft()
    if on_gpu:
        torch.cuda.synchronize()
    now, cpu_now = time.perf_counter(), cpu_seconds()
    seconds.append(now - start)
    cpu.append(cpu_now - cpu_start)
    start, cpu_start = now, cpu_now
leased.clear()
report = loader.report().values


def check_contents():
    """Compares some 64 batches of an epoch with the sources, row by row, and the sum of each array with numpy's."""
    sizes = [source.nbytes // len(source) for source in sources]
    words = [(torch.int64, np.int64) if size % 8 == 0 else (torch.uint8, np.uint8) for size in sizes]
    sums = [torch.zeros((), dtype=torch.int64, device=loader.device.replace("host", "cpu")) for _ in sources]
    for batch in loader.batches():
        for number, (total, source) in enumerate(zip(sums, sources)):
            rows = batch[number].torch().reshape(-1).view(torch.uint8)
            total += rows.view(words[number][0]).sum(dtype=torch.int64)
            if batch.index % max(1, len(loader) // 64) == 0:
                expected = source.rows(batch.row_ids).reshape(-1).view(np.uint8)
                if not np.array_equal(rows.cpu().numpy(), expected):
                    sys.exit(f"take_batches.py: array {number} of batch {batch.index} has other rows than its row_ids")
        batch.release()
    for number, (source, size) in enumerate(zip(sources, sizes)):
        expected, step = 0, max(1, (64 << 20) // size)
        for first in range(0, len(source), step):
            rows = np.ascontiguousarray(source[first:first + step]).reshape(-1).view(np.uint8).view(words[number][1])
            expected = (expected + int(rows.sum(dtype=np.int64))) % 2**64
        if int(sums[number]) % 2**64 != expected:
            sys.exit(f"take_batches.py: array {number} has the sum {int(sums[number])}: other rows were delivered")


if options.digest:
    check_contents()
print(json.dumps({
    "open_seconds": open_seconds, "make_seconds": make_seconds, "seconds": seconds, "cpu_seconds": cpu,
    "rows": loader.row_count, "sample_bytes": sum(source.nbytes // len(source) for source in sources),
    "batches": len(loader), "route": report["route"],
    "arrays": [{"transfer": each["transfer"], "reason": each["reason"]} for each in report["arrays"]],
    "verdict": report["verdict"]}))
