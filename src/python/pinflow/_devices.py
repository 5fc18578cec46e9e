"""Devices by name."""

from __future__ import annotations

import sys
from numbers import Integral
from typing import Any

from ._errors import InvalidArgument, shown


def load_device_name(device: Any) -> str:
    """As device_name, for tensors that are loaded: None is the CPU, and there is no 'auto'."""
    return device_name("cpu" if device is None else device, takes_auto=False)


def device_name(device: Any, *, takes_auto: bool = True) -> str:
    """Returns pinflow's name of a device: 'auto', 'host' or 'cuda:N'. 'cuda' is PyTorch's current GPU if PyTorch has
    initialized CUDA, otherwise the first one.

    Raises:
        InvalidArgument: the name is unknown, or 'auto' without `takes_auto`.
    """
    is_number = isinstance(device, Integral) and not isinstance(device, bool)
    text = f"cuda:{device}" if is_number else str(device)
    if text in ("cpu", "host", "cpu:0"):
        return "host"
    if text == "cuda":
        torch: Any = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device()}" if torch is not None and torch.cuda.is_initialized() else "cuda:0"
    number = text[len("cuda:"):]
    if text == "auto" and takes_auto:
        return text
    if not text.startswith("cuda:") or not number.isdecimal() or not number.isascii() or len(number) > 9:
        auto = "'auto', " if takes_auto else ""
        raise InvalidArgument(f"a device is {auto}'host' or 'cpu', 'cuda', 'cuda:N', the number of a GPU or a torch.device, "
                              f"not {shown(device if is_number else text)}")
    return f"cuda:{int(number)}"
