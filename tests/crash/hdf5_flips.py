#!/usr/bin/python3
"""hdf5_flips.py PINFLOW [--flips N] [--truncations N|all] [--kinds NAME,...] [--limit SECONDS] [--jobs N] [--seed N]
              [--keep FOLDER]

Damages small HDF5 files of the kinds below, made by h5py: changes one byte (N times in all), or cuts them off (each
file at every multiple of 64 bytes, or at N of these). Runs `pinflow inspect FILE --json` and
`pinflow stream FILE:NAME --json` on each. What is expected of every run:

- It ends within the limit, by no signal, with exit status 0 or 1, and leaves no process behind.
- Exit status 1: nothing on standard output, and one line on standard error that begins "pinflow: error: ".
- Exit status 0: nothing on standard error, and one JSON object on standard output. The digest is that
  of the undamaged file, or of what h5py reads from the damaged one. The latter is right if the damage hit data without
  a checksum, or turned a number, byte order or fill value of the metadata into another valid one. (If the damage has
  made the dataset larger than LARGEST bytes, it is not streamed: that would deliver all of these bytes, if only as fill
  values.)
- Data that only libhdf5 can decode is never made up. libhdf5 itself may read past the end of what is stored, or
  leave parts of a chunk uninitialized. So if the tool succeeds with changed data, the tool and h5py must read the same
  whatever free memory was filled with. (How often h5py makes up what the tool refuses is counted.)

h5py reads in a process of its own, as libhdf5 may crash in it. Prints a summary, each violation, and each case in which
libhdf5 crashed, did not finish, ran out of memory, was killed, exited or sent a malformed answer. FOLDER keeps the
damaged files of these cases and of violations. Exits with 77 if there is no h5py, and with 1 after a violation.
"""

import argparse
import collections
import ctypes
import json
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time

try:
    import h5py
    import numpy as np
    from h5py import h5d, h5p, h5s, h5t, h5z
except ImportError:
    sys.exit(77)

LARGEST = 1 << 28
PREFIX = "pinflow: error: "
C_LIBRARY = ctypes.CDLL(None)
C_LIBRARY.malloc.restype = ctypes.c_void_p
PR_SET_CHILD_SUBREAPER = 36
M_PERTURB = -6
FILLS = (0, 85, 170)

# ---- files -----------------------------------------------------------------------------------------------------------


def numbers(shape, dtype="<i4", seed=1):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 100, shape).astype(dtype)


def contiguous(file):
    file["a"] = numbers((12, 5), "<f4")
    file["b"] = numbers((7, 3), ">i2")


def checksummed(file):
    file.create_dataset("a", data=numbers((40, 6)), chunks=(9, 4), shuffle=True, compression="gzip", fletcher32=True)


def deflated(file):
    file.create_dataset("a", data=numbers((30, 4), "<i8"), chunks=(8, 4), compression="gzip")


def lzf(file):
    file.create_dataset("a", data=np.repeat(numbers((20,), "<i8"), 8).reshape(40, 4), chunks=(16, 4), compression="lzf")


def plain_chunks(file):
    file.create_dataset("a", data=numbers((30, 3), "<u2"), chunks=(8, 3))
    file.create_dataset("partly", (20, 4), ">f8", chunks=(5, 4), fillvalue=1.5)[5:10] = 2
    file.create_dataset("never", (9, 2), "<f4", fillvalue=-1)


def compact(file):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.COMPACT)
    data = numbers((10, 4), "<i2")
    h5d.create(file.id, b"a", h5t.py_create(data.dtype), h5s.create_simple(data.shape), properties).write(
        h5s.ALL, h5s.ALL, data)


def groups(file):
    for name in ("one/a", "one/two/b", "three/c", "d"):
        file[name] = numbers((5, 2), seed=len(name))
    file["soft"] = h5py.SoftLink("/one/two/b")
    file["hard"] = file["three"]
    file["other"] = h5py.ExternalLink("elsewhere.h5", "/a")
    file["one"].attrs["unit"] = "m"


def latest(file):  # indexes of chunks: one chunk, fixed array, extensible array, version 2 B-tree
    file.create_dataset("single", data=numbers((8, 3)), chunks=(8, 3), compression="gzip")
    file.create_dataset("implicit", data=numbers((8, 3)), chunks=(4, 3), maxshape=(8, 3))
    file.create_dataset("fixed", data=numbers((8, 3)), chunks=(4, 3), maxshape=(8, 3), shuffle=True, compression="gzip")
    file.create_dataset("extensible", data=numbers((8, 3)), chunks=(2, 3), maxshape=(None, 3))
    file.create_dataset("tree", data=numbers((8, 4)), chunks=(2, 2), maxshape=(None, None), compression="gzip")
    file.create_dataset("group/contiguous", data=numbers((8, 3)))


def user_block(file):
    file["a"] = numbers((12, 5), "<f4")
    file.create_dataset("b", data=numbers((20, 3)), chunks=(8, 3), compression="gzip")


def types(file):
    structure = np.dtype([("x", "<f4"), ("y", ">i2", (3,)), ("name", "S5")])
    records = np.zeros(9, structure)
    records["x"], records["y"], records["name"] = numbers(9, "<f4"), numbers((9, 3)), b"abc"
    file["structure"] = records
    file["truth"] = numbers((9, 2)) % 2 == 0
    file["complex"] = numbers((6, 2)) + 1j * numbers((6, 2), seed=2)
    file.create_dataset("enum", data=numbers((8, 2), "u1") % 3, dtype=h5py.enum_dtype({"a": 0, "b": 1, "c": 2}, "u1"))
    file["half"] = numbers((6, 2), "<f2")


def with_filter(file, name, data, set_filter, file_type=None):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk((9,) + data.shape[1:])
    set_filter(properties)
    file_type = file_type or h5t.py_create(data.dtype, logical=True)
    h5py.Dataset(h5d.create(file.id, name.encode(), file_type, h5s.create_simple(data.shape), properties))[...] = data


# only libhdf5 can decode the next three kinds


def scaleoffset(file):
    file.create_dataset("a", data=numbers((40, 6)), chunks=(9, 4), scaleoffset=0)
    file.create_dataset("b", data=numbers((40, 6)), chunks=(9, 4), scaleoffset=0, shuffle=True, compression="gzip")
    file.create_dataset("c", data=numbers((40, 6)) / np.float32(4), chunks=(9, 4), scaleoffset=2)
    file.create_dataset("large", data=numbers((700, 6), ">i2"), chunks=(300, 6), scaleoffset=0)


def szip(file):
    if not h5z.get_filter_info(h5z.FILTER_SZIP) & h5z.FILTER_CONFIG_ENCODE_ENABLED:
        return
    walk = np.cumsum(np.random.default_rng(2).integers(-3, 4, (700, 6)), axis=0)
    file.create_dataset("a", data=walk[:40].astype("<i4"), chunks=(9, 6), compression="szip")
    file.create_dataset("b", data=walk[:40].astype(">u2"), chunks=(9, 6), shuffle=True, compression="szip")
    file.create_dataset("large", data=walk.astype("<f8"), chunks=(300, 6), compression="szip", fletcher32=True)


def nbit(file):
    library = ctypes.CDLL("libhdf5_serial.so.103") if h5py.version.hdf5_version.startswith("1.10.") else None
    if library is None:  # h5py does not offer it
        return
    # of the types used here, only long doubles (f16) have unused bits, which the n-bit filter removes
    with_filter(file, "a", numbers((40, 3)).astype("<f16"), lambda dcpl: library.H5Pset_nbit(ctypes.c_int64(dcpl.id)))
    records = np.zeros(40, np.dtype([("x", "<f16"), ("y", ">i2", (3,)), ("name", "S5")]))
    records["x"], records["y"], records["name"] = numbers(40), numbers((40, 3)), b"abc"
    with_filter(file, "b", records, lambda dcpl: library.H5Pset_nbit(ctypes.c_int64(dcpl.id)))


KINDS = [(contiguous, {}), (checksummed, {}), (deflated, {}), (lzf, {}), (plain_chunks, {}), (compact, {}),
         (groups, {}), (latest, {"libver": "latest"}), (user_block, {"userblock_size": 512}), (types, {}),
         (scaleoffset, {}), (szip, {}), (nbit, {})]


def make_files(folder, kinds):
    """{kind: (bytes, {name: digest})}"""
    files = {}
    for write, options in KINDS:
        if kinds and write.__name__ not in kinds.split(","):
            continue
        path = folder / f"{write.__name__}.h5"
        with h5py.File(path, "w", **options) as file:
            write(file)
            names = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        if not names:
            continue  # this h5py lacks the filter
        files[write.__name__] = (path.read_bytes(), {name: digest_by_h5py(path, name) for name in names})
    return files


# ---- what is right ---------------------------------------------------------------------------------------------------


def mix(words):
    words = words.copy()
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def digest_of(content, row_count):
    """The digest of an array of `row_count` rows, as the tool defines it."""
    if row_count == 0:
        return "0" * 16
    golden = np.uint64(0x9E3779B97F4A7C15)
    row_bytes = len(content) // row_count
    word_count = -(-row_bytes // 8)
    padded = np.zeros((row_count, word_count * 8), np.uint8)
    padded[:, :row_bytes] = np.frombuffer(content, np.uint8).reshape(row_count, row_bytes)
    words = padded.view("<u8")
    rows = mix(words + np.arange(1, word_count + 1, dtype=np.uint64) * golden).sum(axis=1, dtype=np.uint64)
    samples = mix(mix(rows + np.uint64(row_bytes) + golden))
    return f"{int(samples.sum(dtype=np.uint64)):016x}"


def turn(elements, datatype, offset=0):
    """Reverses the bytes of each big-endian number in `elements`, which has one row of bytes for each element."""
    if isinstance(datatype, h5t.TypeCompoundID):
        for member in range(datatype.get_nmembers()):
            turn(elements, datatype.get_member_type(member), offset + datatype.get_member_offset(member))
    elif isinstance(datatype, h5t.TypeArrayID):
        base = datatype.get_super()
        for index in range(int(np.prod(datatype.get_array_dims(), dtype=np.int64))):
            turn(elements, base, offset + index * base.get_size())
    elif isinstance(datatype, h5t.TypeEnumID):
        turn(elements, datatype.get_super(), offset)
    elif isinstance(datatype, (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeBitfieldID)):
        if datatype.get_order() == h5t.ORDER_BE:
            end = offset + datatype.get_size()
            elements[:, offset:end] = elements[:, offset:end][:, ::-1].copy()


def digest_by_h5py(path, name):
    """The digest of what libhdf5 reads without converting it. Numbers are made little-endian here."""
    with h5py.File(path, "r") as file:
        dataset = h5d.open(file.id, name.encode())
        datatype = dataset.get_type()
        shape = dataset.shape
        if isinstance(datatype, h5t.TypeArrayID):
            shape += datatype.get_array_dims()
        count = int(np.prod(dataset.shape, dtype=np.int64))
        elements = np.zeros((count, datatype.get_size()), np.uint8)
        if elements.size > 0:
            dataset.read(h5s.ALL, h5s.ALL, elements, datatype)
        turn(elements, datatype)
        return digest_of(elements.tobytes(), shape[0])


def fill_free_memory(fill):
    """Fills memory that malloc returns from now on with that byte, including its cached small blocks."""
    C_LIBRARY.mallopt(M_PERTURB, ~fill & 255 if fill else 0)
    blocks = []
    for size in [size for size in range(24, 4096, 16) for _ in range(9)]:
        blocks.append(C_LIBRARY.malloc(ctypes.c_size_t(size)))
        C_LIBRARY.memset(ctypes.c_void_p(blocks[-1]), fill, ctypes.c_size_t(size))
    for block in blocks:
        C_LIBRARY.free(ctypes.c_void_p(block))


def digest_now(path, name, limit, fill=0):
    """Runs digest_by_h5py in another process, whose free memory is filled with the byte `fill`. @return the digest, or
    why there is none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            signal.alarm(limit)
            fill_free_memory(fill)
            text = digest_by_h5py(path, name)
        except BaseException as failure:
            text = "h5py: " + str(failure)
        os.write(writing, text.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if status == 0 else f"h5py: ended by signal {-status}"


# ---- runs ------------------------------------------------------------------------------------------------------------


class Violation(Exception):
    pass


def left_behind():
    """Waits a moment for processes that the tool has not waited for: they have become ours."""
    for _ in range(200):
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return False
    return True


def run(tool, limit, *arguments, fill=0):
    """@return the JSON object, or the line of an error."""
    environment = dict(os.environ)
    if fill:  # small blocks that malloc keeps at hand would not be filled
        environment.update(MALLOC_PERTURB_=str(fill), GLIBC_TUNABLES="glibc.malloc.tcache_count=0")
    process = subprocess.Popen([tool, *arguments, "--json"], env=environment,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = (text.decode(errors="replace") for text in process.communicate(timeout=limit))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Violation(f"{arguments[0]} did not end within {limit} s")
    if left_behind():
        raise Violation(f"{arguments[0]} left a process behind")
    if process.returncode == 1:
        if output:
            raise Violation(f"{arguments[0]} failed, but printed {output!r}")
        if not errors.startswith(PREFIX) or errors.find("\n") != len(errors) - 1:
            raise Violation(f"{arguments[0]} failed with {errors!r}, which is not one line")
        return errors[len(PREFIX):-1]
    if process.returncode != 0:
        raise Violation(f"{arguments[0]} ended with {process.returncode}, and said {errors!r}")
    if errors:
        raise Violation(f"{arguments[0]} succeeded, but said {errors!r}")
    try:
        result = json.loads(output)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise Violation(f"{arguments[0]} succeeded, but printed {output!r}")
    return result


def listed(listing, name):
    """A dataset in what inspect prints; None when it is not there."""
    for array in listing.get("arrays", [dict(listing, name=name)]) if isinstance(listing, dict) else []:
        if array["name"] == name:
            return array
    return None


def by_library(settings, path, name):
    dataset = run(settings.tool, settings.limit, "inspect", f"{path}:{name}")
    return isinstance(dataset, dict) and dataset["reason"].startswith("it is read by libhdf5")


def made_up_by_h5py(settings, path, name):
    """Whether the data read depends on the fill byte of the memory."""
    return len({digest_now(path, name, settings.limit, fill) for fill in FILLS}) > 1


def check(settings, path, name, undamaged):
    """@return the outcomes of both commands, in a few words each."""
    listing = run(settings.tool, settings.limit, "inspect", str(path))
    words = ["inspect: " + ("done" if isinstance(listing, dict) else kind_of_failure(listing))]
    dataset = listed(listing, name)
    if dataset and (dataset["size_bytes"] or 0) > LARGEST:
        return words + ["stream: not tried, too large now"]
    result = run(settings.tool, settings.limit, "stream", f"{path}:{name}")
    if not isinstance(result, dict):
        if "chunk" in result and by_library(settings, path, name) and made_up_by_h5py(settings, path, name):
            words.append("h5py makes up what stream refuses")
        return words + ["stream: " + kind_of_failure(result)]
    if result["digest"] == undamaged:
        return words + ["stream: done, undamaged data"]
    reference = digest_now(path, name, settings.limit)
    if by_library(settings, path, name):
        for fill in FILLS[1:]:
            again = run(settings.tool, settings.limit, "stream", f"{path}:{name}", fill=fill)
            if not isinstance(again, dict) or again["digest"] != result["digest"]:
                raise Violation(f"stream made up {result['digest']}, and later {again}, undamaged {undamaged}")
        if made_up_by_h5py(settings, path, name):
            raise Violation(f"stream read {result['digest']}, which h5py makes up, undamaged {undamaged}")
    if result["digest"] == reference:
        return words + ["stream: done, what h5py reads"]
    raise Violation(f"stream read {result['digest']}, undamaged {undamaged}, now {reference}")


def kind_of_failure(sentence):
    for part in ("crashed", "did not finish", "ran out of memory", "sent a malformed answer", "was killed", "has ended"):
        if part in sentence:
            return f"refused, libhdf5 {part}"
    return "refused"


def run_case(case):
    kind, name, change, argument = case
    settings = run_case.settings
    content, digests = run_case.files[kind]
    damaged = bytearray(content)
    if change == "flip":
        offset, mask = argument
        damaged[offset] ^= mask
    else:
        del damaged[argument:]
    path = pathlib.Path(run_case.folder, f"{os.getpid()}.h5")
    path.write_bytes(damaged)
    words, violation = [], None
    try:
        words = check(settings, path, name, digests[name])
    except Violation as failure:
        violation = str(failure)
    if settings.keep and (violation or any("libhdf5" in text for text in words)):
        where = f"{argument[0]}-{argument[1]}" if change == "flip" else str(argument)
        kept = pathlib.Path(settings.keep, f"{kind}-{name.replace('/', '.')}-{change}-{where}.h5")
        kept.write_bytes(damaged)
    return case, words, violation


def start_worker(settings, files, folder):
    C_LIBRARY.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run_case.settings, run_case.files, run_case.folder = settings, files, folder


# ---- the campaign ----------------------------------------------------------------------------------------------------


def make_cases(settings, files):
    generator = random.Random(settings.seed)
    cases = []
    for number in range(settings.flips):
        kind = list(files)[number % len(files)]
        content, digests = files[kind]
        # most bytes of a small file are unused zeros, so every second flip of a file hits a byte that is not zero
        used = [offset for offset, byte in enumerate(content) if byte]
        offset = generator.choice(used if number // len(files) % 2 else range(len(content)))
        cases.append((kind, generator.choice(list(digests)), "flip", (offset, generator.randrange(1, 256))))
    for kind, (content, digests) in files.items():
        sizes = range(0, len(content), 64)
        if settings.truncations != "all":
            sizes = generator.sample(sizes, min(settings.truncations, len(sizes)))
        cases += [(kind, generator.choice(list(digests)), "cut", size) for size in sizes]
    return cases


def all_or_count(text):
    return text if text == "all" else int(text)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n")[0])
    parser.add_argument("tool")
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--truncations", type=all_or_count, default="all")
    parser.add_argument("--kinds")
    parser.add_argument("--limit", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=min(8, len(os.sched_getaffinity(0))))
    parser.add_argument("--seed", type=int, default=3)  # libhdf5 1.10.8 crashes within its first 200 flips
    parser.add_argument("--keep")
    settings = parser.parse_args()
    if settings.keep:
        os.makedirs(settings.keep, exist_ok=True)
    # the same values as in tests/api/loader/digest_test.cpp
    assert digest_of(bytes(range(6)), 2) == "c5121eb0e0166a0a" and digest_of(b"", 1) == "48218226ff3cd4bf"
    assert digest_of(bytes(range(9)), 1) == "e87e5cfe1c1f92ad"

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pinflow-test-") as folder:
        files = make_files(pathlib.Path(folder), settings.kinds)
        whole = pathlib.Path(folder, "whole.h5")
        for kind, (content, digests) in files.items():
            whole.write_bytes(content)
            for name, digest in digests.items():
                result = run(settings.tool, settings.limit, "stream", f"{whole}:{name}")
                if not isinstance(result, dict) or result["digest"] != digest:
                    sys.exit(f"{kind}:{name}, undamaged, should have the digest {digest}: {result}")
        cases = make_cases(settings, files)
        tally, deaths, violations = collections.Counter(), [], []
        with multiprocessing.Pool(settings.jobs, start_worker, (settings, files, folder)) as pool:
            for case, words, violation in pool.imap_unordered(run_case, cases, chunksize=8):
                tally.update(words)
                deaths += [f"{case}: {text}" for text in words if "libhdf5" in text]
                if violation:
                    violations.append(f"{case}: {violation}")
    for line in sorted(deaths) + sorted(violations):
        print(line)
    for words, count in sorted(tally.items()):
        print(f"{count:6} {words}")
    flips = sum(case[2] == "flip" for case in cases)
    print(f"{flips} byte flips and {len(cases) - flips} truncations of {len(files)} files in "
          f"{time.monotonic() - begin:.0f} s (seed {settings.seed}): {len(violations)} violations")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
