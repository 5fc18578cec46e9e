#!/usr/bin/env python3
"""Loads arrays of many formats, orders and types to the first GPU: pinflow beside what people write by hand.

    python3 samples/bench/array_load.py [--dir DIR] [--gb N] [--only WORDS]

Writes files of about 1 GB to DIR: .npy files, also in Fortran order and big-endian; HDF5 files, contiguous, in chunks and
compressed; safetensors files of one large and of many small tensors. All stay in the page cache. Each is loaded by
pinflow and by a peer: h5py or numpy and then PyTorch, or safetensors. The first load of each is compared element by
element; then come five timed ones, with a pause of 0.2 s before each, and with memory that PyTorch has kept. Prints
median rates in GB/s of decoded elements, beside the rate of the link: the median of 9 copies of 256 MiB from page-locked
memory.
"""

import argparse
import gc
import os
import statistics
import time

import h5py
import numpy as np
import pinflow
import safetensors
import safetensors.torch
import torch

ROUNDS = 5
PAUSE_SECONDS = 0.2


def seconds_of(load, rounds=ROUNDS):
    seconds = []
    for _ in range(rounds):
        gc.collect()
        time.sleep(PAUSE_SECONDS)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loaded = load()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del loaded
    return statistics.median(seconds)


def link_rate():
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds_of(lambda: device.copy_(host), 1)
    return (1 << 28) / seconds_of(lambda: device.copy_(host), 9) / 1e9


def equal(ours, theirs):
    """Whether two dictionaries of tensors, or two lists, have the same elements."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and equal(list(ours.values()), [theirs[name] for name in ours])
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in zip(ours, theirs))


class Cases:
    """Files, and what loads them."""

    def __init__(self, folder, size_bytes):
        self.folder = folder
        random = np.random.default_rng(7)
        columns = 2048
        self.floats = random.standard_normal((size_bytes // (4 * columns), columns), dtype=np.float32)
        rows = self.floats.shape[0] // 4
        self.counts = random.integers(0, 50, (rows, columns)).astype(np.float32)  # can be compressed
        self.cases = {}

    def path(self, name):
        return os.path.join(self.folder, "array_load-" + name)

    def add(self, name, size_bytes, ours, theirs):
        self.cases[name] = (size_bytes, ours, theirs)

    def add_npy(self, name, array, dtype=None):
        path = self.path(name.replace(" ", "_").replace(",", "") + ".npy")
        np.save(path, array)
        stem = os.path.basename(path)[:-4]

        def by_hand():
            loaded = np.load(path)
            native = loaded.astype(loaded.dtype.newbyteorder("="), copy=False)
            return {stem: torch.from_numpy(native).cuda().contiguous().to(dtype or torch.float32)}

        self.add(name, array.nbytes, lambda: pinflow.load_file(path, device="cuda", dtype=dtype), by_hand)

    def add_hdf5(self, name, arrays, **storage):
        path = self.path(name.replace(" ", "_").replace(",", "") + ".h5")
        with h5py.File(path, "w") as file:
            for i, array in enumerate(arrays):
                file.create_dataset(f"data{i:04}", data=array, **storage)

        def by_hand():
            with h5py.File(path) as file:
                return {key: torch.from_numpy(file[key][()]).cuda() for key in file}

        self.add(name, sum(array.nbytes for array in arrays), lambda: pinflow.load_file(path, device="cuda"), by_hand)

    def add_one_by_one(self, name, count, size_bytes):
        path = self.path(f"{count}.safetensors")
        words = self.floats.reshape(-1)[:count * size_bytes // 4].reshape(count, -1)
        pinflow.save_file({f"t{i}": torch.from_numpy(row) for i, row in enumerate(words)}, path)

        def one_by_one(opener):
            with opener(path, framework="pt", device="cuda") as file:
                return {key: file.get_tensor(key) for key in file.keys()}

        self.add(name, words.nbytes, lambda: one_by_one(pinflow.safe_open),
                 lambda: one_by_one(safetensors.safe_open))

    def add_small_file(self, name, size_bytes):
        path = self.path(f"{size_bytes}.safetensors")
        words = self.floats.reshape(-1)[:size_bytes // 4].reshape(4, -1)
        pinflow.save_file({f"t{i}": torch.from_numpy(row) for i, row in enumerate(words)}, path)
        self.add(name, size_bytes, lambda: pinflow.load_file(path, device="cuda"),
                 lambda: safetensors.torch.load_file(path, device="cuda"))

    def add_all(self):
        volume = self.counts.reshape(self.counts.shape[0] // 128, 512, 512)
        self.add_npy("npy", self.floats)
        self.add_npy("npy, cast to bfloat16", self.floats, torch.bfloat16)
        self.add_npy("npy, Fortran order", np.asfortranarray(self.floats))
        self.add_npy("npy, Fortran order of 3 axes", np.asfortranarray(self.floats.reshape(256, -1, 256)))
        self.add_npy("npy, big-endian", self.floats.astype(">f4"))
        self.add_hdf5("HDF5, contiguous", [self.floats])
        self.add_hdf5("HDF5, chunks of 64 rows", [self.floats], chunks=(64, 2048))
        self.add_hdf5("HDF5, tiles of 256 x 512", [self.floats], chunks=(256, 512))
        self.add_hdf5("HDF5, volume in cubes of 64", [volume], chunks=(64, 64, 64))
        self.add_hdf5("HDF5, the same, shuffled and deflated", [volume], chunks=(64, 64, 64), shuffle=True,
                      compression="gzip", compression_opts=1)
        self.add_hdf5("HDF5, chosen by h5py, deflated", [volume], compression="gzip", compression_opts=1)
        self.add_hdf5("HDF5, 500 datasets of 16 KiB, deflated", list(self.counts[:1000].reshape(500, 2, 2048)),
                      chunks=(1, 2048), compression="gzip", compression_opts=1)
        self.add_one_by_one("safetensors, 30 tensors of 32 MiB one by one", 30, 32 << 20)
        self.add_one_by_one("safetensors, 200 tensors of 2 MiB one by one", 200, 2 << 20)
        self.add_small_file("safetensors, a file of 2 MiB", 2 << 20)
        self.add_small_file("safetensors, a file of 32 MiB", 32 << 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm", help="where the files are written")
    parser.add_argument("--gb", type=float, default=1.07, help="the size of the large arrays")
    parser.add_argument("--only", default="", help="measure only cases whose name contains one of these words, "
                        "separated by semicolons")
    arguments = parser.parse_args()
    torch.zeros(1).cuda()
    link = link_rate()
    print(f"{torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} cores, {arguments.dir}; LINK {link:.1f} GB/s",
          flush=True)
    size_bytes = max(int(arguments.gb * 1e9) >> 26, 4) << 26
    cases = Cases(arguments.dir, size_bytes)
    cases.add_all()
    for name, (size, ours, theirs) in cases.cases.items():
        if arguments.only and not any(word in name for word in arguments.only.split(";")):
            continue
        assert equal(ours(), theirs()), name
        rate = size / seconds_of(ours) / 1e9
        peer = size / seconds_of(theirs) / 1e9
        print(f"{name:46} {rate:6.2f} GB/s  {rate / link:5.2f} LINK  {rate / peer:6.1f} times {peer:.2f}", flush=True)
    for file in os.listdir(arguments.dir):
        if file.startswith("array_load-"):
            os.unlink(os.path.join(arguments.dir, file))


if __name__ == "__main__":
    main()
