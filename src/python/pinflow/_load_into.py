"""Loading tensors into memory of the caller."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _native
from ._arrays import PathLike, spelling_of
from ._errors import InvalidArgument, shown
from ._load import Progress, load_with, path_texts
from ._tensor_types import FLOATS, SPELLINGS

#: Memory of the caller: its type, shape, address, size in bytes and device.
_Place = Tuple[str, Tuple[int, ...], int, int, str]


def load_into(filenames: Union[PathLike, Sequence[PathLike]], tensors: Mapping[str, Any], *, route: str = "auto",
              threads: int = 0, progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> None:
    """Fills tensors that exist with those of the same names in files, and waits until they are complete:

        pinflow.load_into("model.safetensors", model.state_dict())

    No memory is allocated for the tensors. Those of the files that have no destination are not loaded. On a GPU, work on
    PyTorch's current stream is waited for before anything is written.

    Args:
        filenames: a file or a list of files, as for `load_files`.
        tensors: the destinations by name: contiguous PyTorch tensors or numpy arrays, all on one device, of the shapes in
            the files. Floating-point numbers are cast to the type of the destination. If destinations with one memory
            have several names, as those of tied weights, the files need only one of these.
        route, threads, progress, report: as for `load_files`.

    Raises:
        InvalidArgument: a destination has another shape or type than its tensor, cannot be written to, overlaps with
            another one, or has no tensor in the files. Nothing has been written then.
        others: as `load_files`. Destinations may be half written then.
    """
    paths = path_texts([filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else filenames)
    if not hasattr(tensors, "items"):
        raise InvalidArgument(f"load_into takes destinations by name, a dict, not {type(tensors).__name__}")
    files = _native.tensor_files(paths)
    stored = {name: (spelling, tuple(shape)) for name, spelling, shape, _ in files.tensors()}
    requests: List[Tuple[str, int, int, int, str]] = []
    addresses: List[int] = []
    devices: Dict[str, str] = {}
    filled: Dict[Tuple[Any, ...], str] = {}
    missing: Dict[str, Tuple[Any, ...]] = {}
    for name, tensor in tensors.items():
        spelling, shape, address, nbytes, device = place = _place_of(name, tensor)
        devices.setdefault(device, name)
        if name not in stored:
            missing[name] = place
            continue
        of_file, stored_shape = stored[name]
        if stored_shape != shape:
            raise InvalidArgument(f"the tensor {name!r} has the shape {stored_shape}, and its destination {shape}")
        if of_file != spelling and not (of_file in FLOATS and spelling in FLOATS):
            raise InvalidArgument(f"the tensor {name!r} has elements of {of_file}, and its destination {spelling}: only "
                                  "floating-point numbers are cast")
        if nbytes == 0 or filled.setdefault(place, name) != name:
            continue
        requests.append((name, -1, 0, 0, "" if of_file == spelling else spelling))
        addresses.append(address)
    for name, place in missing.items():
        if place not in filled:
            files.check(name)  # says why it cannot be loaded
    if len(devices) > 1:
        (one, first), (other, second) = list(devices.items())[:2]
        raise InvalidArgument(f"the tensor {first!r} is on {one} and {second!r} on {other}; load_into takes one device")
    device = next(iter(devices), "host")
    torch: Any = sys.modules.get("torch")
    if device != "host":
        torch.cuda.current_stream(int(device.split(":")[1])).synchronize()
    load_with(functools.partial(files.load, requests, destinations=addresses), device, "dlpack", route, threads, progress,
              report)
    if torch is not None:  # autograd must notice that saved tensors have changed
        changed = [each for each in tensors.values() if isinstance(each, torch.Tensor) and not each.is_inference()]
        importlib.import_module("torch.autograd.graph").increment_version(changed)


def _place_of(name: Any, tensor: Any) -> _Place:
    torch: Any = sys.modules.get("torch")
    if not isinstance(name, str):
        raise InvalidArgument(f"destinations are given by name, not by {shown(name)}")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _place_of_torch(torch, name, tensor)
    import numpy

    if not isinstance(tensor, numpy.ndarray):
        raise InvalidArgument(f"the destination {name!r} is no PyTorch tensor or numpy array, but {type(tensor).__name__}")
    if isinstance(tensor, numpy.ma.MaskedArray):
        raise InvalidArgument(f"the destination {name!r} is a masked array")
    if not tensor.flags.c_contiguous or not tensor.flags.writeable:
        what = "contiguous" if tensor.flags.writeable else "writable"
        raise InvalidArgument(f"the destination {name!r} is not {what}")
    return spelling_of(tensor.dtype), tensor.shape, tensor.ctypes.data, tensor.nbytes, "host"


def _place_of_torch(torch: Any, name: str, tensor: Any) -> _Place:
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgument(f"the destination {name!r} is uninitialized")
    if tensor.device.type == "meta":
        raise InvalidArgument(f"the destination {name!r} is on the device meta: allocate it first, as Module.to_empty does")
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"the destination {name!r} is {tensor.layout} on {tensor.device}: only dense tensors on the CPU "
                              "or a CUDA device can be filled")
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and tensor.numel() != 0:
        raise InvalidArgument(f"the destination {name!r} is a {type(tensor).__name__} without memory of its own")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"the destination {name!r} is not contiguous")
    spelling = SPELLINGS.get(str(tensor.dtype)[len("torch."):])
    if spelling is None:
        raise InvalidArgument(f"the destination {name!r} has elements of {tensor.dtype}, which pinflow cannot load")
    device = "host" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
    return spelling, tuple(tensor.shape), address, tensor.numel() * tensor.element_size(), device
