#!/usr/bin/env python3
"""What the Python package costs, in microseconds: python_cost.py [DEVICE] (host by default)

Bare iteration over batches of 10 rows of 32 bytes with a label, and the part of it that is the native `next`. Converting
one tensor to each package that is installed: numpy on the host, CuPy on a GPU, PyTorch. Means of 200,000 batches and
100,000 conversions; `import` in milliseconds. Contents are not checked.
"""

import importlib
import sys
import time

start = time.perf_counter()
import pinflow  # noqa: E402

print(f"import {(time.perf_counter() - start) * 1e3:.0f} ms")

import numpy as np  # noqa: E402

ROWS, BATCH, REPEATS = 2_000_000, 10, 100_000
device = sys.argv[1] if len(sys.argv) > 1 else "host"


def new_loader():
    return pinflow.Loader(np.zeros((ROWS, 8), np.float32), np.zeros(ROWS, np.int64), batch=BATCH, device=device,
                          threads=1)


def report(name, seconds, count):
    print(f"{name} {seconds / count * 1e6:.2f} us", flush=True)


take = new_loader()._loader.next
stream = None if device == "host" else 1
start = time.perf_counter()
for _ in range(ROWS // BATCH):
    take(stream, None)
report("native next", time.perf_counter() - start, ROWS // BATCH)

loader = new_loader()
start = time.perf_counter()
for _ in loader:
    pass
report("iteration", time.perf_counter() - start, ROWS // BATCH)

kept = new_loader()
rows, _ = next(iter(kept))
functions = {"Tensor.numpy()": ("numpy", rows.numpy), "np.from_dlpack(tensor)": ("numpy", lambda: np.from_dlpack(rows))}
if device != "host":
    functions = {"Tensor.cupy()": ("cupy", rows.cupy)}
functions["Tensor.torch()"] = ("torch", rows.torch)  # last: with PyTorch, iteration asks for its stream
for name, (package, function) in functions.items():
    try:
        importlib.import_module(package)
    except ImportError:
        continue
    function()
    start = time.perf_counter()
    for _ in range(REPEATS):
        function()
    report(name, time.perf_counter() - start, REPEATS)
if "torch" in sys.modules:
    start = time.perf_counter()
    for _ in loader:
        pass
    report("iteration, PyTorch loaded", time.perf_counter() - start, ROWS // BATCH)
