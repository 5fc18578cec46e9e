#!/usr/bin/env python3
"""Runs loops in Python and in C++ in turns, on a GPU: python_stream.py PINFLOW TAKE_BATCHES [--dir DIR]
[--gib 8] [--repetitions 3]

Large batches are 64 rows of 256 KiB, sequential and shuffled, with and without a label of 8 bytes: `pinflow stream`
against `for x, ... in loader: x.torch()` of take_batches.py. Small batches are shuffled, in microseconds: TAKE_BATCHES
(made from take_batches.cpp), a loop in Python over the tuples, and one that makes tensors of PyTorch. All stream five
epochs, each in a process of its own, and the medians of the epochs after the first count. The first run of each loop
with tensors checks the contents in a further epoch. LINK is the rate of a 256 MiB copy from pinned memory. Exits with 1
if a ratio to `pinflow stream` is below 0.97.
"""
import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("pinflow", help="the tool")
parser.add_argument("take_batches", help="the program")
parser.add_argument("--dir", default="/dev/shm", help="where the files are made (default: /dev/shm)")
parser.add_argument("--gib", type=int, default=8, help="size of the file of rows (default: 8)")
parser.add_argument("--repetitions", type=int, default=3, help="runs of each program (default: 3)")
options = parser.parse_args()

here = os.path.dirname(os.path.abspath(__file__))
folder = tempfile.mkdtemp(prefix="python-stream-", dir=options.dir)
atexit.register(shutil.rmtree, folder, ignore_errors=True)
python_loop = os.path.join(here, "take_batches.py")


def make(row_bytes, rows):
    """Files of rows that differ, and of labels."""
    path, labels = (os.path.join(folder, f"{name}-{row_bytes}.npy") for name in ("rows", "labels"))
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(rows, row_bytes // 8))
    block = np.random.default_rng(0).integers(0, 2**62, ((64 << 20) // row_bytes, row_bytes // 8))
    for first in range(0, rows, len(block)):
        part = array[first:first + len(block)]
        part[:] = block[:len(part)]
        part[:, 0] = np.arange(first, first + len(part))
    np.save(labels, np.arange(rows))
    return path, labels


def run(*command):
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command[:3])} ...: {finished.stderr.strip()[-500:]}")
    return json.loads(finished.stdout)


link = run(options.pinflow, "bench", "copy", "--json")["link_gbps"]
print(f"LINK {link:.1f} GB/s", flush=True)
print("| rows of 256 KiB by 64 | pinflow stream, GB/s | Python, GB/s (of LINK) | ratio |\n|---|---|---|---|", flush=True)
worst = 1.0
path, labels = make(256 * 1024, options.gib * 4096)
common = ["--batch", "64", "--epochs", "5", "--device", "cuda:0"]
for files, name in (([path], ""), ([path, labels], " with a label")):
    for order in ("sequential", "shuffled"):
        tool, loop = [], []
        for repetition in range(options.repetitions):
            check = ["--digest"] if repetition == 0 else []
            tool += run(options.pinflow, "stream", *files, *common, "--order", order, "--json")["epoch_seconds"][1:]
            loop += run(sys.executable, python_loop, *files, *common, "--order", order, *check)["seconds"][1:]
        size = sum(os.path.getsize(each) for each in files)
        rates = [size / statistics.median(seconds) / 1e9 for seconds in (tool, loop)]
        worst = min(worst, rates[1] / rates[0])
        print(f"| {order}{name} | {rates[0]:.1f} | {rates[1]:.1f} ({rates[1] / link:.2f}) | {rates[1] / rates[0]:.3f} |",
              flush=True)
os.remove(path)
print("| small batches | C++, us a batch | Python, tuples | Python, tensors of PyTorch |\n|---|---|---|---|", flush=True)
for row_bytes, batch, rows in ((4096, 64, 262144), (3072, 256, 524288), (32, 10, 1048576)):
    path, labels = make(row_bytes, rows)
    for files, name in (([path], ""), ([path, labels], ", with a label")):
        micros = {"C++": [], "tuples": [], "tensors": []}
        common = [*files, "--batch", str(batch), "--epochs", "5", "--device", "cuda:0", "--order", "shuffled"]
        for repetition in range(options.repetitions):
            check = ["--digest"] if repetition == 0 else []
            for how, command in (("C++", [options.take_batches]), ("tuples", [sys.executable, python_loop, "--bare"]),
                                 ("tensors", [sys.executable, python_loop, *check])):
                result = run(*command, *common)
                micros[how] += [seconds / result["batches"] * 1e6 for seconds in result["seconds"][1:]]
        figures = " | ".join(f"{statistics.median(each):.1f}" for each in micros.values())
        print(f"| {batch} rows of {row_bytes} B{name} | {figures} |", flush=True)
    os.remove(path)
sys.exit(0 if worst >= 0.97 else 1)
