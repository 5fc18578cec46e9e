#!/usr/bin/env python3
"""Measures how fast pinflow and numpy inflate the arrays of a .npz file, in the same run.

    python3 inflate_npz.py PROGRAM [FOLDER]

PROGRAM is inflate_npz as built. FOLDER takes half a gigabyte for a while.

The file has eight members of 64 MiB of float32, in which about 3 of 4 bytes are noise. Rounds of both alternate, and
medians count. Exits with 1 if the contents differ, or if pinflow's rate is below three times numpy's.
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

ROUNDS = 5


def make(path):
    random = np.random.default_rng(1)
    arrays = {}
    for number in range(8):
        noise = random.standard_normal(1 << 24, np.float32)
        noise.view(np.uint32)[:] &= 0xFFFFFF00
        arrays[f"array_{number}"] = noise.reshape(1 << 14, 1 << 10)
    np.savez_compressed(path, **arrays)
    return sum(array.nbytes for array in arrays.values())


def with_numpy(path):
    begin = time.perf_counter()
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return time.perf_counter() - begin, arrays


def with_pinflow(program, path):
    output = subprocess.run([program, path, "1"], check=True, capture_output=True, text=True).stdout
    lines = dict(line.split() for line in output.splitlines())
    return float(lines.pop("seconds")), lines


def main(program, folder=None):
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = pathlib.Path(scratch) / "compressed.npz"
        size = make(path)
        print(f"{size / 2**20:.0f} MiB in 8 arrays, {path.stat().st_size / size:.2f} of that compressed")
        numpy_seconds, pinflow_seconds = [], []
        for _ in range(ROUNDS):
            seconds, arrays = with_numpy(path)
            numpy_seconds.append(seconds)
            sums = {name: f"{zlib.crc32(array):08x}" for name, array in arrays.items()}
            del arrays
            seconds, pinflow_sums = with_pinflow(program, path)
            pinflow_seconds.append(seconds)
            if pinflow_sums != sums:
                sys.exit("the contents differ")
    ratio = statistics.median(numpy_seconds) / statistics.median(pinflow_seconds)
    for name, seconds in (("numpy", numpy_seconds), ("pinflow", pinflow_seconds)):
        rounds = " ".join(f"{second:.2f}" for second in seconds)
        print(f"{name:8} {size / statistics.median(seconds) / 1e9:.2f} GB/s   seconds: {rounds}")
    print(f"ratio    {ratio:.2f}")
    return 0 if ratio >= 3 else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
