"""Indices by numbers, slices and lists of numbers, which select from a box of an array."""

from __future__ import annotations

import numbers
from typing import Any, List, Optional, Sequence, Tuple


def box_of(key: Any, shape: Sequence[int]) -> Optional[Tuple[List[Tuple[int, int]], Tuple[Any, ...]]]:
    """The ranges (begin, end) along all axes that contain what `key` selects from an array of this shape, and the key
    that selects it within these ranges. None for a key with anything but numbers, slices, lists or arrays of numbers, and
    an Ellipsis: None and masks take no axis, or several.

    Raises:
        IndexError: as for a numpy array.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if not all(each is Ellipsis or isinstance(each, slice) or is_number(each) for each in keys):
        keys = tuple(_numbers_of(each) for each in keys)
        if any(each is None for each in keys):
            return None
    dots = [at for at, each in enumerate(keys) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one Ellipsis at most")
    before, after = (keys[:dots[0]], keys[dots[0] + 1:]) if dots else (keys, ())
    given = len(before) + len(after)
    if given > len(shape):
        raise IndexError(f"{given} indices were given for an array of shape {tuple(shape)}")
    ranges = [(0, length) for length in shape]
    rest: List[Any] = []
    for axis, each in enumerate((*before, *after)):
        if axis >= len(before):
            axis += len(shape) - given  # counted from the end
        part = _range_of(each, shape[axis])
        if part is None:
            return None
        begin, end, within = part
        ranges[axis] = begin, end
        rest.append(within)
    if dots:
        rest.insert(len(before), Ellipsis)  # with it, numpy returns an array without axes, not a scalar
    return ranges, tuple(rest)


def is_number(key: Any) -> bool:
    """Whether `key` is a whole number."""
    return type(key) is int or isinstance(key, numbers.Integral) and not isinstance(key, bool)


def _numbers_of(key: Any) -> Any:
    """A list, range or array of whole numbers as a numpy array; other keys that box_of takes as they are; otherwise None."""
    import numpy

    if key is Ellipsis or isinstance(key, slice) or is_number(key):
        return key
    if not isinstance(key, (list, range, numpy.ndarray)):
        return None
    try:
        given = numpy.asarray(key)
    except ValueError:  # lists of different lengths
        return None
    if given.size == 0 and not isinstance(key, numpy.ndarray):
        given = given.astype(numpy.int64)
    return given if given.dtype.kind in "iu" and given.ndim > 0 else None


def _range_of(key: Any, length: int) -> Optional[Tuple[int, int, Any]]:
    """As box_of, for one axis."""
    if not isinstance(key, slice) and not is_number(key):
        return _range_of_numbers(key, length)
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


def _range_of_numbers(key: Any, length: int) -> Optional[Tuple[int, int, Any]]:
    """As box_of, for one axis and an array of whole numbers. None if one is out of range: numpy raises, or there is nothing
    to select along another axis."""
    import numpy

    if key.size == 0:
        return 0, 0, key
    if int(key.min()) < -length or int(key.max()) >= length:
        return None
    indices = numpy.where(key < 0, key.astype(numpy.int64) + length, key.astype(numpy.int64))
    begin = int(indices.min())
    return begin, int(indices.max()) + 1, indices - begin
