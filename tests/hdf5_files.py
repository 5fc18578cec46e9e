"""h5py's side of hdf5_rows_test.cpp and hdf5_rows_damage_test.cpp.

hdf5_files.py check           exits with 77 when there is no h5py
hdf5_files.py write FOLDER    writes HDF5 files of many layouts, and a manifest of where h5py finds their bytes

manifest.json has an entry for each dataset, in the words of formats/hdf5_description.hpp, but "inline" for compact.
NUMBER.npy is what h5py reads, NUMBER.little the same elements with every number little-endian.
"""

import itertools
import json
import pathlib
import random
import sys

try:
    import h5py
    import numpy as np
except ImportError:
    sys.exit(77)

DTYPES = ["|b1", "|i1", "|u1", "<i2", ">i2", "<u4", ">f4", "<f2", "<f4", "<f8", ">i8", "<c8", ">c16", "|S10", "|V7", "|S3",
          [("a", "<f4"), ("b", ">i2", (3,))],
          {"names": ["x", "y"], "formats": ["<u1", [("re", ">f8"), ("im", "<f8")]], "offsets": [3, 8], "itemsize": 30}]

# keyword arguments of create_dataset, or a function that adds filters to a property list
FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip0": {"compression": "gzip", "compression_opts": 0},
    "shuffle": {"shuffle": True},
    "shuffle,gzip": {"shuffle": True, "compression": "gzip", "compression_opts": 6},
    "lzf": {"compression": "lzf"},
    "shuffle,lzf": {"shuffle": True, "compression": "lzf"},
    "fletcher32": {"fletcher32": True},
    "shuffle,gzip,fletcher32": {"shuffle": True, "compression": "gzip", "fletcher32": True},
    "shuffle,lzf,fletcher32": {"shuffle": True, "compression": "lzf", "fletcher32": True},
    "fletcher32,shuffle,gzip": lambda plist: (plist.set_fletcher32(), plist.set_shuffle(), plist.set_deflate(4)),
    "gzip,fletcher32,gzip": lambda plist: (plist.set_deflate(9), plist.set_fletcher32(), plist.set_deflate(1)),
    "lzf,shuffle,gzip": lambda plist: (plist.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL),
                                       plist.set_shuffle(), plist.set_deflate(4)),
    "fletcher32,fletcher32": lambda plist: (plist.set_fletcher32(), plist.set_fletcher32()),
}

# shape, chunk shape
GRIDS = [((1000,), (100,)), ((1003,), (64,)), ((5,), (1,)), ((37, 5), (8, 5)), ((40, 6), (10, 6)), ((37, 11), (5, 4)),
         ((7, 300), (7, 1)), ((9, 7, 5), (2, 3, 5)), ((9, 7, 5), (4, 7, 2)), ((4, 3, 2, 5), (1, 2, 2, 3)), ((1, 5000), (1, 512)),
         ((20, 1, 4), (3, 1, 4)), ((3, 2), (3, 2))]


def sample(dtype, shape, compressible=True):
    count = int(np.prod(shape, dtype=np.int64))
    content = random.randbytes(count * dtype.itemsize)
    if compressible:  # half of the bytes repeat
        content = bytes(byte if byte & 1 else 7 for byte in content)
    if dtype.kind == "b":
        content = bytes(byte & 1 for byte in content)
    if dtype.kind == "S":
        content = bytes(byte % 26 + 97 for byte in content)
    return np.frombuffer(content, dtype).reshape(shape)


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
            size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
            for begin in range(offset, offset + dtype.itemsize, size):
                content[:, begin:begin + size] = content[:, begin:begin + size][:, ::-1].copy()

    turn(array.dtype, 0)
    return content.tobytes()


def chunk_addresses_lack(folder):
    """Returns by how much the addresses of get_chunk_info are too low in a file with a user block of 512 bytes: 512 or
    0, depending on the version of HDF5."""
    path = folder / "probe.h5"
    content = random.randbytes(4096)
    with h5py.File(path, "w", userblock_size=512) as file:
        dataset = file.create_dataset("d", data=np.frombuffer(content, np.uint8), chunks=(4096,))
        file.flush()
        reported = dataset.id.get_chunk_info(0).byte_offset
    return path.read_bytes().index(content) - reported


class Manifest:
    def __init__(self, folder):
        self.folder = folder
        self.entries = []
        self.lacks_user_block = chunk_addresses_lack(folder) == 512

    def chunks(self, dataset):
        grid = [-(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks)]
        chunks = [[0, 0, 0] for _ in range(int(np.prod(grid, dtype=np.int64)))]
        base = dataset.file.userblock_size if self.lacks_user_block else 0
        for number in range(dataset.id.get_num_chunks()):
            info = dataset.id.get_chunk_info(number)
            place = [first // chunk for first, chunk in zip(info.chunk_offset, dataset.chunks)]
            if any(index >= count for index, count in zip(place, grid)):
                continue
            chunks[int(np.ravel_multi_index(place, grid))] = [info.byte_offset + base, info.size, info.filter_mask]
        return chunks

    def add(self, dataset, fill=None):
        plist = dataset.id.get_create_plist()
        entry = {"file": pathlib.Path(dataset.file.filename).name, "name": dataset.name.lstrip("/"),
                 "fill": "" if fill is None else np.asarray(fill, dataset.dtype).tobytes().hex()}
        # without h5py's note on a string's encoding
        array = np.empty(dataset.shape, dataset.dtype.str if dataset.dtype.kind == "S" else dataset.dtype)
        if array.size:
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, array)
        layout = plist.get_layout()
        if not array.size:
            entry |= {"storage": "absent"}
        elif layout == h5py.h5d.CHUNKED:
            filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
            entry |= {"storage": "chunked", "chunk_shape": list(dataset.chunks), "chunks": self.chunks(dataset),
                      "filters": [[code, name.decode(), list(values)] for code, _, values, name in filters]}
        elif layout == h5py.h5d.COMPACT:
            entry |= {"storage": "inline", "inline": array.tobytes("C").hex()}
        elif dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
            entry |= {"storage": "absent"}
        else:
            entry |= {"storage": "contiguous", "offset": dataset.id.get_offset()}
        number = len(self.entries)
        self.entries.append(entry)
        np.save(self.folder / f"{number}.npy", array)
        (self.folder / f"{number}.little").write_bytes(as_little(array))

    def write(self):
        (self.folder / "manifest.json").write_text(json.dumps(self.entries))


def create(file, name, shape, dtype, chunks, filters, **more):
    if not callable(filters):
        return file.create_dataset(name, shape, dtype, chunks=chunks, **filters, **more)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(chunks)
    filters(plist)
    group = file.require_group(name.rpartition("/")[0])
    h5py.h5d.create(group.id, name.rpartition("/")[2].encode(), h5py.h5t.py_create(np.dtype(dtype), logical=True),
                    h5py.h5s.create_simple(shape), plist)
    return file[name]


def write_chunked(file, manifest):
    def whole(name, dtype, grid, filters, compressible=True):
        shape, chunks = grid
        dataset = create(file, name, shape, dtype, chunks, FILTERS[filters])
        dataset[...] = sample(np.dtype(dtype), shape, compressible)
        file.flush()
        manifest.add(dataset)

    for grid, filters in itertools.product(GRIDS, FILTERS):
        dtype = "<f4" if filters == "none" else random.choice(["<f4", "|u1", "<i8", ">f4"])
        whole(f"grids/{grid}/{filters}", dtype, grid, filters)
    for number, dtype in enumerate(DTYPES):
        for filters in "none", "shuffle,gzip", "shuffle,lzf,fletcher32":
            for place, grid in enumerate([((103,), (10,)), ((23, 7), (4, 3))]):
                whole(f"types/{number}/{filters}/{place}", dtype, grid, filters)
    for filters in FILTERS:
        whole(f"incompressible/{filters}", "<f4", ((5000,), (700,)), filters, False)
    # checksums of many lengths: odd, and longer than what is summed before it is reduced
    for length in 1, 2, 3, 31, 32, 33, 719, 720, 721, 5759, 5760, 11521, 1 << 20, (1 << 20) + 1:
        for filters in "fletcher32", "shuffle,gzip,fletcher32":
            whole(f"checksums/{length}/{filters}", "|u1", ((length + 5,), (length,)), filters)
    for number, value in enumerate([0, 255]):
        dataset = create(file, f"checksums/all/{number}", (200001,), "|u1", (100001,), FILTERS["fletcher32"])
        dataset[...] = value
        file.flush()
        manifest.add(dataset)


def write_shuffled(file, manifest):
    """Chunks so large that a few of their rows are unshuffled without the others; filters skipped for some."""
    grids = [((2900,), (400,)), ((300, 40), (64, 40)), ((300, 70), (50, 33)), ((90, 9, 20), (32, 4, 20))]
    dtypes = ["<u2", "<f4", "<f8", "<c16", "|S3", "|u1", ">f4", [("a", "<f4"), ("b", "<i8")]]
    for (shape, chunks), (number, dtype) in itertools.product(grids, enumerate(dtypes)):
        filters = random.choice([name for name in FILTERS if "shuffle" in name])
        dataset = create(file, f"shuffled/{chunks}/{number}", shape, dtype, chunks, FILTERS[filters])
        dataset[...] = sample(np.dtype(dtype), shape)
        file.flush()
        manifest.add(dataset)
    write_masks(file, manifest, "shuffled/masks", (100, 30), [0, 1, 2, 3])


def write_partly(file, manifest):
    for number, (dtype, fill) in enumerate([("<f4", None), ("<f4", 1.5), (">i2", -2), ("|u1", 9), (DTYPES[-2], (2.5, (1, 2, 3)))]):
        for filters in "none", "shuffle,gzip,fletcher32":
            for shape, chunks in ((50,), (7,)), ((20, 9), (3, 4)), ((20, 9), (3, 9)):
                name = f"partly/{number}/{filters}/{len(shape)}{chunks[-1]}"
                more = {} if fill is None else {"fillvalue": np.array(fill, dtype)}
                dataset = create(file, name, shape, dtype, chunks, FILTERS[filters], **more)
                manifest_fill = None if fill is None else np.array(fill, dtype)
                file.flush()
                manifest.add(dataset, manifest_fill)
                some = slice(5, 16)
                dataset = create(file, name + "some", shape, dtype, chunks, FILTERS[filters], **more)
                dataset[some] = sample(np.dtype(dtype), shape)[some]
                file.flush()
                manifest.add(dataset, manifest_fill)


def write_masks(file, manifest, name, chunks, masks):
    """Chunks whose filters were skipped in part, as a program that encodes chunks itself may store them."""
    import zlib
    rows = chunks[0]
    shape = rows * len(masks), *chunks[1:]
    dataset = create(file, name, shape, "<i4", chunks, FILTERS["shuffle,gzip"])
    values = sample(np.dtype("<i4"), shape)
    for number, mask in enumerate(masks):
        content = values[rows * number:rows * (number + 1)].tobytes()
        if not mask & 1:
            content = np.frombuffer(content, np.uint8).reshape(-1, 4).T.tobytes()
        if not mask & 2:
            content = zlib.compress(content)
        dataset.id.write_direct_chunk((rows * number, 0), content, filter_mask=mask)
    file.flush()
    assert (dataset[...] == values).all()
    manifest.add(dataset)


def write_others(file, manifest):
    for number, dtype in enumerate(DTYPES):
        for shape in (), (0,), (5,), (0, 3), (3, 0), (17, 5), (2, 3, 4):
            name = f"contiguous/{number}/of{'x'.join(map(str, shape))}"
            dataset = file.create_dataset(name, data=sample(np.dtype(dtype), shape))
            file.flush()
            manifest.add(dataset)
    for shape, dtype in ((), "<f4"), ((6,), ">i4"), ((3, 4), "<f8"), ((2, 1), DTYPES[-1]):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        name = f"compact{len(manifest.entries)}"
        h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype), logical=True), space, plist)
        file[name][...] = sample(np.dtype(dtype), shape)
        file.flush()
        manifest.add(file[name])
    for shape, dtype, fill in ((), "<f4", 2.5), ((6, 2), ">i4", None), ((30,), ">i4", 70000), ((3, 0), "<f8", 1):
        name = f"absent{len(manifest.entries)}"
        more = {} if fill is None else {"fillvalue": fill}
        manifest.add(file.create_dataset(name, shape, dtype, **more), fill)
    # shapes that changed after chunks were written; chunks larger than the dataset
    for number, (before, after, chunks) in enumerate([((20, 6), (11, 4), (4, 5)), ((11, 4), (20, 6), (4, 5)), ((3, 2), (3, 2), (8, 9)),
                                                      ((0, 5), (0, 5), (4, 5)), ((4, 5), (0, 5), (4, 5)), ((4, 5), (4, 0), (4, 5)),
                                                      ((5,), (3,), (100,))]):
        for filters in "none", "shuffle,gzip":
            dataset = file.create_dataset(f"resized/{number}/{filters}", before, "<i4", chunks=chunks,
                                          maxshape=(None,) * len(before), fillvalue=5, **FILTERS[filters])
            dataset[...] = sample(np.dtype("<i4"), before)
            dataset.resize(after)
            file.flush()
            manifest.add(dataset, 5)


def write(folder):
    random.seed(5)
    manifest = Manifest(folder)
    for user_block, version in (0, "earliest"), (512, "earliest"), (1024, "latest"):
        with h5py.File(folder / f"{user_block}.h5", "w", userblock_size=user_block, libver=version) as file:
            write_others(file, manifest)
            write_partly(file, manifest)
            write_masks(file, manifest, "masks", (4, 6), [0, 1, 2, 3, 0, 3])
            write_chunked(file, manifest)
    with h5py.File(folder / "shuffled.h5", "w") as file:
        write_shuffled(file, manifest)
    manifest.write()


if __name__ == "__main__" and sys.argv[1] != "check":
    write(pathlib.Path(sys.argv[2]))
