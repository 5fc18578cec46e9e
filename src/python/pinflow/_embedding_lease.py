"""Rows of an EmbeddingTable, from `fetch` to `commit`."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from ._arrays import Interface
from ._embedding_inputs import import_torch


class RowFormat(NamedTuple):
    """PyTorch's device and type of a table's rows, and the bytes of one."""

    device: str
    dtype: str
    row_bytes: int


class EmbeddingLease:
    """Rows on the table's device, from `fetch` to `commit`: each row once, in ascending order of ids. Needs PyTorch.
    Dropping it without a commit changes nothing in the table. The tensors `weights` and `positions` keep it, too."""

    def __init__(self, lease: Any, row_format: RowFormat, has_gpu_ids: bool = False) -> None:
        self._lease, self._format, self._has_gpu_ids = lease, row_format, has_gpu_ids

    @property
    def weights(self) -> Any:
        """A tensor of shape (rows, columns) in the memory of the lease; not contiguous. Valid until the commit. If the
        ids were on the GPU, it has as many rows as there were ids, and only the first `count` are defined."""
        return self._first_rows(self._lease.row_count)

    def _first_rows(self, rows: int) -> Any:
        """The weights of the first rows. There is memory for one row for each id of the fetch."""
        torch = import_torch()
        stride = self._lease.stride_bytes
        raw = self._view(self._lease.weights_address, rows * stride).view(rows, stride)
        return raw[:, :self._format.row_bytes].view(getattr(torch, self._format.dtype))

    @property
    def positions(self) -> Any:
        """An int64 tensor: for each id of the fetch, the row that has it. `weights[positions]` are the embeddings."""
        count = self._lease.position_count
        return self._view(self._lease.positions_address, count * 8).view(import_torch().int64)

    @property
    def count(self) -> Any:
        """The number of different ids. If they were on the GPU, a tensor there, because only the GPU knows it."""
        if not self._has_gpu_ids:
            return self._lease.row_count
        return self._view(self._lease.device_row_count_address, 8).view(import_torch().int64)[0].clone()

    @property
    def ids(self) -> Any:
        """The ids of the rows, as a numpy array. If they were on the GPU, an int64 tensor there with as many entries as
        `weights` has rows; only the first `count` are defined. That tensor is valid until the commit."""
        import numpy

        if self._has_gpu_ids:
            return self._view(self._lease.device_ids_address, self._lease.row_count * 8).view(import_torch().int64)

        return numpy.frombuffer(self._lease.ids(), numpy.uint64).astype(numpy.int64)

    def release(self) -> None:
        """Gives the rows back without a change."""
        self._lease.release()

    def _view(self, address: int, nbytes: int) -> Any:
        torch = import_torch()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._format.device)
        interface = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}
        if self._format.device == "cpu":
            import numpy

            return torch.from_numpy(numpy.asarray(Interface(interface, self._lease)))
        return torch.as_tensor(_CudaMemory(interface, self._lease), device=self._format.device)


class _CudaMemory:
    """Memory of a lease, for torch.as_tensor."""

    def __init__(self, interface: Dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self._owner = owner
