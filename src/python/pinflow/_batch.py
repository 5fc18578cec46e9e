"""What a loop over a loader gets: batches of tensors."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Tuple

from . import _native
from ._arrays import Interface
from ._elements import numpy_type
from ._errors import InvalidArgument
from ._streams import consumer_stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Tensor(_native.Tensor):
    """One array of a batch, on the loader's device. PyTorch, CuPy, JAX and numpy take it without a copy: by `.torch()`,
    `.cupy()`, `.jax()`, `.numpy()`, or any of their functions for DLPack and array interfaces.

    It holds the batch's slot of the loader until it, and everything made of it, has been dropped. So clone what you
    keep for long. On a GPU the data is ready for the stream of the loader's consumer; other streams that read it must
    be named by `used_on`.
    """

    __slots__ = ("__weakref__",)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements, as Array.dtype."""
        return numpy_type(self._dtype)

    def __repr__(self) -> str:
        return f"<pinflow.Tensor {self._dtype} {self.shape} on {self.device}>"

    def used_on(self, stream: Any) -> None:
        """Makes another stream wait for the data, and the slot wait for that stream. `stream` is a handle or an object
        of PyTorch, CuPy or Numba, which is kept alive."""
        handle, owner = consumer_stream(stream, self._gpu)
        if handle is not None:
            self._used_on(handle, owner)

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> NDArray[Any]:
        """For numpy, which uses the array interface on the host, except for types with padding. Raises on a GPU, as
        `numpy` does."""
        import numpy

        self._refuse_gpu()
        array = numpy.asarray(Interface(self._interface, self))
        if array.dtype.kind == "V":
            array = array.view(self.dtype)
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"elements of {array.dtype} cannot be of {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def numpy(self) -> NDArray[Any]:
        """A numpy array of the same memory, which belongs to the batch: writing to it changes nothing in the source.
        Only on the host. (With `route='direct'` it is the source's memory, and read-only.)"""
        import numpy

        self._refuse_gpu()
        array = numpy.asarray(self)  # by the array interface, or by __array__
        return array.view(self.dtype) if array.dtype.kind == "V" else array

    def _refuse_gpu(self) -> None:
        if self._gpu is not None:
            raise InvalidArgument(f"the tensor is on {self.device}: numpy needs host memory; use .torch() or .cupy()")

    def torch(self) -> Any:
        """A PyTorch tensor of the same memory, for PyTorch's current stream. With `route='direct'` on the host it is the
        source's memory, and must not be written to. PyTorch has no read-only tensors. If the source is a file, a write
        ends the process."""
        torch = sys.modules.get("torch") or importlib.import_module("torch")
        if self._gpu is None:
            if not self._is_read_only:
                return torch.from_dlpack(self.__dlpack__())  # of a capsule, this takes half the time
            warnings.warn("a tensor that was loaded with route='direct' must not be written to: it is its source's memory",
                          stacklevel=2)
            return torch.from_dlpack(self)  # asks for a versioned capsule, which can be read-only
        return torch.from_dlpack(self.__dlpack__(stream=consumer_stream(None, self._gpu)[0]))

    def cupy(self) -> Any:
        """A CuPy array of the same memory, for CuPy's current stream. Only on a GPU."""
        cupy = sys.modules.get("cupy") or importlib.import_module("cupy")
        if self._gpu is not None:
            if cupy.cuda.runtime.getDevice() != self._gpu:
                with cupy.cuda.Device(self._gpu):
                    return self.cupy()
            stream = cupy.cuda.get_current_stream()
            if stream.ptr:  # 0 is the legacy default stream, for which from_dlpack makes the data ready
                self._used_on(stream.ptr, stream)
        return cupy.from_dlpack(self)

    def jax(self) -> Any:
        """A JAX array of the same memory."""
        import jax

        return jax.dlpack.from_dlpack(self)


def tensors_of(batch: _native.Batch) -> Tuple[Tensor, ...]:
    return batch.tensors(Tensor)


class Batch:
    """Some samples, leased: the memory is reused once this batch and its tensors have been dropped, and the streams
    that use them have completed the work enqueued until then. Use it in a `with` statement, or call `release`."""

    __slots__ = ("_batch", "_tensors")

    def __init__(self, batch: _native.Batch) -> None:
        self._batch = batch
        self._tensors = tensors_of(batch)

    @property
    def tensors(self) -> Tuple[Tensor, ...]:
        """One tensor for each source."""
        return self._tensors

    @property
    def row_ids(self) -> NDArray[np.int64]:
        """The numbers of the rows in the sources, in the order of the samples. A new array."""
        import numpy

        return numpy.frombuffer(self._batch.row_ids, dtype=numpy.int64).copy()

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self._batch.epoch

    @property
    def index(self) -> int:
        """The number of this batch within its epoch, counted from 0. After a resume within an epoch, the first batch
        has the index position // (batch * world), as if the whole epoch were delivered with this batch size."""
        return self._batch.index

    def state_dict(self) -> Dict[str, Any]:
        """Where to resume after this batch, as Loader.state_dict. For consumers that take batches ahead."""
        return dict(json.loads(self._batch.state()))

    def __len__(self) -> int:
        return self._batch.row_count

    def __repr__(self) -> str:
        if not self._tensors:
            return "<pinflow.Batch, released>"
        return f"<pinflow.Batch {self.index} of epoch {self.epoch}, {len(self)} rows>"

    def __getitem__(self, index: int) -> Tensor:
        len(self)  # raises if it has been released
        return self._tensors[index]

    def used_on(self, stream: Any) -> None:
        """As Tensor.used_on, for all tensors of the batch."""
        len(self)  # raises if it has been released
        self._tensors[0].used_on(stream)  # they share the batch

    def __iter__(self) -> Iterator[Tensor]:
        len(self)  # raises if it has been released
        return iter(self._tensors)

    def __copy__(self) -> Batch:
        raise TypeError("a batch cannot be copied: clone its tensors")

    def release(self) -> None:
        """Drops the batch. Its tensors hold the slot as long as they are kept elsewhere."""
        self._tensors = ()
        self._batch.release()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
