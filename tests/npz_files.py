"""numpy's side of npz_numpy_test.cpp.

npz_files.py check           exits with 77 when there is no numpy
npz_files.py write FOLDER    writes archives by numpy and by zipfile
npz_files.py read FOLDER     compares the archives that C++ wrote with numpy's reading of them

A manifest has a line for each array: archive, name, type, 1 for Fortran order, lengths, number; NUMBER.raw are the
elements in C order, and NUMBER.little the same with every number little-endian. A manifest that C++ wrote does not say
whether the order is Fortran's, and has no files NUMBER.little.
"""

import io
import pathlib
import random
import shutil
import subprocess
import sys
import zipfile

try:
    import numpy as np
except ImportError:
    sys.exit(77)

DTYPES = ["|b1", "|i1", "|u1", "|S10", "|V7", "<i4", ">i4", "<f2", "<f4", "<f8", ">f8", "<c16", ">c8", "<U5", ">U3",
          "<M8[ns]", ">m8[25us]", "<f16",
          [("a", "<f4"), ("b", ">i2", (3,))],
          {"names": ["x", "y"], "formats": ["<u1", [("re", ">f8"), ("im", "<f8")]], "offsets": [3, 8], "itemsize": 30}]
SHAPES = [(), (0,), (5,), (0, 3), (2, 3), (3, 0, 2), (2, 3, 4), (1, 700), (300, 11)]


def sample(dtype, shape):
    count = int(np.prod(shape, dtype=np.int64))
    content = random.randbytes(count * dtype.itemsize)
    if dtype.kind == "b":
        content = bytes(byte & 1 for byte in content)
    if dtype.kind in "SU":
        content = bytes(count * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(shape)


def spelled(dtype):
    return repr(dtype.descr) if dtype.names else dtype.str


def as_little(array):
    """The bytes of the elements, with each big-endian number made little-endian."""
    content = np.frombuffer(array.tobytes("C"), np.uint8).reshape(array.size, array.dtype.itemsize).copy()

    def turn(dtype, offset):
        if dtype.subdtype:
            base, shape = dtype.subdtype
            for index in range(int(np.prod(shape))):
                turn(base, offset + index * base.itemsize)
        elif dtype.names:
            for name in dtype.names:
                turn(dtype.fields[name][0], offset + dtype.fields[name][1])
        elif dtype.byteorder == ">":
            size = {"U": 4, "c": dtype.itemsize // 2}.get(dtype.kind, dtype.itemsize)
            for begin in range(offset, offset + dtype.itemsize, size):
                content[:, begin:begin + size] = content[:, begin:begin + size][:, ::-1].copy()

    turn(array.dtype, 0)
    return content.tobytes()


class Manifest:
    def __init__(self, folder):
        self.folder = folder
        self.lines = []

    def add(self, archive, arrays):
        for name, array in arrays.items():
            number = len(self.lines)
            fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            self.lines.append("\t".join([archive, name, spelled(array.dtype), str(int(fortran)),
                                         ",".join(map(str, array.shape)), str(number)]))
            (self.folder / f"{number}.raw").write_bytes(array.tobytes("C"))
            (self.folder / f"{number}.little").write_bytes(as_little(array))

    def write(self):
        (self.folder / "manifest.txt").write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")


class Unseekable(io.RawIOBase):
    """A file that is not seekable, like a pipe: zipfile then writes sizes and CRCs after the members."""

    def __init__(self, file):
        self.file = file

    def writable(self):
        return True

    def seekable(self):
        return False

    def write(self, content):
        return self.file.write(content)


def write(folder):
    random.seed(20)
    manifest = Manifest(folder)
    arrays = {}
    for number, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            array = sample(np.dtype(dtype), shape)
            arrays[f"{number}/{'x'.join(map(str, shape))}"] = array
            if len(shape) > 1:
                arrays[f"{number}/fortran/{'x'.join(map(str, shape))}"] = np.asfortranarray(array)
    large = np.cumsum(np.ones((1000, 333), np.float32), axis=0)
    some = {"café": np.arange(10), "a b": large, "large": large.T, "x.npy": np.float64(3)}

    np.savez(folder / "stored.npz", **arrays)
    manifest.add("stored.npz", arrays)
    np.savez_compressed(folder / "deflated.npz", **arrays)
    manifest.add("deflated.npz", arrays)
    np.savez(folder / "names.npz", *some.values())
    manifest.add("names.npz", {f"arr_{number}": array for number, array in enumerate(some.values())})
    for save in (np.savez, np.savez_compressed):
        save(folder / f"{save.__name__}.npz", **some)
        manifest.add(f"{save.__name__}.npz", some)
        with open(folder / f"{save.__name__}_pipe.npz", "wb") as file:
            save(Unseekable(file), **some)
        manifest.add(f"{save.__name__}_pipe.npz", some)
    many = {str(number): np.int16(number) for number in range(3000)}
    np.savez_compressed(folder / "many.npz", **many)
    manifest.add("many.npz", many)
    # zip64 in every place, as if the files were large
    limits = zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT
    zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT = 100, 2
    for save in (np.savez, np.savez_compressed):
        save(folder / f"{save.__name__}_64.npz", **some)
        manifest.add(f"{save.__name__}_64.npz", some)
    zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT = limits
    # other tools: a comment, other levels of compression, a member added later
    with zipfile.ZipFile(folder / "other.npz", "w") as archive:
        archive.comment = b"a comment"
        for level, (name, array) in enumerate(some.items()):
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(name + ".npy", content.getvalue(), zipfile.ZIP_DEFLATED, 3 * level)
    with zipfile.ZipFile(folder / "other.npz", "a") as archive:
        with archive.open("later.npy", "w") as member:
            np.save(member, large)
    manifest.add("other.npz", {**some, "later": large})
    manifest.write()


def read(folder):
    """Every archive of the manifest is sound for zipfile and unzip, and numpy finds the arrays."""
    archives = set()
    for line in (folder / "manifest.txt").read_text(encoding="utf-8").splitlines():
        archive, name, dtype, lengths, number = line.split("\t")
        archives.add(archive)
        with np.load(folder / archive) as loaded:
            array = loaded[name]
        shape = tuple(map(int, lengths.split(","))) if lengths else ()
        content = (folder / f"{number}.raw").read_bytes()
        if spelled(array.dtype) != dtype or array.shape != shape or array.tobytes("C") != content:
            sys.exit(f"{archive}: {name} is {array.dtype} {array.shape}, or differs")
    for archive in archives:
        with zipfile.ZipFile(folder / archive) as opened:
            if opened.testzip() is not None:
                sys.exit(f"{archive}: {opened.testzip()} is damaged for zipfile")
        if shutil.which("unzip"):
            subprocess.run(["unzip", "-tqq", folder / archive], check=True)


if __name__ == "__main__" and sys.argv[1] != "check":
    {"write": write, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
