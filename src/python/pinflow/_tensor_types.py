"""The types of tensors, as the library, PyTorch, numpy and safetensors files spell them."""

from __future__ import annotations

from typing import Any, List

from ._elements import spelling_of
from ._errors import InvalidArgument, Unsupported, shown

#: How the library spells the types of PyTorch.
TORCH_TYPES = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "bfloat16": "bfloat16",
    "<c8": "complex64", "<c16": "complex128", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e8m0fnu": "float8_e8m0fnu", "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}
SPELLINGS = {name: spelling for spelling, name in TORCH_TYPES.items()}
FLOATS = ("<f2", "<f4", "<f8", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: The names of types in safetensors files.
FORMAT_NAMES = {
    "|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32", "<i8": "I64",
    "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "bfloat16": "BF16", "<c8": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def torch_type(torch: Any, spelling: str, name: str) -> Any:
    """PyTorch's type of the tensor `name`."""
    found = getattr(torch, TORCH_TYPES.get(spelling, ""), None)
    if found is None:
        raise Unsupported(f"the tensor {name!r} has elements of {spelling}, which this PyTorch lacks")
    return found


def check_dense(torch: Any, what: str, tensor: Any, verb: str) -> None:
    """Checks that a PyTorch tensor has elements in memory of the CPU or of a CUDA device. `what` begins the message.

    Raises:
        InvalidArgument: it has not.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgument(f"{what} is not initialized: only dense tensors can be {verb}")
    if tensor.is_nested:
        raise InvalidArgument(f"{what} is nested: only dense tensors can be {verb}")
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{what} is of layout {tensor.layout}: only dense tensors can be {verb}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{what} is on the device {tensor.device}: only tensors on the CPU or a CUDA device can be "
                              f"{verb}")


def address_of(what: str, tensor: Any, verb: str) -> int:
    """Where the memory of a PyTorch tensor begins. `what` begins a message, `verb` begins its advice.

    Raises:
        InvalidArgument: it has no memory of its own, or its storage has been shrunk.
    """
    try:
        address = int(tensor.data_ptr())
    except RuntimeError:
        raise InvalidArgument(f"{what} has no memory of its own, as within torch.vmap") from None
    if address == 0 and tensor.numel() != 0:
        raise InvalidArgument(f"{what} is a {type(tensor).__name__} without memory of its own; for a DTensor, {verb} what "
                              "to_local() gives")
    steps = zip(tensor.shape, tensor.stride())
    end = (tensor.storage_offset() + 1 + sum((length - 1) * step for length, step in steps)) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() != 0 and end > held:
        raise InvalidArgument(f"{what} ends at byte {end} of a storage that has been resized to {held} bytes")
    return address


def float_spelling(dtype: Any) -> str:
    """How the library spells a type of floating-point numbers, of PyTorch, numpy or safetensors.

    Raises:
        InvalidArgument: it is another type.
    """
    text = str(dtype)
    formats = {name: spelling for spelling, name in FORMAT_NAMES.items()}
    spelling: Any
    if text.startswith("torch."):
        spelling = SPELLINGS.get(text[len("torch."):])
    elif text.upper() in formats:
        spelling = formats[text.upper()]
    else:
        try:
            spelling = spelling_of(dtype)
        except (TypeError, ValueError):
            spelling = None
    if spelling not in FLOATS:
        raise InvalidArgument("dtype must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, little-endian, "
                              f"not {shown(dtype)}")
    return str(spelling)


def note_changes(torch: Any, tensors: List[Any]) -> None:
    """Increments the versions of tensors, so that autograd refuses what it saved of them before."""
    increment = getattr(torch.autograd.graph, "increment_version", None)
    for each in tensors:
        if increment is not None and not each.is_inference():
            increment(each)
