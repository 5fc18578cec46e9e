"""Rows by index, out of tables larger than the GPU, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from . import _native
from ._arrays import Array, _bytes_of, native_of
from ._errors import InvalidArgument
from ._streams import consumer_stream

if TYPE_CHECKING:
    pass


class RowTable:
    """The rows of an array in host memory, page-locked where it lies, for reading and writing by index.

        table = pinflow.RowTable(weights)          # a numpy array or a CPU tensor of PyTorch
        rows = table.gather(ids)                   # on the GPU
        table.scatter(ids, rows)                   # back

    Args:
        array: a writable numpy array or CPU tensor, which is written in place; or an Array, a path, or a read-only
            array, out of which rows are only gathered. It is kept.
        device: 'auto' (the first GPU, otherwise the host), 'host', 'cuda', 'cuda:N'.

    Calls may come from several threads.
    """

    def __init__(self, array: Any, *, device: str = "auto") -> None:
        writable = None
        if not isinstance(array, Array) and not isinstance(array, str) and not hasattr(array, "__fspath__"):
            import numpy

            elements = numpy.asarray(array)
            if elements.flags.writeable:
                if not elements.flags.c_contiguous:
                    raise InvalidArgument("the rows of a table are contiguous, and this array's are not")
                writable = _bytes_of(elements)
            array = elements
        self._table = _native.RowTable(native_of(array), writable, device)

    @property
    def device(self) -> str:
        """'host' or 'cuda:N': where rows are gathered to."""
        return self._table.device

    def __len__(self) -> int:
        return self._table.row_count

    def gather(self, ids: Any, out: Any = None, stream: Any = None) -> Any:
        """Copies the rows of `ids` to `out`, in this order, and returns it.

        Args:
            ids: one axis of int64 or uint64: a numpy array, a list, or a tensor on the host or on the table's device.
            out: a contiguous tensor or array on the table's device, of shape (len(ids), ...). None: a new one, of
                PyTorch on a GPU, of numpy on the host.
            stream: the stream on which the rows are used: a handle or an object. None: PyTorch's current one if PyTorch
                is loaded, otherwise the legacy default stream. The call only enqueues on a GPU.

        Raises:
            InvalidArgument: a row number is not below the number of rows. Numbers in device memory are checked on the
                device: `check` raises then.
        """
        handle, _ = consumer_stream(stream, self.device)
        ids = _numbers(ids)
        if out is None:
            out = self._new(len(ids))
        self._table.gather(_capsule(ids, handle), _capsule(out, handle), handle)
        return out

    def scatter(self, ids: Any, rows: Any, *, duplicates: str = "last", stream: Any = None) -> None:
        """Copies `rows` to the rows of `ids` in the table. On a GPU the call only enqueues: the table holds the rows
        once the stream has passed the call.

        Args:
            ids, stream: as in `gather`.
            rows: a contiguous tensor or array on the table's device.
            duplicates: what happens to a row number that comes twice: 'last', 'sum' (the rows replace it by their sum)
                or 'error'.
        """
        handle, _ = consumer_stream(stream, self.device)
        self._table.scatter(_capsule(_numbers(ids), handle), _capsule(rows, handle), duplicates, handle)

    def check(self) -> None:
        """Raises the error of the oldest finished call that failed on the device."""
        self._table.check()

    def tune(self, batch_rows: int, batches: int = 1) -> None:
        """Measures how calls of `batch_rows` rows are fastest. Takes about a second."""
        self._table.tune(batch_rows, batches)

    def _new(self, count: int) -> Any:
        shape = (count, *self._table.row_shape)
        import numpy

        dtype = numpy.dtype(self._table.dtype)
        if self.device == "host":
            return numpy.empty(shape, dtype)
        import torch

        return torch.empty(shape, dtype=torch.from_numpy(numpy.empty(0, dtype)).dtype, device=self.device)


def _numbers(ids: Any) -> Any:
    if hasattr(ids, "__dlpack__") and hasattr(ids, "__dlpack_device__"):
        return ids
    import numpy

    return numpy.ascontiguousarray(ids, dtype=numpy.int64)


def _capsule(tensor: Any, stream: Optional[int]) -> Any:
    """A capsule of a tensor whose data is ready for `stream`."""
    on_gpu = tensor.__dlpack_device__()[0] == 2
    arguments = {"stream": stream} if on_gpu else {}
    try:
        return tensor.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # older producers know no versions
        return tensor.__dlpack__(**arguments)
