"""The loader: batches ahead of the consumer."""

from __future__ import annotations

import json
import numbers
import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable, Dict, Generic, Iterator, Optional, Tuple, TypeVar, Union

from . import _native
from ._batch import Batch, Tensor, tensors_of
from ._devices import device_name
from ._elements import elements_of, row_numbers
from ._errors import DeviceError, Error, FormatError, InvalidArgument, shown
from ._sources import native_of
from ._streams import consumer_stream

_Made = TypeVar("_Made", covariant=True)

#: More epochs than anybody trains.
_ENDLESS = 1 << 32
#: The library counts the rows of all epochs together in 64 bits.
_MAX_ROWS = (1 << 64) - 1


class Report:
    """Where the time of a loader went. `str(report)` is the verdict, one sentence.

    `values` has the rest: verdict, route, reason, arrays (name, transfer, reason, bytes of each), threads, slots,
    threads_reason and slots_reason (what limits the number, or empty), lost_slots (not filled again, because no event
    could be recorded in a stream that used them), slot_bytes, batches, rows, bytes, seconds, pinned_bytes; the seconds
    that the consumer waited, by cause: storage_wait, file_wait, cpu_wait, link_wait; and consumer_wait, the seconds
    that the loader waited for it.
    """

    def __init__(self, values: Dict[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        return str(self.values["verdict"])

    def __repr__(self) -> str:
        return f"<pinflow.Report {self}>"


def _weights_of(weights: Any) -> Any:
    import numpy

    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(weights, torch.Tensor) and weights.is_floating_point():
        weights = weights.detach().double()  # bfloat16, and those that require gradients
    given = elements_of(weights)
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        raise InvalidArgument(f"the weights of rows are numbers on one axis, not {given.dtype} of shape {given.shape}")
    return numpy.ascontiguousarray(given, dtype=numpy.float64)


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, and not True or False."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:  # such as an array with an axis
        return False
    return True


class _Loop(Generic[_Made]):
    """An iterator over one epoch of a loader. `make` turns each native batch into what the loop gets. The epoch begins
    with the first `next`."""

    __slots__ = ("_loader", "_make", "_turn", "_epoch", "_is_over")

    def __init__(self, loader: Loader, make: Callable[[_native.Batch], _Made]) -> None:
        self._loader = loader
        self._make = make
        self._turn: Optional[int] = None
        self._epoch = 0
        self._is_over = False

    def __iter__(self) -> _Loop[_Made]:
        return self

    def __next__(self) -> _Made:
        loader = self._loader
        thread, before = threading.get_ident(), loader._thread_in_next
        if before not in (None, thread):
            loader._refuse_forked()
            raise Error("this loop cannot go on: another thread waits for a batch of its loader; use a loader from one "
                        "thread at a time")
        try:
            loader._thread_in_next = thread
            return self._next(loader)
        finally:
            loader._thread_in_next = before

    def _next(self, loader: Loader) -> _Made:
        if self._turn is None and not self._is_over:
            if not loader._begin_loop(self):
                self._is_over = True
                raise StopIteration
        if self._is_over:
            if self._turn == loader._turn:
                loader._end_epoch()
            raise StopIteration
        if self._turn != loader._turn:
            raise Error("this loop cannot go on: another loop over its loader has begun, or the loader was closed or "
                        "has loaded a state")
        gpu = loader._gpu
        batch = loader._loader.next() if gpu is None else loader._loader.next(*consumer_stream(loader._stream, gpu))
        if batch is None and loader._closed:
            raise Error("this loop cannot go on: the loader was closed while it waited for a batch")
        if self._turn != loader._turn:  # a signal handler has begun another loop, or loaded a state
            raise Error("this loop cannot go on: while it waited for a batch, another loop over its loader began, or the "
                        "loader loaded a state")
        # an error, thrown before, has ended the epoch
        if batch is None and not loader._loader.has_delivered_all:
            self._turn, self._is_over = None, True
            raise StopIteration
        if batch is None or batch.epoch != self._epoch:  # this rank had no part in the rest of the epoch
            self._is_over = True
            loader._end_epoch()
            raise StopIteration
        if batch.last_of_epoch:
            self._is_over = True
            loader._native_at = self._epoch + 1
        return self._make(batch)


class Loader:
    """Delivers the rows of one or several sources as batches on a device, ahead of the consumer.

        for images, labels in pinflow.Loader("images.npy", "labels.npy", batch=64):
            model(images.torch(), labels.torch())

    Each `for` loop is one epoch, shuffled anew by default. `break` ends it, and the next loop begins the next epoch. A
    loader has one position: once a second loop has begun, the first one raises Error at its next batch. With one
    source, write `for (x,) in loader`. The loader reads ahead, into the next epoch too: after changing arrays in
    memory, or what a RowSource returns, make a new loader.

        validation = pinflow.Loader("test.npy", "labels.npy", order="sequential", batch=256)

        loader.load_state_dict(json.loads(saved))        # goes on within an epoch
        for epoch in range(loader.epoch, 10):
            for images, labels in loader:
                ...                                      # now and then, with the model:
                saved = json.dumps(loader.state_dict())

    A tensor only carries the data: take it by `.torch()`, `.cupy()`, `.jax()` or `.numpy()`. It lies in a slot of the
    loader, which is filled again once the tensor and all that was made of it have been dropped. So copy or clone what
    you keep: once all slots are kept, the loop raises AllSlotsLeased.

    Args:
        sources: arrays with equally many rows: paths ('FILE', 'FILE:NAME', patterns), Arrays, numpy arrays, PyTorch
            tensors on the CPU, or RowSources. A sample is the same row of each. Give a path instead of
            `numpy.load(path, mmap_mode="r")`. For pinflow, a file that numpy has mapped is only memory: changes are not
            noticed, and truncating the file ends the process (SIGBUS). Arrays in memory that are not contiguous are
            copied, except views of 64 MiB or more (with the elements that repeat) whose single rows are contiguous, in
            ascending order: numpy's `sliding_window_view(tokens, 1025)[::1024]`. For files use Array.sliding_windows.
        batch: samples in a batch. The last batch of an epoch may have fewer.
        order: 'sequential', 'shuffled', 'windowed' (chunks in shuffled order, the rows of some chunks shuffled
            together) or 'weighted' (rows drawn with replacement, in the proportions of `weights`); the row numbers of
            an epoch (an array or a list), or an object with `name` ('mine/1'), `position_count`, and `rows_at(epoch,
            first, out)`, which fills all of `out`, a memoryview of unsigned 64-bit numbers, with the row numbers at
            the positions first, first + 1, ..., and returns None. It is called on other threads, for one range at a time,
            not always in their order
        weights: for the weighted order: a number of at least 0 for each row, as an array, a list or a tensor.
        draws: how many rows are drawn in an epoch of the weighted order; None: as many as there are.
        seed: of the shuffled, the windowed and the weighted order. Each epoch has another order.
        epochs: epochs in all, those before a resume included; further loops deliver nothing. None: any number.
        device: 'auto' (the first GPU, otherwise the host), 'host' or 'cpu', 'cuda', 'cuda:N', the number of a GPU, or a
            torch.device.
        rank, world: the part of each epoch that this process delivers. None: everything. `rank='auto'` takes both from
            the variables of torchrun, MPI or Slurm.
        tail: what becomes of the samples at the end of an epoch that do not fill a batch for every rank. 'partial':
            they are split among the ranks, so that the last batch may be smaller, and a rank may have one batch fewer.
            'drop': they are left out, and all ranks have the same number of full batches.
        route: how rows travel, for experiments: 'auto', 'direct' (the device reads the file's pages), 'copy' (the copy
            engine does), 'staged' (the CPU gathers them), 'read' (the same, with reads of the file).
        memory: the maximum bytes of all slots, staging buffers and arrays held on the device. None or 0: 1 GiB, less if
            memory is short; if `slots` is given or a source is a RowSource, the memory that is left. After `break`, the
            next loop has new slots. The old ones are freed when their last tensor is dropped.
        stream: the consumer's stream, a handle or an object. None: PyTorch's current stream at each batch if PyTorch is
            loaded, otherwise CUDA's legacy default stream.
        slots: the number of batches that can exist at once, from 2 on; None: the loader chooses, 8 if a source is a
            RowSource.
        threads: the maximum number of threads that gather rows; None or 0: one for each core.
        window: rows of a window of the windowed order; None or 0: 64 MiB of samples.

    Raises:
        InvalidArgument, NotFound, FormatError, Unsupported, DeviceError, SystemFailure: on construction. A loop also
            raises DataChanged if a file changes, and what a Python source or order raises.

    Not for several threads at a time. A forked process (a worker of a DataLoader) cannot use a loader of its parent, but
    may close it.
    """

    def __init__(self, *sources: Any, batch: int = 64, order: Any = "shuffled", seed: int = 0,
                 epochs: Optional[int] = None, device: Any = "auto", rank: Union[int, str, None] = None,
                 world: Optional[int] = None, tail: str = "partial", route: str = "auto",
                 memory: Optional[int] = None, stream: Any = None, slots: Optional[int] = None,
                 threads: Optional[int] = None, window: Optional[int] = None, weights: Any = None,
                 draws: Optional[int] = None) -> None:
        if isinstance(rank, str) and rank == "auto":
            if world is not None:
                raise InvalidArgument("rank='auto' takes world from the environment, too: do not give it")
            rank, world = _native.shard_from_environment()
        if (rank is None) != (world is None):
            raise InvalidArgument("rank and world belong together: give both or none")
        whole: Dict[str, Tuple[Any, int]] = {
            "batch": (batch, 1), "seed": (seed, 0), "epochs": (epochs, 0), "rank": (rank, 0), "world": (world, 1),
            "memory": (memory, 0), "slots": (slots, 2), "threads": (threads, 0), "window": (window, 0),
            "draws": (draws, 0)}
        for name, (value, least) in whole.items():
            if value is None and name not in ("batch", "seed"):
                continue
            most = (1 << 31) - 1 if name in ("rank", "world", "slots", "threads") else (1 << 63) - 1
            if name == "seed":
                most = (1 << 64) - 1
            if not _is_whole(value) or not least <= operator.index(value) <= most:
                raise InvalidArgument(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
        for name, text in {"tail": tail, "route": route}.items():
            if not isinstance(text, str):
                raise InvalidArgument(f"{name} is a name, not {shown(text)}")
        self._sources = sources  # kept where the garbage collector sees them
        self._arrays = [native_of(each, f"source {number}") for number, each in enumerate(sources)]
        self._epochs = epochs
        self._stream = stream
        is_weighted = isinstance(order, str) and order == "weighted"
        if is_weighted != (weights is not None):
            raise InvalidArgument("order='weighted' and `weights` belong together: give both or none")
        if draws is not None and weights is None:
            raise InvalidArgument("`draws` needs order='weighted'")
        native_order, rows = self._order_of(order)
        if weights is not None and draws is None:
            draws = rows
        rows = max(1, rows if draws is None else draws)
        self._options: Dict[str, Any] = {
            "batch": batch, "order": native_order, "seed": seed, "device": device_name(device), "rank": rank,
            "world": world, "tail": tail, "route": route, "memory": memory, "slots": slots, "threads": threads,
            "window": window, "epochs": min(_ENDLESS, _MAX_ROWS // rows) if epochs is None else epochs,
            "state": None, "first_epoch": 0, "weights": None if weights is None else _weights_of(weights), "draws": draws,
        }
        self._loader = _native.make_loader(self._arrays, self._options)
        self._device = self._loader.device
        self._gpu = self._loader.gpu
        self._row_count = self._loader.row_count
        self._length = self._loader.batches_per_epoch
        self._report: Dict[str, Any] = {}
        self._process = os.getpid()
        self._closed = False
        self._thread_in_next: Optional[int] = None  # the thread that waits for a batch
        self._epoch = 0  # of the next loop
        self._turn = 0  # counts loops: an older one must not go on
        self._native_at: Optional[int] = 0  # the epoch with which the native loader can go on; None within one
        self._is_between = True  # no epoch has been begun, or the last one has been delivered
        self._is_native_closed = False  # the native loader was closed to make another one, which has not been made

    @property
    def device(self) -> str:
        """'host' or 'cuda:N'."""
        return self._device

    @property
    def epoch(self) -> int:
        """The epoch that the next loop delivers, counted from 0. Within a loop and after `break` this is one more than
        the loop's own, which `Batch.epoch` says."""
        return self._epoch

    @property
    def row_count(self) -> int:
        """The number of samples in the data."""
        return self._row_count

    def __len__(self) -> int:
        """Batches of this process in a whole epoch."""
        return self._length

    def __repr__(self) -> str:
        return f"<pinflow.Loader of {len(self._arrays)} sources on {self._device}, next epoch {self._epoch}>"

    def __iter__(self) -> Iterator[Tuple[Tensor, ...]]:
        """One epoch, as tuples with a tensor for each source."""
        return _Loop(self, tensors_of)

    def batches(self) -> Iterator[Batch]:
        """One epoch, as Batch objects, which also know their row numbers, epoch and index."""
        return _Loop(self, Batch)

    def _begin_loop(self, loop: _Loop[Any]) -> bool:
        """Begins the next epoch. False if there is none. If a signal handler raises, it has not begun."""
        if self._closed:
            raise InvalidArgument("the loader has been closed")
        self._refuse_forked()
        if self._epochs is not None and self._epoch >= self._epochs:
            return False
        self._turn += 1
        if self._is_native_closed or self._native_at != self._epoch:
            self._renew()
        # no signal handler runs between these, as they call nothing
        self._native_at = None
        self._is_between = False
        loop._epoch = self._epoch
        self._epoch += 1
        loop._turn = self._turn
        # this rank has no part in a whole epoch, nor in the rest of one that was resumed
        if self._length == 0 and self._loader.has_delivered_all:
            self._end_epoch()
            return False
        return True

    def _end_epoch(self) -> None:
        self._is_between = True

    def _refuse_forked(self) -> None:
        if self._process != os.getpid():
            raise DeviceError("a loader cannot be used in a forked process: its threads exist in the parent only")

    def _renew(self) -> None:
        """Makes a native loader that begins with the next epoch. If that fails, or a signal handler raises, there is none
        until the next call."""
        if not self._is_native_closed:
            self._report = self._loader.report()
        self._is_between = True
        self._is_native_closed = True
        self._loader.close()  # first: the memory of its slots may be needed
        options = {**self._options, "state": None, "first_epoch": self._epoch}
        self._replace(_native.make_loader(self._arrays, options), options, self._epoch)

    def _replace(self, made: _native.Loader, options: Dict[str, Any], epoch: int) -> None:
        """Replaces the native loader by one that begins in this epoch."""
        self._is_native_closed = True
        self._loader.close()
        # no signal handler runs between these, as they call nothing
        self._loader = made
        self._options = options
        self._epoch = self._native_at = epoch
        self._turn += 1
        self._is_native_closed = False

    def state_dict(self) -> Dict[str, Any]:
        """Where to resume: after the last batch that was delivered, also after `break`. Plain values, for json or
        torch.save. The same on all ranks after the same step, and after the same epoch; a run can resume with another
        batch size and number of ranks. After `break`, a loader that loads this state delivers the rest of the epoch,
        while the next loop of this loader begins another epoch. The first call reads some rows, so that the data can be
        recognised. If a signal handler raises while a loop takes its next batch, as Ctrl-C does, that batch may count as
        delivered: `Batch.state_dict` of the last batch that was used is exact.

        Raises:
            DataChanged: a file changed before the first call. InvalidArgument: the loader has been closed. If a loop
            could not begin, also what a Loader raises on construction.
        """
        if self._is_native_closed and not self._closed:
            self._refuse_forked()
            self._renew()
        state: Dict[str, Any] = json.loads(self._loader.state())
        if self._is_between:
            state["epoch"], state["position"] = self._epoch, 0
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Resumes from a state: the next loop delivers the rest of its epoch.

        Raises:
            StateMismatch: it is a state of another order or seed, or of other data. Data is compared by types, shapes
            and a hash of some rows, so that a copy in another place or format is the same data.
            FormatError: it is not the state of a loader. Unsupported: its format has another version.
        """
        if self._closed:
            raise InvalidArgument("the loader has been closed")
        self._refuse_forked()
        try:
            text = json.dumps(state, default=operator.index)  # numpy's whole numbers, too
        except (TypeError, ValueError) as failure:
            raise FormatError(f"this is not the state of a loader: {failure}") from None
        options = {**self._options, "state": text, "first_epoch": 0}
        made = _native.make_loader(self._arrays, options)  # if that fails, nothing has changed
        epoch = int(state["epoch"])
        self._is_between = False
        self._replace(made, options, epoch)

    def report(self) -> Report:
        """Where the time went since the loader last started. `load_state_dict` starts it again, and so does the first
        loop after an epoch that was not delivered completely, for example after `break`."""
        self._refuse_forked()
        return Report(self._report if self._closed or self._is_native_closed else self._loader.report())

    def close(self) -> None:
        """Ends the loader's threads. Tensors that are kept stay valid."""
        if self._closed and self._is_native_closed:
            return
        self._closed = True
        self._turn += 1
        if self._process == os.getpid() and not self._is_native_closed:  # a forked process has no part in the loader
            self._report = self._loader.report()
        self._is_native_closed = True
        self._loader.close()

    def _order_of(self, order: Any) -> Tuple[Any, int]:
        """The order for the library, and the number of its positions."""
        first_length = self._arrays[0].shape[0] if self._arrays and self._arrays[0].shape else 0
        if isinstance(order, str):
            return order, first_length
        if hasattr(order, "rows_at"):
            name, count = getattr(order, "name", None), getattr(order, "position_count", None)
            if not isinstance(name, str):
                raise InvalidArgument(f"the `name` of an order is a text, not {shown(name)}")
            if isinstance(count, bool) or not isinstance(count, numbers.Integral) or not 0 <= int(count) < 1 << 63:
                raise InvalidArgument(f"the `position_count` of an order is a whole number of at least 0, not {shown(count)}")
            return _native.Order(order), int(count)
        if not hasattr(order, "__array__") and not isinstance(order, Sequence):
            raise InvalidArgument("an order is 'sequential', 'shuffled', 'windowed' or 'weighted', a list of row numbers, or "
                                  f"an object with name, position_count and rows_at, not {shown(order)}")
        numbers_of_rows = row_numbers(order, first_length)
        return _native.Order(numbers_of_rows), len(numbers_of_rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a loader cannot be copied or pickled: make another one")

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
