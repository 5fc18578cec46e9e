"""The exceptions of pinflow: one class for each error of the C++ library."""

__all__ = [
    "AllSlotsLeased", "AlreadyThere", "DataChanged", "DeviceError", "Error", "FatalDeviceError", "FormatError",
    "FormatNotBuilt", "InvalidArgument", "NotFound", "NotPermitted", "StateMismatch", "SystemFailure", "Unsupported",
]


def shown(value: object) -> str:
    """What a caller gave, for a message: on one line, at most 100 characters."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= 100 else text[:97] + "..."


class Error(Exception):
    """The base class of all exceptions of pinflow. Its text says what failed, with the path, the offset or the shape if
    there is one."""


class SystemFailure(Error, OSError):
    """The system refused an operation (file, memory, thread or signal). `errno` has its number."""


class NotFound(SystemFailure, FileNotFoundError):
    """There is no file of this name."""


class AlreadyThere(SystemFailure, FileExistsError):
    """Something has this name already."""


class NotPermitted(SystemFailure, PermissionError):
    """The system does not permit the operation (EACCES, EPERM)."""


class FormatError(Error, ValueError):
    """The bytes of a file contradict its format or its own header."""


class Unsupported(Error, BufferError):
    """The input is valid, but pinflow, or this build of it, does not support the operation on it."""


class FormatNotBuilt(Unsupported):
    """The file is of a format that this build cannot read."""


class InvalidArgument(Error, ValueError):
    """The arguments of a call contradict each other or the data."""


class StateMismatch(InvalidArgument):
    """A saved state does not fit: a loader's was saved for other data or another order, an optimizer's for other
    parameters or another rule, an EmbeddingTable's for another shape, dtype or optimizer."""


class DataChanged(Error, OSError):
    """A file changed after it was opened."""


class AllSlotsLeased(Error):
    """Batches or tensors that are kept hold every slot of a loader: release some, or give it more slots. Or leases and
    prefetches of an EmbeddingTable hold the memory of all its steps: commit or release leases."""


class DeviceError(Error, RuntimeError):
    """A device refused or failed an operation; the process can continue."""


class FatalDeviceError(DeviceError):
    """A device failed so that no later call in this process can recover."""
