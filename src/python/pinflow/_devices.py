"""Devices by name."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import InvalidArgument


def device_name(device: Any, *, takes_auto: bool = True) -> str:
    """How the library calls a device: 'auto', 'host' or 'cuda:N'. 'cuda' is PyTorch's current GPU if PyTorch has
    initialized CUDA, otherwise the first one.

    Raises:
        InvalidArgument: it is none on which tensors can be.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    text = str(device)
    if text in ("cpu", "host", "cpu:0"):
        return "host"
    if text == "cuda":
        torch: Any = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device()}" if torch is not None and torch.cuda.is_initialized() else "cuda:0"
    number = text[len("cuda:"):]
    if not (text == "auto" and takes_auto) and not (text.startswith("cuda:") and number.isdecimal() and number.isascii()):
        raise InvalidArgument(f"a device is {'auto, ' if takes_auto else ''}host or cpu, cuda, cuda:N, the number of a GPU "
                              f"or a torch.device, not {text!r}")
    return text
