"""h5py's side of hdf5_writer_test.cpp and cli_convert_hdf5_test.cpp.

hdf5_writer_files.py check           exits with 77 when there is no h5py
hdf5_writer_files.py verify FOLDER   compares what manifest.json says of files with what h5py finds in them

Each entry: file, name; expected: a .npy file of what h5py is to read; chunks: their shape, null if there are none;
level: of gzip, if there are chunks; alignment: of the elements in the file, if there are none; skipped: the filter mask
of all chunks, if it matters.
"""

import json
import pathlib
import sys

try:
    import h5py
    import numpy as np
except ImportError:
    sys.exit(77)


class Mismatch(Exception):
    pass


def equal(what, found, expected):
    if found != expected:
        raise Mismatch(f"{what} is {found}, not {expected}")


def verify(dataset, folder, entry):
    expected = np.load(folder / entry["expected"])
    is_text = expected.dtype.kind == "S"  # whose encoding h5py notes in the type
    equal("dtype", dataset.dtype.str if is_text else dataset.dtype, expected.dtype.str if is_text else expected.dtype)
    equal("shape", dataset.shape, expected.shape)
    # the elements as they are: dataset[()] makes Python's objects of some
    content = np.empty(dataset.shape, expected.dtype if is_text else dataset.dtype)
    if content.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, content)
    equal("content", content.tobytes("C"), expected.tobytes("C"))
    equal("attributes", list(dataset.attrs), [])
    equal("maxshape", dataset.maxshape, dataset.shape)
    chunks = entry["chunks"]
    equal("chunks", dataset.chunks, tuple(chunks) if chunks else None)
    equal("compression", dataset.compression, "gzip" if chunks else None)
    equal("compression_opts", dataset.compression_opts, entry["level"] if chunks else None)
    equal("shuffle", dataset.shuffle, bool(chunks))
    if not chunks:
        offset = dataset.id.get_offset()
        equal("having an offset", offset is not None, expected.size > 0)
        equal("alignment", (offset or 0) % entry["alignment"], 0)
    if "skipped" in entry:
        masks = {dataset.id.get_chunk_info(number).filter_mask for number in range(dataset.id.get_num_chunks())}
        equal("filter masks", masks, {entry["skipped"]})


def main(folder):
    failures = []
    files = {}
    for entry in json.loads((folder / "manifest.json").read_text()):
        files.setdefault(entry["file"], []).append(entry)
    for path, entries in files.items():
        with h5py.File(folder / path, "r") as file:
            found = []
            file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
            if sorted(found) != sorted(entry["name"] for entry in entries):
                failures.append(f"{path} holds {sorted(found)[:20]}")
            if file.userblock_size or list(file.attrs):
                failures.append(f"{path} has a user block or attributes")
            for entry in entries:
                try:
                    verify(file[entry["name"]], folder, entry)
                except (Mismatch, OSError, KeyError, ValueError, TypeError) as failure:
                    failures.append(f"{path}: {entry['name']}: {failure!r:.300}")
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures or not files else 0


if __name__ == "__main__" and sys.argv[1] != "check":
    sys.exit(main(pathlib.Path(sys.argv[2])))
