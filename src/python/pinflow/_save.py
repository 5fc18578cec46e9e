"""Saving tensors."""

from __future__ import annotations

import builtins
import sys
from typing import Any, Dict, List, Optional, Tuple

from . import _native
from ._arrays import Array, PathLike, path_text
from ._elements import BEYOND_NUMPY, bytes_of, contiguous, elements_of, numpy_type, spelling_of
from ._errors import InvalidArgument, shown
from ._load import DeviceTensor, Progress
from ._readable import check_readable
from ._streams import consumer_stream
from ._tensor_types import FORMAT_NAMES, SPELLINGS, address_of, check_dense


def save_file(tensors: Dict[str, Any], filename: PathLike, metadata: Optional[Dict[str, str]] = None, *,
              progress: Optional[Progress] = None) -> None:
    """Writes tensors to a safetensors file, which appears under its name complete or not at all, and is durable then.
    A file or symbolic link of that name is replaced. Takes the place of safetensors.torch.save_file. Bytes on a GPU pass
    through 32 MiB of host memory.

    Args:
        tensors: PyTorch tensors, DeviceTensors or numpy arrays, all on one device. Those that are not contiguous are
            copied first. Tensors that share memory are each written in full.
        metadata: a dict of str to str.
        progress: called with the bytes written and all bytes, at most ten times a second, and at the end. If it raises,
            or on Ctrl-C, the save ends, and an existing file stays as it was.

    Raises:
        InvalidArgument: tensors of several devices, metadata that is no str, or a type that cannot be saved.
        DataChanged: a tensor is mapped from a file that was truncated. SystemFailure: the file cannot be written.
        DeviceError: the device has failed.
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
    texts = _texts_of({} if metadata is None else metadata)
    # larger types first, so that every tensor begins at a multiple of its type's size
    entries.sort(key=lambda each: (-_item_size(each[1]), each[0]))
    _native.save_tensors(path_text(filename), entries, texts, device, consumer_stream(None, gpu)[0],
                         progress)


def _texts_of(metadata: Any) -> List[Tuple[str, str]]:
    if not isinstance(metadata, dict):
        raise InvalidArgument(f"metadata is a dict of str to str, not a {type(metadata).__name__}")
    for text in (each for item in metadata.items() for each in item):
        if not isinstance(text, str) or not _is_unicode(text):
            raise InvalidArgument(f"metadata is a dict of str to str in valid Unicode, not of {shown(text)}")
    return builtins.list(metadata.items())


def _is_unicode(text: str) -> bool:
    """Whether the text has no halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry_of(name: str, tensor: Any) -> Tuple[Tuple[str, str, List[int], int], Any, str]:
    """(name, type, shape, address), the owner of the memory, and the device."""
    torch: Any = sys.modules.get("torch")
    if not isinstance(name, str) or not _is_unicode(name):
        raise InvalidArgument(f"the name of a tensor is a str in valid Unicode, not {shown(name)}")
    if torch is not None and isinstance(tensor, torch.Tensor):
        check_dense(torch, f"the tensor {name!r}", tensor, "saved")
        start = address_of(f"the tensor {name!r}", tensor, "save")
        is_copied = not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
        if is_copied and tensor.device.type == "cpu":
            size = tensor.element_size()
            check_readable(f"the tensor {name!r}", start, tensor.shape, [step * size for step in tensor.stride()], size)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        address = address_of(f"the tensor {name!r}", flat, "save")
        spelling = SPELLINGS.get(str(flat.dtype)[len("torch."):])
        if spelling is None:
            raise InvalidArgument(f"the tensor {name!r} has elements of {flat.dtype}, which pinflow cannot save")
        device = "host" if flat.device.type == "cpu" else f"cuda:{flat.device.index}"
        return (name, spelling, builtins.list(flat.shape), address), flat, device
    if isinstance(tensor, DeviceTensor):
        native = tensor._tensor
        return (name, native.dtype, builtins.list(native.shape), native.address), tensor, native.device
    if not hasattr(tensor, "__array_interface__") and not hasattr(tensor, "__array__"):
        raise InvalidArgument(f"{name!r} is no tensor or array, but {type(tensor).__name__}")
    try:
        array = elements_of(tensor)
    except InvalidArgument as failure:
        raise InvalidArgument(f"the tensor {name!r}: {failure}") from None
    stored = tensor._array.dtype if isinstance(tensor, Array) else ""
    spelling = stored if stored in BEYOND_NUMPY else spelling_of(array.dtype.newbyteorder("="))
    if spelling not in FORMAT_NAMES:
        advice = ("; to keep bfloat16 and 8-bit floats, load them with framework='pt' or 'dlpack', or install ml_dtypes"
                  if spelling in ("|V1", "|V2") else "")
        raise InvalidArgument(f"the tensor {name!r} has elements of {array.dtype}, which pinflow cannot save{advice}")
    if not array.flags.c_contiguous or not array.dtype.isnative:
        check_readable(f"the tensor {name!r}", array.ctypes.data, array.shape, array.strides, array.itemsize)
    copied = contiguous(array, f"the tensor {name!r}")
    if not copied.dtype.isnative:
        copied = copied.astype(copied.dtype.newbyteorder("="))
    flat = bytes_of(copied)
    return (name, spelling, builtins.list(copied.shape), flat.ctypes.data), flat, "host"


def _item_size(spelling: str) -> int:
    return numpy_type(spelling).itemsize
