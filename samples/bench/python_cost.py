#!/usr/bin/env python3
"""What the Python package costs on the host, in microseconds: python_cost.py

Bare iteration over batches of 10 rows of 32 bytes with a label, the part of it that is the native `next`, and taking a
tensor. Means of 200,000 batches and 100,000 tensors; `import` in milliseconds. Contents are not checked.
"""

import time

start = time.perf_counter()
import pinflow  # noqa: E402

print(f"import {(time.perf_counter() - start) * 1e3:.0f} ms")

import numpy as np  # noqa: E402

ROWS, BATCH, REPEATS = 2_000_000, 10, 100_000


def new_loader():
    return pinflow.Loader(np.zeros((ROWS, 8), np.float32), np.zeros(ROWS, np.int64), batch=BATCH, device="host",
                          threads=1)


def report(name, seconds, count):
    print(f"{name} {seconds / count * 1e6:.2f} us", flush=True)


take = new_loader()._loader.next
start = time.perf_counter()
for _ in range(ROWS // BATCH):
    take(None, None)
report("native next", time.perf_counter() - start, ROWS // BATCH)

loader = new_loader()
start = time.perf_counter()
for _ in loader:
    pass
report("iteration", time.perf_counter() - start, ROWS // BATCH)

rows, _ = next(iter(loader))
for name, function in (("Tensor.numpy()", rows.numpy), ("np.from_dlpack(tensor)", lambda: np.from_dlpack(rows))):
    start = time.perf_counter()
    for _ in range(REPEATS):
        function()
    report(name, time.perf_counter() - start, REPEATS)
