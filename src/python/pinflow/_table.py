"""Rows by index, out of tables larger than the GPU, and back."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Optional, Tuple

from . import _native
from ._arrays import Array
from ._devices import device_name
from ._elements import BEYOND_NUMPY, bytes_of, elements_of, numpy_type, spelling_of, typed_elements, whole_numbers
from ._errors import InvalidArgument, Unsupported
from ._sources import native_of
from ._streams import consumer_stream
from ._tensor_types import note_changes

if TYPE_CHECKING:
    import numpy as np


class RowTable:
    """The rows of an array in host memory, page-locked where it lies, for reading and writing by index.

        table = pinflow.RowTable(weights)          # a numpy array or a CPU tensor of PyTorch
        rows = table.gather(ids)                   # on the GPU
        table.scatter(ids, rows)                   # back

    Autograd notices what is written to tensors of PyTorch: `scatter` to the table's, `gather` to `out`.

    Args:
        array: a writable numpy array or CPU tensor, which is written in place; or an Array, a path, or a read-only
            array, out of which rows are only gathered. It must be mapped in one piece or in memory, in C order: not a
            chunked HDF5 dataset, not several files, not a field or sliding windows. A compressed .npz member is decoded
            into memory. The array is kept; a read-only numpy array with gaps, overlaps or another order is copied. An
            array of less than 32 MiB that ends within a page is page-locked only if no other array can begin in its last
            page; otherwise its rows pass through buffers, and `reason` says why.
        device: 'auto' (the first GPU, otherwise the host), 'host' or 'cpu', 'cuda', 'cuda:N', the number of a GPU, or a
            torch.device.

    On a GPU, a call takes up to 131,072 rows. Calls may come from several threads, but not from a process that was
    forked after the table was made.
    """

    def __init__(self, array: Any, *, device: Any = "auto") -> None:
        writable = None
        #: the PyTorch tensor whose memory the table uses, or None
        self._tensor = array if _is_torch(array) else None
        if not isinstance(array, (Array, str, bytes, os.PathLike)):
            if not any(hasattr(array, name) for name in ("__array_interface__", "__array__", "__dlpack__")):
                raise InvalidArgument("a table is made of an array, a CPU tensor or a path, not of "
                                      f"{type(array).__name__}: it works in the memory of its array")
            elements, spelling = typed_elements(array)
            if elements.dtype.kind in "biufc" and not elements.dtype.isnative:
                raise InvalidArgument(f"rows of {elements.dtype} have another byte order than this machine: convert "
                                      f"them with astype('{elements.dtype.newbyteorder('=').str}')")
            if spelling not in BEYOND_NUMPY and not _are_numbers(elements.dtype):
                raise InvalidArgument(f"rows of {elements.dtype} cannot be exchanged with other libraries: view them "
                                      "as numbers of 1, 2, 4 or 8 bytes, such as view('u1')")
            if elements.flags.writeable:
                if any(getattr(array, name, bool)() for name in ("is_conj", "is_neg")):  # `elements` is a copy
                    raise InvalidArgument("a table cannot be a tensor that is conjugated or negated lazily: give "
                                          "resolve_conj() or resolve_neg() of it")
                if not elements.flags.c_contiguous:
                    raise InvalidArgument("a table that is written has contiguous rows, in C order, without gaps between them; "
                                          f"this array of shape {elements.shape} has strides {elements.strides}")
                writable = bytes_of(elements)
            if spelling not in BEYOND_NUMPY:
                array = elements
        self._writable = writable is not None
        self._table = _native.RowTable(native_of(array, "the table's array", strided=False), writable, device_name(device))
        self._gpu = self._table.gpu
        kind = numpy_type(self._table.dtype)
        if self._table.dtype not in BEYOND_NUMPY and not _are_numbers(kind):
            raise InvalidArgument(f"rows of {kind} cannot be exchanged with other libraries: a table has rows of numbers")

    @property
    def device(self) -> str:
        """'host' or 'cuda:N': where rows are gathered to."""
        return self._table.device

    @property
    def shape(self) -> Tuple[int, ...]:
        """The number of rows, and the shape of one."""
        return (self._table.row_count, *self._table.row_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements, as Array.dtype."""
        return numpy_type(self._table.dtype)

    def __len__(self) -> int:
        return self._table.row_count

    def __repr__(self) -> str:
        return f"<pinflow.RowTable {self._table.dtype} {self.shape}, rows on {self.device}>"

    def gather(self, ids: Any, out: Any = None, stream: Any = None) -> Any:
        """Copies the rows of `ids` to `out`, in this order, and returns it.

        Args:
            ids: whole numbers on one axis: a numpy array, a list, or a tensor on the host or on the table's device. A
                tensor on a GPU has int64 or uint64 elements.
            out: a contiguous tensor or array on the table's device, of shape (len(ids), ...). None: a new one, of
                PyTorch on a GPU and for types that numpy lacks, otherwise of numpy.
            stream: the stream on which the rows are used: a handle or an object. None: PyTorch's current one if PyTorch
                is loaded, otherwise the legacy default stream. On a GPU, the call only enqueues.

        Raises:
            InvalidArgument: a row number is negative, or not below the number of rows. Numbers in device memory are
                checked on the device: `check` raises then.
            Unsupported: `out` cannot be exchanged by DLPack, such as numbers of another byte order.
        """
        handle, _ = consumer_stream(stream, self._gpu)
        ids = _numbers(ids)
        if out is None:
            out = self._new(len(ids))
        else:
            _note_change(out)
        self._table.gather(_capsule(ids, handle), _capsule(out, handle), handle)
        return out

    def scatter(self, ids: Any, rows: Any, *, duplicates: str = "last", stream: Any = None) -> None:
        """Copies `rows` to the rows of `ids` in the table. On a GPU the call only enqueues: the table holds the rows
        once the stream has passed the call.

        Args:
            ids, stream: as in `gather`.
            rows: a contiguous tensor or array on the table's device, of the table's dtype and of shape
                (len(ids), ...); on the host also a list.
            duplicates: what happens to a row number that comes twice: 'last', 'sum' (the table's row is replaced by
                the sum of these rows) or 'error'.

        Raises:
            InvalidArgument: as `gather`; other dtypes or shapes; equal numbers with 'error'.
            Unsupported: the table is read-only, or `rows` cannot be exchanged by DLPack.
        """
        handle, _ = consumer_stream(stream, self._gpu)
        if not self._writable:
            raise Unsupported("the table is read-only: it was made of a file or of a read-only array")
        if self.device == "host":
            import numpy

            if isinstance(rows, numpy.ma.MaskedArray):
                rows = elements_of(rows)  # raises
            if self._table.dtype in BEYOND_NUMPY:
                rows = _torch_rows(rows, self._table.dtype)
            if not hasattr(rows, "__dlpack__"):
                given = numpy.asarray(rows).dtype
                takes = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}.get(numpy.dtype(self.dtype).kind)
                if given.kind not in takes if takes else not numpy.can_cast(given, self.dtype, "same_kind"):
                    raise InvalidArgument(f"rows of {given} cannot become rows of the table, whose type is {self.dtype}")
                try:
                    rows = numpy.ascontiguousarray(rows, dtype=self.dtype)
                except OverflowError as failure:
                    raise InvalidArgument(f"rows cannot become rows of the table: {failure}") from None
            if isinstance(rows, numpy.ndarray):
                rows = _writable(rows)
        _note_change(self._tensor)
        self._table.scatter(_capsule(_numbers(ids), handle), _capsule(rows, handle), duplicates, handle)

    def check(self) -> None:
        """Raises the error of the oldest asynchronous call that has finished with one, such as InvalidArgument or
        DataChanged. Raises each error once, and does not wait for calls."""
        self._table.check()

    def tune(self, batch_rows: int) -> None:
        """Measures the routes of calls of `batch_rows` rows. Later calls of this size take the fastest. Takes about a
        second on a GPU; on the host there is no choice."""
        self._table.tune(batch_rows)

    def reason(self, batch_rows: int) -> str:
        """One sentence: which route gathers of `batch_rows` rows take, and why."""
        return self._table.reason(batch_rows)

    def _new(self, count: int) -> Any:
        shape = (count, *self._table.row_shape)
        import numpy

        spelling = self._table.dtype
        if self.device == "host" and spelling not in BEYOND_NUMPY:
            return numpy.empty(shape, self.dtype)
        import torch

        dtype = (getattr(torch, spelling) if spelling in BEYOND_NUMPY else
                 torch.from_numpy(numpy.empty(0, self.dtype)).dtype)
        return torch.empty(shape, dtype=dtype, device="cpu" if self.device == "host" else self.device)


def _torch_rows(rows: Any, spelling: str) -> Any:
    """Rows of a type that numpy lacks, as a tensor of PyTorch: those of a list are converted, and those of an array of
    ml_dtypes, which numpy does not exchange by DLPack, are viewed."""
    import numpy

    is_array = isinstance(rows, numpy.ndarray)
    if hasattr(rows, "__dlpack__") and not (is_array and rows.dtype.name in BEYOND_NUMPY):
        return rows
    import torch

    if not is_array:
        return torch.as_tensor(rows, dtype=getattr(torch, spelling))
    spelling = spelling_of(rows.dtype)  # raises for another byte order
    same_size = numpy.uint8 if rows.itemsize == 1 else numpy.int16
    numbers = _writable(numpy.ascontiguousarray(rows).view(same_size))
    return torch.from_numpy(numbers).view(getattr(torch, spelling))


def _are_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether elements of this type can be exchanged with other libraries."""
    return dtype.kind in "biufc" and dtype.itemsize <= 16


def _numbers(ids: Any) -> Any:
    """Row numbers as a tensor of 64-bit numbers. Those on a GPU are taken as they are."""
    if hasattr(ids, "__dlpack__") and ids.__dlpack_device__()[0] == _CUDA:
        return ids
    import numpy

    given = whole_numbers(ids)
    return _writable(numpy.ascontiguousarray(given, dtype=numpy.int64))


def _writable(array: Any) -> Any:
    """The array, or a copy if it is read-only: before 2.1, numpy exports no read-only arrays."""
    return array if array.flags.writeable else array.copy()


_CUDA = 2  # DLPack's number


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _note_change(tensor: Any) -> None:
    """Tells autograd of a change, if it is a tensor of PyTorch."""
    if _is_torch(tensor):
        note_changes(sys.modules["torch"], [tensor])


def _capsule(tensor: Any, stream: Optional[int]) -> Any:
    """A capsule of a tensor whose data is ready for `stream`.

    Raises:
        Unsupported: its library does not export it.
    """
    if not hasattr(tensor, "__dlpack__"):
        raise InvalidArgument(f"rows are a tensor or an array on the table's device, not {type(tensor).__name__}")
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    arguments = {"stream": stream} if tensor.__dlpack_device__()[0] == _CUDA else {}
    try:
        try:
            return tensor.__dlpack__(max_version=(1, 1), **arguments)
        except TypeError:  # older producers know no versions
            return tensor.__dlpack__(**arguments)
    except BufferError as failure:
        raise Unsupported(f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'unknown type')} cannot be exchanged: "
                          f"{failure}") from None
