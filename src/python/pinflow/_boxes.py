"""Indices by numbers and slices, which select from a box of an array."""

from __future__ import annotations

import numbers
from typing import Any, List, Optional, Sequence, Tuple


def box_of(key: Any, shape: Sequence[int]) -> Optional[Tuple[List[Tuple[int, int]], Tuple[Any, ...]]]:
    """The ranges (begin, end) along all axes that contain what `key` selects from an array of this shape, and the key
    that selects it within these ranges. None for a key with more than numbers, slices and an Ellipsis, such as None, a
    list or a mask: these take no axis, or several.

    Raises:
        IndexError: as for a numpy array.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if not all(each is Ellipsis or isinstance(each, slice) or is_number(each) for each in keys):
        return None
    dots = [at for at, each in enumerate(keys) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one Ellipsis at most")
    before, after = (keys[:dots[0]], keys[dots[0] + 1:]) if dots else (keys, ())
    given = len(before) + len(after)
    if given > len(shape):
        raise IndexError(f"{given} indices were given for an array of shape {tuple(shape)}")
    ranges: List[Tuple[int, int]] = []
    rest: List[Any] = []
    for each, length in zip((*before, *(slice(None),) * (len(shape) - given), *after), shape):
        begin, end, within = _range_of(each, length)
        ranges.append((begin, end))
        rest.append(within)
    if dots:
        rest.append(Ellipsis)  # with it, numpy returns an array without axes, not a scalar
    else:
        del rest[given:]
    return ranges, tuple(rest)


def is_number(key: Any) -> bool:
    """Whether `key` is a whole number."""
    return type(key) is int or isinstance(key, numbers.Integral) and not isinstance(key, bool)


def _range_of(key: Any, length: int) -> Tuple[int, int, Any]:
    """As box_of, for one axis."""
    if isinstance(key, slice):
        chosen = range(*key.indices(length))
        if not chosen:
            return 0, 0, slice(None)
        step = None if chosen.step == 1 or len(chosen) == 1 else chosen.step
        return min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1, slice(None, None, step)
    index = int(key) + length if key < 0 else int(key)
    if not 0 <= index < length:
        raise IndexError(f"index {key} is out of range for an axis of length {length}")
    return index, index + 1, 0
