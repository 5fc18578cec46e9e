#!/usr/bin/env python3
"""Sequences of tokens out of one long file, as language models train on them: pinflow beside numpy's indexing.

    python3 samples/bench/token_windows.py [--dir DIR] [--gib GIB] [--device cuda|cpu] [--rounds N]

Writes a file of uint16 tokens, so that it is in the page cache. A sequence has 1025 tokens, and one begins every 1024.
Both sides deliver all sequences in new shuffled orders, in batches of 16 and of 256. The peer indexes the same windows
by the row numbers of a batch, copies the result into one of two page-locked tensors, and that to the GPU without
waiting; on the CPU, into one of two arrays. (A loop that copies one sequence after the other takes three times as long,
and with slices of numpy.memmap itself six times.) Each round takes two epochs of each side, in turns, and compares
every 50th batch with the file, which is not timed. Prints medians of the rounds in GB/s of tokens. On a GPU also the
rate of the link: the median of 9 copies of 256 MiB from page-locked memory.
"""

import argparse
import os
import statistics
import time

import numpy as np
import pinflow

LENGTH, STEP = 1025, 1024
EPOCHS = 2


def write_tokens(path, sequences):
    """The first two tokens of each sequence are its number."""
    random = np.random.default_rng(1)
    with open(path, "wb") as file:
        for first in range(0, sequences, 1 << 14):
            part = random.integers(0, 1 << 16, (min(1 << 14, sequences - first), STEP), np.uint16)
            numbers = np.arange(first, first + len(part), dtype=np.uint32)
            part[:, :2] = numbers.view(np.uint16).reshape(-1, 2)
            part.tofile(file)
        np.zeros(1, np.uint16).tofile(file)


def compare(batch, tokens):
    for row in batch:
        begin = int(row[:2].copy().view(np.uint32)[0]) * STEP
        if not np.array_equal(row, tokens[begin:begin + LENGTH]):
            raise SystemExit("a sequence differs from the file")


def rate(batches, tokens, sequences, device):
    """GB/s of all batches; `batches` yields arrays or tensors."""
    import torch
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds, count, start = 0.0, 0, time.perf_counter()
    for number, batch in enumerate(batches):
        count += len(batch)
        if number % 50 == 0:
            synchronize()
            seconds += time.perf_counter() - start
            compare(batch.cpu().numpy().view(np.uint16) if device == "cuda" else batch, tokens)
            start = time.perf_counter()
    synchronize()
    seconds += time.perf_counter() - start
    if count != sequences * EPOCHS:
        raise SystemExit(f"{count} sequences were delivered, not {sequences * EPOCHS}")
    return count * LENGTH * 2 / seconds / 1e9


def of_pinflow(windows, batch, device, seed):
    with pinflow.Loader(windows, batch=batch, epochs=EPOCHS, seed=seed, device=device) as loader:
        for _ in range(EPOCHS):
            for (rows,) in loader:
                yield rows.torch() if device == "cuda" else rows.numpy()


def of_numpy(windows, batch, device, seed):
    import torch
    buffers = [torch.empty((batch, LENGTH), dtype=torch.uint16, pin_memory=device == "cuda") for _ in range(2)]
    done = [torch.cuda.Event() if device == "cuda" else None for _ in range(2)]
    random = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        order = random.permutation(len(windows))
        for number, first in enumerate(range(0, len(order), batch)):
            ids = order[first:first + batch]
            buffer, event = buffers[number % 2][:len(ids)], done[number % 2]
            if event is not None:
                event.synchronize()  # the copy of this buffer
            buffer.numpy()[:] = windows[ids]
            if event is None:
                yield buffer.numpy()
                continue
            copied = buffer.to("cuda", non_blocking=True)
            event.record()
            yield copied


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    path = os.path.join(given.dir, f"token_windows.{os.getpid()}.bin")
    try:
        sequences = int(given.gib * (1 << 30)) // (2 * STEP)
        write_tokens(path, sequences)
        tokens = np.memmap(path, np.uint16, "r")
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), LENGTH)[::STEP]
        if given.device == "cuda":
            from model_load import link_rate
            print(f"LINK {link_rate():.1f} GB/s", flush=True)
        print("| batch | numpy | pinflow | factor |\n|---|---|---|---|", flush=True)
        for batch in (16, 256):
            rates = {of_numpy: [], of_pinflow: []}
            for seed in range(given.rounds):
                for side, measured in rates.items():
                    measured.append(rate(side(windows, batch, given.device, seed), tokens, sequences, given.device))
                    time.sleep(0.6)
            peer, ours = (statistics.median(measured) for measured in rates.values())
            print(f"| {batch} | {peer:.2f} | {ours:.2f} | {ours / peer:.1f} |", flush=True)
    finally:
        if os.path.exists(path):
            os.remove(path)


if __name__ == "__main__":
    main()
