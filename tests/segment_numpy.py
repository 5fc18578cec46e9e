#!/usr/bin/env python3
"""segment_numpy.py PINFLOW: segments that `pinflow pin` makes, read by numpy, are equal to what was pinned.

Exit status 77 if numpy is missing.
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    sys.exit(77)

tool = sys.argv[1]
random = np.random.default_rng(23)
arrays = {
    "bytes": random.integers(0, 255, (301, 7, 5), dtype=np.uint8),
    "numbers": random.random((50, 3)),
    "big": random.integers(-9, 9, (40, 2)).astype(">i4"),
    "halves": random.random((9, 9)).astype(np.float16),
    "complex": random.random((5, 2)) + 1j,
    "flags": random.random((33,)) < 0.5,
    "records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "texts": np.array([["ab", "c"], ["", "defg"]]),
    "times": np.array(["2026-11-25", "2027-01-01"], dtype="datetime64[D]"),
    "fortran": np.asfortranarray(random.random((6, 4, 3))),
    "none": np.zeros((0, 4)),
    "scalar": np.float32(2.5),
}
folder = f"/dev/shm/pinflow-{os.geteuid()}"
group = f"pinflow-test-numpy-{os.getpid()}"
failed = []


def compare(name, expected):
    path = f"{folder}/{name}.npy"
    found = np.load(path, mmap_mode="r" if expected.size else None)
    if found.shape != expected.shape or not np.array_equal(np.asarray(found), expected):
        failed.append(f"{name}: {found!r}, expected {expected!r}")
    if os.stat(path).st_mode & 0o777 != 0o600:
        failed.append(f"{name}: mode {os.stat(path).st_mode:o}")


with tempfile.TemporaryDirectory() as work:
    np.savez(f"{work}/stored.npz", **arrays)
    np.savez_compressed(f"{work}/deflated.npz", **arrays)
    for kind in ("stored", "deflated"):
        subprocess.run([tool, "pin", f"{work}/{kind}.npz", group], check=True, stdout=subprocess.DEVNULL)
        for name, expected in arrays.items():
            compare(f"{group}/{name}", np.asarray(expected))
            subprocess.run([tool, "verify", f"shm:{group}/{name}"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([tool, "unpin", group], check=True)
    for name, expected in arrays.items():
        np.save(f"{work}/one.npy", expected)
        subprocess.run([tool, "pin", f"{work}/one.npy", group], check=True, stdout=subprocess.DEVNULL)
        compare(group, np.asarray(expected))
        subprocess.run([tool, "unpin", group], check=True)

print("\n".join(failed) or f"{3 * len(arrays)} segments are equal to their arrays")
sys.exit(1 if failed else 0)
