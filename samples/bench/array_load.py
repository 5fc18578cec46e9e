#!/usr/bin/env python3
"""Loads arrays of many formats, orders and types to the first GPU: pinflow beside h5py, numpy and safetensors.

    python3 samples/bench/array_load.py [--dir DIR] [--only WORDS]

Each case writes one file of 2 MiB to 1 GB to DIR, so that it is in the page cache: .npy files, also in Fortran order and
big-endian; HDF5 files, contiguous, in chunks and compressed; safetensors files, loaded as a whole or one tensor after the
other. pinflow and a peer load it: h5py or numpy and then PyTorch, or safetensors. Their first loads are compared byte by
byte. Then come five timed ones of each, with a pause of 0.2 s before each, and with memory that PyTorch has kept. Prints
median rates in GB/s of the elements before a cast, beside the rate of the link: the median of 9 copies of 256 MiB from
page-locked memory.
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


def equal(loaded, expected):
    """Whether two dictionaries have the same tensors, byte by byte."""
    return loaded.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape and
        torch.equal(tensor.flatten().view(torch.uint8), expected[name].flatten().view(torch.uint8))
        for name, tensor in loaded.items())


class Arrays:
    """The elements of all files."""

    def __init__(self):
        random = np.random.default_rng(7)
        self.floats = random.standard_normal((122880, 2048), dtype=np.float32)
        counts = random.integers(0, 50, (self.floats.shape[0] // 4, 2048))
        self.counts = counts.astype(np.float32)  # can be compressed
        self.volume = self.counts.reshape(-1, 512, 512)

    def rows_of(self, count, size_bytes):
        return self.floats.reshape(-1)[:count * size_bytes // 4].reshape(count, -1)


# Each of these writes a file, and returns two functions that load it: with pinflow, and with a peer.


def npy(path, array, dtype=torch.float32):
    np.save(path, array)
    os.rename(path + ".npy", path)

    def peer():
        loaded = np.load(path)
        native = loaded.astype(loaded.dtype.newbyteorder("="), copy=False)
        return {os.path.basename(path): torch.from_numpy(native).cuda().contiguous().to(dtype)}

    return lambda: pinflow.load_file(path, device="cuda", dtype=dtype), peer


def hdf5(path, arrays, **storage):
    with h5py.File(path, "w") as file:
        for i, array in enumerate(arrays):
            file.create_dataset(f"data{i:04}", data=array, **storage)

    def peer():
        with h5py.File(path) as file:
            return {key: torch.from_numpy(file[key][()]).cuda() for key in file}

    return lambda: pinflow.load_file(path, device="cuda"), peer


def one_by_one(path, rows):
    pinflow.save_file({f"t{i}": torch.from_numpy(row) for i, row in enumerate(rows)}, path)

    def load(opener):
        with opener(path, framework="pt", device="cuda") as file:
            return {key: file.get_tensor(key) for key in file.keys()}

    return lambda: load(pinflow.safe_open), lambda: load(safetensors.safe_open)


def whole_file(path, rows):
    pinflow.save_file({f"t{i}": torch.from_numpy(row) for i, row in enumerate(rows)}, path)
    return lambda: pinflow.load_file(path, device="cuda"), lambda: safetensors.torch.load_file(path, device="cuda")


def cases_of(arrays):
    """For each case its size in bytes, and what writes its file."""
    floats, volume = arrays.floats, arrays.volume
    deflated = {"compression": "gzip", "compression_opts": 1}
    yield "npy", floats.nbytes, lambda path: npy(path, floats)
    yield "npy, cast to bfloat16", floats.nbytes, lambda path: npy(path, floats, torch.bfloat16)
    yield "npy, Fortran order", floats.nbytes, lambda path: npy(path, np.asfortranarray(floats))
    yield ("npy, Fortran order of 3 axes", floats.nbytes,
           lambda path: npy(path, np.asfortranarray(floats.reshape(256, -1, 256))))
    yield "npy, big-endian", floats.nbytes, lambda path: npy(path, floats.astype(">f4"))
    yield "HDF5, contiguous", floats.nbytes, lambda path: hdf5(path, [floats])
    yield "HDF5, chunks of 64 rows", floats.nbytes, lambda path: hdf5(path, [floats], chunks=(64, 2048))
    yield "HDF5, tiles of 256 x 512", floats.nbytes, lambda path: hdf5(path, [floats], chunks=(256, 512))
    yield "HDF5, volume in cubes of 64", volume.nbytes, lambda path: hdf5(path, [volume], chunks=(64, 64, 64))
    yield ("HDF5, the same, shuffled and deflated", volume.nbytes,
           lambda path: hdf5(path, [volume], chunks=(64, 64, 64), shuffle=True, **deflated))
    yield "HDF5, chunks chosen by h5py, deflated", volume.nbytes, lambda path: hdf5(path, [volume], **deflated)
    yield ("HDF5, 500 datasets of 16 KiB, deflated", 500 << 14,
           lambda path: hdf5(path, arrays.counts[:1000].reshape(500, 2, 2048), chunks=(1, 2048), **deflated))
    for count, mebibytes in (30, 32), (200, 2):
        yield (f"safetensors, {count} tensors of {mebibytes} MiB one by one", count * mebibytes << 20,
               lambda path, count=count, size=mebibytes << 20: one_by_one(path, arrays.rows_of(count, size)))
    for mebibytes in 2, 32:
        yield (f"safetensors, 4 tensors, {mebibytes} MiB in all", mebibytes << 20,
               lambda path, size=mebibytes << 18: whole_file(path, arrays.rows_of(4, size)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm", help="where the files are written")
    parser.add_argument("--only", default="", help="measure only cases whose name contains one of these "
                        "texts, separated by semicolons")
    arguments = parser.parse_args()
    torch.zeros(1).cuda()
    link = link_rate()
    print(f"{torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} cores, {arguments.dir}; LINK {link:.1f} GB/s",
          flush=True)
    path = os.path.join(arguments.dir, "array_load")
    for name, size, write in cases_of(Arrays()):
        if arguments.only and not any(word in name for word in arguments.only.split(";")):
            continue
        load, peer = write(path)
        assert equal(load(), peer()), name
        rate = size / seconds_of(load) / 1e9
        peer_rate = size / seconds_of(peer) / 1e9
        print(f"{name:46} {rate:6.2f} GB/s  {rate / link:5.2f} LINK  {rate / peer_rate:6.1f} x {peer_rate:.2f} GB/s",
              flush=True)
        os.unlink(path)


if __name__ == "__main__":
    main()
