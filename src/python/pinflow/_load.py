"""Loading the tensors of whole models, and saving them."""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import os
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

from . import _native
from ._arrays import Interface, PathLike, bytes_of, elements_of, numpy_type, spelling_of
from ._errors import InvalidArgument, Unsupported
from ._streams import consumer_stream

Progress = Callable[[int, int], None]

#: A tensor to load: its name, the axis of a slice or -1, its begin and end, and the type to cast to or "".
_Request = Tuple[str, int, int, int, str]

#: How the library spells the types of PyTorch.
_TORCH_TYPES = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "bfloat16": "bfloat16",
    "<c8": "complex64", "<c16": "complex128", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}
_SPELLINGS = {name: spelling for spelling, name in _TORCH_TYPES.items()}
#: The names of types in safetensors files.
_FORMAT_NAMES = {
    "|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32", "<i8": "I64",
    "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "bfloat16": "BF16", "<c8": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}


class LoadedTensors(Dict[str, Any]):
    """Tensors by name, and `report`: bytes, copied_bytes (by the copy engine from pages of the files), staged_bytes
    (through buffers), mapped_bytes (on the CPU), threads, seconds, and the reason for the route."""

    report: Dict[str, Any]


class DeviceTensor:
    """A loaded tensor in GPU or host memory, which framework='dlpack' gives: for `cupy.from_dlpack(tensor)`,
    `jax.dlpack.from_dlpack(tensor)` or `tensor.torch()`. The memory is freed when this tensor and everything made of it
    are gone, after the work that is then enqueued on every stream that a consumer named."""

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

    def torch(self) -> Any:
        """A PyTorch tensor of the same memory."""
        return importlib.import_module("torch").from_dlpack(self)


def load_file(filename: PathLike, device: Any = "cpu", *, names: Optional[Sequence[str]] = None, dtype: Any = None,
              framework: Optional[str] = None, route: str = "auto", threads: int = 0,
              progress: Optional[Progress] = None) -> LoadedTensors:
    """Loads the tensors of one file: see `load_files`. Takes the place of safetensors.torch.load_file."""
    return load_files([filename], device, names=names, dtype=dtype, framework=framework, route=route, threads=threads,
                      progress=progress)


def load_files(filenames: Iterable[PathLike], device: Any = "cpu", *, names: Optional[Sequence[str]] = None,
               dtype: Any = None, framework: Optional[str] = None, route: str = "auto", threads: int = 0,
               progress: Optional[Progress] = None) -> LoadedTensors:
    """Loads the tensors of safetensors, .npz, .npy and HDF5 files, and waits until they are complete.

    On a GPU, the memory of PyTorch tensors comes from PyTorch's allocator; tensors of less than 1 MiB share blocks of
    up to 32 MiB. On the CPU, aligned tensors in C order that need no decoding and no cast are private mappings of the
    file, if at least 1 MiB of it is loaded without being gathered, decoded or cast. Writing to a tensor never changes
    its file. If the file is written to, a mapped tensor may change. If it is truncated, reading the lost part ends the
    process (SIGBUS).

    Types that safetensors has and pinflow lacks (F4, F6, F8_E8M0, F8_*FNUZ) are refused: select the other tensors
    by `names`.

    Args:
        filenames: the files. No two may have a tensor of the same name. The array of a .npy file has the
            name of the file without .npy.
        device: 'cpu', 'cuda', 'cuda:N', a number of a GPU, or a torch.device.
        names: names or shell patterns of the tensors to load; all if not given.
        dtype: the type that float16, bfloat16, float32 and float64 tensors are cast to. Others keep their type.
        framework: 'pt' for PyTorch tensors; 'np' for numpy arrays, on the CPU only (bfloat16 and 8-bit floats are opaque
            bytes if ml_dtypes cannot be imported); 'dlpack' for `DeviceTensor`. By
            default 'pt' if PyTorch can be imported, otherwise 'np' on the CPU and 'dlpack' on a GPU.
        route: 'auto'; 'copy' (from page-locked pages of the files), 'staged' (through buffers), or 'both'.
        threads: CPU threads that read; 0 chooses.
        progress: called with the bytes done and all bytes, at most ten times a second, and once more at the
            end. What it raises ends the load.

    Raises:
        NotFound, FormatError: as `open`. DataChanged: a file has changed since it was opened.
        InvalidArgument: two tensors have one name, or a name or pattern selects none.
        Unsupported: the framework has no such type, or the route 'copy' cannot be taken.
        SystemFailure: a read has failed, or host memory is short.
        DeviceError, or PyTorch's OutOfMemoryError: device memory is short.
    """
    if isinstance(filenames, (str, bytes, os.PathLike)):
        raise InvalidArgument("load_files takes a list of files; load_file takes one")
    if names is not None and (isinstance(names, str) or not all(isinstance(each, str) for each in names)):
        raise InvalidArgument("names is a list of names and patterns")
    paths = [_path_text(each) for each in filenames]
    spelling = "" if dtype is None else _type_spelling(dtype)
    chosen = None if names is None else builtins.list(names)
    return _load(functools.partial(_native.load_all, paths, chosen, spelling), device, framework, route, threads, progress)


def _open(filenames: Iterable[PathLike]) -> _native.TensorFiles:
    return _native.tensor_files([_path_text(each) for each in filenames])


def _path_text(path: PathLike) -> str:
    text = os.fsdecode(path)
    if "\0" in text:
        raise InvalidArgument(f"a path has no NUL character, and {ascii(text)} has one")
    return text


def _load(load: Callable[..., Any], device: Any, framework: Optional[str], route: str = "auto", threads: int = 0,
          progress: Optional[Progress] = None) -> LoadedTensors:
    """Calls a load function of `_native`, and makes the tensors of a framework of the result."""
    if not isinstance(threads, int) or not 0 <= threads < 1 << 16:
        raise InvalidArgument(f"threads must be a whole number from 0 to 65535, not {threads!r}")
    where = _device_name(device)
    kind = _framework(framework, where)
    loaded = LoadedTensors()
    if kind != "pt":
        made, tensors, loaded.report = load(where, route, threads, False, None, progress)
        for name, tensor in zip(made, tensors):
            loaded[name] = _numpy_of(tensor) if kind == "np" else DeviceTensor(tensor)
        return loaded
    torch: Any = importlib.import_module("torch")
    allocate = None if where == "host" else _torch_allocator(torch, where)
    made, capsules, loaded.report = load(where, route, threads, True, allocate, progress)
    from_dlpack = torch.utils.dlpack.from_dlpack
    for name, capsule in zip(made, capsules):
        if type(capsule) is tuple:  # without elements
            spelling, shape = capsule
            loaded[name] = torch.empty(shape, dtype=_torch_type(torch, spelling, name),
                                       device="cpu" if where == "host" else where)
        else:
            loaded[name] = from_dlpack(capsule)
    return loaded


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
        memory = torch.empty((nbytes + 255) // 256 * 256, dtype=torch.uint8, device=where)
        return memory, memory.data_ptr(), consumer_stream(None, where.index)[0] or 1

    return allocate


def _device_name(device: Any) -> str:
    """How the library calls a device."""
    if isinstance(device, int):
        return f"cuda:{device}"
    text = str(device)
    if text in ("cpu", "host"):
        return "host"
    if text == "cuda":
        torch: Any = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device()}" if torch is not None and torch.cuda.is_initialized() else "cuda:0"
    return text


def _framework(wanted: Optional[str], device: str) -> str:
    if wanted is None:
        if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
            return "pt"
        return "np" if device == "host" else "dlpack"
    known = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np", "dlpack": "dlpack"}
    if wanted not in known:
        raise InvalidArgument(f"framework is 'pt', 'np' or 'dlpack', not {wanted!r}")
    if known[wanted] == "np" and device != "host":
        raise InvalidArgument(f"numpy arrays lie in host memory, not on {device}: load to 'cpu', or with framework='dlpack'")
    return known[wanted]


def _torch_type(torch: Any, spelling: str, name: str) -> Any:
    found = getattr(torch, _TORCH_TYPES.get(spelling, ""), None)
    if found is None:
        raise Unsupported(f"the tensor {name!r} has elements of {spelling}, which this PyTorch lacks")
    return found


def _type_spelling(dtype: Any) -> str:
    """How the library spells a type of floating-point numbers, of PyTorch, numpy or safetensors.

    Raises:
        InvalidArgument: it is another type.
    """
    text = str(dtype)
    formats = {name: spelling for spelling, name in _FORMAT_NAMES.items()}
    if text.startswith("torch."):
        spelling = _SPELLINGS.get(text[len("torch."):], text)
    else:
        spelling = formats.get(text) or spelling_of(dtype)
    if spelling not in ("<f2", "<f4", "<f8", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        raise InvalidArgument(f"dtype is a type of floating-point numbers, not {text}")
    return spelling


class TensorSlice:
    """A tensor of a file of which parts are loaded: `part[:, 10:20]`. Made by `safe_open.get_slice`."""

    def __init__(self, opened: safe_open, name: str) -> None:
        self._opened = opened
        self._name = name

    def get_shape(self) -> List[int]:
        """The lengths of the axes of the whole tensor."""
        return builtins.list(self._opened._shape(self._name))

    def get_dtype(self) -> str:
        """The type as safetensors files name it, such as 'BF16'."""
        spelling = self._opened._types[self._name]
        return _FORMAT_NAMES.get(spelling, spelling)

    def __getitem__(self, key: Any) -> Any:
        """The elements that `key` selects. Of the first axis that a number or a slice of step 1 restricts, only the needed
        range is read. All other axes are read whole, and indexed afterwards. With any other key, such as None, a list
        or a mask, the whole tensor is read."""
        request, rest = self._request_of(key)
        if self._opened._framework != "dlpack":
            return self._opened._load(request)[rest]
        if not all(isinstance(each, slice) and each == slice(None) for each in rest):
            raise Unsupported("with framework='dlpack', a part is one slice of step 1 along one axis: index the tensor "
                              "that another library makes of it")
        return self._opened._load(request)

    def _request_of(self, key: Any) -> Tuple[_Request, Tuple[Any, ...]]:
        """What is loaded, and the index into it that remains."""
        keys = key if isinstance(key, tuple) else (key,)
        whole: _Request = (self._name, -1, 0, 0, "")
        # other keys, such as None and masks, take no axis or several
        if not all(each is Ellipsis or isinstance(each, (int, slice)) and not isinstance(each, bool) for each in keys):
            return whole, keys
        shape = self._opened._shape(self._name)
        dots = [at for at, each in enumerate(keys) if each is Ellipsis]
        if len(dots) > 1:
            raise IndexError("an index has one Ellipsis at most")
        if dots:
            keys = (*keys[:dots[0]], *(slice(None),) * (len(shape) - len(keys) + 1), *keys[dots[0] + 1:])
        if len(keys) > len(shape):
            raise IndexError(f"{len(keys)} indices for a tensor of {len(shape)} axes")
        parts = [_part_of(each, shape[axis]) for axis, each in enumerate(keys)]
        rest = [part[2] if part[:2] == (0, length) else each for part, each, length in zip(parts, keys, shape)]
        for axis, (begin, end, inside) in enumerate(parts):
            if (begin, end) != (0, shape[axis]):
                rest[axis] = inside
                return (self._name, axis, begin, end, ""), tuple(rest)
        return whole, tuple(rest)


def _part_of(key: Any, length: int) -> Tuple[int, int, Any]:
    """The range (begin, end) along an axis that contains what `key` selects, and the key that selects it within this
    range."""
    if isinstance(key, slice) and key.step in (None, 1):
        begin, end, _ = key.indices(length)
        return begin, max(begin, end), slice(None)
    if isinstance(key, int) and not isinstance(key, bool):
        index = key + length if key < 0 else key
        if not 0 <= index < length:
            raise IndexError(f"index {key} is out of range for an axis of length {length}")
        return index, index + 1, 0
    return 0, length, key


class safe_open:  # named as in safetensors, whose place it takes
    """Opens a file, or several, by their headers; tensors are loaded one by one, or in part.

        with pinflow.safe_open("model.safetensors", framework="pt", device="cuda:0") as model:
            for name in model.keys():
                weight = model.get_tensor(name)
    """

    def __init__(self, filename: Union[PathLike, Sequence[PathLike]], framework: Optional[str] = None,
                 device: Any = "cpu") -> None:
        several = not isinstance(filename, (str, bytes, os.PathLike))
        self._native = _open(filename if several else [filename])  # type: ignore[arg-type, list-item]
        listed = self._native.tensors()
        self._types: Dict[str, str] = {name: spelling for name, spelling, _, _ in listed}
        self._shapes: Dict[str, Tuple[int, ...]] = {name: shape for name, _, shape, _ in listed}
        self._framework = _framework(framework, _device_name(device))
        self._device = device

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> List[str]:
        """The names of the tensors that can be loaded, sorted. `get_tensor` says why another one cannot."""
        return sorted(self._types)

    def offset_keys(self) -> List[str]:
        """The same names, file by file; of a safetensors file in the order of their data."""
        return builtins.list(self._types)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def metadata(self) -> Optional[Dict[str, str]]:
        """The text metadata of the safetensors files; None if there is none. Of equal keys, the first file's counts."""
        return self._native.metadata() or None

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor."""
        self._shape(name)
        return self._load((name, -1, 0, 0, ""))

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts are loaded by indexing."""
        self._shape(name)
        return TensorSlice(self, name)

    def get_slices(self, slices: Dict[str, Tuple[int, int, int]]) -> LoadedTensors:
        """Loads parts of several tensors together, which is faster than one by one: for each name an axis, and the
        indices begin and end along it. What a rank of tensor parallelism needs."""
        requests: List[_Request] = []
        for name, (axis, begin, end) in slices.items():
            shape = self._shape(name)
            if not (0 <= axis < len(shape) and 0 <= begin <= end <= shape[axis]):
                raise InvalidArgument(f"the tensor {name!r} of shape {shape} has no indices {begin} to {end} on axis {axis}")
            requests.append((name, axis, begin, end, ""))
        return _load(functools.partial(self._native.load, requests), self._device, self._framework)

    def _shape(self, name: str) -> Tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            self._native.check(name)  # says why
            raise InvalidArgument(f"there is no tensor {name!r}")
        return shape

    def _load(self, request: _Request) -> Any:
        return _load(functools.partial(self._native.load, [request]), self._device, self._framework)[request[0]]


def save_file(tensors: Dict[str, Any], filename: PathLike, metadata: Optional[Dict[str, str]] = None) -> None:
    """Writes tensors to a safetensors file, which appears under its name complete or not at all, and is durable then.
    Takes the place of safetensors.torch.save_file. Tensors of a GPU pass through 32 MiB of host memory.

    Args:
        tensors: PyTorch tensors, DeviceTensors or numpy arrays, all on one device. Those that are not contiguous are
            copied first.
        metadata: texts by name.

    Raises:
        InvalidArgument: tensors of several devices, or a type that the format lacks.
    """
    if not isinstance(tensors, dict):
        raise InvalidArgument(f"save_file takes tensors by name, a dict, not {type(tensors).__name__}")
    entries: List[Tuple[str, str, List[int], int]] = []
    kept: List[Any] = []
    devices: Dict[str, str] = {}
    for name, tensor in tensors.items():
        entry, owner, device = _entry_of(name, tensor)
        entries.append(entry)
        kept.append(owner)
        devices.setdefault(device, name)
    if len(devices) > 1:
        (one, first), (other, second) = builtins.list(devices.items())[:2]
        raise InvalidArgument(f"the tensor {first!r} is on {one} and {second!r} on {other}; save_file takes one device")
    device = next(iter(devices), "host")
    gpu = None if device == "host" else int(device.split(":")[1])
    texts = [(str(key), str(text)) for key, text in (metadata or {}).items()]
    # larger types first, so that every tensor begins at a multiple of its type's size
    entries.sort(key=lambda each: (-_item_size(each[1]), each[0]))
    _native.save_tensors(_path_text(filename), entries, texts, device, consumer_stream(None, gpu)[0])


def _entry_of(name: str, tensor: Any) -> Tuple[Tuple[str, str, List[int], int], Any, str]:
    """(name, type, shape, address), the owner of the memory, and the device."""
    torch: Any = sys.modules.get("torch")
    if not isinstance(name, str):
        raise InvalidArgument(f"the names of tensors are texts, not {name!r}")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"the tensor {name!r} is {tensor.layout} on {tensor.device}: only dense tensors on the CPU or "
                                  "a CUDA device can be saved")
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        spelling = _SPELLINGS.get(str(flat.dtype)[len("torch."):])
        if spelling is None:
            raise InvalidArgument(f"the tensor {name!r} has elements of {flat.dtype}, which cannot be saved")
        device = "host" if flat.device.type == "cpu" else f"cuda:{flat.device.index}"
        return (name, spelling, builtins.list(flat.shape), flat.data_ptr()), flat, device
    if isinstance(tensor, DeviceTensor):
        native = tensor._tensor
        return (name, native.dtype, builtins.list(native.shape), native.address), tensor, native.device
    import numpy

    array = elements_of(tensor)
    if array.dtype.hasobject:
        raise InvalidArgument(f"{name!r} is no tensor, but {type(tensor).__name__}")
    contiguous = numpy.ascontiguousarray(array).reshape(array.shape)
    if not contiguous.dtype.isnative:
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("="))
    flat = bytes_of(contiguous)
    return (name, spelling_of(contiguous.dtype), builtins.list(contiguous.shape), flat.ctypes.data), flat, "host"


def _item_size(spelling: str) -> int:
    return numpy_type(spelling).itemsize
