"""Arrays in files, and how they are opened and saved."""

from __future__ import annotations

import builtins
import math
import operator
import os
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from . import _native
from ._boxes import box_of
from ._elements import bytes_of, contiguous, is_array, numpy_type, row_numbers, typed_elements
from ._errors import InvalidArgument, shown
from ._readable import check_readable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    AnyArray = NDArray[Any]

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class Interface:
    """An object with `__array_interface__`, of which numpy makes an array without a copy. Keeps `owner` alive."""

    def __init__(self, interface: Dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


class Array:
    """An array in a file or in memory. `numpy.asarray(array)` is a read-only view of it, without a copy if the array is
    mapped. Elements of other arrays are decoded or read when they are first asked for.

    Made by `pinflow.open`, `pinflow.concatenate` and `pinflow.stack`. May be used from several threads. When it is
    pickled, for a process that is spawned, its files are opened again there.
    """

    __slots__ = ("_array", "_parts", "_made_by", "__weakref__")

    def __init__(self, array: _native.Array, made_by: Tuple[Callable[..., Array], Tuple[Any, ...]],
                 parts: Tuple[Any, ...] = ()) -> None:
        self._array = array
        self._made_by = made_by
        self._parts = parts  # kept where the garbage collector sees them

    def __reduce__(self) -> Tuple[Callable[..., Array], Tuple[Any, ...]]:
        return self._made_by

    @property
    def shape(self) -> Tuple[int, ...]:
        """The lengths of the axes, in elements."""
        return self._array.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements. bfloat16 and 8-bit floats are those of ml_dtypes if that can be imported, otherwise
        opaque bytes."""
        return numpy_type(self._array.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._array.nbytes

    @property
    def mapped(self) -> bool:
        """Whether the elements are mapped from a file. `numpy.asarray(array)` and slices are then views, not copies."""
        return self._array.mapped

    @property
    def reason(self) -> str:
        """One sentence: why the array is mapped, or where its elements are instead."""
        return self._array.reason

    @property
    def label(self) -> str:
        """What messages call the array: its path, or 'FILE:NAME'."""
        return self._array.label

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<pinflow.Array {self.label!r} {self._array.dtype} {self.shape}{', mapped' if self.mapped else ''}>"

    def _numpy(self) -> AnyArray:
        import numpy

        view = numpy.asarray(Interface(self._array.interface(), self))
        return view.view(self.dtype) if view.dtype.kind == "V" else view

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> AnyArray:
        """A read-only view for numpy. With another `dtype`, or with `copy=True`, a copy that can be written."""
        view = self._numpy()
        if dtype is not None and view.dtype != dtype:
            if copy is False:
                raise ValueError(f"elements of {view.dtype} cannot be of {dtype} without a copy")
            return view.astype(dtype)
        return view.copy() if copy else view

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        """A DLPack capsule of the elements in host memory. Read-only if the array is mapped."""
        return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        """Elements by numpy's rules: a view if the array is mapped or was opened in memory. Otherwise, a number, a slice
        or row numbers as the first index read or decode only those rows at each access, also after `numpy.asarray` has
        decoded everything. Of a chunked HDF5 dataset, numbers and slices along other axes also restrict what is
        decoded: the chunks with elements of the box around the selection, or whole rows if these have fewer bytes. But
        the first access to a compressed .npz member decodes all of it."""
        if self._array.in_memory or not self.shape:
            return self._numpy()[key]
        if self._array.has_boxes:
            part = self._part(key)
            if part is not None:
                return part
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        numbers = _chosen_rows(first, len(self))
        if numbers is None or not self._array.has_rows:
            return self._numpy()[key]
        if numbers.ndim == 0:
            return self.rows(numbers.reshape(1))[(0, *rest)]
        rows = self.rows(numbers.reshape(-1))
        if isinstance(first, slice):
            return rows[(slice(None), *rest)]
        if numbers.ndim == 1 and not rest:
            return rows
        import numpy

        return rows[(numpy.arange(numbers.size).reshape(numbers.shape), *rest)]

    def _part(self, key: Any) -> Optional[AnyArray]:
        """The elements of a key that restricts other axes than the first; None if they must be selected from rows, or
        from all elements."""
        import numpy

        selected = box_of(key, self.shape)
        if selected is None or all(range_ == (0, length) for range_, length in zip(selected[0][1:], self.shape[1:])):
            return None
        ranges, rest = selected
        lengths = [end - begin for begin, end in ranges]
        first = rest[0]
        chosen_rows = lengths[0]
        if isinstance(first, slice):
            chosen_rows = -(-lengths[0] // abs(first.step or 1))
        elif isinstance(first, numpy.ndarray):
            chosen_rows = first.size
        if math.prod(lengths) > chosen_rows * math.prod(self.shape[1:]):
            return None  # rows far apart: they have fewer bytes than the box
        out = numpy.empty(lengths, dtype=self.dtype.newbyteorder("<"))  # as they are read
        if not self._array.read_box([begin for begin, _ in ranges], lengths, bytes_of(out)):
            return None
        chosen: AnyArray = out.astype(self.dtype, copy=False)[rest]
        return chosen

    def sliding_windows(self, length: int, step: int = 1) -> Array:
        """Sliding windows along the first axis, of the shape (windows, length, *shape[1:]): window i has the rows i * step
        to i * step + length - 1. Rows after the last whole window are left out. A view: a loader reads windows where the
        array lies, also if they overlap. An array in one file that is not mapped is decoded or read into memory first. Of
        several files, make the windows of each, and concatenate them.

            tokens = pinflow.open("tokens.npy")                              # shape (N,)
            loader = pinflow.Loader(tokens.sliding_windows(1025, 1024), batch=8)
            for (rows,) in loader:
                inputs, targets = rows.torch()[:, :-1], rows.torch()[:, 1:]

        Raises:
            InvalidArgument: the length or the step is not a whole number above 0, the array has no axes, or the windows,
            with all elements that repeat, take 2**63 bytes or more. Unsupported: the array was made by `concatenate` or
            `stack`, or of a pattern or a RowSource.
        """
        for what, number in (("length", length), ("step", step)):
            if isinstance(number, bool) or not isinstance(number, Integral) or not 0 < int(number) < 1 << 63:
                raise InvalidArgument(f"the {what} of sliding windows is a whole number above 0, not {shown(number)}")
        windows = self._array.sliding_windows(int(length), int(step))
        return Array(windows, (Array.sliding_windows, (self, int(length), int(step))), self._parts)

    def rows(self, ids: Union[Sequence[int], AnyArray]) -> AnyArray:
        """The rows of these numbers, from 0 on, read or copied to a new array, in this order."""
        import numpy

        numbers = row_numbers(ids, len(self))
        out = numpy.empty((len(numbers), *self.shape[1:]), dtype=self.dtype.newbyteorder("<"))  # as they are read
        self._array.read_rows(numbers, bytes_of(out))
        return out.astype(self.dtype, copy=False)


def _chosen_rows(index: Any, count: int) -> Any:
    """The numbers of the rows that an index for the first axis chooses, as an array of the index's shape; None if it is
    an index of another kind, such as a field, a new axis or a mask of several axes.

    Raises:
        IndexError: a row is out of range, or a mask has another length; numpy's.
    """
    import numpy

    if isinstance(index, slice):
        return numpy.arange(*index.indices(count))
    if isinstance(index, (bool, numpy.bool_)):
        return None
    if not isinstance(index, (builtins.list, numpy.ndarray)):
        try:
            index = numpy.array(operator.index(index))
        except (TypeError, ValueError, RuntimeError):
            if not hasattr(index, "__array__") and not isinstance(index, range):
                return None
    chosen = numpy.asarray(index)
    if chosen.size == 0 and isinstance(index, (builtins.list, range)):
        chosen = chosen.astype(numpy.int64)
    if chosen.dtype.kind not in "iub" or (chosen.dtype.kind == "b" and chosen.ndim != 1):
        return None
    numpy.broadcast_to(numpy.int8(0), (count,))[chosen]  # raises if a row is out of range
    if chosen.dtype.kind == "b":
        return numpy.flatnonzero(chosen)
    numbers = chosen.astype(numpy.int64)
    return numpy.where(numbers < 0, numbers + count, numbers)


def is_encodable(text: str) -> bool:
    """Whether os.fsencode takes this text. It refuses lone surrogates, except those that stand for bytes."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def path_text(path: PathLike) -> str:
    """A path as a str."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidArgument(f"a file is given by its path, not by {type(path).__name__}")
    text = os.fsdecode(path)
    if "\0" in text:
        raise InvalidArgument(f"a path has no NUL character, and {ascii(text)} has one")
    if not is_encodable(text):
        raise InvalidArgument(f"{ascii(text)} cannot be encoded, so no path has this name")
    return text


def open(path: PathLike, name: Optional[str] = None, *, stack: bool = False) -> Array:
    """Opens an array of a .npy, .npz, HDF5 or safetensors file.

    Args:
        path: the file, 'FILE:NAME', or a pattern such as 'data/part-*.npy', whose files' rows follow each other in the
            order of their paths (numbers by value).
        name: the array in the file; needed if it has several.
        stack: each file of a pattern is one row.

    Raises:
        NotFound: there is no such file. FormatError: the file is damaged. InvalidArgument: nothing matches the pattern,
        the file has no array of that name, or it has several and no name is given. Unsupported: it cannot be read here.
    """
    text = path_text(path)
    made_by = _open_again, (_absolute(text), name, stack)
    if stack and not _native.is_pattern(text):
        raise InvalidArgument(f"`stack` makes each file of a pattern one row, and {ascii(text)} is not a pattern")
    if name is not None and not (isinstance(name, str) and is_encodable(name)):
        raise InvalidArgument(f"the name of an array is a str in valid Unicode, not {shown(name)}")
    if name is None:
        return Array(_native.open_array(text, stack), made_by)
    if _native.is_pattern(text):
        return Array(_native.open_array(f"{text}:{name}", stack), made_by)
    return Array(_native.open_named(text, name), made_by)


def strided_rows(elements: AnyArray) -> Optional[Tuple[AnyArray, int]]:
    """The bytes from the start of the first row to the end of the last, and those from the start of a row to the start of
    the next. None if all elements are contiguous, if those of a row are not, or if rows do not ascend."""
    import numpy

    if elements.flags.c_contiguous or not elements[:1].flags.c_contiguous or elements.strides[0] <= 0:
        return None
    size = (len(elements) - 1) * elements.strides[0] + elements[:1].nbytes
    memory = {"data": (elements.ctypes.data, True), "shape": (size,), "typestr": "|u1", "version": 3}
    return numpy.asarray(Interface(memory, elements)), elements.strides[0]


def working_folder() -> str:
    """The working directory, or "" if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _absolute(text: str) -> str:
    """The path or pattern, for a process with another working directory."""
    folder = working_folder()
    if _native.is_pattern(text):
        folder = "".join(f"[{each}]" if each in "*?[" else each for each in folder)
    return os.path.join(folder, text)


def _open_again(path: str, name: Optional[str], stack: bool) -> Array:
    return open(path, name, stack=stack)


def list(path: PathLike) -> List[Dict[str, Any]]:  # named after what it does, as in the tool
    """Describes the arrays of a file from its metadata alone: name, dtype (None if it cannot be opened), shape, nbytes,
    mappable, and the reason."""
    return _native.list_arrays(path_text(path))


# Views with shorter rows are copied before they are saved. With 16 bytes both take as long.
_MIN_SAVED_ROW_BYTES = 16


def save(path: PathLike, array: Any) -> None:
    """Writes an array to a .npy file, which appears under its name complete or not at all, and is durable then. A file
    or symbolic link of that name is replaced. The array is one of numpy, a dense tensor of PyTorch on the CPU, or a list
    of numbers. The format has no bfloat16 and no float8: they are saved as opaque bytes (`|V2`, `|V1`), and
    `save_file` keeps their type.

    Raises:
        InvalidArgument: an array that cannot be saved, or a name with another ending. DataChanged: the array is mapped from
        a file that was truncated. SystemFailure: the file cannot be written, or memory is short.
    """
    text = path_text(path)
    if not text.endswith(".npy"):
        raise InvalidArgument(f"save writes .npy files, and the name {ascii(text)} has another ending")
    if not is_array(array) and not isinstance(array, (builtins.list, tuple, range, Number)):
        raise InvalidArgument(f"save takes a numpy array or a CPU tensor, not {type(array).__name__}: give the arrays "
                              "in it")
    elements, spelling = typed_elements(array)
    if elements.dtype.hasobject:
        raise InvalidArgument("arrays of Python objects cannot be saved")
    if elements.dtype.names is not None:
        raise InvalidArgument("structured arrays cannot be saved yet; save each field")
    check_readable("the array", elements.ctypes.data, elements.shape, elements.strides, elements.itemsize)
    shape = builtins.list(elements.shape)
    strided = strided_rows(elements)
    if strided is not None and elements[:1].nbytes >= _MIN_SAVED_ROW_BYTES:
        return _native.save_npy(text, strided[0], spelling, shape, strided[1])
    _native.save_npy(text, bytes_of(contiguous(elements, "an array")), spelling, shape, 0)
