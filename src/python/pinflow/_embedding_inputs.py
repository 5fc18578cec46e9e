"""What users give to an EmbeddingTable, checked: ids, weights and numbers."""

from __future__ import annotations

import importlib
import numbers
import sys
from typing import Any, List, Optional, Tuple

from ._elements import elements_of
from ._errors import InvalidArgument, Unsupported, shown


def import_torch() -> Any:
    return importlib.import_module("torch")


def is_on_gpu(ids: Any) -> bool:
    return getattr(getattr(ids, "device", None), "type", "cpu") == "cuda"


def ids_of(ids: Any, gpu: Optional[int]) -> Any:
    """Ids as one list of int64: a numpy array, or a tensor on the table's GPU."""
    if not is_on_gpu(ids):
        return host_ids(ids)
    torch = import_torch()
    if ids.device.index != gpu:
        rows = "in host memory" if gpu is None else f"on cuda:{gpu}"
        raise InvalidArgument(f"the ids are on {ids.device}, and the table's rows {rows}: use ids.cpu()")
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InvalidArgument(f"ids on a GPU are whole numbers of up to 64 bits with a sign, or uint8, not {ids.dtype}")
    return ids.detach().reshape(-1).to(torch.int64).contiguous()


def joined_ids(ids: List[Any], device: str) -> Any:
    """What ids_of has returned, as one list."""
    import numpy

    if not any(is_on_gpu(each) for each in ids):
        return numpy.concatenate(ids)
    torch = import_torch()
    return torch.cat([torch.as_tensor(each, device=device) for each in ids])


def host_ids(ids: Any) -> Any:
    import numpy

    if is_on_gpu(ids):
        raise Unsupported(f"the ids are on {ids.device}, and only `fetch` and the module take ids on a GPU: use "
                          "ids.cpu()")
    if is_torch(ids):
        torch = import_torch()
        if ids.layout != torch.strided or ids.device.type != "cpu" or ids.is_floating_point() or ids.is_complex():
            raise InvalidArgument(f"ids are whole numbers below 2^63, not {ids.dtype} of {ids.layout} on {ids.device}")
        ids = ids.detach().numpy()
    array = elements_of(ids)
    if array.size > 0 and array.dtype.kind not in "iu":
        raise InvalidArgument(f"ids are whole numbers below 2^63, not {array.dtype} of shape {array.shape}")
    if array.dtype == numpy.uint64 and array.size > 0 and int(array.max()) >= 1 << 63:
        raise InvalidArgument(f"ids are whole numbers below 2^63, and one is {int(array.max())}")
    return numpy.ascontiguousarray(array.reshape(-1), dtype=numpy.int64)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def real_tensor(array: Any) -> Any:
    """An array or tensor of real numbers, as a tensor."""
    torch = import_torch()
    if is_torch(array):
        tensor = array.detach().resolve_conj().resolve_neg()
    else:
        import numpy

        elements = elements_of(array)
        if elements.dtype.kind not in "biuf" or elements.dtype.itemsize > 8:
            raise InvalidArgument(f"weights are real numbers of up to 64 bits, not {elements.dtype}")
        tensor = torch.from_numpy(numpy.array(elements, dtype=elements.dtype.newbyteorder("="), order="C"))
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise InvalidArgument(f"weights are dense real numbers, not {tensor.dtype} of {tensor.layout}")
    return tensor


def check_whole(name: str, number: Any, end: int) -> None:
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or not 0 <= int(number) < end:
        raise InvalidArgument(f"{name} is a whole number from 0 to {end - 1}, not {shown(number)}")


def first_weights(spec: Any) -> Tuple[str, float, float]:
    if isinstance(spec, str) and spec == "zeros":
        return "zeros", 0.0, 0.0
    if isinstance(spec, (tuple, list)) and len(spec) == 3 and spec[0] in ("uniform", "normal"):
        kind, first, second = spec
        if all(isinstance(each, numbers.Real) for each in (first, second)):
            return kind, float(first), float(second)
    raise InvalidArgument("weights begin as 'zeros', ('uniform', LOW, HIGH), ('normal', MEAN, DEVIATION), or as a function "
                          f"makes them, not as {shown(spec)}")
