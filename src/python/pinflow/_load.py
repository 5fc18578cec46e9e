"""Loading the tensors of whole models."""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import io
import os
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import _native
from ._arrays import Interface, PathLike, is_encodable, path_text
from ._devices import load_device_name
from ._elements import numpy_type
from ._errors import InvalidArgument, shown
from ._streams import consumer_stream
from ._tensor_types import float_spelling, torch_type

Progress = Callable[[int, int], None]
#: An axis, and the begin and end of the indices along it.
Slice = Tuple[int, int, int]
#: A tensor to load: its name, slices of some axes, and the type to cast to or "".
Request = Tuple[str, List[Slice], str]


class DeviceTensor:
    """A loaded tensor in GPU or host memory, which framework='dlpack' gives: for `cupy.from_dlpack(tensor)`,
    `jax.dlpack.from_dlpack(tensor)` or `tensor.torch()`. The memory is freed when this tensor and everything made of it
    are gone, after the work that is then enqueued on every stream that a consumer named. These streams must live until
    then: CuPy destroys a stream with its `cupy.cuda.Stream` object."""

    __slots__ = ("_tensor", "__weakref__")

    def __init__(self, tensor: _native.DeviceTensor) -> None:
        self._tensor = tensor

    @property
    def name(self) -> str:
        """The name in the file."""
        return self._tensor.name

    @property
    def shape(self) -> Tuple[int, ...]:
        """The lengths of the axes, in elements."""
        return self._tensor.shape

    @property
    def dtype(self) -> Any:
        """The type of the elements, as numpy has it."""
        return numpy_type(self._tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._tensor.nbytes

    @property
    def device(self) -> str:
        """'host' or 'cuda:N'."""
        return self._tensor.device

    def __repr__(self) -> str:
        return f"<pinflow.DeviceTensor {self.name!r} {self._tensor.dtype} {self.shape} on {self.device}>"

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self._tensor.dlpack_device()

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        """A DLPack capsule of the elements."""
        return self._tensor.export(stream, max_version, dl_device, copy)

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """A numpy array of the same memory, or a copy if `copy` is true or `dtype` differs. On the CPU only."""
        import numpy

        if self.device != "host":
            raise TypeError(f"numpy cannot read the tensor {self.name!r} on {self.device}: use .torch() or cupy.from_dlpack()")
        made = _numpy_of(self._tensor)
        if dtype is not None and made.dtype != dtype:
            if copy is False:
                raise ValueError(f"elements of {made.dtype} become {dtype} only by a copy")
            return made.astype(dtype)
        return numpy.array(made) if copy else made

    def torch(self) -> Any:
        """A PyTorch tensor of the same memory."""
        return importlib.import_module("torch").from_dlpack(self)


def load_file(filename: PathLike, device: Any = "cpu", *, names: Optional[Iterable[str]] = None, dtype: Any = None,
              framework: Optional[str] = None, route: str = "auto", threads: int = 0,
              progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Loads the tensors of one file: see `load_files`. Takes the place of safetensors.torch.load_file."""
    return load_files([filename], device, names=names, dtype=dtype, framework=framework, route=route, threads=threads,
                      progress=progress, report=report)


def load_files(filenames: Iterable[PathLike], device: Any = "cpu", *, names: Optional[Iterable[str]] = None,
               dtype: Any = None, framework: Optional[str] = None, route: str = "auto", threads: int = 0,
               progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Loads the tensors of safetensors, .npz, .npy and HDF5 files, and waits until they are complete.

    On a GPU, the memory of PyTorch tensors comes from PyTorch's allocator. Tensors of 1 MiB and more are PyTorch's own.
    Smaller ones share blocks of up to 32 MiB: `record_stream` has no effect on them, and their storage cannot be
    resized. If another stream uses a small tensor, keep it until that work is done, or clone it. On the CPU, aligned
    tensors in C order that need no decoding and no cast are private mappings of the file, if at least 64 KiB of it are
    loaded without being gathered, decoded or cast. Writing to a tensor never changes its file. If the file is written
    to, a mapped tensor may change. If it is truncated, reading the lost part ends the process (SIGBUS). Do not
    overwrite a file while tensors are mapped from it: numpy.save and h5py write in place. `save_file` is safe: it
    writes a new file, and then replaces the old one.

    Without `names`, one tensor that cannot be loaded makes the call fail: Python objects, variable-length strings,
    members of a .npz file that are no arrays, the types F4 and F6 of safetensors, and as PyTorch tensors also strings,
    dates, structured types and other types that PyTorch lacks. Select the others by `names`: `pinflow.list` gives those
    that cannot be loaded the dtype None. All datasets of an HDF5 file are listed first, which takes 50 us each. Exception: it
    is the only file, `names` is the name of one dataset, and no other link leads to a group on its path.

    Links to one HDF5 dataset share memory: writing to one changes the other. The CRC-32 of uncompressed .npz
    members is not checked.

    Args:
        filenames: the files. No two may have a tensor of the same name. The array of a .npy file has the
            name of the file without .npy.
        device: 'host' or 'cpu', 'cuda', 'cuda:N', the number of a GPU, or a torch.device.
        names: names or shell patterns of the tensors to load, in any order; all if not given. A name that a tensor has
            is no pattern.
        dtype: the type that float16, bfloat16, float32 and float64 tensors are cast to, rounded once (PyTorch rounds
            float64 to float32 first). Others keep their type.
        framework: 'pt' for PyTorch tensors; 'np' for numpy arrays, on the CPU only (bfloat16 and 8-bit floats are opaque
            bytes if ml_dtypes cannot be imported); 'dlpack' for `DeviceTensor`. By
            default 'pt' if PyTorch can be imported, otherwise 'np' on the CPU and 'dlpack' on a GPU.
        route: to a GPU: 'auto'; 'copy' (from page-locked pages of the files), 'staged' (through buffers), or 'both'.
        threads: CPU threads that read; 0 chooses.
        progress: called with the bytes done and all bytes, at most ten times a second, and once more at the
            end. What it raises ends the load.
        report: a dict that gets what the load did: bytes, copied_bytes (by the copy engine from pages of the files),
            staged_bytes (through buffers), mapped_bytes (on the CPU), threads, seconds, and the reason for the route.

    Returns:
        the tensors by name, in the order of the files and of their data.

    Raises:
        NotFound, FormatError: as `open`. DataChanged: a file has changed since it was opened. A safetensors file may be
            replaced meanwhile (see safe_open).
        InvalidArgument: two tensors have one name, or a name or pattern selects none.
        Unsupported: the framework has no such type, or the route 'copy' cannot be taken.
        SystemFailure: a read has failed, or host memory is short.
        DeviceError, or PyTorch's OutOfMemoryError: device memory is short.
    """
    if isinstance(filenames, (str, bytes, os.PathLike)):
        raise InvalidArgument("load_files takes a list of files; load_file takes one")
    paths = path_texts(filenames)
    spelling = "" if dtype is None else float_spelling(dtype)
    chosen = None if names is None else _names_of(names)
    return load_with(functools.partial(_native.load_all, paths, chosen, spelling), device, framework, route, threads,
                     progress, report)


def path_texts(paths: Iterable[PathLike]) -> List[str]:
    """The paths of files, as texts.

    Raises:
        InvalidArgument: it is no list of paths.
    """
    if isinstance(paths, (dict, io.IOBase)) or not hasattr(paths, "__iter__"):
        raise InvalidArgument(f"files are given by a path or a list of paths, not {type(paths).__name__}")
    return [path_text(each) for each in paths]


def is_name(name: Any) -> bool:
    """Whether a tensor can have this name."""
    return isinstance(name, str) and is_encodable(name)


def _names_of(names: Iterable[str]) -> List[str]:
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        raise InvalidArgument(f"names is a list of names and patterns, not {type(names).__name__}")
    listed = builtins.list(names)
    for each in listed:
        if not is_name(each):
            raise InvalidArgument(f"names is a list of names and patterns, not of {shown(each)}")
    return listed


def load_with(load: Callable[..., Any], device: Any, framework: Optional[str], route: str = "auto", threads: int = 0,
              progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Calls a load function of `_native`, and makes the tensors of a framework of the result."""
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 <= threads < 1 << 16:
        raise InvalidArgument(f"threads must be a whole number from 0 to 65535, not {shown(threads)}")
    if not isinstance(route, str):
        raise InvalidArgument(f"a route is auto, copy, staged or both, not {shown(route)}")
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress must be a function of (bytes done, all bytes), not {type(progress).__name__}")
    if report is not None and not isinstance(report, dict):
        raise InvalidArgument(f"report is a dict that receives facts about the load, not {type(report).__name__}")
    where = load_device_name(device)
    return deliver(load, where, framework_of(framework, where), route, threads, progress, report)


def deliver(load: Callable[..., Any], where: str, kind: str, route: str = "auto", threads: int = 0,
            progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """As load_with, for checked arguments: `where` is pinflow's name of the device, `kind` a result of framework_of."""
    loaded: Dict[str, Any] = {}
    if kind != "pt":
        made, tensors, facts = load(where, route, threads, False, None, progress)
        for name, tensor in zip(made, tensors):
            loaded[name] = _numpy_of(tensor) if kind == "np" else DeviceTensor(tensor)
    else:
        torch: Any = importlib.import_module("torch")
        allocate = None if where == "host" else _torch_allocator(torch, where)
        made, capsules, facts = load(where, route, threads, True, allocate, progress)
        from_dlpack = torch.utils.dlpack.from_dlpack
        for name, capsule in zip(made, capsules):
            if type(capsule) is tuple:
                loaded[name] = _torch_tensor(torch, where, name, *capsule)
            else:
                loaded[name] = from_dlpack(capsule)
    if report is not None:
        report.update(facts)
    return loaded


def _torch_tensor(torch: Any, where: str, name: str, memory: Any, spelling: str, shape: Optional[Tuple[int, ...]]) -> Any:
    """Makes a PyTorch tensor of a tuple that a load function of `_native` returns for it."""
    dtype = torch_type(torch, spelling, name)
    if shape is None:  # a capsule of bytes
        return torch.utils.dlpack.from_dlpack(memory).view(dtype)
    device = "cpu" if where == "host" else where
    if memory is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(memory.untyped_storage(), 0, shape)


def _numpy_of(tensor: _native.DeviceTensor) -> Any:
    import numpy

    dtype = numpy_type(tensor.dtype)
    if tensor.nbytes == 0:
        return numpy.empty(tensor.shape, dtype)
    interface = {"version": 3, "typestr": "|u1", "shape": (tensor.nbytes,), "data": (tensor.address, False)}
    return numpy.asarray(Interface(interface, tensor)).view(dtype).reshape(tensor.shape)


def _torch_allocator(torch: Any, device: str) -> Callable[[int], Tuple[Any, int, int]]:
    """Allocates bytes with PyTorch, for the load functions of `_native`."""
    where = torch.device(device)

    def allocate(nbytes: int) -> Tuple[Any, int, int]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=where)
        return memory, memory.data_ptr(), consumer_stream(None, where.index)[0] or 1

    return allocate


def framework_of(wanted: Optional[str], device: str) -> str:
    """'pt', 'np' or 'dlpack'."""
    if wanted is None:
        if "torch" in sys.modules:
            has_torch = sys.modules["torch"] is not None  # None: its import is blocked
        else:
            has_torch = importlib.util.find_spec("torch") is not None
        if has_torch:
            return "pt"
        return "np" if device == "host" else "dlpack"
    known = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np", "dlpack": "dlpack"}
    if not isinstance(wanted, str) or wanted not in known:
        raise InvalidArgument(f"framework is 'pt', 'np' or 'dlpack', not {shown(wanted)}")
    if known[wanted] == "np" and device != "host":
        raise InvalidArgument(f"numpy arrays lie in host memory, not on {device}: load to 'cpu', or with framework='dlpack'")
    return known[wanted]
