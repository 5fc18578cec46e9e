"""Memory that can be read: a mapping of a truncated file cannot."""

from __future__ import annotations

import builtins
from typing import Sequence

from . import _native
from ._errors import DataChanged


def check_readable(what: str, address: int, shape: Sequence[int], strides: Sequence[int], size: int) -> None:
    """Checks the elements of an array, of `size` bytes each, that are about to be accessed without the fault guard. `what`
    begins the message.

    Raises:
        DataChanged: they are mapped from a file that has been truncated.
    """
    if not _native.is_readable(address, builtins.list(shape), builtins.list(strides), size):
        raise DataChanged(f"{what} cannot be accessed, probably because the file that it is mapped from has been truncated")
