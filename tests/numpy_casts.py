"""numpy's side of cast_numpy_test.cpp.

numpy_casts.py check           exits with 77 when there is no numpy
numpy_casts.py write FOLDER    writes, for pairs of types, elements and what numpy's astype makes of them

cases.txt has a line for each pair: name, type before, type after; NAME.before and NAME.after are the elements.
Types that numpy lacks are there when ml_dtypes is installed.
"""

import pathlib
import sys

try:
    import numpy as np
except ImportError:
    sys.exit(77)
try:
    import ml_dtypes
    SMALL = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
except ImportError:
    SMALL = {}

INTEGERS = ["|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"]
FLOATS = ["<f2", "<f4", "<f8"]
COUNT = 20000


def name_of(dtype):
    return dtype.str if dtype not in SMALL.values() else dtype.name


def sample(dtype, random):
    """Elements with any bits, and of all magnitudes; the NaNs among them quiet and without a payload."""
    if dtype.kind == "b":
        return random.integers(0, 2, COUNT).astype(dtype)
    if dtype.itemsize <= 2:
        values = np.arange(1 << (8 * dtype.itemsize), dtype="<u%d" % dtype.itemsize).view(dtype)
    else:
        words = random.integers(0, 1 << 64, COUNT, dtype=np.uint64, endpoint=False)
        words >>= random.integers(0, 64, COUNT, dtype=np.uint64)
        words = np.concatenate([words, ~words])
        if dtype.kind in "iu":
            return words.astype("<u%d" % dtype.itemsize).view(dtype)
        anything = random.bytes(COUNT * dtype.itemsize)
        scaled = words.astype(np.float64) * 2.0 ** -random.integers(0, 90, 2 * COUNT)
        special = [0.0, np.inf, np.nan, 65504, 65519.99, 65520, 464, 465, 61440, 61439, 2.0 ** -25, 2.0 ** -24]
        values = np.concatenate([np.frombuffer(anything, dtype), scaled.astype(dtype), -scaled.astype(dtype),
                                 np.array(special, dtype), -np.array(special, dtype)])
    if dtype.kind in "iu":
        return values
    return np.where(np.isnan(values), np.array(np.nan).astype(dtype), values).astype(dtype)


def write(folder):
    random = np.random.default_rng(17)
    numbers = [np.dtype(descr) for descr in ["|b1"] + INTEGERS + FLOATS] + list(SMALL.values())
    lines = []
    for before in numbers:
        for after in numbers:
            if before == after:
                continue
            # ml_dtypes goes through float32, which rounds twice
            if after in SMALL.values() and before.itemsize > 2 and before.str != "<f4":
                continue
            values = sample(before, random)
            if after.kind in "iu":
                # out of range, numpy wraps around, or does what the processor does
                limits = np.iinfo(after)
                if before.kind in "iu":
                    values = values[[limits.min <= int(value) <= limits.max for value in values]]
                else:
                    wide = values.astype(np.float64)
                    values = values[(wide >= limits.min) & (wide < float(limits.max) + 1)]
            result = values.astype(after)
            name = "case%d" % len(lines)
            lines.append("\t".join([name, name_of(before), name_of(after)]))
            (folder / (name + ".before")).write_bytes(values.tobytes())
            (folder / (name + ".after")).write_bytes(result.tobytes())
    (folder / "cases.txt").write_text("".join(line + "\n" for line in lines))


if sys.argv[1] == "write":
    np.seterr(all="ignore")
    write(pathlib.Path(sys.argv[2]))
