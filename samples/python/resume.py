"""Stops in the middle of an epoch, and resumes with another batch size and two ranks: every sample is delivered once.

    python resume.py [FILE]        an array with rows, samples/data/digits_train_images.npy by default
"""

from __future__ import annotations

import json
import sys
from typing import List

import pinflow


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "samples/data/digits_train_images.npy"
    delivered: List[int] = []

    loader = pinflow.Loader(path, batch=32, seed=7, device="host")
    for number, batch in enumerate(loader.batches()):
        delivered.extend(batch.row_ids.tolist())
        if number == 20:
            break
    text = json.dumps(loader.state_dict())  # a training run writes it to a file, with the model and the optimizer
    loader.close()

    for rank in range(2):  # a training run has one process for each rank
        resumed = pinflow.Loader(path, batch=50, seed=7, device="host", rank=rank, world=2)
        resumed.load_state_dict(json.loads(text))
        for batch in resumed.batches():
            delivered.extend(batch.row_ids.tolist())

    rows = len(pinflow.open(path))
    once = sorted(delivered) == list(range(rows))
    print(f"{len(delivered)} of {rows} rows were delivered, {'each once' if once else 'not each once'}")
    if not once:
        sys.exit(1)


main()
