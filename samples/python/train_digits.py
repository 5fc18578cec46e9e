"""Trains a softmax classifier on the handwritten digits of samples/data, with numpy or, on a GPU, with PyTorch. Fails
if it recognises fewer than 94 % of the held-out digits.

    python train_digits.py [FOLDER]        the folder with the four .npy files, samples/data by default
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
from numpy.typing import NDArray

import pinflow

RATE, EPOCHS, REQUIRED = 0.5, 50, 94.0


def files(folder: Path, part: str) -> Dict[str, str]:
    return {kind: str(folder / f"digits_{part}_{kind}.npy") for kind in ("images", "labels")}


def with_bias(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.column_stack([images / np.float32(16), np.ones(len(images), np.float32)]).astype(np.float32)


def train_on_host(folder: Path) -> float:
    weights = np.zeros((65, 10), np.float32)
    with pinflow.Loader(*files(folder, "train").values(), batch=32, seed=1, device="host") as loader:
        for _ in range(EPOCHS):
            for images, labels in loader:
                pixels = with_bias(images.numpy())
                scores = pixels @ weights
                chances = np.exp(scores - scores.max(axis=1, keepdims=True))
                chances /= chances.sum(axis=1, keepdims=True)
                chances[np.arange(len(labels)), labels.numpy()] -= 1
                weights -= RATE / len(labels) * (pixels.T @ chances)
        print(loader.report())
    test = files(folder, "test")
    predicted = (with_bias(np.asarray(pinflow.open(test["images"]))) @ weights).argmax(axis=1)
    return float((predicted == np.asarray(pinflow.open(test["labels"]))).mean() * 100)


def train_on_gpu(folder: Path, torch: Any) -> float:
    model = torch.nn.Linear(64, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with pinflow.Loader(*files(folder, "train").values(), batch=32, seed=1) as loader:
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimizer.zero_grad()
                scores = model(images.torch() / 16)
                torch.nn.functional.cross_entropy(scores, labels.torch().long()).backward()
                optimizer.step()
        print(loader.report())
    correct = 0
    for images, labels in pinflow.Loader(*files(folder, "test").values(), order="sequential"):
        correct += int((model(images.torch() / 16).argmax(1) == labels.torch().long()).sum())
    return 100 * correct / len(pinflow.open(files(folder, "test")["labels"]))


def import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        print("PyTorch is not installed, so the digits train on the host")
        return None


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "samples/data")
    torch = None if pinflow.no_cuda_reason() else import_torch()
    percent = train_on_gpu(folder, torch) if torch else train_on_host(folder)
    print(f"test accuracy: {percent:.1f} %")
    if percent < REQUIRED:
        sys.exit(f"expected a test accuracy of at least {REQUIRED:.0f} %")


main()
