"""h5py's side of hdf5_matrix_test.cpp.

hdf5_matrix.py check           exits with 77 when there is no h5py
hdf5_matrix.py write FOLDER    writes files with many combinations of layout, filters, type, user block and chunk shape

manifest.json has two lists. An entry of "datasets" has the file, the name, numpy's spelling of the type, the shape with
the axes of an array type, whether the elements are contiguous in the file ("together"), how many rows of a chunk can be
taken from the file as they are, or 0, and where expected.bin has the elements: first as they are stored, then
little-endian. An entry of "refused" has the file, the name, and a part of the reason that its listing must give.
"""

import json
import pathlib
import random
import sys

try:
    import h5py
    import numpy as np
    from h5py import h5d, h5p, h5s, h5t, h5z
except ImportError:
    sys.exit(77)

import hdf5_files

ENUM = h5py.enum_dtype({"red": 1, "green": 300}, "<u2")
# as numpy spells them; the axes of an array type follow those of the dataset
TYPES = ["?", "|i1", "|u1", *(order + kind for order in "<>" for kind in
                              ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")),
         "|S1", "|S10", "|V7", ENUM, ("<i4", (2, 3)), (">f4", (3,)),
         [("a", "<f4"), ("b", ">i2", (3,))],
         {"names": ["x", "y"], "formats": ["<u1", [("re", ">f8"), ("im", "<f8")]], "offsets": [3, 8], "itemsize": 30}]

# shape, chunk shape: from one to four axes; shapes that are a multiple of the chunk's and others; chunks of whole rows,
# of parts of rows, and larger than the dataset
GRIDS = [((100,), (10,)), ((103,), (10,)), ((40, 6), (10, 6)), ((37, 6), (10, 6)), ((37, 11), (5, 4)), ((8, 12), (4, 3)),
         ((9, 7, 5), (2, 3, 5)), ((8, 6, 4), (4, 6, 4)), ((4, 3, 2, 5), (1, 2, 2, 3)), ((5, 2, 3, 2), (2, 2, 3, 2)),
         ((3, 5), (8, 9)), ((3, 5), (8, 5)), ((1, 600), (1, 64))]

# filters that only libhdf5 can undo
OTHER_FILTERS = {"scaleoffset": lambda plist: plist.set_scaleoffset(h5z.SO_INT, 0),
                 "nbit": lambda plist: plist.set_filter(h5z.FILTER_NBIT, h5z.FLAG_MANDATORY),
                 "szip": lambda plist: plist.set_szip(h5z.SZIP_NN_OPTION_MASK, 8),
                 "shuffle, szip": lambda plist: (plist.set_shuffle(), plist.set_szip(h5z.SZIP_NN_OPTION_MASK, 8))}


def as_dtype(spelled):
    return spelled if isinstance(spelled, np.dtype) else np.dtype(spelled)


def sample(dtype, shape):
    """Elements of that type; those of an array type are spread over axes of their own."""
    if dtype.subdtype:
        base, inner = dtype.subdtype
        return hdf5_files.sample(base, (*shape, *inner))
    if h5py.check_enum_dtype(dtype):
        return np.array(random.choices([1, 300], k=int(np.prod(shape))), dtype).reshape(shape)
    return hdf5_files.sample(dtype, shape)


class Writer:
    def __init__(self, folder):
        self.folder = folder
        self.datasets, self.refused = [], []
        self.expected = open(folder / "expected.bin", "wb")

    def expect(self, dataset, data, together=False, whole_rows=0):
        """`data` is what was written, and fill values where nothing was."""
        data = np.asarray(data, order="C")
        assert dataset[...].tobytes() == data.tobytes(), dataset.name
        plain = np.dtype(data.dtype.str) if data.dtype.names is None else data.dtype
        little = hdf5_files.as_little(data.astype(plain, copy=False)) if data.size else b""
        offset = self.expected.tell()
        self.expected.write(data.tobytes() + little)
        self.datasets.append({
            "file": pathlib.Path(dataset.file.filename).name, "name": dataset.name.lstrip("/"),
            "dtype": repr(plain.descr) if plain.names else plain.str, "shape": data.shape,
            "together": together and data.size > 0, "whole_rows": whole_rows, "offset": offset, "size": data.nbytes})

    def refuse(self, file, name, says):
        self.refused.append({"file": pathlib.Path(file.filename).name, "name": name, "says": says})

    def close(self):
        self.expected.close()
        (self.folder / "manifest.json").write_text(json.dumps({"datasets": self.datasets, "refused": self.refused}))


def whole_rows(shape, chunks, filters, dtype):
    """How many rows a chunk holds that can be taken from the file as they are."""
    plain = "none" == filters and dtype.newbyteorder("<") == dtype
    return chunks[0] if plain and tuple(chunks[1:]) == tuple(shape[1:]) else 0


def create(file, name, shape, dtype, layout=h5d.CONTIGUOUS, fill=None, maxshape=None, early=False, chunks=None,
           filters=None):
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(layout)
    if chunks:
        plist.set_chunk(chunks)
    if filters:
        filters(plist)
    if fill is not None:
        plist.set_fill_value(np.array(fill, dtype))
    if early:
        plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    space = h5s.create(h5s.SCALAR)
    if shape:
        most = tuple(h5s.UNLIMITED if length is None else length for length in maxshape or shape)
        space = h5s.create_simple(shape, most)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    h5d.create(file.id, name.encode(), h5t.py_create(dtype, logical=True), space, plist, links)
    return file[name]


def write_types(file, writer):
    for number, spelled in enumerate(TYPES):
        dtype = as_dtype(spelled)
        for shape in (), (5,), (7, 5), (2, 3, 4):
            data = sample(dtype, shape)
            dataset = create(file, f"types/{number}/together{len(shape)}", shape, dtype)
            dataset[...] = data
            writer.expect(dataset, data, together=True)
        data = sample(dtype, (7, 5))
        dataset = create(file, f"types/{number}/compact", (7, 5), dtype, h5d.COMPACT)
        dataset[...] = data
        writer.expect(dataset, data)
        for filters, chunks in (("none", (3, 5)), ("none", (3, 2)), ("shuffle,gzip", (3, 2)), ("shuffle,lzf,fletcher32", (3, 5))):
            dataset = hdf5_files.create(file, f"types/{number}/{filters}{chunks[1]}", (7, 5), dtype, chunks,
                                        hdf5_files.FILTERS[filters])
            dataset[...] = data
            writer.expect(dataset, data, whole_rows=whole_rows((7, 5), chunks, filters, dtype))
        for shape in (0,), (0, 3), (3, 0):
            writer.expect(create(file, f"types/{number}/empty{shape}", shape, dtype), sample(dtype, shape))


def write_grids(file, writer):
    for (shape, chunks), (filters, how) in ((grid, pipeline) for grid in GRIDS for pipeline in hdf5_files.FILTERS.items()):
        if any(chunk > length for chunk, length in zip(chunks, shape)):
            if callable(how):
                continue
            how = how | {"maxshape": (None,) * len(shape)}
        dtype = as_dtype(random.choice(["<f4", "|u1", "<i8", ">f8"]))
        data = sample(dtype, shape)
        dataset = hdf5_files.create(file, f"grids/{shape}{chunks}/{filters}", shape, dtype, chunks, how)
        dataset[...] = data
        writer.expect(dataset, data, whole_rows=whole_rows(shape, chunks, filters, dtype))


def write_indexes(file, writer):
    """Each way in which libhdf5 finds chunks (all of them version 1 B-trees in files for old versions)."""
    shape, chunks = (7, 10), (3, 10)
    kinds = {"one": (shape, None, False), "implicit": (chunks, None, True), "fixed": (chunks, None, False),
             "extensible": (chunks, (None, 10), False), "tree": (chunks, (None, None), False)}
    for kind, (chunk, maxshape, early) in kinds.items():
        for filters in "none", "shuffle,gzip", "fletcher32":
            if early and filters != "none":
                continue
            for written in "all", "some", "none":
                for fill in None, -5:
                    def set_filters(plist):
                        if "shuffle" in filters:
                            plist.set_shuffle()
                            plist.set_deflate(4)
                        if "fletcher32" in filters:
                            plist.set_fletcher32()

                    data = np.full(shape, fill or 0, "<i4")
                    dataset = create(file, f"indexes/{kind}/{filters}/{written}/{fill}", shape, data.dtype, h5d.CHUNKED,
                                     fill, maxshape, early, chunk, set_filters)
                    if written == "all":
                        data[...] = sample(data.dtype, shape)
                        dataset[...] = data
                    if written == "some":
                        data[4:6, 2:5] = sample(data.dtype, (2, 3))
                        dataset[4:6, 2:5] = data[4:6, 2:5]
                    there = early or written == "all" or (written == "some" and kind == "one")
                    writer.expect(dataset, data, whole_rows=chunk[0] if filters == "none" and there else 0)


def write_others(file, writer):
    # never written, or in part; without a fill value and with one
    for number, (dtype, fill) in enumerate([("<f4", None), ("<f4", 1.5), (">i2", -2), ("|u1", 9), ("|S3", b"abc")]):
        dtype = np.dtype(dtype)
        for shape in (), (6,), (6, 4):
            data = np.full(shape, fill if fill is not None else np.zeros((), dtype), dtype)
            writer.expect(file.create_dataset(f"never/{number}/{len(shape)}", shape, dtype, fillvalue=fill), data)
        dataset = file.create_dataset(f"never/{number}/part", (6, 4), dtype, fillvalue=fill)
        data = np.full((6, 4), fill if fill is not None else np.zeros((), dtype), dtype)
        data[2:4] = dataset[2:4] = sample(dtype, (2, 4))
        writer.expect(dataset, data, together=True)
    # chunks whose filters were skipped in part, as a program that encodes chunks itself may store them
    import zlib
    data = sample(np.dtype("<i4"), (24, 6))
    dataset = hdf5_files.create(file, "masks", (24, 6), "<i4", (4, 6), hdf5_files.FILTERS["shuffle,gzip"])
    for number, mask in enumerate([0, 1, 2, 3, 0, 3]):
        content = data[4 * number:4 * number + 4].tobytes()
        if not mask & 1:
            content = np.frombuffer(content, np.uint8).reshape(-1, 4).T.tobytes()
        if not mask & 2:
            content = zlib.compress(content)
        dataset.id.write_direct_chunk((4 * number, 0), content, filter_mask=mask)
    writer.expect(dataset, data)
    # shrunk and grown again
    dataset = file.create_dataset("resized", (20, 6), "<i4", chunks=(4, 5), maxshape=(None, None), fillvalue=5)
    data = sample(np.dtype("<i4"), (20, 6))
    dataset[...] = data
    dataset.resize((9, 3))
    dataset.resize((15, 8))
    writer.expect(dataset, dataset[...])
    assert (dataset[9:] == 5).all() and (dataset[:9, :3] == data[:9, :3]).all()
    for name, filters in OTHER_FILTERS.items():
        if "szip" in name and not h5z.get_filter_info(h5z.FILTER_SZIP) & h5z.FILTER_CONFIG_ENCODE_ENABLED:
            continue
        for dtype in "<i4", ">u2":
            data = np.arange(70, dtype=dtype).reshape(7, 10)
            dataset = create(file, f"library/{name}/{dtype}", (7, 10), data.dtype, h5d.CHUNKED, chunks=(3, 4), filters=filters)
            dataset[...] = data
            writer.expect(dataset, data)


def write_refused(file, writer):
    folder = writer.folder
    file.create_dataset("refused/text", data=["a", "bc"], dtype=h5py.string_dtype())
    file.create_dataset("refused/lists", (3,), h5py.vlen_dtype("<i4"))
    file.create_dataset("refused/within", (3,), np.dtype([("n", "<i4"), ("s", h5py.string_dtype())]))
    file.create_dataset("refused/references", (3,), h5py.ref_dtype)
    file.create_dataset("refused/regions", (3,), h5py.regionref_dtype)
    file["refused/null"] = h5py.Empty("f4")
    file.create_dataset("refused/external", (3,), "<i4", external=[(str(folder / "raw.bin"), 0, 12)])
    layout = h5py.VirtualLayout((3,), "<i8")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "data", (3,))
    file.create_virtual_dataset("refused/virtual", layout)
    file["refused/outside"] = h5py.ExternalLink("other.h5", "/data")
    file["refused/dangling"] = h5py.SoftLink("/nothing")
    unknown = create(file, "refused/filter", (4,), np.dtype("<i4"), h5d.CHUNKED, chunks=(2,),
                     filters=lambda plist: plist.set_filter(511, h5z.FLAG_OPTIONAL))
    unknown[...] = 1
    for name, says in (("text", "strings of variable length"), ("lists", "sequences of variable length"),
                       ("within", "strings of variable length"), ("references", "references"), ("regions", "references"),
                       ("null", "null dataspace"), ("external", "external storage"), ("virtual", "virtual"),
                       ("outside", "'other.h5'"), ("dangling", "nothing"), ("filter", "the filter 511")):
        writer.refuse(file, f"refused/{name}", says)


def write(folder):
    random.seed(5)
    writer = Writer(folder)
    with h5py.File(folder / "other.h5", "w") as other:
        other["data"] = np.arange(3)
    for user_block, version in (0, "earliest"), (512, "earliest"), (0, "latest"), (1024, "latest"):
        name = f"{version}{user_block}.h5"
        with h5py.File(folder / name, "w", userblock_size=user_block, libver=version) as file:
            file["before"] = np.uint8(0)  # the data after it begins at an odd offset
            for part in write_types, write_grids, write_indexes, write_others:
                part(file, writer)
            write_refused(file, writer)
    writer.close()


if __name__ == "__main__" and sys.argv[1] != "check":
    write(pathlib.Path(sys.argv[2]))
