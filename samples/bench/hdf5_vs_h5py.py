#!/usr/bin/env python3
"""Measures how fast pinflow and h5py read HDF5 datasets, in the same run.

    python3 hdf5_vs_h5py.py PROGRAM [FOLDER]

PROGRAM is hdf5_rows as built. FOLDER takes 2.1 GB for a while.

rows        10,000 random rows of 2 KiB of a contiguous dataset of 10^6 rows
whole       all of 1 GiB of float32, with HDF5's shuffle filter and deflate (level 4), in chunks of 1 MiB
chunked     1,000 random rows of 4 KiB of that dataset

`whole` and `chunked` are measured on two datasets. The first is a smooth function plus noise; deflate mostly stores its
noise bytes. The second is the same data rounded to two decimals; every byte has to be decoded.

Required ratios: rows 50 and chunked 5 to h5py's fancy indexing, whole 3 to h5py reading all; whole and chunked on both
datasets. Exits with 1 if the contents differ or a required ratio is missed.

Files are in the page cache. Time counts from opening the file until the elements are in the process's own memory, so
decoding is included. Each side does the same twice in a row and the second time counts, because a virtual machine may
first have to ask its host for memory. Rounds of both sides alternate, each with its own rows. The contents are
compared in each round, and medians count.

h5py takes sorted, distinct indices ("fancy"), or rows in any order one by one ("loop"). `chunked` is also measured with
a chunk cache that holds the whole dataset. Each line has wall-clock and CPU seconds, and their ratios to pinflow's. The
wall clock decides, but it says little about a program that uses all cores if other work runs. Then judge by CPU
seconds: h5py's, which has one thread, divided by pinflow's, times the number of cores ("at best").
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zlib

import h5py
import numpy as np

ROUNDS = 5
CORES = len(os.sched_getaffinity(0))
LARGE_CACHE = {"rdcc_nbytes": 2 << 30, "rdcc_nslots": 100_003}


def make_contiguous(path):
    random = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("rows", (1_000_000, 512), "<u4")
        for first in range(0, 1_000_000, 10_000):
            dataset[first:first + 10_000] = random.integers(0, 1 << 32, (10_000, 512), np.uint32)


def make_chunked(path, rounded):
    random = np.random.default_rng(2)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("field", (262_144, 1024), "<f4", chunks=(256, 1024), shuffle=True,
                                      compression="gzip")
        columns = np.arange(1024, dtype=np.float32) / 30
        for first in range(0, 262_144, 256):
            rows = np.arange(first, first + 256, dtype=np.float32)[:, None] / 50
            field = 280 + 15 * np.sin(rows + columns) + random.normal(0, 0.05, (256, 1024))
            dataset[first:first + 256] = field.round(2) if rounded else field
        return dataset.size * 4 / dataset.id.get_storage_size()


def with_h5py(path, name, take, **options):
    for _ in range(2):
        content = None
        begin = time.perf_counter(), time.process_time()
        with h5py.File(path, "r", **options) as file:
            content = take(file[name])
        seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
    return *seconds, f"{zlib.crc32(content):08x}"


def fancy(ids):
    return lambda dataset: dataset[ids]


def loop(ids):
    def take(dataset):
        content = np.empty((len(ids), *dataset.shape[1:]), dataset.dtype)
        for position, row in enumerate(ids):
            dataset.read_direct(content, np.s_[row], np.s_[position])
        return content
    return take


def with_pinflow(program, path, name, ids=None):
    arguments = [program, path, name]
    if ids is not None:
        ids_path = path.parent / "ids"
        ids.astype("<u8").tofile(ids_path)
        arguments.append(ids_path)
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    lines = dict(line.split() for line in output.splitlines())  # the second time's
    return float(lines["seconds"]), float(lines["cpu"]), lines["crc"]


def measure(sides):
    """`sides` are the ways to do the same, by name: functions of a round. @return wall-clock and CPU seconds of each."""
    seconds = {name: [] for name in sides}
    for number in range(ROUNDS):
        sums = set()
        for name, side in sides.items():
            *took, crc = side(number)
            seconds[name].append(took)
            sums.add(crc)
        if len(sums) != 1:
            sys.exit("the contents differ")
    return seconds


def show(what, size, seconds, min_ratio=None):
    """Prints the rounds of all sides, pinflow first. @return whether it is at least `min_ratio` times as fast as the
    second side."""
    print(f"{what}; load average {os.getloadavg()[0]:.1f}")
    medians = [[statistics.median(took) for took in zip(*each)] for each in seconds.values()]
    first_wall, first_cpu = medians[0]
    for (name, each), (wall, cpu) in zip(seconds.items(), medians):
        rounds = " ".join(f"{took[0]:.4f}" for took in each)
        print(f"  {name:24} wall {wall:.4f} s  {size / wall / 1e9:7.3f} GB/s  {wall / first_wall:6.1f}   "
              f"CPU {cpu:.4f} s  {cpu / first_cpu:6.1f}   ({rounds})")
    reached, at_best = medians[1][0] / first_wall, medians[1][1] / first_cpu * CORES
    if min_ratio:
        verdict = "reached" if reached >= min_ratio else "MISSED"
        print(f"  {verdict}: {reached:.1f} of {min_ratio}; by CPU seconds at best {at_best:.1f} on {CORES} cores", flush=True)
    return min_ratio is None or reached >= min_ratio


def random_ids(seed, count, rows):
    """Rows in random order, each at most once; and the same rows sorted."""
    ids = np.random.default_rng(seed).choice(rows, count, replace=False)
    return ids, np.sort(ids)


def compare_contiguous(program, path):
    make_contiguous(path)
    ids, ordered = zip(*(random_ids(10 + number, 10_000, 1_000_000) for number in range(ROUNDS)))
    good = show("10,000 random rows of 2 KiB of 10^6, contiguous, sorted", 10_000 * 2048, measure({
        "pinflow": lambda n: with_pinflow(program, path, "rows", ordered[n]),
        "h5py, fancy": lambda n: with_h5py(path, "rows", fancy(ordered[n])),
        "h5py, loop": lambda n: with_h5py(path, "rows", loop(ordered[n])),
    }), 50)
    show("the same in random order, which fancy indexing refuses", 10_000 * 2048, measure({
        "pinflow": lambda n: with_pinflow(program, path, "rows", ids[n]),
        "h5py, loop": lambda n: with_h5py(path, "rows", loop(ids[n])),
    }))
    return good


def compare_chunked(program, path, rounded):
    ratio = make_chunked(path, rounded)
    print(f"-- {'rounded' if rounded else 'not rounded'}: compressed {ratio:.2f} to 1")
    good = show("1 GiB of float32, shuffle and deflate, chunks of 1 MiB", 1 << 30, measure({
        "pinflow": lambda n: with_pinflow(program, path, "field"),
        "h5py": lambda n: with_h5py(path, "field", lambda dataset: dataset[...]),
    }), 3)
    ids, ordered = zip(*(random_ids(20 + number, 1_000, 262_144) for number in range(ROUNDS)))
    good &= show("1,000 random rows of 4 KiB of it, sorted", 1_000 * 4096, measure({
        "pinflow": lambda n: with_pinflow(program, path, "field", ordered[n]),
        "h5py, fancy": lambda n: with_h5py(path, "field", fancy(ordered[n])),
        "h5py, fancy, large cache": lambda n: with_h5py(path, "field", fancy(ordered[n]), **LARGE_CACHE),
    }), 5)
    show("the same in random order", 1_000 * 4096, measure({
        "pinflow": lambda n: with_pinflow(program, path, "field", ids[n]),
        "h5py, loop": lambda n: with_h5py(path, "field", loop(ids[n])),
        "h5py, loop, large cache": lambda n: with_h5py(path, "field", loop(ids[n]), **LARGE_CACHE),
    }))
    return good


def main(program, folder=None):
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = pathlib.Path(scratch) / "data.h5"
        good = compare_contiguous(program, path)
        for rounded in False, True:
            good &= compare_chunked(program, path, rounded)
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
