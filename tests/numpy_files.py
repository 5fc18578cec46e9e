"""numpy's side of npy_numpy_test.cpp.

numpy_files.py check           exits with 77 when there is no numpy
numpy_files.py write FOLDER    writes arrays, and what numpy thinks of many headers and type strings
numpy_files.py read FOLDER     compares the arrays that C++ wrote with numpy's reading and writing of them

A manifest has a line for each array: name, dtype, 1 for Fortran order, lengths; NAME.npy is the file, and
NAME.raw the elements in C order. If numpy wrote the array, NAME.fields holds the elements of each field of a
structured array, field after field. If its NAME ends in _default, pinflow must write the same header as numpy.
"""

import io
import pathlib
import random
import struct
import sys
import warnings

try:
    import numpy as np
except ImportError:
    sys.exit(77)

warnings.simplefilter("ignore")  # numpy warns of versions 2.0 and 3.0, and of deprecated types

NUMBERS = ["i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "f16", "c8", "c16", "c32", "U1", "U5",
           "M8", "m8", "M8[ns]", "M8[D]", "m8[25us]", "m8[Y]", "M8[2147483647as]"]
DTYPES = ["|b1", "|i1", "|u1", "|S1", "|S10", "|V1", "|V7"]
DTYPES += [order + number for number in NUMBERS for order in "<>"]
SHAPES = [(), (0,), (5,), (0, 3), (2, 3), (3, 0, 2), (2, 3, 4)]
VERSIONS = [(1, 0), (2, 0), (3, 0)]


def sample(descr, shape, order="C"):
    """An array of random bytes, those of gaps included. It is copied as opaque elements, because numpy does not promise
    to copy gaps."""
    dtype = np.dtype(descr)
    count = int(np.prod(shape, dtype=np.int64))
    content = random.randbytes(count * dtype.itemsize)
    if dtype.kind == "b":
        content = bytes(byte & 1 for byte in content)
    opaque = np.frombuffer(content, f"V{dtype.itemsize}").reshape(shape)
    return np.array(opaque, order=order).view(dtype)


def raw(array):
    """The elements in C order, gaps included."""
    return array.view(f"V{array.dtype.itemsize}").tobytes("C") if array.dtype.itemsize else b""


def flat(dtype):
    """The type of the elements, and the shape, of a type that may be an array of arrays."""
    shape = ()
    while dtype.subdtype is not None:
        shape += dtype.subdtype[1]
        dtype = dtype.subdtype[0]
    return dtype, shape


def as_descr(dtype):
    """What numpy writes into a header, but for arrays of arrays, which become arrays of more axes."""
    if dtype.names is None:
        return dtype.str
    result = []
    for name, part in zip([part[0] for part in dtype.descr], dtype.descr):
        if name == "":
            result.append(part)
            continue
        element, shape = flat(dtype.fields[name[1] if isinstance(name, tuple) else name][0])
        result.append((name, as_descr(element), shape) if shape else (name, as_descr(element)))
    return result


def spelled(dtype):
    descr = as_descr(dtype)
    return descr if isinstance(descr, str) else repr(descr)


def has_array_of_arrays(dtype):
    if dtype.subdtype is not None:
        return dtype.subdtype[0].subdtype is not None or has_array_of_arrays(dtype.subdtype[0])
    return dtype.names is not None and any(has_array_of_arrays(dtype[name]) for name in dtype.names)


# ---- random types ------------------------------------------------------------------------------------------

NAMES = ["x", "y", "label", "a b", "it's", 'say "a"', "it's \"a\"", "back\\slash", "tab\t", "line\n",
         "\x00", "\x7f", "\x85", "\xa0", "caf\xe9", "\xad", "\xff", "\u0100", "\u6570\u636e", "\U0001f600",
         "]", "')", "2L", "#", "u'x'"]


def random_shape(max_axes, lengths):
    return tuple(random.choice(lengths) for _ in range(random.randrange(max_axes + 1)))


def random_structured(depth=0):
    names = random.sample(NAMES, random.choice([1, 1, 2, 3, 5]))
    spare = [name for name in NAMES if name not in names]
    fields = []
    for name in names:
        element = (random_structured(depth + 1) if depth < 3 and random.random() < 0.25
                   else np.dtype(random.choice(DTYPES)))
        if random.random() < 0.3:
            element = np.dtype((element, random_shape(3, [0, 1, 2, 2, 3]) or (2,)))
            if element.itemsize > 0 and random.random() < 0.15:
                element = np.dtype((element, (2,)))
        title = spare.pop() if random.random() < 0.15 else None
        fields.append((name, title, element))
    kind = random.choice(["packed", "aligned", "gaps"])
    if kind == "gaps":
        offsets, offset = [], random.choice([0, 0, 3])
        for _, _, element in fields:
            offsets.append(offset)
            offset += element.itemsize + random.choice([0, 0, 1, 5])
        dtype = np.dtype({"names": names, "formats": [field[2] for field in fields], "offsets": offsets,
                          "titles": [field[1] for field in fields], "itemsize": offset})
    else:
        dtype = np.dtype([((title, name) if title else name, element) for name, title, element in fields],
                         align=kind == "aligned")
    return dtype if dtype.itemsize > 0 else random_structured(depth)


def random_dtype():
    return random_structured() if random.random() < 0.7 else np.dtype(random.choice(DTYPES))


class Manifest:
    def __init__(self, folder):
        self.folder = folder
        self.lines = []

    def add(self, name, content, array):
        self.lines.append("\t".join([name, spelled(array.dtype), str(int(is_fortran(array))),
                                     ",".join(map(str, array.shape))]))
        (self.folder / (name + ".npy")).write_bytes(content)
        (self.folder / (name + ".raw")).write_bytes(raw(array))
        if array.dtype.names is not None:
            (self.folder / (name + ".fields")).write_bytes(
                b"".join(raw(np.asarray(array[field])) for field in array.dtype.names))

    def write(self):
        (self.folder / "manifest.txt").write_text("".join(line + "\n" for line in self.lines), "utf-8")


def is_fortran(array):
    return array.flags.f_contiguous and not array.flags.c_contiguous


def saved(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def by_hand(text, version=(1, 0)):
    encoded = text.encode("utf8" if version == (3, 0) else "latin1", "surrogateescape")
    length = struct.pack("<H" if version == (1, 0) else "<I", len(encoded))
    return b"\x93NUMPY" + bytes(version) + length + encoded


def write_arrays(folder):
    manifest = Manifest(folder)
    for descr in DTYPES:
        for shape in SHAPES:
            for order in "CF" if len(shape) > 1 else "C":
                array = sample(descr, shape, order)
                for version in VERSIONS:
                    name = f"array{len(manifest.lines)}"
                    name += "_default" if version == (1, 0) else ""
                    manifest.add(name, saved(array, version), array)
    for _ in range(1200):
        dtype = random_dtype()
        array = sample(dtype, random_shape(5, [0, 1, 2, 3, 4]), random.choice("CCF"))
        name = f"random{len(manifest.lines)}"
        version = random.choice([None, None, (1, 0), (2, 0), (3, 0)])
        if version is None and not has_array_of_arrays(dtype):
            name += "_default"
        try:
            manifest.add(name, saved(array, version), array)
        except UnicodeEncodeError:
            manifest.add(name, saved(array, (3, 0)), array)
    for descr in ["V0", "S0", "<U0", ">U0", [], [("a", "V0"), ("b", "<i4")], [("a", "S0"), ("b", ">i4")],
                  [("a", []), ("b", "<i4")], [("a", [], (2,))], [("a", "<U0")], [("a", "<f4", (0,))],
                  {"names": [], "formats": [], "itemsize": 4}]:
        array = np.zeros((3, 2), np.dtype(descr)) if np.dtype(descr).itemsize else np.ndarray((3, 2), np.dtype(descr))
        manifest.add(f"bare{len(manifest.lines)}_default", saved(array), array)
    values = np.arange(24, dtype="<f4").reshape(4, 6)
    for name, array in {"transposed": values.T, "stepped": values[::2, ::-3],
                        "broadcast": np.broadcast_to(values, (2, 4, 6))}.items():
        manifest.add(name, saved(array), array)
    # numpy writes bfloat16 and the 8-bit floats of ml_dtypes as raw bytes, some of them with a byte order
    for descr in ["<V2", "|V2", "<V1", "|V1"]:
        array = sample(descr, (4, 6))
        text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (4, 6), }}"
        manifest.add(f"lacking_{descr[0] == '<'}_{descr[2]}", by_hand(text + "\n") + array.tobytes(), array)
    # what numpy wrote before 2017 (aligned to 16), under Python 2, and what others write (not aligned)
    for name, text in {
        "aligned_16": "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 6), }",
        "python_2": "{'descr': '<f4', 'fortran_order': False, 'shape': (4L, 6L), }",
        "unaligned": "{'shape': (4, 6), 'fortran_order': False, 'descr': '<f4'}",
    }.items():
        padding = 0 if name == "unaligned" else -(10 + len(text) + 1) % 16
        content = by_hand(text + " " * padding + "\n") + values.tobytes()
        assert (np.load(io.BytesIO(content)) == values).all()
        manifest.add(name, content, values)
    manifest.write()


# ---- numpy as the judge of headers -------------------------------------------------------------------------

PIECES = ["'descr'", '"descr"', "'fortran_order'", "'shape'", "'<f4'", '">i8"', "'|b1'", "'float32'",
          "'<M8[ns]'", "'<U5'", "'|O'", "'|V0'", "[('a', '<f4')]", "True", "False", "1", "0", "2L",
          "3L", "L", "00", "07", "-1", "+2", "0x2", "1_0", "1.0", "1e2", "None", "(2, 3)", "(2,)",
          "(2)", "()", "(", ")", "[", "]", "{", "}", ",", ":", " ", "  ", "\n", "\t", "\r", "\f", "\v",
          "\\", "\\\n", "#", "'", '"', "'''", "b", "u", "r", ";", "\0", "\x7f", "\xe9",
          "9223372036854775807", "9223372036854775808", "18446744073709551616",
          "[('b', '>i2', (2,))]", "('c', '|S3'), ", "('', '|V4'), ", "(('t', 'd'), '<f8', (2, 1))",
          "('t', 'e')", "('<f4', (2,))", "''", "'a'", "'b'", "[]", "()", "[", "]", "\\x41", "\\u0041", "\\N",
          "\\'", "'|O'", "2147483647", "2147483648", "536870911", "u't'", "b'a'", ", 2", ", (3, 0)",
          ", ()", ", 1"]
BASES = ["{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }      \n",
         "{'descr': '>M8[25us]', 'fortran_order': True, 'shape': (7,), }\n",
         "{'descr': '|S10', 'fortran_order': False, 'shape': (), }",
         '{"shape":(2L,0L),"descr":"uint8","fortran_order":True}\n\n']
STRUCTURED_BASES = [
    "{'descr': [('a', '<f4'), ('b', '>i2', (2, 3))], 'fortran_order': False, 'shape': (2, 3), }      \n",
    "{'descr': [(('title', 'name'), '|S3'), ('', '|V5'), ('x', '<f8')], 'fortran_order': False, "
    "'shape': (7,), }",
    "{'descr': [('a', [('b', '|u1'), ('c', [('d', '<M8[ns]')], (2,))]), ('', '|V7')], 'fortran_order': True, "
    "'shape': (2, 3), }\n",
    "{'descr': [('a', ('<f4', (2,)), (3,)), ((u'\\xe9', 'caf\xe9'), '<U5', 2L)], 'fortran_order': False, "
    "'shape': (), }\n",
]


def mutated():
    text = random.choice(random.choice([BASES, STRUCTURED_BASES]))
    for _ in range(random.choice([0, 1, 1, 1, 2, 2, 3, 5])):
        at = random.randrange(len(text) + 1)
        action = random.randrange(5)
        if action == 0:
            text = text[:at] + random.choice(PIECES) + text[at:]
        elif action == 1:
            text = text[:at] + text[at + random.randrange(1, 4):]
        elif action == 2:
            text = text[:at] + random.choice(PIECES) + text[at + random.randrange(1, 8):]
        elif action == 3:
            until = at + random.randrange(1, 30)
            text = text[:at] + text[at:until] + text[at:]
        else:
            old = random.choice(["<f4", "False", "(2, 3)", "2", "3", "7", "'", " ", ",", "(", "\n", "2L"])
            text = text.replace(old, random.choice(PIECES))
    return by_hand(text, random.choice(VERSIONS))


def verdict(content):
    """What numpy reads in a header: dtype, order, lengths, offset; or nothing, when it rejects it."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran_order, dtype = np.lib.format._read_array_header(file, version)
        if not all(type(length) is int and 0 <= length < 2**63 for length in shape):
            return ""  # numpy notices when it makes the array
        lengths = ",".join(map(str, shape))
        return "\t".join([spelled(dtype), str(int(fortran_order)), lengths, str(file.tell())])
    except Exception:  # SyntaxError, TypeError, ValueError, RecursionError, tokenize.TokenError, ...
        return ""


def write_judged_headers(folder):
    with open(folder / "headers.bin", "wb") as file:
        for _ in range(16000):
            content = mutated()
            for part in (content, verdict(content).encode()):
                file.write(struct.pack("<I", len(part)) + part)


def write_judged_types(folder):
    units = ["", "generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "B",
             "1s", "2D", "025s", "0s", "-1s", "7s/2", "7/2s", "2147483647s", "2147483648s", "s ", "5", "[s"]
    spellings = [prefix + letter + size for prefix in ["", "<", ">", "=", "|", "<<", " "]
                 for letter in map(chr, range(33, 127))
                 for size in ["", "0", "1", "2", "3", "4", "5", "7", "8", "10", "12", "16", "32", "04", "+4",
                              " 4", "4 ", "4x", "2147483647", "2147483648", "536870911", "536870912",
                              "4294967301"]]
    spellings += [prefix + time + f"[{unit}]" for prefix in ["", "<", ">", "|"]
                  for time in ["M8", "m8", "m4", "datetime64", "timedelta64"] for unit in units]
    names = [name for name in np.sctypeDict if isinstance(name, str)]
    spellings += [prefix + name for prefix in ["", "<", "="] for name in names]
    lines = []
    for spelling in spellings:
        try:
            dtype = np.dtype(spelling)
            lines.append(f"{spelling}\t{dtype.str}\t{dtype.itemsize}\n")
        except Exception:
            lines.append(f"{spelling}\t\t0\n")
    (folder / "types.txt").write_text("".join(lines))


# ---- what C++ wrote ----------------------------------------------------------------------------------------

def read_arrays(folder):
    failures = 0
    lines = (folder / "manifest.txt").read_text("utf-8").splitlines()
    for line in lines:
        name, descr, fortran_order, lengths = line.split("\t")
        path = folder / (name + ".npy")
        shape = tuple(map(int, lengths.split(","))) if lengths else ()
        content = path.read_bytes()
        array = np.load(path)
        same = (spelled(array.dtype) == descr and array.shape == shape
                and is_fortran(array) == bool(int(fortran_order))
                and raw(array) == (folder / (name + ".raw")).read_bytes()
                # byte for byte what numpy writes, padding and version included
                and saved(array) == content)
        if array.size > 0:
            mapped = np.load(path, mmap_mode="r")
            same = same and raw(mapped) == raw(array)
        if not same:
            print(f"{name}: {descr} {shape} differs: {content[:100]!r}")
            failures += 1
    if not lines:
        sys.exit("the manifest is empty")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    random.seed(20)
    if sys.argv[1] == "write":
        target = pathlib.Path(sys.argv[2])
        write_arrays(target)
        write_judged_headers(target)
        write_judged_types(target)
    elif sys.argv[1] == "read":
        read_arrays(pathlib.Path(sys.argv[2]))
