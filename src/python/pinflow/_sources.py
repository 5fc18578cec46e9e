"""Where rows come from: arrays, paths, tensors, Python row sources, and several of them as one array."""

from __future__ import annotations

import os
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any, Iterable, Protocol, Tuple

from . import _native
from ._arrays import Array, open, strided_rows
from ._elements import bytes_of, contiguous, is_array, spelling_of, typed_elements
from ._errors import InvalidArgument, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    AnyArray = NDArray[Any]


# Smaller arrays with strided rows are copied: loaders are faster with contiguous rows.
_MIN_STRIDED_BYTES = 64 << 20


class RowSource(Protocol):
    """Rows that a Python object reads: any object with these three members. It need not be a subclass.

        class Squares:
            dtype = "float32"
            shape = (1000, 3)                                   # 1000 rows of 3 elements

            def read_rows(self, ids, out):
                rows = numpy.frombuffer(out, numpy.float32).reshape(len(ids), 3)
                rows[:] = numpy.asarray(ids)[:, None] ** 2      # write all of `out`: it is not zeroed

    Threads of a loader call `read_rows`, one at a time, for a part of a batch or all of it, and again for the same rows
    in later epochs. Calls run ahead of the consumer, into the next epoch too. To tell whether the data is the same,
    `state_dict` and `load_state_dict` call it for up to 16 rows. An exception that it raises ends the loop over the
    loader, which raises it (RuntimeError for StopIteration). If a call never returns, `Loader.close` does not return
    either, and Python does not end.
    """

    @property
    def dtype(self) -> Any:
        """The type of the elements, little-endian: a numpy.dtype, or what numpy.dtype takes."""

    @property
    def shape(self) -> Tuple[int, ...]:
        """The number of rows, and the shape of one."""

    def read_rows(self, ids: memoryview, out: memoryview) -> None:
        """Writes the rows of `ids` (unsigned 64-bit numbers) to `out` (bytes), one after the other. Both belong to
        this call: what is written to `out` afterwards has no effect."""


def concatenate(arrays: Iterable[Any]) -> Array:
    """One array with the rows of several, in their order. Copies only compressed members of .npz files, which are
    decoded, and the numpy arrays that a Loader copies."""
    parts = parts_of(arrays)
    return Array(_native.concatenate([native_of(each) for each in parts], False), (concatenate, (parts,)), parts)


def stack(arrays: Iterable[Any]) -> Array:
    """One array of which each of `arrays` is one row. Copies what `concatenate` copies."""
    parts = parts_of(arrays)
    return Array(_native.concatenate([native_of(each) for each in parts], True), (stack, (parts,)), parts)


def native_of(source: Any, label: str = "", strided: bool = True) -> _native.Array:
    """A source of rows: an Array, a path, a numpy array or another object with its interface, or a RowSource. Messages
    call it `label`. Unless it may be `strided`, an array whose rows are not contiguous is copied."""
    if isinstance(source, Array):
        return source._array
    if isinstance(source, (str, bytes, os.PathLike)):
        return open(source)._array
    if hasattr(source, "read_rows"):
        return _native_of_rows(source, label)
    if isinstance(source, (list, tuple, dict, set)):
        raise InvalidArgument(f"a source is a path, an array or a RowSource, not a {type(source).__name__}: give "
                              "several as separate arguments, and numbers as a numpy array")
    import numpy

    if not is_array(source) and hasattr(source, "__getitem__"):
        raise InvalidArgument(f"a source is a path, an array or a RowSource (help(pinflow.RowSource)), not "
                              f"{type(source).__name__}, which numpy would read item by item: give the arrays in it as "
                              "sources")
    elements, spelling = typed_elements(source)
    if elements.dtype.hasobject and isinstance(source, numpy.ndarray):
        raise InvalidArgument("an array of Python objects cannot be a source: give it a dtype of numbers or of "
                              "characters")
    if elements.dtype.hasobject or not isinstance(source, numpy.generic) and isinstance(source, Number):
        raise InvalidArgument(f"a source is a path, an array or a RowSource (help(pinflow.RowSource)), not "
                              f"{type(source).__name__}")
    if elements.dtype.names is not None:
        raise InvalidArgument("structured arrays are loaded from files only; give each field as a source")
    shape = list(elements.shape)
    rows = strided_rows(elements) if strided and elements.nbytes >= _MIN_STRIDED_BYTES else None
    if rows is not None:
        return _native.array_of_buffer(rows[0], spelling, shape, rows[1], label)
    copied = contiguous(elements, label or "an array", "give a RowSource that reads its rows" if strided else "")
    return _native.array_of_buffer(bytes_of(copied), spelling, shape, 0, label)


def _native_of_rows(source: Any, label: str) -> _native.Array:
    """The native array of a RowSource."""
    if not callable(source.read_rows):
        raise InvalidArgument(f"read_rows of a source of rows is a method, not {shown(source.read_rows)}")
    shape = source.shape
    if not isinstance(shape, tuple):
        raise InvalidArgument(f"the shape of a source of rows is a tuple, the row count first, not {shown(shape)}")
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, Integral) or not 0 <= int(length) < 1 << 63:
            raise InvalidArgument(f"the lengths in the shape of a source of rows are whole numbers from 0 to 2**63 - 1, "
                                  f"not {shown(length)}")
    try:
        spelling = spelling_of(source.dtype)
    except (TypeError, ValueError):
        raise InvalidArgument("the dtype of a source of rows is what numpy.dtype takes, or a name such as 'bfloat16', not "
                              f"{shown(source.dtype)}") from None
    return _native.array_of_source(source, spelling, [int(each) for each in shape], label)


def parts_of(arrays: Any) -> Tuple[Any, ...]:
    """The arrays to be joined; those given by paths are opened.

    Raises:
        InvalidArgument: it is a single path, or cannot be iterated.
    """
    try:
        parts = None if isinstance(arrays, (str, bytes, os.PathLike)) else iter(arrays)
    except TypeError:  # such as an array without axes
        parts = None
    if parts is None:
        raise InvalidArgument(f"arrays are given as a list, not as {type(arrays).__name__}")
    return tuple(open(each) if isinstance(each, (str, bytes, os.PathLike)) else each for each in parts)
