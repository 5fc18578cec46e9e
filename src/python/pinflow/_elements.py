"""Elements of arrays and their types, as numpy, PyTorch and the library have them."""

from __future__ import annotations

import ast
import errno
import importlib
import sys
from typing import TYPE_CHECKING, Any, Dict, Tuple

from . import _native
from ._errors import InvalidArgument, SystemFailure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    AnyArray = NDArray[Any]

#: Types that numpy lacks, and their sizes in bytes.
BEYOND_NUMPY = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1,
                "float8_e5m2fnuz": 1}

_known_types: Dict[str, np.dtype[Any]] = {}


def numpy_type(text: str) -> np.dtype[Any]:
    """The numpy type for the library's spelling of a type."""
    known = _known_types.get(text)
    if known is None:
        import numpy

        known = numpy.dtype(_numpy_spelling(text))
        _known_types[text] = known
    return known


def _numpy_spelling(text: str) -> Any:
    """The argument for numpy.dtype, for the library's spelling of a type."""
    if text.startswith("["):
        import numpy

        return numpy.lib.format.descr_to_dtype(ast.literal_eval(text))  # fields without a name are padding
    is_big_endian = text.startswith(">") and text[1:] in BEYOND_NUMPY
    name = text[1:] if is_big_endian else text
    if name not in BEYOND_NUMPY:
        return text
    try:
        known = getattr(importlib.import_module("ml_dtypes"), name)
    except ImportError:
        return f"V{BEYOND_NUMPY[name]}"
    if not is_big_endian:
        return known
    import numpy

    return numpy.dtype(known).newbyteorder(">")


def spelling_of(dtype: Any) -> str:
    """How the library spells a type, given as anything that numpy.dtype takes.

    Raises:
        InvalidArgument: bfloat16 of another byte order.
    """
    if isinstance(dtype, str) and dtype in BEYOND_NUMPY:
        return dtype
    import numpy

    known: Any = numpy.dtype(dtype)
    if known.name not in BEYOND_NUMPY:
        return str(known.str)
    if not known.isnative:
        raise InvalidArgument(f"elements of {known.name} have another byte order than this machine: convert them with "
                              f"astype(ml_dtypes.{known.name})")
    return str(known.name)


def whole_numbers(numbers: Any) -> AnyArray:
    """Numbers as a numpy array.

    Raises:
        InvalidArgument: they are not whole numbers on one axis.
    """
    import numpy

    given = elements_of(numbers)
    if given.ndim != 1 or given.dtype.kind not in "iu" and given.size > 0:
        hint = "; numpy.flatnonzero makes row numbers of a mask" if given.dtype.kind == "b" else ""
        raise InvalidArgument("row numbers are whole numbers on one axis, not "
                              f"{given.dtype} of shape {given.shape}{hint}")
    return given


def row_numbers(ids: Any, row_count: int) -> NDArray[np.uint64]:
    """Row numbers as the library takes them.

    Raises:
        InvalidArgument: they are not whole numbers on one axis, or one is not a row.
    """
    import numpy

    given = whole_numbers(ids)
    if given.size == 0:
        return numpy.empty(0, numpy.uint64)
    for wrong in (int(given.min()), int(given.max())):
        if not 0 <= wrong < row_count:
            raise InvalidArgument(f"row number {wrong} is out of range: there are {row_count} rows")
    return numpy.ascontiguousarray(given, dtype=numpy.uint64)


def is_array(value: Any) -> bool:
    """Whether numpy can read a value as one array, by the buffer or an array protocol. It reads other sequences item by
    item."""
    if any(hasattr(value, name) for name in ("__array_interface__", "__array_struct__", "__array__")):
        return True
    try:
        memoryview(value)
    except (TypeError, ValueError, BufferError):
        return False
    return True


def elements_of(array: Any) -> AnyArray:
    """A numpy array of what numpy can view.

    Raises:
        InvalidArgument: it is masked.
    """
    import numpy

    if isinstance(array, numpy.ma.MaskedArray):
        raise InvalidArgument("the mask of a masked array would be lost: give its `data`, or `filled(value)`")
    return numpy.asarray(array)


def typed_elements(array: Any) -> Tuple[AnyArray, str]:
    """A numpy array of what numpy can view, or of a tensor of PyTorch, and how the library spells its type. If numpy
    lacks the type, the elements are whole numbers of the same size.

    Raises:
        InvalidArgument: it is masked, or a tensor that is not dense, not on the CPU, or of a type that pinflow lacks.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _elements_of_torch(torch, array)
    elements = elements_of(array)
    return elements, spelling_of(elements.dtype)


def _elements_of_torch(torch: Any, tensor: Any) -> Tuple[AnyArray, str]:
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise InvalidArgument(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be used as an array: give a "
                              "dense tensor on the CPU")
    plain = tensor.detach().resolve_conj().resolve_neg()
    spelling = str(plain.dtype)[len("torch."):]
    if spelling not in BEYOND_NUMPY:
        try:
            elements = plain.numpy()
        except (TypeError, RuntimeError):
            raise InvalidArgument(f"a tensor of {tensor.dtype} cannot be used as an array: pinflow has no such "
                                  "type") from None
        return elements, spelling_of(elements.dtype)
    same_size = torch.uint8 if BEYOND_NUMPY[spelling] == 1 else torch.int16
    return plain.view(same_size).numpy(), spelling


def bytes_of(array: AnyArray) -> AnyArray:
    """The bytes of a contiguous array, for the buffer protocol. As uint8, because numpy exports no dates by it."""
    import numpy

    return array.reshape(-1).view(numpy.uint8) if array.dtype.itemsize else numpy.empty(0, numpy.uint8)


def contiguous(elements: Any, name: str, advice: str = "") -> Any:
    """The array in C order, copied if it isn't. Messages call it `name`, and end with `advice`.

    Raises:
        SystemFailure: there is no memory for the copy. Linux would end the process instead.
    """
    if elements.flags.c_contiguous:
        return elements
    import numpy

    subject = f"cannot copy {name} of shape {elements.shape} and dtype {elements.dtype}, which is not contiguous: it takes " \
              f"{elements.nbytes} bytes"
    _native.require_memory(elements.nbytes, subject, advice)
    try:
        return numpy.ascontiguousarray(elements)
    except MemoryError:  # a limit of the address space
        raise SystemFailure(errno.ENOMEM, f"{subject}, which do not fit into memory{advice and '; '}{advice}") from None
