"""Loading tensors into memory of the caller."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from . import _native
from ._arrays import PathLike, spelling_of
from ._errors import InvalidArgument, shown
from ._load import Progress, is_name, load_with, path_texts
from ._tensor_types import FLOATS, SPELLINGS


class _Place(NamedTuple):
    """Memory of the caller."""

    spelling: str
    shape: Tuple[int, ...]
    address: int
    device: str


def load_into(filenames: Union[PathLike, Sequence[PathLike]], tensors: Mapping[str, Any], *, route: str = "auto",
              threads: int = 0, progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> None:
    """Fills tensors that exist with those of the same names in files, and waits until they are complete:

        pinflow.load_into("model.safetensors", model.state_dict())

    No memory is allocated for whole tensors. Those of the files that have no destination are not loaded. On a GPU, work on
    PyTorch's current stream is waited for before anything is written. Destinations must not be resized meanwhile.

    Args:
        filenames: a file or a list of files, as for `load_files`.
        tensors: the destinations by name: contiguous PyTorch tensors or numpy arrays in writable memory, all on one device,
            of the shapes in the files. Floating-point numbers are cast to the type of the destination. Destinations may
            share all of their memory, as tied weights do: the first of their names that the files have is loaded.
        route, threads, progress, report: as for `load_files`.

    Raises:
        InvalidArgument: a destination has another shape or type than its tensor, cannot be written to, overlaps with
            another one, or has no tensor in the files. Nothing has been written then.
        All others as `load_files`: destinations may have been written to, in part or as a whole.
    """
    paths = path_texts([filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else filenames)
    if not hasattr(tensors, "items"):
        advice = ": pass its state_dict()" if hasattr(tensors, "state_dict") else ""
        raise InvalidArgument(f"load_into takes destinations by name, a dict, not {type(tensors).__name__}{advice}")
    kept = list(tensors.items())  # until the load has ended
    files = _native.tensor_files(paths)
    stored = {name: (spelling, tuple(shape)) for name, spelling, shape, _ in files.tensors()}
    requests: List[Tuple[str, int, int, int, str]] = []
    addresses: List[int] = []
    devices: Dict[str, str] = {}
    filled: Set[_Place] = set()
    missing: Dict[str, _Place] = {}
    for name, tensor in kept:
        place = _place_of(name, tensor)
        devices.setdefault(place.device, name)
        if name not in stored:
            missing[name] = place
            continue
        spelling, shape = stored[name]
        if shape != place.shape:
            raise InvalidArgument(f"the tensor {name!r} has the shape {shape}, and its destination {place.shape}")
        if spelling != place.spelling and not (spelling in FLOATS and place.spelling in FLOATS):
            raise InvalidArgument(f"the tensor {name!r} has elements of {spelling}, and its destination {place.spelling}: only "
                                  "little-endian floating-point numbers are cast")
        if place in filled:
            continue
        filled.add(place)
        if 0 not in shape:
            requests.append((name, -1, 0, 0, "" if spelling == place.spelling else place.spelling))
            addresses.append(place.address)
    lacking = [name for name, place in missing.items() if place not in filled]
    if len(lacking) > 1 and len(lacking) == len(kept):
        raise InvalidArgument(f"none of the {len(kept)} destinations, such as {lacking[0]!r}, has a tensor of its name in the "
                              f"files, which have {len(stored)}, such as {shown(next(iter(stored), None))}")
    for name in lacking:
        files.check(name)  # says why it cannot be loaded
    if len(devices) > 1:
        (one, first), (other, second) = list(devices.items())[:2]
        raise InvalidArgument(f"the tensor {first!r} is on {one} and {second!r} on {other}; load_into takes one device")
    device = next(iter(devices), "host")
    torch: Any = sys.modules.get("torch")
    if device != "host":
        torch.cuda.current_stream(int(device.split(":")[1])).synchronize()
    if torch is not None:
        _note_changes(torch, [each for _, each in kept if isinstance(each, torch.Tensor)])
    load_with(functools.partial(files.load, requests, destinations=addresses), device, "dlpack", route, threads, progress,
              report)


def _note_changes(torch: Any, tensors: List[Any]) -> None:
    """Tells autograd that tensors change, so that it does not use them as if they were those that it saved."""
    increment = getattr(importlib.import_module("torch.autograd.graph"), "increment_version", None)
    for each in tensors:
        if increment is not None and not each.is_inference():
            increment(each)


def _place_of(name: Any, tensor: Any) -> _Place:
    torch: Any = sys.modules.get("torch")
    if not is_name(name):
        raise InvalidArgument(f"destinations are given by name, a str in valid Unicode, not by {shown(name)}")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _place_of_torch(torch, name, tensor)
    import numpy

    if not isinstance(tensor, numpy.ndarray):
        raise InvalidArgument(f"the destination {name!r} is no PyTorch tensor or numpy array, but {type(tensor).__name__}")
    if isinstance(tensor, numpy.ma.MaskedArray) or tensor.dtype.hasobject:
        what = "is a masked array" if isinstance(tensor, numpy.ma.MaskedArray) else "holds Python objects"
        raise InvalidArgument(f"the destination {name!r} {what}")
    if not tensor.flags.c_contiguous or not tensor.flags.writeable:
        what = "contiguous" if tensor.flags.writeable else "writable"
        raise InvalidArgument(f"the destination {name!r} is not {what}")
    is_record = tensor.dtype.names is not None
    spelling = str(tensor.dtype.descr) if is_record else spelling_of(tensor.dtype)
    return _Place(spelling, tensor.shape, tensor.ctypes.data, "host")


def _place_of_torch(torch: Any, name: str, tensor: Any) -> _Place:
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgument(f"the destination {name!r} is uninitialized")
    if tensor.is_nested:
        raise InvalidArgument(f"the destination {name!r} is nested: only dense tensors can be filled")
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
        raise InvalidArgument(f"the destination {name!r} is a {type(tensor).__name__} without memory of its own; "
                              "for a DTensor, pass what to_local() gives")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        what = "not contiguous" if not tensor.is_contiguous() else "a conjugate or negative view"
        raise InvalidArgument(f"the destination {name!r} is {what}")
    spelling = SPELLINGS.get(str(tensor.dtype)[len("torch."):])
    if spelling is None:
        raise InvalidArgument(f"the destination {name!r} has elements of {tensor.dtype}, which pinflow cannot load")
    device = "host" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
    return _Place(spelling, tuple(tensor.shape), address, device)
