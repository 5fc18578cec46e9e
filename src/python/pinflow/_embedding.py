"""Embeddings larger than the GPU, trained with an ordinary optimizer."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from . import _native
from ._arrays import path_text
from ._devices import device_name
from ._embedding_inputs import check_whole, first_weights, host_ids, ids_of, import_torch, is_on_gpu, joined_ids, real_tensor
from ._embedding_lease import EmbeddingLease, RowFormat
from ._embedding_optimizer import embedding_optimizer
from ._errors import AllSlotsLeased, InvalidArgument, Unsupported, shown
from ._streams import consumer_stream
from ._train import _TYPES, _numbers

_SIZES = {"<f4": 4, "<f2": 2, "bfloat16": 2}
_SPELLINGS = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}
Weights = Union[str, Tuple[str, float, float], Callable[[int, int], Any]]
#: a function of first weights makes about this many bytes in one call
_PIECE_BYTES = 16 << 20


class EmbeddingTable:
    """A table of embeddings in host memory, with the optimizer's state beside the weights of each row. The GPU needs
    memory for a few batches only. Needs PyTorch for tensors.

        table = pinflow.EmbeddingTable(10_000_000, 128, weights=("normal", 0, 0.1), optimizer="adam", lr=1e-3)
        embedding = table.module()               # in the place of torch.nn.Embedding
        for ids, y in batches:
            loss(model(embedding(ids)), y).backward()
            table.step()                         # updates the rows of `ids`

    Args:
        rows, columns: the shape of the table.
        dtype: of the weights: 'float32', 'float16', 'bfloat16', or a dtype of PyTorch. State is float32.
        optimizer: a rule of FlatParameters: 'sgd', 'adagrad', 'adadelta', 'rmsprop', 'rprop', 'adam', 'adamw',
            'adamax', 'nadam', 'radam', 'asgd', 'sparse_adam'; or 'rowwise_adagrad'. `lr` and the other settings have
            the names and default values of torch.optim (those of 'rowwise_adagrad' are Adagrad's).
        weights: how they begin: 'zeros', ('uniform', LOW, HIGH) or ('normal', MEAN, DEVIATION); these depend on `seed`
            and on the row alone. Or a function of (first, end) that returns the weights of these rows, as an array
            of the shape (end - first, columns); it is called for all rows, some at a time, in their order.
        device: 'auto' (the first GPU, otherwise the host), 'host' or 'cpu', 'cuda', 'cuda:N', the number of a GPU, or a
            torch.device.
        max_batch_ids: the most ids of one fetch.
        look_ahead: how many steps `prefetch` may be ahead. The device holds 2 + 2 * look_ahead batches.
        device_rows: how many rows, from the first on, stay in device memory.

    Each row counts its own steps: see pinflow::embedding_table in C++. One thread at a time may use a table.

    Raises:
        InvalidArgument, Unsupported: numbers, rules, settings or types that do not work.
        SystemFailure, DeviceError: memory is short.
    """

    def __init__(self, rows: int, columns: int, *, dtype: Any = "float32", optimizer: str = "adam",
                 lr: Optional[float] = None, weights: Weights = "zeros", seed: int = 0, device: Any = "auto",
                 max_batch_ids: int = 1 << 17, look_ahead: int = 1, device_rows: int = 0, **settings: Any) -> None:
        for argument, number, end in (("rows", rows, 1 << 63), ("columns", columns, 1 << 63), ("seed", seed, 1 << 64),
                                      ("max_batch_ids", max_batch_ids, 1 << 63), ("look_ahead", look_ahead, 9),
                                      ("device_rows", device_rows, 1 << 63)):
            check_whole(argument, number, end)
        if not isinstance(optimizer, str):
            raise InvalidArgument(f"optimizer is the name of a rule, such as 'adam', not {shown(optimizer)}")
        name = str(dtype)
        spelling = _TYPES.get(name, _SPELLINGS.get(name))
        if spelling not in _SIZES:
            raise Unsupported(f"weights are float32, float16 or bfloat16, not {shown(dtype)}")
        self._function = weights if callable(weights) else None
        kind, first, second = ("zeros", 0.0, 0.0) if callable(weights) else first_weights(weights)
        of_rule = _numbers(settings if lr is None else {"lr": lr, **settings})
        self._table = _native.EmbeddingTable(rows, columns, spelling, optimizer, of_rule,
                                             (kind, first, second, seed), max_batch_ids, look_ahead, device_rows,
                                             device_name(device))
        self.shape: Tuple[int, int] = (rows, columns)
        self.dtype = name.rpartition(".")[2]
        self._spelling = spelling
        self._row_bytes = columns * _SIZES[spelling]
        self._gpu = self._table.gpu
        self._torch_device = "cpu" if self._gpu is None else self._table.device
        # not the table itself: the gradients that the table keeps have leases
        self._format = RowFormat(self._torch_device, self.dtype, self._row_bytes)
        #: of backward passes: the lease, if it is still held, the ids and their gradients
        self._pending: List[Tuple[Optional[EmbeddingLease], Any, Any]] = []
        self._events: List[Any] = []
        self._held: Any = None
        #: whether `prefetch` was called after the last cancel_prefetches: rows may be waiting for a lookup
        self._has_prefetched = False
        #: how many rows, from the first on, need no call of the function of first weights any more
        self._begun = 0
        self._begin()

    @property
    def device(self) -> str:
        """'host' or 'cuda:N': where rows are used."""
        device: str = self._table.device
        return device

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<pinflow.EmbeddingTable {self.dtype} {self.shape}, rows on {self.device}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an EmbeddingTable cannot be pickled or copied: `save` writes it to a file, and `load` reads it")

    def prefetch(self, ids: Any) -> None:
        """Begins to move the rows of a later fetch of the same ids in the same order. Changes no result. If there are
        2048 ids or more, a GPU whose kernels move the rows groups them. Otherwise background threads group 8192 ids and
        more, and enqueue the work; `fetch` then raises their errors.

        Args:
            ids: whole numbers in host memory.

        Raises:
            InvalidArgument: `look_ahead` steps are prefetched already. Otherwise as `fetch`.
            Unsupported: ids on a GPU.
        """
        found = host_ids(ids)
        self._has_prefetched = True
        try:
            self._table.prefetch(found.ctypes.data, found.size)
        except AllSlotsLeased:
            if not self._release_held():
                raise
            self._table.prefetch(found.ctypes.data, found.size)

    def cancel_prefetches(self) -> None:
        """Forgets what was prefetched and not fetched, for example when the order of batches changes. Waits until
        background threads have prepared all prefetched steps."""
        self._table.cancel_prefetches()
        self._has_prefetched = False

    def fetch(self, ids: Any) -> EmbeddingLease:
        """The rows of `ids`, as all commits before have left them, for work on PyTorch's current stream. For
        ids in host memory, waits until the number of rows is known; lookups of the module on a GPU do not.

        Args:
            ids: whole numbers of any shape, which may repeat: a numpy array, a list or a tensor. A tensor on the
                table's GPU is read in the order of the current stream, and the host does not wait for it. If some of
                its ids are outside the table, the count and all positions are 0, and the commit changes nothing. The
                commit, or a later call, raises the error.

        Raises:
            InvalidArgument: ids outside the table, or more than max_batch_ids; ids on another GPU.
            AllSlotsLeased: leases and prefetches hold the memory of all steps. A lease also holds the rows of every
                commit that comes after its fetch: after 2 * look_ahead + 1 of them, commit or release it.
        """
        return self._fetch(ids_of(ids, self._gpu), counts=True)

    def _fetch(self, ids: Any, counts: bool = False) -> EmbeddingLease:
        """Fetches the rows of what ids_of has returned. With `counts`, waits until their number is known."""
        stream, _ = consumer_stream(None, self._gpu)
        on_gpu = is_on_gpu(ids)
        address, count = (ids.data_ptr(), ids.numel()) if on_gpu else (ids.ctypes.data, ids.size)
        try:
            try:
                lease = self._table.fetch(address, count, on_device=on_gpu, counts=counts, stream=stream)
            except AllSlotsLeased:
                if not self._release_held():
                    raise
                lease = self._table.fetch(address, count, on_device=on_gpu, counts=counts, stream=stream)
        except InvalidArgument:  # perhaps of an earlier fetch
            self._drop_wrong_passes()
            raise
        return EmbeddingLease(lease, self._format, on_gpu)

    def commit(self, lease: EmbeddingLease, gradients: Any) -> None:
        """Makes one step of the optimizer on each row of the lease, and writes it back.

        Args:
            gradients: a tensor on the table's device with a row for each id of the fetch. Those of equal ids are added.

        Raises:
            InvalidArgument: gradients of another shape or on another device, or no dense tensor; a lease of another
                table, or one that was committed or released; ids on the GPU outside the table.
            Unsupported: gradients of another type. Except for wrong ids, the lease is still valid.
        """
        self._commit(lease, gradients)

    def write_back(self, lease: EmbeddingLease) -> None:
        """Writes back what was written to `lease.weights`, for an optimizer of one's own."""
        if not isinstance(lease, EmbeddingLease):
            raise InvalidArgument(f"rows are written back by their lease, not by {type(lease).__name__}")
        stream, _ = consumer_stream(None, self._gpu)
        self._table.write_back(lease._lease, stream)

    def weights(self, ids: Any) -> Any:
        """The weights of rows as a CPU tensor of shape (len(ids), columns). Waits for all commits."""
        torch = import_torch()
        found = host_ids(ids)
        rows = torch.empty((found.size, self.shape[1]), dtype=getattr(torch, self.dtype), device="cpu")
        self._table.read_weights(found.ctypes.data, found.size, rows.data_ptr(), found.size * self._row_bytes)
        return rows

    def set_weights(self, ids: Any, weights: Any) -> None:
        """Replaces the weights of rows. They keep their state and number of steps. Waits for all commits, and forgets what
        was prefetched.

        Args:
            weights: an array or tensor of shape (len(ids), columns), of any real type. Of equal ids the last counts.

        Raises:
            InvalidArgument: another shape, ids outside the table, or leases of `fetch` are held. (That of a lookup is
                released; `step` fetches its rows again.)
        """
        self._write(ids, weights)
        self._begun = self.shape[0]

    def _write(self, ids: Any, weights: Any) -> None:
        torch = import_torch()
        found = host_ids(ids)
        rows = real_tensor(weights).to("cpu", getattr(torch, self.dtype)).contiguous()
        if tuple(rows.shape) != (found.size, self.shape[1]):
            raise InvalidArgument(f"the weights of {found.size} rows have the shape ({found.size}, {self.shape[1]}), not "
                                  f"{tuple(rows.shape)}")
        self._release_held()
        self._table.write_weights(found.ctypes.data, found.size, rows.data_ptr(), found.size * self._row_bytes)

    def grow(self, rows: int) -> None:
        """Appends rows with their first weights, until the table has `rows` rows. Meanwhile the host needs memory for
        the old and the new table. Waits and forgets as `set_weights`. If a function of first weights raises, the rows
        are there, some with zeros; a repeated call sets those, unless weights were set or loaded meanwhile.

        Raises:
            InvalidArgument: fewer rows, or leases are held.
            SystemFailure, DeviceError: memory is short.
        """
        check_whole("rows", rows, 1 << 63)
        self._release_held()
        self._table.grow(rows)
        self.shape = (rows, self.shape[1])
        self._begin()

    def export_weights(self, path: Any) -> None:
        """Writes the weights of all rows as a .npy file, atomically, with some MiB of memory. Waits for all commits. numpy
        has no bfloat16: such weights are written as |V2, which import_weights of a bfloat16 table reads; `save` and
        load_file keep the type.

        Raises:
            InvalidArgument: the name does not end in .npy. SystemFailure: the file cannot be written.
        """
        text = path_text(path)
        if not text.endswith(".npy"):
            raise InvalidArgument(f"export_weights writes .npy files, and the name {ascii(text)} has another ending")
        self._table.export_weights(text)

    def import_weights(self, path: Any) -> None:
        """Replaces the weights of all rows by an array of the same shape, of any type that can be cast: the only array of
        a .npy, .npz, HDF5 or safetensors file. Waits and forgets as `set_weights`."""
        text = path_text(path)
        self._release_held()
        self._table.import_weights(text)
        self._begun = self.shape[0]

    def save(self, path: Any) -> None:
        """Writes weights, state and numbers of steps as safetensors, atomically. Waits for all commits."""
        self._table.save(path_text(path))

    def load(self, path: Any) -> None:
        """Reads what `save` wrote. Raises StateMismatch if the shape, dtype or optimizer differs. Settings such as `lr`
        are not saved, and stay those of this table. Waits and forgets as `set_weights`."""
        text = path_text(path)
        self._release_held()
        self._table.load(text)
        self._begun = self.shape[0]

    def set_rate(self, lr: float) -> None:
        """Sets the rate of all later commits."""
        try:
            lr = float(lr)
        except (TypeError, ValueError):
            raise InvalidArgument(f"lr is a number, not {shown(lr)}") from None
        stream, _ = consumer_stream(None, self._gpu)
        self._table.set_rate(lr, stream)

    def synchronize(self) -> None:
        """Waits until all commits are written."""
        self._table.synchronize()

    def _begin(self) -> None:
        """Sets the first weights of the rows that have none yet, if a function makes them."""
        if self._function is None:
            return
        import numpy

        count = max(_PIECE_BYTES // self._row_bytes, 1)
        while self._begun < self.shape[0]:
            end = min(self._begun + count, self.shape[0])
            self._write(numpy.arange(self._begun, end), self._function(self._begun, end))
            self._begun = end

    # ---- autograd

    def module(self) -> Any:
        """A torch.nn.Module that looks embeddings up, with ids as for `fetch`: module(ids) has the shape of `ids` and a
        last axis of `columns`. The backward pass keeps the gradients until `step`. In eval mode, under no_grad and
        after `requires_grad_(False)` of this module it keeps nothing: this is how embeddings are frozen. On the host
        device such a lookup reads the weights directly, as `weights` does, unless `prefetch` was called after the last
        `cancel_prefetches`. The module has no parameters and no state: `requires_grad_` of a model does not reach it,
        and a state_dict of a model lacks the table, which `save` and `load` are for."""
        return _module_class()(self)

    def optimizer(self) -> Any:
        """A torch.optim.Optimizer that steps this table, for torch.amp.GradScaler (which skips steps whose gradients are
        infinite or NaN), torch.nn.utils.clip_grad_norm_ and schedulers of `lr`:

            optimizer = table.optimizer()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)               # table.step(), unless it is skipped
            scaler.update()
            optimizer.zero_grad()                # drops the gradients of a skipped step

        The parameters in `param_groups` stand for `gradients`, and are made anew whenever it is read: change their `grad`
        in place. Its state_dict has `lr` and what schedulers add; `save` is for weights and state. A step calls
        set_rate if `lr` has changed since the last one; other settings of a group are refused."""
        return embedding_optimizer(self)

    @property
    def gradients(self) -> List[Any]:
        """The gradients that `step` will use: for each backward pass of a lookup a tensor with a row for each id. Scale or
        clip them in place. Rows of equal ids are added by `step`, so their norm is not that of a dense gradient.
        `optimizer` has them as parameters, which torch.nn.utils.clip_grad_norm_ and GradScaler take."""
        return [gradient for _, _, gradient in self._pending]

    def step(self) -> None:
        """Commits the gradients of all backward passes since the last step, as one step of the optimizer. Their ids
        together are at most max_batch_ids.

        Raises:
            InvalidArgument: there are more ids; the gradients are kept. Or ids on the GPU were outside the table; then the
                gradients of their passes are dropped, and those of other passes are kept.
        """
        pending = self._pending
        if not pending:
            return
        torch = import_torch()
        if self._events:
            current = torch.cuda.current_stream(self._gpu)
            for event in self._events:
                current.wait_event(event)
            # of other streams: their later work must not overwrite what this one reads
            for _, ids, gradient in pending:
                gradient.record_stream(current)
                if is_on_gpu(ids):
                    ids.record_stream(current)
        lease, _, gradient = pending[0]
        if len(pending) != 1 or lease is None or not lease._lease.is_valid():
            for each, _, _ in pending:
                if each is not None and each._lease.is_valid():
                    each.release()
            lease = self._fetch(joined_ids([each for _, each, _ in pending], self._torch_device))
            gradient = torch.cat([each for _, _, each in pending])
        try:
            self._commit(lease, gradient)
        except InvalidArgument:
            self._drop_wrong_passes()
            raise
        self.zero_grad()

    def _drop_wrong_passes(self) -> None:
        """Drops the gradients of backward passes whose ids on the GPU are outside the table. Waits for the GPU."""
        def is_right(ids: Any) -> bool:
            return not is_on_gpu(ids) or not bool(((ids < 0) | (ids >= self.shape[0])).any())

        self._pending = [each for each in self._pending if is_right(each[1])]

    def zero_grad(self) -> None:
        """Drops the gradients of backward passes since the last step."""
        for lease, _, _ in self._pending:
            if lease is not None and lease._lease.is_valid():
                lease.release()
        self._pending, self._events = [], []

    def _keep(self, lease: EmbeddingLease) -> Optional[EmbeddingLease]:
        """Remembers the lease of a forward pass, and returns it. If another lease is held, releases this one and
        returns None: then `step` fetches its rows again."""
        held = self._held() if self._held is not None else None
        if held is not None and held._lease.is_valid():
            lease.release()
            return None
        self._held = weakref.ref(lease)
        return lease

    def _release_held(self) -> bool:
        """Releases the lease of the last forward pass, because its graph may be kept: `step` fetches its rows again.
        Returns whether there was one."""
        held = self._held() if self._held is not None else None
        if held is None or not held._lease.is_valid():
            return False
        held.release()
        return True

    def _commit(self, lease: EmbeddingLease, gradients: Any) -> None:
        torch = import_torch()
        if not isinstance(lease, EmbeddingLease):
            raise InvalidArgument(f"rows are committed by their lease, not by {type(lease).__name__}")
        if not isinstance(gradients, torch.Tensor) or gradients.layout != torch.strided:
            kind = gradients.layout if isinstance(gradients, torch.Tensor) else type(gradients).__name__
            raise InvalidArgument(f"gradients are a dense tensor of PyTorch, not {kind}")
        count = lease._lease.position_count
        if gradients.numel() != count * self.shape[1] or gradients.shape[-1:] != (self.shape[1],):
            raise InvalidArgument(f"the gradients of {count} ids have the shape ({count}, {self.shape[1]}), not "
                                  f"{tuple(gradients.shape)}")
        if gradients.device != torch.device(self._torch_device):
            raise InvalidArgument(f"the table's rows are on {self._torch_device}, and the gradients on {gradients.device}")
        spelling = _TYPES.get(str(gradients.dtype))
        if spelling not in _SIZES:
            raise Unsupported(f"gradients are float32, float16 or bfloat16, not {gradients.dtype}")
        gradients = gradients.detach().resolve_neg().contiguous()
        stream, _ = consumer_stream(None, self._gpu)
        self._table.commit(lease._lease, gradients.data_ptr(), spelling, stream)


def _lookup(lease: EmbeddingLease, shape: Tuple[int, ...]) -> Any:
    """The embeddings of the ids of a lease, which had this shape. A tensor of its own, no view."""
    # as many rows as there may be: the host need not wait for their number
    rows = lease._first_rows(lease._lease.position_count)
    return import_torch().nn.functional.embedding(lease.positions.view(shape), rows)


_classes: Dict[str, Any] = {}


def _module_class() -> Any:
    """The module's class, made when it is first needed: pinflow does not import PyTorch."""
    if "module" in _classes:
        return _classes["module"]
    torch = import_torch()

    class lookup(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, anchor: Any, table: EmbeddingTable, ids: Any, shape: Any) -> Any:
            lease = table._fetch(ids)
            rows = _lookup(lease, shape)
            # a copy: the caller may change the ids before `step`
            ctx.save_for_backward(anchor)  # autograd frees it after a backward pass that does not retain the graph
            ctx.kept = (table, table._keep(lease), ids.clone() if is_on_gpu(ids) else ids.copy())
            return rows

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            _ = ctx.saved_tensors  # raises if an earlier backward pass has freed the graph
            table, lease, ids = ctx.kept
            # a copy: autograd may hand the same memory to several backward passes
            kept = gradients[0].reshape(-1, table.shape[1]).clone(memory_format=torch.contiguous_format)
            if table._gpu is not None:
                event = torch.cuda.Event()
                event.record()
                table._events.append(event)
            table._pending.append((lease, ids, kept))
            return None, None, None, None

    class Embedding(torch.nn.Module):  # type: ignore[misc,name-defined]
        """Looks embeddings up in an EmbeddingTable."""

        def __init__(self, table: EmbeddingTable) -> None:
            super().__init__()
            self.table = table
            #: what makes autograd call the backward pass
            self._anchor = torch.zeros((), requires_grad=True)

        def forward(self, ids: Any) -> Any:
            import numpy

            found = ids_of(ids, self.table._gpu)
            shape = tuple(ids.shape) if is_on_gpu(ids) else numpy.shape(ids)
            if self.training and torch.is_grad_enabled() and self._anchor.requires_grad:
                return lookup.apply(self._anchor, self.table, found, shape)
            if self.table._gpu is None and not self.table._has_prefetched:
                return self.table.weights(found).view(*shape, self.table.shape[1])
            lease = self.table._fetch(found)
            rows = _lookup(lease, shape)
            lease.release()
            return rows

        def requires_grad_(self, requires_grad: bool = True) -> Any:
            self._anchor.requires_grad_(requires_grad)
            return self

        def extra_repr(self) -> str:
            return repr(self.table)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.table.__reduce_ex__(protocol)

    _classes["module"] = Embedding
    return Embedding
