"""Loading tensors into memory of the caller."""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from . import _native
from ._arrays import PathLike
from ._elements import numpy_type, spelling_of
from ._errors import InvalidArgument, shown
from ._load import Progress, Request, is_name, load_with, path_texts
from ._readable import check_readable
from ._tensor_types import FLOATS, SPELLINGS, address_of, check_dense, note_changes


class _Destination(NamedTuple):
    """Memory of the caller."""

    spelling: str
    shape: Tuple[int, ...]
    address: int
    device: str


def load_into(filenames: Union[PathLike, Sequence[PathLike]], tensors: Mapping[str, Any], *, route: str = "auto",
              threads: int = 0, progress: Optional[Progress] = None, report: Optional[Dict[str, Any]] = None) -> None:
    """Fills tensors that exist with those of the same names in files, and waits until they are complete:

        pinflow.load_into("model.safetensors", model.state_dict())

    The tensors themselves are not allocated. Tensors of the files without a destination are not loaded. On a GPU, the call
    first waits for the work on PyTorch's current stream. Destinations must not be resized meanwhile.

    Args:
        filenames: a file or a list of files, as for `load_files`.
        tensors: the destinations by name: contiguous PyTorch tensors or numpy arrays, all on one device, of the shapes in
            the files. Floating-point numbers are cast to the type of the destination. Destinations of the same memory,
            shape and type, such as tied weights, are filled once: with the first of their names that the files have. A
            PyTorch tensor in read-only memory is not noticed, and may end the process. So may one that is mapped from a
            file, if the disk is full, or the file is truncated meanwhile.
        route, threads, progress, report: as for `load_files`.

    Raises:
        InvalidArgument: a destination has another shape or type than its tensor, is a numpy array that is read-only,
            overlaps with another one, or has no tensor in the files. DataChanged: the last element of a destination is
            mapped from a file that has been truncated. Nothing has been written then.
        All others as `load_files`: destinations may have been written to, in part or as a whole.
    """
    paths = path_texts([filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else filenames)
    if not hasattr(tensors, "items"):
        advice = ": pass its state_dict()" if hasattr(tensors, "state_dict") else ""
        raise InvalidArgument(f"load_into takes destinations by name, a dict, not {type(tensors).__name__}{advice}")
    kept = list(tensors.items())  # until the load has ended
    files = _native.tensor_files(paths)
    stored = {name: (spelling, tuple(shape)) for name, spelling, shape, *_ in files.tensors()}
    requests: List[Request] = []
    addresses: List[int] = []
    devices: Dict[str, str] = {}
    filled: Set[_Destination] = set()
    missing: Dict[str, _Destination] = {}
    for name, tensor in kept:
        destination = _destination_of(name, tensor)
        devices.setdefault(destination.device, name)
        if name not in stored:
            missing[name] = destination
            continue
        spelling, shape = stored[name]
        if shape != destination.shape:
            raise InvalidArgument(f"the tensor {name!r} has the shape {shape}, and its destination {destination.shape}")
        if spelling != destination.spelling and not (spelling in FLOATS and destination.spelling in FLOATS):
            raise InvalidArgument(f"the tensor {name!r} has elements of {spelling}, and its destination of "
                                  f"{destination.spelling}: only little-endian floating-point numbers are cast")
        if 0 in shape or destination in filled:
            continue
        if destination.device == "host":
            size = numpy_type(destination.spelling).itemsize
            end = destination.address + math.prod(shape) * size
            check_readable(f"the destination {name!r}", end - size, (1,), (size,), size)
        filled.add(destination)
        requests.append((name, [], "" if spelling == destination.spelling else destination.spelling))
        addresses.append(destination.address)
    unmatched = [name for name, destination in missing.items() if destination not in filled]
    if len(unmatched) > 1 and len(unmatched) == len(kept):
        others = f": they have {shown(next(iter(stored)))}, for example" if stored else ""
        raise InvalidArgument(f"none of the {len(kept)} destinations, such as {unmatched[0]!r}, has a tensor of its name in "
                              f"the files{others}")
    for name in unmatched:
        files.check(name)  # says why it cannot be loaded
    if len(devices) > 1:
        (one, first), (other, second) = list(devices.items())[:2]
        raise InvalidArgument(f"the tensor {first!r} is on {one} and {second!r} on {other}; load_into takes one device")
    device = next(iter(devices), "host")
    torch: Any = sys.modules.get("torch")
    if device != "host":
        torch.cuda.current_stream(int(device.split(":")[1])).synchronize()
    if torch is not None:
        note_changes(torch, [each for _, each in kept if isinstance(each, torch.Tensor)])
    load_with(functools.partial(files.load, requests, destinations=addresses), device, "dlpack", route, threads, progress,
              report)


def _destination_of(name: Any, tensor: Any) -> _Destination:
    torch: Any = sys.modules.get("torch")
    if not is_name(name):
        raise InvalidArgument(f"destinations are given by name, a str in valid Unicode, not by {shown(name)}")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _destination_of_torch(torch, name, tensor)
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
    return _Destination(spelling, tensor.shape, tensor.ctypes.data, "host")


def _destination_of_torch(torch: Any, name: str, tensor: Any) -> _Destination:
    check_dense(torch, f"the destination {name!r}", tensor, "filled")
    address = address_of(f"the destination {name!r}", tensor, "pass")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        what = "not contiguous" if not tensor.is_contiguous() else "a conjugate or negative view"
        raise InvalidArgument(f"the destination {name!r} is {what}")
    spelling = SPELLINGS.get(str(tensor.dtype)[len("torch."):])
    if spelling is None:
        raise InvalidArgument(f"the destination {name!r} has elements of {tensor.dtype}, which pinflow cannot load")
    device = "host" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
    return _Destination(spelling, tuple(tensor.shape), address, device)
