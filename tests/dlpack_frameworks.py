#!/usr/bin/env python3
"""Batches as tensors of numpy, PyTorch, CuPy and JAX, those that are installed: dlpack_frameworks.py BRIDGE

BRIDGE is the library of dlpack_bridge.cpp. Without a GPU, only numpy and JAX are tested. Exits with 77
without numpy.
"""

import ctypes
import gc
import importlib
import os
import sys
import tempfile
import threading
from collections import deque

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed")
    sys.exit(77)

NONE = -(2**63)  # bridge's word for Python's None
WIDTH = 64
ROW_COUNT = 4000
BATCH_ROWS = 20

bridge = ctypes.CDLL(sys.argv[1])
pointer, text, number, flag = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_bool
for name, result, arguments in [
    ("error", text, []),
    ("open", pointer, [text, text, flag, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]),
    ("close", None, [pointer]),
    ("next", pointer, [pointer, number]),
    ("row_count", ctypes.c_uint64, [pointer]),
    ("row_ids", None, [pointer, pointer]),
    ("data", pointer, [pointer, ctypes.c_size_t]),
    ("used_on", flag, [pointer, pointer, number]),
    ("export", pointer, [pointer, pointer, ctypes.c_size_t, number, flag]),
    ("release", None, [pointer]),
    ("export_array", pointer, [text, flag]),
    ("delete", None, [pointer, flag]),
]:
    function = getattr(bridge, "bridge_" + name)
    function.restype, function.argtypes = result, arguments

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [pointer, text, pointer]
is_valid = ctypes.pythonapi.PyCapsule_IsValid
is_valid.restype, is_valid.argtypes = ctypes.c_int, [pointer, text]
get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = pointer, [pointer, text]
NAMES = {True: b"dltensor_versioned", False: b"dltensor"}


@ctypes.CFUNCTYPE(None, pointer)
def delete_untaken(capsule):
    for versioned, name in NAMES.items():
        if is_valid(capsule, name):
            bridge.bridge_delete(get_pointer(capsule, name), versioned)


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def last_error():
    return bridge.bridge_error().decode()


def capsule_of(managed, versioned):
    if not managed:
        raise BufferError(last_error())
    return new_capsule(managed, NAMES[versioned], ctypes.cast(delete_untaken, pointer))


class Array:
    """A .npy file, as a producer of tensors."""

    def __init__(self, path):
        self.path = path

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        versioned = max_version is not None and max_version[0] >= 1
        return capsule_of(bridge.bridge_export_array(self.path.encode(), versioned), versioned)


class Batch:
    """A batch, as a producer of tensors."""

    def __init__(self, loader, handle):
        self.loader, self.handle = loader, handle
        ids = np.empty(bridge.bridge_row_count(handle), np.uint64)
        bridge.bridge_row_ids(handle, ids.ctypes.data)
        self.row_ids = ids.astype(np.int64)
        self.data = bridge.bridge_data(handle, 0)

    def __dlpack_device__(self):
        return (2, 0) if self.loader.device.startswith("cuda") else (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        versioned = max_version is not None and max_version[0] >= 1
        consumer = NONE if stream is None else stream
        return capsule_of(bridge.bridge_export(self.handle, self.loader.handle, 0, consumer, versioned), versioned)

    def used_on(self, stream):
        check(bridge.bridge_used_on(self.handle, self.loader.handle, stream), last_error())

    def release(self):
        bridge.bridge_release(self.handle)
        self.handle = None


class Loader:
    def __init__(self, path, device, in_order=False, epochs=1, slots=6):
        self.device = device
        self.handle = bridge.bridge_open(path.encode(), device.encode(), in_order, BATCH_ROWS, epochs, slots)
        check(self.handle, last_error())

    def next(self, stream=NONE):
        handle = bridge.bridge_next(self.handle, stream)
        check(handle or not last_error(), last_error())
        return Batch(self, handle) if handle else None

    def close(self):
        bridge.bridge_close(self.handle)


def holds(tensor, ids, to_numpy):
    elements = to_numpy(tensor)
    return elements.shape == (len(ids), WIDTH) and bool((elements == ids[:, None]).all())


kept_until_exit = []


def keep_and_drop(path, device, take, to_numpy, address, rounds):
    """Tensors of 1,000 batches, each kept while three more are taken, then dropped here or on another thread."""
    loader = Loader(path, device, epochs=rounds, slots=6)
    kept = deque()
    count = 0
    while True:
        batch = loader.next()
        if batch is None:
            break
        ids = batch.row_ids
        tensor = take(batch)
        if address is not None:
            check(address(tensor) == batch.data, "the tensor is a copy")
        batch.release()
        kept.append((tensor, ids))
        del tensor
        count += 1
        if len(kept) > 3:
            check(holds(*kept[0], to_numpy), f"batch {count - 4} has other rows")
            if count % 3 == 0:
                dropped = [kept.popleft()]
                thread = threading.Thread(target=dropped.clear)
                thread.start()
                thread.join()
            else:
                kept.popleft()
    loader.close()
    for tensor, ids in kept:
        check(holds(tensor, ids, to_numpy), "a tensor that outlives its loader has other rows")
    kept_until_exit.extend(kept)
    check(count == rounds * ROW_COUNT // BATCH_ROWS, f"{count} batches")
    return count


def check_numpy(path):
    loader = Loader(path, "host")
    batch = loader.next()
    ids = batch.row_ids
    rows = np.from_dlpack(batch)
    check(rows.ctypes.data == batch.data, "numpy has copied a batch")
    batch.release()
    check(holds(rows, ids, lambda tensor: tensor), "numpy reads other rows")
    loader.close()
    check(holds(rows, ids, lambda tensor: tensor), "numpy reads other rows after the loader has gone")
    views = Loader(path, "host", in_order=True)
    for producer in (Array(path), views.next()):
        try:
            rows = np.from_dlpack(producer)
        except BufferError as error:
            # numpy before 2.1 asks for the structure that cannot say read-only
            check(np.lib.NumpyVersion(np.__version__) < "2.1.0", str(error))
            print(f"numpy {np.__version__}: a read-only tensor is skipped, it needs numpy 2.1", flush=True)
            continue
        check(not rows.flags.writeable, "numpy may write to a mapping")
        check(int(rows[3, 0]) == 3, "numpy reads other rows of a mapping")
    kept_until_exit.append(views)
    count = keep_and_drop(path, "host", np.from_dlpack, lambda tensor: tensor, lambda tensor: tensor.ctypes.data, 5)
    print(f"numpy {np.__version__}: {count} batches on the host", flush=True)


def check_torch(torch, path):
    to_numpy = lambda tensor: tensor.cpu().numpy()
    count = keep_and_drop(path, "cuda", torch.from_dlpack, to_numpy, lambda tensor: tensor.data_ptr(), 5)
    print(f"torch {torch.__version__}: {count} batches", flush=True)
    side = torch.cuda.Stream()
    for named in (False, True):
        loader = Loader(path, "cuda", epochs=5, slots=2)
        batch = loader.next()
        ids = batch.row_ids
        tensor = torch.from_dlpack(batch)
        torch.cuda.synchronize()
        if named:
            batch.used_on(side.cuda_stream)
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)  # some tenths of a second
            late = tensor.clone()
        del tensor
        batch.release()
        for _ in range(20):
            following = loader.next()
            following.release()
        delayed = not side.query()
        torch.cuda.synchronize()
        right = holds(late, ids, to_numpy)
        loader.close()
        check(named or delayed, "the side stream was not delayed, so nothing was tried")
        check(right == named, f"a side stream {'with' if named else 'without'} used_on reads "
              f"{'other' if named else 'the right'} rows")
        print(f"torch, side stream {'with' if named else 'without'} used_on: "
              f"{'right' if right else 'wrong'} rows, as it must be", flush=True)


def check_cupy(cupy, path):
    count = keep_and_drop(path, "cuda", cupy.from_dlpack, cupy.asnumpy, lambda tensor: tensor.data.ptr, 5)
    print(f"cupy {cupy.__version__}: {count} batches", flush=True)


def check_jax(jax, path, device):
    jax.config.update("jax_enable_x64", True)
    address = lambda tensor: tensor.unsafe_buffer_pointer()
    count = keep_and_drop(path, device, jax.dlpack.from_dlpack, np.asarray, address if device == "cuda" else None, 5)
    print(f"jax {jax.__version__} on {device}: {count} batches", flush=True)


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name}: skipped, not installed", flush=True)
        return None


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.npy")
        np.save(path, np.repeat(np.arange(ROW_COUNT, dtype=np.int64)[:, None], WIDTH, axis=1))
        check_numpy(path)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        torch, cupy, jax = installed("torch"), installed("cupy"), installed("jax.dlpack")
        if jax:
            jax = sys.modules["jax"]
            check_jax(jax, path, "host")
        if torch and torch.cuda.is_available():
            check_torch(torch, path)
        if cupy and cupy.cuda.is_available():
            check_cupy(cupy, path)
        if jax and any(each.platform == "gpu" for each in jax.devices()):
            check_jax(jax, path, "cuda")
    gc.collect()
    print(f"{len(kept_until_exit)} tensors and loaders are kept until the process ends")


main()
