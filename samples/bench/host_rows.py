#!/usr/bin/env python3
"""Rows by index on the host device: pinflow.RowTable beside numpy, for tables in memory and in a mapped file.

    python3 samples/bench/host_rows.py [--dir DIR] [--columns N]

Makes a table of 1,048,576 rows of N float32 (64 by default), in memory and as a .npy file in the page cache. pinflow
gathers and scatters 1 to 131,072 random rows with `RowTable.gather(ids, out)` and `RowTable.scatter`. numpy does the
same with `numpy.take(..., out=out, mode="clip")` and `table[ids] = rows`; for the file, it takes rows from the array
that it maps. Only the table in memory is scattered to. Each call has its own row numbers, and both sides take turns.
Before each size is timed, its rows are compared with numpy's. Prints the median time of a call in microseconds.
"""

import argparse
import os
import statistics
import time

import numpy as np
import pinflow

ROWS = 1 << 20


def medians(random, count, calls, functions):
    """The median time of a call of each function, in microseconds. The functions are called in turns."""
    times = [[] for _ in functions]
    for _ in range(calls):
        for function, measured in zip(functions, times):
            ids = random.integers(0, ROWS, count)
            start = time.perf_counter()
            function(ids)
            measured.append(time.perf_counter() - start)
    return [statistics.median(measured) * 1e6 for measured in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--columns", type=int, default=64)
    given = parser.parse_args()
    random = np.random.default_rng(1)
    content = random.random((ROWS, given.columns), np.float32)
    path = os.path.join(given.dir, f"host_rows.{os.getpid()}.npy")
    try:
        np.save(path, content)
        mapped = np.load(path, mmap_mode="r")
        memory, file = pinflow.RowTable(content, device="cpu"), pinflow.RowTable(path, device="cpu")
        print("| rows | gather, memory: numpy, pinflow | gather, file: numpy, pinflow | scatter: numpy, pinflow |")
        print("|---|---|---|---|", flush=True)
        for count in (1, 16, 256, 1024, 8192, 131072):
            out = np.empty((count, given.columns), np.float32)
            ids = random.permutation(ROWS)[:count]
            for table, expected in ((memory, content), (file, mapped)):
                table.gather(ids, out)
                if not np.array_equal(out, expected[ids]):
                    raise SystemExit("the gathered rows differ from numpy's")
            rows = random.random((count, given.columns), np.float32)
            memory.scatter(ids, rows)
            if not np.array_equal(content[ids], rows):
                raise SystemExit("the scattered rows are not in the table")

            def assign(ids):
                content[ids] = rows

            measured = medians(random, count, max(20, min(2000, (1 << 20) // count)), (
                lambda ids: np.take(content, ids, axis=0, out=out, mode="clip"), lambda ids: memory.gather(ids, out),
                lambda ids: np.take(mapped, ids, axis=0, out=out, mode="clip"), lambda ids: file.gather(ids, out),
                assign, lambda ids: memory.scatter(ids, rows)))
            print(f"| {count} | " + " | ".join(f"{measured[i]:.1f}, {measured[i + 1]:.1f}" for i in (0, 2, 4)) + " |",
                  flush=True)
    finally:
        if os.path.exists(path):
            os.remove(path)


if __name__ == "__main__":
    main()
