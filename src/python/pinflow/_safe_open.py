"""Loading the tensors of a model one by one, or in part."""

from __future__ import annotations

import builtins
import functools
import numbers
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

from . import _native
from ._arrays import PathLike, working_folder
from ._devices import load_device_name
from ._errors import InvalidArgument, Unsupported, shown
from ._load import deliver, framework_of, is_name, load_with, path_texts
from ._tensor_types import FORMAT_NAMES

#: A tensor to load: its name, the axis of a slice or -1, its begin and end, and the type to cast to or "".
_Request = Tuple[str, int, int, int, str]


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
        request: _Request = (self._name, -1, 0, 0, "")
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
        """The elements that `key` selects. Of the axis that a number or a slice of step 1 restricts most, only the needed
        range is read. All other axes are read whole, and indexed afterwards. With any other key, such as None, a list
        or a mask, the whole tensor is read. Of a chunked HDF5 dataset, only chunks with elements of the range are
        decoded. A .npz member that must be decoded or reordered is read whole.

        On the CPU, numbers and slices give a view of a private mapping of the file if the tensor can be mapped (see
        `load_files`): nothing is read until it is used, it need not be contiguous, and torch.save writes the whole tensor
        unless the view is cloned. Parts of less than 64 KiB along the first axis are read, and other small parts while
        tensors have 8192 mappings.

        Raises:
            IndexError: as for a numpy array.
            Unsupported: with framework='dlpack', the key is not one slice of step 1 along one axis.
        """
        request, rest = self._request_of(key)
        opened = self._opened
        if opened._framework != "dlpack":
            if request[1] > 0 and self._name in opened._mappable and not _native.has_many_mappings():
                return opened._load((self._name, -1, 0, 0, ""))[key]  # a view, without reading anything
            loaded = opened._load(request)
            return loaded if rest and _selects_all(rest) else loaded[rest]  # of (), numpy makes a scalar
        if not _selects_all(rest):
            raise Unsupported("with framework='dlpack', a part is one slice of step 1 along one axis: index the tensor "
                              "that another library makes of it")
        return self._opened._load(request)

    def _request_of(self, key: Any) -> Tuple[_Request, Tuple[Any, ...]]:
        """What is loaded, and the index into it that remains."""
        keys = key if isinstance(key, tuple) else (key,)
        whole: _Request = (self._name, -1, 0, 0, "")
        # other keys, such as None and masks, take no axis or several
        if not all(each is Ellipsis or isinstance(each, slice) or _is_number(each) for each in keys):
            return whole, keys
        shape = self._opened._shape(self._name)
        dots = [at for at, each in enumerate(keys) if each is Ellipsis]
        if len(dots) > 1:
            raise IndexError("an index has one Ellipsis at most")
        if dots:
            keys = (*keys[:dots[0]], *(slice(None),) * (len(shape) - len(keys) + 1), *keys[dots[0] + 1:])
        if len(keys) > len(shape):
            raise IndexError(f"{len(keys)} indices for a tensor of {len(shape)} axes")
        request, within_range = whole, None
        rest = builtins.list(keys)
        min_fraction = 1.0  # only the axis of which the smallest fraction is selected is restricted
        for axis, (each, length) in enumerate(zip(keys, shape)):
            begin, end, within = _part_of(each, length)
            if (begin, end) == (0, length):
                rest[axis] = within
            elif (end - begin) / length < min_fraction:
                min_fraction = (end - begin) / length
                request, within_range = (self._name, axis, begin, end, ""), within
        if request is not whole:
            rest[request[1]] = within_range
        if dots:
            rest.append(Ellipsis)  # with it, numpy returns an array without axes, not a scalar
        return request, tuple(rest)


def _selects_all(key: Tuple[Any, ...]) -> bool:
    return all(each is Ellipsis or isinstance(each, slice) and each == slice(None) for each in key)


def _is_number(key: Any) -> bool:
    return isinstance(key, numbers.Integral) and not isinstance(key, bool)


def _part_of(key: Any, length: int) -> Tuple[int, int, Any]:
    """The range (begin, end) along an axis that contains what `key` selects, and the key that selects it within this
    range."""
    if isinstance(key, slice) and key.step in (None, 1):
        begin, end, _ = key.indices(length)
        return begin, max(begin, end), slice(None)
    if _is_number(key):
        index = int(key) + length if key < 0 else int(key)
        if not 0 <= index < length:
            raise IndexError(f"index {key} is out of range for an axis of length {length}")
        return index, index + 1, 0
    return 0, length, key


class safe_open:  # named as in safetensors, whose place it takes
    """Opens a file, or several, by their headers; tensors are loaded one by one, or in part.

        with pinflow.safe_open("model.safetensors", framework="pt", device="cuda:0") as model:
            for name in model.keys():
                weight = model.get_tensor(name)

    A safetensors file may be replaced while it is open: its old contents are loaded. But if open files hold more than a
    quarter of the descriptors that the process may have, replacing another one raises DataChanged, as writing to a file
    always does. A safe_open can be pickled, for a process that is spawned: the files are opened again there.

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
        self._mappable: Set[str] = {name for name, *_, is_mappable in listed if is_mappable and where == "host"}
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
        return self._load((name, -1, 0, 0, ""))

    def get_tensors(self) -> Dict[str, Any]:
        """Loads all tensors together, which is faster than one by one. Raises as `get_tensor` if one cannot be loaded."""
        return self._load_all([(name, -1, 0, 0, "") for name in self.offset_keys()])

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts are loaded by indexing."""
        self._shape(name)
        return TensorSlice(self, name)

    def get_slices(self, slices: Dict[str, Tuple[int, int, int]]) -> Dict[str, Any]:
        """Loads parts of several tensors together, which is faster than one by one: for each name an axis, from the end
        if negative, and the indices begin and end along it. What a rank of tensor parallelism needs. All are contiguous."""
        if not isinstance(slices, dict):
            raise InvalidArgument(f"slices are given by name, in a dict, not in a {type(slices).__name__}")
        requests: List[_Request] = []
        for name, part in slices.items():
            shape = self._shape(name)
            if not isinstance(part, tuple) or len(part) != 3 or not all(_is_number(each) for each in part):
                raise InvalidArgument(f"a slice is (axis, begin, end), not {shown(part)}")
            given, begin, end = (int(each) for each in part)
            axis = given + len(shape) if given < 0 else given
            if not (0 <= axis < len(shape) and 0 <= begin <= end <= shape[axis]):
                raise InvalidArgument(f"the tensor {name!r} of shape {shape} has no indices {begin} to {end} on axis {given}")
            requests.append((name, axis, begin, end, ""))
        return self._load_all(requests)

    def _shape(self, name: str) -> Tuple[int, ...]:
        shape = self._shapes.get(name) if isinstance(name, str) else None
        if shape is not None:
            return shape
        if not is_name(name):
            raise InvalidArgument(f"the name of a tensor is a str in valid Unicode, not {shown(name)}")
        self._files.check(name)  # says why
        raise InvalidArgument(f"there is no tensor {name!r}")

    def _load_all(self, requests: List[_Request]) -> Dict[str, Any]:
        return deliver(functools.partial(self._files.load, requests), load_device_name(self._device), self._framework)

    def _load(self, request: _Request) -> Any:
        return self._load_all([request])[request[0]]
