"""A table of embeddings in host memory, which may be larger than the GPU's memory: a step fetches its rows, changes
them, and writes them back. SpeedTorch's getData and insertData, in a line each.

    python embeddings.py [ROWS]
"""

from __future__ import annotations

import sys

import numpy as np

import pinflow

WIDTH, STEPS, BATCH = 64, 200, 256


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    weights = np.zeros((rows, WIDTH), np.float32)
    table = pinflow.RowTable(weights)  # on a GPU, page-locks `weights` in place if it can
    random = np.random.default_rng(1)
    expected = np.zeros(rows, np.float32)
    for _ in range(STEPS):
        ids = random.choice(rows, BATCH, replace=False)
        batch = table.gather(ids)  # on the GPU, a tensor of PyTorch's
        batch += 1
        table.scatter(ids, batch)
        expected[ids] += 1
    if table.device != "host":
        import torch

        torch.cuda.synchronize()  # scatters have been enqueued
    wrong = int((weights != expected[:, None]).sum())
    print(f"on {table.device}: {wrong} of {weights.size} numbers differ")
    if wrong:
        sys.exit(1)


main()
