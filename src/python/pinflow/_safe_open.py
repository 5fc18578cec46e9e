"""Loading the tensors of a model one by one, or in part."""

from __future__ import annotations

import builtins
import functools
import math
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from . import _native
from ._arrays import PathLike, working_folder
from ._boxes import box_of, is_number
from ._devices import load_device_name
from ._errors import InvalidArgument, Unsupported, shown
from ._load import Request, Slice, deliver, framework_of, is_name, load_with, path_texts
from ._tensor_types import FORMAT_NAMES

#: Reading a smaller part is faster than mapping the tensor, since each of its pages that is used costs a page fault.
_MIN_VIEW_BYTES = 4 << 20


class TensorSlice:
    """A tensor of a file of which parts are loaded: `part[:, 10:20]`. Made by `safe_open.get_slice`."""

    def __init__(self, opened: safe_open, name: str) -> None:
        self._opened = opened
        self._name = name

    def __repr__(self) -> str:
        return f"<pinflow.TensorSlice {self._name!r} {self.get_dtype()} {tuple(self.get_shape())}>"

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """Loads all elements to a numpy array, whatever the framework and the device."""
        import numpy

        if copy is False:
            raise ValueError("elements are loaded from the file, so there is no array without a copy")
        request: Request = (self._name, [], "")
        loaded = load_with(functools.partial(self._opened._files.load, [request]), "cpu", "np")[self._name]
        return numpy.asarray(loaded, dtype=dtype)

    def get_shape(self) -> List[int]:
        """The lengths of the axes of the whole tensor."""
        return builtins.list(self._opened._shape(self._name))

    def get_dtype(self) -> str:
        """The type as safetensors files name it, such as 'BF16'."""
        spelling = self._opened._types[self._name]
        return FORMAT_NAMES.get(spelling, spelling)

    def __getitem__(self, key: Any) -> Any:
        """The elements that `key` selects. Numbers, slices and lists of numbers restrict what is read: along each axis,
        from the first selected index to the last one. With any other key, such as None or a mask, the whole tensor is
        read. Of a chunked HDF5 dataset, only chunks with elements of the part are decoded. A .npz member that must be
        decoded or reordered is read whole.

        On the CPU, the result is a view of a private mapping of the file if the tensor can be mapped (see `load_files`) and
        what would be read has 4 MiB or more (64 KiB if only the first axis is restricted): nothing is read until it is
        used, it need not be contiguous, and torch.save writes the whole tensor unless the view is cloned. While tensors
        have 8192 mappings, all parts are read, except 1 MiB or more along the first axis.

        Raises:
            IndexError: as for a numpy array.
            Unsupported: with framework='dlpack', the key has anything but slices of step 1 and an Ellipsis.
        """
        opened = self._opened
        whole: Request = (self._name, [], "")
        is_plain = opened._framework == "dlpack"
        part = box_of(key, opened._shape(self._name))
        if part is None and not is_plain:
            return opened._load(whole)[key]
        ranges, rest = part or ([], (key,))
        if is_plain and not _selects_all(rest):
            raise Unsupported("with framework='dlpack', a part is given by slices of step 1: index the tensor that "
                              "another library makes of it")
        shape = opened._shape(self._name)
        slices = [(axis, begin, end) for axis, (begin, end) in enumerate(ranges) if (begin, end) != (0, shape[axis])]
        if not is_plain and self._has_view(slices):
            return opened._load(whole)[key]  # a view, without reading anything
        loaded = opened._load((self._name, slices, ""))
        # of (), numpy makes a scalar
        return loaded if is_plain or rest and _selects_all(rest) else loaded[rest]

    def _has_view(self, slices: List[Slice]) -> bool:
        """Whether slices that leave gaps in the file become a view of all elements."""
        element_bytes = self._opened._mappable.get(self._name)
        if element_bytes is None or all(axis == 0 for axis, *_ in slices):
            return False
        lengths = builtins.list(self._opened._shape(self._name))
        for axis, begin, end in slices:
            lengths[axis] = end - begin
        return element_bytes * math.prod(lengths) >= _MIN_VIEW_BYTES and not _native.has_many_mappings()


def _selects_all(key: Tuple[Any, ...]) -> bool:
    return all(each is Ellipsis or isinstance(each, slice) and each == slice(None) for each in key)


class safe_open:  # named as in safetensors, whose place it takes
    """Opens a file, or several, by their headers; tensors are loaded one by one, or in part.

        with pinflow.safe_open("model.safetensors", framework="pt", device="cuda:0") as model:
            for name in model.keys():
                weight = model.get_tensor(name)

    A safetensors file may be replaced while it is open: its old contents are loaded. But if open files hold more than a
    quarter of the descriptors that the process may have, replacing another one raises DataChanged, as writing to a file
    always does. A safe_open can be pickled, for a process that is spawned: the files are opened again there.

    All datasets of HDF5 files are listed, which takes 50 us each; `open` reads one dataset without listing the others.

    Args:
        filename: the file, or a list of files. No two may have a tensor of the same name.
        framework, device: as for `load_files`.
    """

    def __init__(self, filename: Union[PathLike, Sequence[PathLike]], framework: Optional[str] = None,
                 device: Any = "cpu") -> None:
        is_one = isinstance(filename, (str, bytes, os.PathLike))
        paths = path_texts([filename] if is_one else filename)  # type: ignore[list-item, arg-type]
        opened = _native.tensor_files(paths)
        self._paths = [os.path.join(working_folder(), each) for each in paths]  # for another working directory
        listed = opened.tensors()
        self._opened: Optional[_native.TensorFiles] = opened
        self._types: Dict[str, str] = {name: spelling for name, spelling, *_ in listed}
        self._shapes: Dict[str, Tuple[int, ...]] = {name: shape for name, _, shape, *_ in listed}
        where = load_device_name(device)
        #: the bytes of an element of each tensor that can be mapped
        self._mappable: Dict[str, int] = {name: nbytes // math.prod(shape) for name, _, shape, nbytes, is_mappable in listed
                                          if is_mappable and where == "host"}
        self._framework = framework_of(framework, where)
        self._device = device

    def __reduce__(self) -> Tuple[Any, ...]:
        if self._opened is None:
            raise InvalidArgument("the files of this safe_open have been closed")
        return safe_open, (self._paths, self._framework, self._device)

    def __repr__(self) -> str:
        files = repr(self._paths[0]) if len(self._paths) == 1 else f"{len(self._paths)} files"
        return f"<pinflow.safe_open {files}{', closed' if self._opened is None else ''}>"

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None

    @property
    def _files(self) -> _native.TensorFiles:
        if self._opened is None:
            raise InvalidArgument("the files of this safe_open have been closed")
        return self._opened

    def keys(self) -> List[str]:
        """The names of the tensors, sorted. Some may be impossible to load: `get_tensor` says why."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> List[str]:
        """The same names in the order of the files and, in a safetensors file, of their data. Those that `get_tensor`
        refuses come last."""
        return [*self._types, *self._files.refused_names()]

    def __len__(self) -> int:
        return len(self.offset_keys())

    def __bool__(self) -> bool:
        return True  # also without tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def metadata(self) -> Optional[Dict[str, str]]:
        """The text metadata of the safetensors files; None if there is none. Of equal keys, the first file's counts."""
        return self._files.metadata() or None

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor. Raises as `load_files`; Unsupported or FormatError if the tensor cannot be loaded."""
        self._shape(name)
        return self._load((name, [], ""))

    def get_tensors(self) -> Dict[str, Any]:
        """Loads all tensors together, which is faster than one by one. Raises as `get_tensor` if one cannot be loaded."""
        return self._load_all([(name, [], "") for name in self.offset_keys()])

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts are loaded by indexing."""
        self._shape(name)
        return TensorSlice(self, name)

    def get_slices(self, slices: Dict[str, Union[Slice, List[Slice]]]) -> Dict[str, Any]:
        """Loads parts of several tensors together, which is faster than one by one: for each name an axis, from the end
        if negative, and the indices begin and end along it, or a list of them, for several axes. What a rank of tensor
        parallelism needs. All are contiguous."""
        if not isinstance(slices, dict):
            raise InvalidArgument(f"slices are given by name, in a dict, not in a {type(slices).__name__}")
        requests: List[Request] = []
        for name, part in slices.items():
            self._shape(name)  # refuses other names
            parts = part if isinstance(part, builtins.list) else [part]
            requests.append((name, [self._slice_of(name, each) for each in parts], ""))
        return self._load_all(requests)

    def _slice_of(self, name: str, part: Any) -> Slice:
        shape = self._shape(name)
        if not isinstance(part, tuple) or len(part) != 3 or not all(is_number(each) for each in part):
            raise InvalidArgument(f"a slice is (axis, begin, end), not {shown(part)}")
        given, begin, end = (int(each) for each in part)
        axis = given + len(shape) if given < 0 else given
        if not (0 <= axis < len(shape) and 0 <= begin <= end <= shape[axis]):
            raise InvalidArgument(f"the tensor {name!r} of shape {shape} has no indices {begin} to {end} on axis {given}")
        return axis, begin, end

    def _shape(self, name: str) -> Tuple[int, ...]:
        shape = self._shapes.get(name) if isinstance(name, str) else None
        if shape is not None:
            return shape
        if not is_name(name):
            raise InvalidArgument(f"the name of a tensor is a str in valid Unicode, not {shown(name)}")
        self._files.check(name)  # says why
        raise InvalidArgument(f"there is no tensor {name!r}")

    def _load_all(self, requests: List[Request]) -> Dict[str, Any]:
        return deliver(functools.partial(self._files.load, requests), load_device_name(self._device), self._framework)

    def _load(self, request: Request) -> Any:
        return self._load_all([request])[request[0]]
