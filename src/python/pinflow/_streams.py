"""Which CUDA stream a consumer works on."""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

#: A stream as an integer handle, and the object that keeps it alive.
Stream = Tuple[Optional[int], Any]

#: CUDA's legacy default stream, in the numbers of DLPack.
_LEGACY_DEFAULT = 1


def handle_of(stream: Any) -> int:
    """The handle of a stream: an integer, or an object of PyTorch, CuPy or Numba."""
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:  # (version, handle)
        return int((protocol() if callable(protocol) else protocol)[1]) or _LEGACY_DEFAULT
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or _LEGACY_DEFAULT)
    raise TypeError("a stream is an integer or has __cuda_stream__, cuda_stream, ptr or handle, not "
                    f"{type(stream).__name__}")


def consumer_stream(stream: Any, gpu: Optional[int]) -> Stream:
    """The stream of a consumer on GPU number `gpu` (None: the host): the one that is given, otherwise PyTorch's current
    one if PyTorch has initialized CUDA. (None, None) is CUDA's legacy default stream, or no stream on the host."""
    if gpu is None:
        return None, None
    if stream is not None:
        return handle_of(stream), stream
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():  # PyTorch has no current stream yet, or no CUDA
        return None, None
    # PyTorch never destroys the streams of its pool, and whoever made an ExternalStream keeps it alive. So the handle
    # is enough, and reading it takes a tenth of the time of current_stream.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return (raw(gpu) if raw else cuda.current_stream(gpu).cuda_stream) or _LEGACY_DEFAULT, None
