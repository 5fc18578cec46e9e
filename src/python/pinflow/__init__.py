"""pinflow opens arrays where they lie (.npy, .npz, HDF5, safetensors) and keeps a GPU fed from them.

    import pinflow

    images = pinflow.open("images.npy")                      # maps the file; numpy.load would read it
    for x, y in pinflow.Loader(images, "labels.npy"):        # one shuffled epoch, on the GPU if there is one
        train(x.torch(), y.torch())

`Loader` streams batches; `RowTable` gathers and scatters rows by index; `load_file` loads the tensors of a model, and
`FlatParameters` updates them; `EmbeddingTable` trains embeddings larger than the GPU; `open`, `list`, `save`,
`concatenate`, `stack` and `convert` are for files; `devices` lists the devices that can consume batches.
`python -m pinflow` is the command line tool.
"""

import atexit as _atexit
from typing import Any as _Any
from typing import Dict as _Dict
from typing import List as _List

from . import _native
from ._arrays import Array, list, open, save
from ._batch import Batch, Tensor
from ._embedding import EmbeddingTable
from ._embedding_lease import EmbeddingLease
from ._errors import (
    AllSlotsLeased,
    AlreadyThere,
    DataChanged,
    DeviceError,
    Error,
    FatalDeviceError,
    FormatError,
    FormatNotBuilt,
    InvalidArgument,
    NotFound,
    NotPermitted,
    StateMismatch,
    SystemFailure,
    Unsupported,
)
from ._load import DeviceTensor, load_file, load_files
from ._load_into import load_into
from ._loader import Loader, Report
from ._safe_open import safe_open
from ._save import save_file
from ._sources import RowSource, concatenate, stack
from ._table import RowTable
from ._tool import convert
from ._train import FlatParameters

__version__: str = _native.version

__all__ = [
    "AllSlotsLeased", "AlreadyThere", "Array", "Batch", "DataChanged", "DeviceError", "DeviceTensor", "EmbeddingLease",
    "EmbeddingTable", "Error",
    "FatalDeviceError", "FlatParameters", "FormatError", "FormatNotBuilt", "InvalidArgument", "Loader",
    "NotFound", "NotPermitted", "Report", "RowSource", "RowTable", "StateMismatch", "SystemFailure", "Tensor", "Unsupported",
    "concatenate", "convert", "devices", "list", "load_file", "load_files", "load_into", "no_cuda_reason", "open", "safe_open",
    "save", "save_file", "stack",
]


def devices() -> _List[_Dict[str, _Any]]:
    """The devices that can consume batches, the host first: name, model, total_bytes, free_bytes of each."""
    return _native.devices()


def no_cuda_reason() -> str:
    """Why no GPU can be used; empty if one can."""
    return _native.no_cuda_reason()


_native.install_fault_guard()
# before Python ends: the threads of loaders may be calling Python sources
_atexit.register(_native.end_all_loaders)
