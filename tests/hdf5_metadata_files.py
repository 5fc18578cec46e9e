"""h5py's side of hdf5_library_test.cpp.

hdf5_metadata_files.py check          exits with 77 when there is no h5py
hdf5_metadata_files.py write FOLDER   writes files of many layouts, chunk indexes, filters and types

datasets.txt has a line for each dataset that opens: file, name, type, lengths, storage, lengths of a chunk, filters,
fill value (hexadecimal, empty for zeros), number; NUMBER.raw are its elements as they are stored, in C order.
refused.txt has a line for each dataset that does not open: file, name, and a part of the error message, in which "$"
stands for the end of the message. damaged.txt has a line for each dataset that opens but cannot be read: the same, and
"twice" if the damage shows only when a chunk is decoded twice with different results, otherwise "once". A line of
listed.txt has a file and all names that its listing must have, in their order.
"""

import ctypes
import itertools
import os
import pathlib
import random
import struct
import sys
import zlib

try:
    import h5py
    import numpy as np
    from h5py import h5d, h5g, h5p, h5s, h5t, h5z
except ImportError:
    sys.exit(77)

DEFLATE, SHUFFLE, FLETCHER32, SZIP, SCALEOFFSET, LZF = 1, 2, 3, 4, 6, 32000
UNKNOWN_FILTER = 511
NUMBERS = ["i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8", "<f2", ">f2",
           "<f4", ">f4", "<f8", ">f8", "<f16", "<c8", ">c8", "<c16", ">c16", "<c32", "?", "S1", "S10", "V7"]


class Writer:
    def __init__(self, folder):
        self.folder = folder
        self.datasets, self.refused, self.damaged, self.listed = [], [], [], []
        # what h5py does not offer
        self.library = ctypes.CDLL("libhdf5_serial.so.103") if h5py.version.hdf5_version.startswith("1.10.") else None

    def expect(self, file, name, dtype, data, storage, chunks=(), filters=(), fill=b""):
        """`data` are the elements as they are stored: an array, or their bytes and the shape."""
        content, shape = data if isinstance(data, tuple) else (data.tobytes("C"), data.shape)
        if not any(fill):
            fill = b""
        number = len(self.datasets)
        self.datasets.append([pathlib.Path(file.filename).name, name, dtype, ",".join(map(str, shape)), storage,
                              ",".join(map(str, chunks)), ",".join(map(str, filters)), fill.hex(), str(number)])
        (self.folder / f"{number}.raw").write_bytes(content)

    def refuse(self, file, name, sentence):
        self.refused.append([pathlib.Path(file.filename).name, name, sentence])

    def list(self, file, *names):
        self.listed.append([pathlib.Path(file.filename).name, *names])

    def write(self):
        for name in ("datasets", "refused", "damaged", "listed"):
            lines = ["\t".join(line) + "\n" for line in getattr(self, name)]
            (self.folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")


def spelled(dtype):
    dtype = np.dtype(dtype)
    return repr(dtype.descr) if dtype.names else dtype.str


def sample(dtype, shape):
    """Numbers that compress a little."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    content = bytes(random.choice(b"\0\0\0\1\2\3") for _ in range(count * dtype.itemsize))
    if dtype.kind == "b" or dtype.names:  # structures may have booleans
        content = bytes(byte & 1 for byte in content)
    if dtype.kind == "S":
        content = bytes(byte + 65 for byte in content)
    if dtype == np.dtype("<f16") or dtype == np.dtype("<c32"):  # their padding is not kept
        return np.arange(count).astype(dtype).reshape(shape)
    return np.frombuffer(content, dtype).reshape(shape)


def properties(layout="contiguous", chunks=None, filters=(), fill=None, early=False, never=False, itemsize=4):
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_layout({"contiguous": h5d.CONTIGUOUS, "compact": h5d.COMPACT, "chunked": h5d.CHUNKED}[layout])
    if chunks:
        dcpl.set_chunk(chunks)
    for number in filters:
        if number == DEFLATE:
            dcpl.set_deflate(6)
        elif number == SHUFFLE:
            dcpl.set_shuffle()
        elif number == FLETCHER32:
            dcpl.set_fletcher32()
        elif number == SZIP:
            dcpl.set_szip(h5z.SZIP_NN_OPTION_MASK, 8)
        elif number == SCALEOFFSET:
            dcpl.set_scaleoffset(h5z.SO_INT, 0)
        else:
            dcpl.set_filter(number, h5z.FLAG_OPTIONAL)
    if fill is not None:
        dcpl.set_fill_value(fill)
    if early:
        dcpl.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    if never:
        dcpl.set_fill_time(h5d.FILL_TIME_NEVER)
    return dcpl


def create(file, name, file_type, shape, dcpl, maxshape=None):
    space = h5s.create_simple(shape, tuple(h5s.UNLIMITED if length is None else length for length in maxshape or shape))
    return h5d.create(file.id, name.encode(), file_type, space, dcpl)


def layouts(writer):
    """Contiguous and compact datasets, and every chunk index that libhdf5 has: without and with a user block; written
    in whole, in part, or never."""
    shape, chunks = (7, 10), (3, 4)
    kinds = {"contiguous": ("contiguous", None, None, False), "compact": ("compact", None, None, False),
             "fixed": ("chunked", chunks, None, False), "one_axis": ("chunked", chunks, (None, 10), False),
             "two_axes": ("chunked", chunks, (None, None), False), "single": ("chunked", shape, None, False),
             "implicit": ("chunked", chunks, None, True)}
    pipelines = [(), (DEFLATE,), (SHUFFLE, DEFLATE), (LZF,), (SHUFFLE, LZF, FLETCHER32), (FLETCHER32,),
                 (SHUFFLE, DEFLATE, FLETCHER32), (FLETCHER32, SHUFFLE, DEFLATE)]
    for libver, user_block in itertools.product(("earliest", "latest"), (0, 512, 4096)):
        with h5py.File(writer.folder / f"layouts_{libver}_{user_block}.h5", "w", libver=libver,
                       userblock_size=user_block) as file:
            file["before"] = np.uint8(0)  # an odd offset for what follows
            for (kind, (layout, chunk, maxshape, early)), filters, written in itertools.product(
                    kinds.items(), pipelines, ("all", "part", "never")):
                if filters and (layout != "chunked" or early):
                    continue
                fill = np.array(-5, ">i4") if written != "all" else None
                name = "_".join([kind, *map(str, filters), written])
                dcpl = properties(layout, chunk, filters, fill, early)
                dataset = h5py.Dataset(create(file, name, h5t.STD_I32BE, shape, dcpl, maxshape))
                data = np.full(shape, -5 if fill is not None else 0, ">i4")
                if written == "all":
                    data[...] = sample(">i4", shape)
                    dataset[...] = data
                if written == "part":
                    data[2:5, 5:7] = dataset[2:5, 5:7] = sample(">i4", (3, 2))
                if layout == "compact":
                    storage = "inline"
                else:
                    storage = "absent" if written == "never" and not early else layout
                is_chunked = storage == "chunked"
                writer.expect(file, name, ">i4", data, storage, chunk if is_chunked else (),
                              filters if is_chunked else (), fill.tobytes() if fill is not None else b"")


def storage_of_library(writer):
    with h5py.File(writer.folder / "library.h5", "w") as file:
        data = np.arange(70, dtype="<i4").reshape(7, 10) - 7
        for name, filters in {"scaleoffset": (SCALEOFFSET,), "szip": (SZIP,), "both": (SHUFFLE, SCALEOFFSET)}.items():
            if SZIP in filters and not (h5z.filter_avail(SZIP) and
                                        h5z.get_filter_info(SZIP) & h5z.FILTER_CONFIG_ENCODE_ENABLED):
                continue
            dataset = h5py.Dataset(create(file, name, h5t.STD_I32LE, data.shape,
                                          properties("chunked", (3, 4), filters)))
            dataset[...] = data
            writer.expect(file, name, "<i4", data, "library", (3, 4), filters)
        # an array type whose fill value is not one number
        pair = h5t.array_create(h5t.STD_I16LE, (2,))
        dcpl = properties("chunked", (2,))
        fill = np.array([1, 2], "<i2")
        if writer.library:
            writer.library.H5Pset_fill_value(ctypes.c_int64(dcpl.id), ctypes.c_int64(pair.id),
                                             fill.ctypes.data_as(ctypes.c_void_p))
            create(file, "pairs", pair, (3,), dcpl)
            writer.expect(file, "pairs", "<i2", np.tile(fill, (3, 1)), "library", (2, 2))
        dcpl = properties("chunked", (2,), (UNKNOWN_FILTER,))
        h5py.Dataset(create(file, "unknown", h5t.STD_I32LE, (4,), dcpl))[...] = 1
        writer.refuse(file, "unknown", "the filter 511")


def damaged_chunks(writer):
    """Writes chunks that are too short or declare wrong sizes. libhdf5 would read past their ends or decode only a part
    of them, and so deliver whatever was in memory."""
    path = writer.folder / "damaged.h5"

    def damage(name, data, dcpl, change, sentence, twice=False):
        dataset = h5py.Dataset(create(file, name, h5t.py_create(data.dtype), data.shape, dcpl))
        dataset[...] = data
        mask, stored = dataset.id.read_direct_chunk((0,) * data.ndim)
        dataset.id.write_direct_chunk((0,) * data.ndim, bytes(change(bytearray(stored))), mask)
        writer.damaged.append([path.name, name, sentence, "twice" if twice else "once"])

    def put(at, value):
        def change(stored):
            stored[at] = value
            return stored
        return change

    data = np.arange(700, dtype="<i4").reshape(70, 10)
    with h5py.File(path, "w") as file:
        packed = lambda *more: properties("chunked", (16, 10), (SCALEOFFSET, *more))
        cut = lambda stored: stored[:-20]
        damage("bits", data, packed(), put(0, 30), "do not hold 4800 bits")
        damage("too_many_bits", data, packed(), put(1, 1), "is said to have 264 bits for elements of 4 bytes")
        damage("short", data, packed(), cut, "do not hold 1280 bits")
        damage("no_head", data, packed(), lambda stored: stored[:20], "is truncated after 20 bytes")
        damage("deflated", data, packed(DEFLATE), lambda stored: zlib.compress(zlib.decompress(stored)[:-9]),
               "do not hold 1280 bits")
        damage("shuffled", data, packed(SHUFFLE, FLETCHER32), cut, "its scale-offset data")
        if writer.library:
            dcpl = properties("chunked", (16, 10))
            writer.library.H5Pset_nbit(ctypes.c_int64(dcpl.id))
            damage("nbit", data.astype("<f16"), dcpl, cut, "do not hold 12800 bits")
        if h5z.filter_avail(SZIP) and h5z.get_filter_info(SZIP) & h5z.FILTER_CONFIG_ENCODE_ENABLED:
            pressed = lambda: properties("chunked", (16, 10), (SZIP,))
            damage("szip_size", data, pressed(), put(0, 0), "declares 512 decompressed bytes, but 640 are expected")
            damage("szip_short", data, pressed(), lambda stored: stored[:len(stored) // 2],
                   "decoded it twice with different results", True)
            small = np.arange(100, dtype="<u2").reshape(10, 10)
            damage("szip_small", small, properties("chunked", (10, 10), (SZIP,)), lambda stored: stored[:9],
                   "decoded it twice with different results", True)
    # chunks that are larger than the filter was told
    with h5py.File(writer.folder / "larger.h5", "w") as file:
        file.create_dataset("d", data=data[:60, :5], chunks=(16, 5), scaleoffset=0)
    content = bytearray((writer.folder / "larger.h5").read_bytes())
    lengths = np.array([16, 5, 4], "<u4").tobytes()
    assert content.count(lengths) == 1
    content[content.find(lengths)] = 255
    (writer.folder / "larger.h5").write_bytes(content)
    writer.damaged.append(["larger.h5", "d", "is for 80 elements of 4 bytes, but a chunk has 5100 bytes", "once"])


def chunks(writer):
    with h5py.File(writer.folder / "chunks.h5", "w", libver="latest", userblock_size=512) as file:
        # filters skipped for some chunks, which HDF5 allows for each of them
        dcpl = properties("chunked", (3,), (SHUFFLE, DEFLATE))
        dataset = h5py.Dataset(create(file, "masked", h5t.STD_U16LE, (6,), dcpl))
        data = np.arange(6, dtype="<u2") * 257 + 1
        dataset[:3] = data[:3]
        dataset.id.write_direct_chunk((3,), data[3:].tobytes(), 3)
        writer.expect(file, "masked", "<u2", data, "chunked", (3,), (SHUFFLE, DEFLATE))
        # by an option of the library, partial chunks at the edges are not filtered; their filter masks do not show it
        dcpl = properties("chunked", (4, 4), (SHUFFLE, DEFLATE))
        if writer.library:
            assert writer.library.H5Pset_chunk_opts(ctypes.c_int64(dcpl.id), 2) >= 0
        data = sample("<i8", (6, 9))
        h5py.Dataset(create(file, "edges", h5t.STD_I64LE, data.shape, dcpl))[...] = data
        writer.expect(file, "edges", "<i8", data, "chunked", (4, 4), (SHUFFLE, DEFLATE))
        h5py.Dataset(create(file, "edges_growing", h5t.STD_I64LE, data.shape, dcpl, (None, None)))[...] = data
        writer.expect(file, "edges_growing", "<i8", data, "chunked", (4, 4), (SHUFFLE, DEFLATE))
        # larger than the dataset
        data = sample("<i2", (3, 5))
        h5py.Dataset(create(file, "large", h5t.STD_I16LE, (3, 5), properties("chunked", (8, 8), (DEFLATE,)),
                            (None, None)))[...] = data
        writer.expect(file, "large", "<i2", data, "chunked", (8, 8), (DEFLATE,))
        # never to be filled: zeros, whatever the fill value
        fill = np.array(7, "<i2")
        create(file, "never_filled", h5t.STD_I16LE, (6,), properties("chunked", (3,), (), fill, never=True))
        writer.expect(file, "never_filled", "<i2", np.zeros(6, "<i2"), "absent")
        # shrunk and grown again
        dcpl = properties("chunked", (2,), (), fill)
        dataset = h5py.Dataset(create(file, "shrunk", h5t.STD_I16LE, (9,), dcpl, (None,)))
        dataset[...] = 3
        dataset.resize((3,))
        dataset.resize((8,))
        data = np.array([3, 3, 3, 7, 7, 7, 7, 7], "<i2")
        writer.expect(file, "shrunk", "<i2", data, "chunked", (2,), (), fill.tobytes())
        create(file, "empty", h5t.STD_I16LE, (0, 4), properties("chunked", (2, 4)), (None, 4))
        writer.expect(file, "empty", "<i2", np.zeros((0, 4), "<i2"), "absent")
        data = np.arange(5000, dtype="<i4").reshape(50, 100)
        dcpl = properties("chunked", (1, 2))
        h5py.Dataset(create(file, "many", h5t.STD_I32LE, data.shape, dcpl, (None, 100)))[...] = data
        writer.expect(file, "many", "<i4", data, "chunked", (1, 2))


def types(writer):
    with h5py.File(writer.folder / "types.h5", "w") as file:
        for number, dtype in enumerate(NUMBERS):
            for shape in ((), (5,), (2, 0), (2, 3)):
                data = sample(dtype, shape)
                name = f"{number}/of {'x'.join(map(str, shape))}"
                file.create_dataset(name, data=data)
                writer.expect(file, name, spelled(data.dtype), data, "contiguous" if data.size else "absent")
        structures = {
            "plain": np.dtype([("a", "<f4"), ("b", ">i2", (3,))]),
            "nested": np.dtype({"names": ["x", "y"], "formats": ["<u1", [("re", ">f8"), ("ok", "?")]],
                                "offsets": [3, 8], "itemsize": 30}),
            "unordered": np.dtype({"names": ["x", "y"], "formats": ["<u2", "<u4"], "offsets": [4, 0], "itemsize": 6}),
            "complex": np.dtype([("z", "<c8", (2, 2)), ("S", "S3")]),
            "not_complex": np.dtype([("r", "<f4"), ("i", ">f4")]),
        }
        for name, dtype in structures.items():
            data = np.zeros(4, dtype)  # also between the fields
            content = sample(dtype, (4,))
            for field in dtype.names:
                data[field] = content[field]
            h5py.Dataset(create(file, name, h5t.py_create(dtype, logical=True), (4,), properties()))[...] = data
            if name == "unordered":
                dtype = np.dtype({"names": ["y", "x"], "formats": ["<u4", "<u2"], "offsets": [0, 4], "itemsize": 6})
            writer.expect(file, name, spelled(dtype), data, "contiguous")
        for name, dtype, plain in (("enum", h5py.enum_dtype({"a": 1, "b": 300}, ">u2"), ">u2"),
                                   ("like_bool", h5py.enum_dtype({"FALSE": 0, "TRUE": 2}, "i1"), "|i1"),
                                   ("time", h5py.opaque_dtype("<M8[25us]"), "<M8[25us]"),
                                   ("span", h5py.opaque_dtype("<m8[ns]"), "<m8[ns]")):
            data = np.array([1, 2], plain)
            file.create_dataset(name, data=data.view(dtype) if name in ("time", "span") else data, dtype=dtype)
            writer.expect(file, name, plain, data, "contiguous")
        raw_types(writer, file)
        refused_types(writer, file)


def floating(size, exponent, mantissa, bias, order=h5t.ORDER_LE):
    result = h5t.IEEE_F64LE.copy()
    result.set_fields(exponent + mantissa, mantissa, exponent, 0, mantissa)
    result.set_ebias(bias)
    result.set_precision(8 * size)
    result.set_size(size)
    result.set_order(order)
    return result


def write_raw(file, name, file_type, content, shape):
    dataset = create(file, name, file_type, shape, properties())
    dataset.write(h5s.ALL, h5s.ALL, np.frombuffer(content, np.uint8), file_type)


def raw_types(writer, file):
    """Types that numpy does not have, and others spelled in HDF5's own ways."""
    content = bytes(range(1, 25))
    padded = h5t.C_S1.copy()
    padded.set_size(4)
    padded.set_strpad(h5t.STR_SPACEPAD)
    halves = h5t.create(h5t.COMPOUND, 4)
    halves.insert(b"r", 0, h5t.IEEE_F16LE)
    halves.insert(b"i", 2, h5t.IEEE_F16LE)
    for name, file_type, dtype, shape in (
            ("halves", halves, "[('r', '<f2'), ('i', '<f2')]", (6,)),
            ("bfloat16", floating(2, 8, 7, 127), "bfloat16", (12,)),
            ("bfloat16_big", floating(2, 8, 7, 127, h5t.ORDER_BE), ">bfloat16", (12,)),
            ("float8_e5m2", floating(1, 5, 2, 15), "float8_e5m2", (24,)),
            ("float8_e4m3", floating(1, 4, 3, 7), "|V1", (24,)),
            ("bits8", h5t.STD_B8LE, "|u1", (24,)),
            ("bits32", h5t.STD_B32BE, ">u4", (6,)),
            ("padded", padded, "|S4", (6,))):
        write_raw(file, name, file_type, content, shape)
        writer.expect(file, name, dtype, (content, shape), "contiguous")
    matrix = h5t.array_create(h5t.array_create(h5t.STD_I16BE, (3,)), (2,))
    for name, storage, dcpl in (("matrices", "contiguous", properties()),
                                ("chunked_matrices", "chunked", properties("chunked", (2,), (DEFLATE,))),
                                ("compact_matrices", "inline", properties("compact"))):
        dataset = create(file, name, matrix, (2,), dcpl)
        dataset.write(h5s.ALL, h5s.ALL, np.frombuffer(content, np.uint8), matrix)
        chunks_and_filters = ((2, 2, 3), (DEFLATE,)) if storage == "chunked" else ()
        writer.expect(file, name, ">i2", (content, (2, 2, 3)), storage, *chunks_and_filters)
    scalar = h5d.create(file.id, b"one_matrix", matrix, h5s.create(h5s.SCALAR))
    scalar.write(h5s.ALL, h5s.ALL, np.frombuffer(content[:12], np.uint8), matrix)
    writer.expect(file, "one_matrix", ">i2", (content[:12], (2, 3)), "contiguous")
    sevens = h5t.array_create(h5t.STD_I16LE, (2,))
    dcpl = properties()
    if writer.library:
        fill = np.array([7, 7], "<i2")
        writer.library.H5Pset_fill_value(ctypes.c_int64(dcpl.id), ctypes.c_int64(sevens.id),
                                         fill.ctypes.data_as(ctypes.c_void_p))
        create(file, "sevens", sevens, (3,), dcpl)
        writer.expect(file, "sevens", "<i2", np.full((3, 2), 7, "<i2"), "absent", fill=fill[:1].tobytes())


def refused_types(writer, file):
    odd = h5t.STD_I16LE.copy()
    odd.set_precision(12)
    shifted = h5t.STD_I32LE.copy()
    shifted.set_precision(16)
    shifted.set_offset(8)
    wide = h5t.STD_I32LE.copy()
    wide.set_precision(24)
    wide.set_size(3)
    vlen_string = h5t.C_S1.copy()
    vlen_string.set_size(h5t.VARIABLE)
    structure = h5t.create(h5t.COMPOUND, 24)
    inner = h5t.create(h5t.COMPOUND, 16)
    inner.insert(b"deep", 0, vlen_string)
    structure.insert(b"number", 0, h5t.STD_I32LE)
    structure.insert(b"inner", 8, inner)
    for name, file_type, sentence in (
            ("bits12", odd, "integers of 12 bits in 2 bytes"),
            ("shifted", shifted, "do not begin at bit 0"),
            ("bytes3", wide, "integers of 3 bytes"),
            ("float_odd", floating(4, 7, 24, 63), "in a layout that pinflow lacks"),
            ("float_bias", floating(2, 5, 10, 16), "in a layout that pinflow lacks"),
            ("vax", h5t.VAX_F32 if hasattr(h5t, "VAX_F32") else None, "byte order"),
            ("clock", h5t.UNIX_D32LE, "times of the class H5T_TIME"),
            ("strings", vlen_string, "strings of variable length"),
            ("sequences", h5t.vlen_create(h5t.STD_I32LE), "sequences of variable length"),
            ("references", h5t.STD_REF_OBJ, "references"),
            ("regions", h5t.STD_REF_DSETREG, "references"),
            ("array_of_strings", h5t.array_create(vlen_string, (2,)), "strings of variable length"),
            ("within", structure, "strings of variable length, whose characters are stored elsewhere in the file in the "
                                  "field 'deep' in the field 'inner'")):
        if file_type is not None:
            create(file, name, file_type, (3,), properties())
            writer.refuse(file, name, sentence)
    file["null"] = h5py.Empty("f4")
    writer.refuse(file, "null", "null dataspace")


def links(writer):
    with h5py.File(writer.folder / "other.h5", "w") as other:
        other["inside/data"] = np.arange(3)
    with h5py.File(writer.folder / "links.h5", "w") as file:
        data = np.arange(4, dtype="<i4")
        file["b/data"] = data
        file["b/again"] = file["b/data"]
        file["a-b"] = np.int8(1)
        file["a/b"] = np.int8(1)
        file["b/up"] = file["/"]  # a cycle
        file["b/c/round"] = file["b"]
        file["soft"] = h5py.SoftLink("/b/data")
        file["soft_group"] = h5py.SoftLink("b")
        file["dangling"] = h5py.SoftLink("/b/nothing")
        file["endless"] = h5py.SoftLink("/endless")
        file["outside"] = h5py.ExternalLink("other.h5", "/inside/data")
        file["outside_group"] = h5py.ExternalLink("other.h5", "/inside")
        file["outside_fifo"] = h5py.ExternalLink("fifo", "/x")
        file["soft_outside"] = h5py.SoftLink("/outside_group/data")
        file["type"] = np.dtype("f8")
        file["caf\u00e9 \u2603"] = data
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(writer.folder / "other.h5", "inside/data", (3,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (3,), "i4", external=[(str(writer.folder / "raw.bin"), 0, 12)])
        for name in ("b/data", "b/again", "soft", "soft_group/data", "soft_group/up/b/c/round/again",
                     "b/up/b/up/b/data", "caf\u00e9 \u2603"):
            writer.expect(file, name, "<i4", data, "contiguous")
        for name, sentence in (
                ("dangling", "leads nowhere"), ("endless", "'endless'"), ("outside", "another file, 'other.h5'"),
                ("outside_group/data", "another file, 'other.h5'"), ("outside_fifo", "another file, 'fifo'"),
                ("soft_outside", "another file"), ("virtual", "is virtual"), ("external", "other files"),
                ("type", "'type' is neither a group nor a dataset$"), ("type/x", "'type' is neither a group nor a dataset$"),
                ("b", "'b' is a group, not a dataset$"),
                ("b/data/more", "'b/data' is a dataset, not a group$"),
                ("nothing", "nothing called 'nothing' in it; it has 'a', 'a-b', 'b', "),
                ("b/nothing/more", "nothing called 'b/nothing' in it; 'b' has 'again', "),
                (".", "nothing called '.'"), ("", "not the name"), ("/", "not the name")):
            writer.refuse(file, name, sentence)
        writer.list(file, "a/b", "a-b", "b/again", "caf\u00e9 \u2603", "dangling", "endless", "external", "outside",
                    "outside_fifo", "outside_group", "soft_outside", "virtual")
    os.mkfifo(writer.folder / "fifo")
    with h5py.File(writer.folder / "deep.h5", "w") as file:
        group = file
        for _ in range(300):
            group = group.create_group("g")
        group["data"] = 1
        writer.expect(file, "/".join(["g"] * 300 + ["data"]), "<i8", np.array(1), "contiguous")
        writer.list(file, "/".join(["g"] * 257))


def lookup3(data):
    """Bob Jenkins' hashlittle with the initial value 0: the checksum of HDF5's metadata."""
    def rotated(x, bits):
        return (x << bits | x >> 32 - bits) & 0xFFFFFFFF

    s = [0xDEADBEEF + len(data) & 0xFFFFFFFF] * 3
    for begin in range(0, len(data), 12):
        words = struct.unpack("<3I", data[begin:begin + 12].ljust(12, b"\0"))
        s = [old + word & 0xFFFFFFFF for old, word in zip(s, words)]
        if begin + 12 < len(data):
            for to, by, other, bits in ((0, 2, 1, 4), (1, 0, 2, 6), (2, 1, 0, 8), (0, 2, 1, 16), (1, 0, 2, 19),
                                        (2, 1, 0, 4)):
                s[to] = (s[to] - s[by] & 0xFFFFFFFF) ^ rotated(s[by], bits)
                s[by] = s[by] + s[other] & 0xFFFFFFFF
        else:
            for to, by, bits in ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24)):
                s[to] = (s[to] ^ s[by]) - rotated(s[by], bits) & 0xFFFFFFFF
    return s[2]


def wrong_link_count(writer):
    """A group whose index claims 1000 links and has 12: libhdf5 crashes if it sorts them."""
    with h5py.File(writer.folder / "wrong_link_count.h5", "w", libver="latest") as file:
        group = file.create_group("g")
        for number in range(12):
            group[f"n{number}"] = np.int8(number)
        writer.expect(file, "g/n7", "|i1", np.int8(7), "contiguous")
        writer.refuse(file, "g/n12", "nothing called 'g/n12' in it; 'g' has 'n")
    path = writer.folder / "wrong_link_count.h5"
    content = bytearray(path.read_bytes())
    header = content.find(b"BTHD\0\5")  # of version 0, of links by name
    assert header > 0
    content[header + 26:header + 34] = struct.pack("<Q", 1000)
    content[header + 34:header + 38] = struct.pack("<I", lookup3(content[header:header + 34]))
    path.write_bytes(content)


def empty_file(writer):
    with h5py.File(writer.folder / "empty.h5", "w") as file:
        writer.list(file)
    # a file that its writer did not close, because it was killed
    child = os.fork()
    if child == 0:
        file = h5py.File(writer.folder / "unclosed.h5", "w", libver="latest")
        file["data"] = np.arange(3)
        file.flush()
        os._exit(0)
    os.waitpid(child, 0)


def stored_sizes_of_zero(writer):
    """Data with a valid offset and a stored size of 0, as a damaged file may have."""
    path = writer.folder / "zero_sizes.h5"
    data = np.arange(1, 65, dtype="<u2")
    with h5py.File(path, "w") as file:
        file["contiguous"] = data
        for name, filters in (("chunked", {}), ("deflated", {"compression": "gzip"})):
            file.create_dataset(name, data=data, chunks=(16,), **filters)
        place = file["contiguous"].id.get_offset()
        sizes = {place.to_bytes(8, "little") + (128).to_bytes(8, "little"): (8, 8)}
        for name in ("chunked", "deflated"):
            # size, filter mask and two coordinates come before the address
            chunk = file[name].id.get_chunk_info(1)
            sizes[chunk.byte_offset.to_bytes(8, "little")] = (-24, 4)
    content = bytearray(path.read_bytes())
    for place, (distance, length) in sizes.items():
        assert content.count(place) == 1
        begin = content.index(place) + distance
        assert any(content[begin:begin + length])
        content[begin:begin + length] = bytes(length)
    path.write_bytes(content)


def chunks_that_are_not_found(writer):
    """Chunks whose coordinates in a version 1 B-tree are those of the next chunk, or outside of the shape."""
    path = writer.folder / "lost_chunks.h5"
    data = np.arange(1, 65, dtype="<u2")
    with h5py.File(path, "w") as file:
        for name in ("repeated", "outside"):
            dataset = file.create_dataset(name, (80,), "<u2", chunks=(16,))
            dataset[:64] = data  # the last chunk is never written
        places = {name: file[name].id.get_chunk_info(1).byte_offset for name in file}
    content = bytearray(path.read_bytes())
    for name, coordinate in (("repeated", 32), ("outside", 16 + 256)):
        place = places[name].to_bytes(8, "little")
        assert content.count(place) == 1
        begin = content.index(place) - 16  # of the coordinates: of the element, and of its bytes
        assert content[begin:begin + 8] == (16).to_bytes(8, "little")
        content[begin:begin + 8] = coordinate.to_bytes(8, "little")
    path.write_bytes(content)


def write(folder):
    random.seed(20)
    writer = Writer(folder)
    for part in (layouts, storage_of_library, damaged_chunks, chunks, types, links, wrong_link_count, empty_file,
                 stored_sizes_of_zero, chunks_that_are_not_found):
        part(writer)
    writer.write()


if __name__ == "__main__" and sys.argv[1] != "check":
    write(pathlib.Path(sys.argv[2]))
