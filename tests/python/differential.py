#!/usr/bin/env python3
"""Compares pinflow with numpy on random files: arrays, rows, loaders, loads, casts and conversions.

    python3 differential.py [--seconds N] [--seed N] [--only NAME,...]

Each trial writes small files with numpy (and h5py and safetensors, if they can be imported), reads them by pinflow on
the host device, and compares. Prints each kind of failure once, with the seed of its trial, which --seed repeats. Exits
with 1 if there was one.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
import traceback

import numpy as np

import pinflow

try:
    import h5py
except ImportError:
    h5py = None
try:
    from safetensors.numpy import save_file as save_safetensors
except ImportError:
    save_safetensors = None

TYPES = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", ">i2", ">f4", ">f8", ">i8"]
LENGTHS = [1, 2, 3, 5, 7, 16, 33]


class Trial:
    """Random choices, and files in a folder."""

    def __init__(self, seed, folder):
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.folder = folder

    def chance(self, probability):
        return self.random.random() < probability

    def shape(self, *first, axes=4):
        """Lengths of up to `axes` axes, those of `first` among them. A length may be 0 if there is no `first`."""
        lengths = LENGTHS if first or self.chance(0.9) else [0, *LENGTHS]
        return (*first, *(self.random.choice(lengths) for _ in range(self.random.randint(0, axes - len(first)))))

    def array(self, shape, dtype=None):
        dtype = np.dtype(dtype or self.random.choice(TYPES))
        count = int(np.prod(shape))
        native = dtype.newbyteorder("=")
        if dtype.kind == "b":
            flat = self.numpy.integers(0, 2, count)
        elif dtype.kind in "iu":
            limits = np.iinfo(native)
            flat = self.numpy.integers(limits.min, limits.max, count, dtype=native, endpoint=True)
        else:
            flat = self.numpy.standard_normal(count) * 10.0 ** self.random.randint(-2, 3)
            if dtype.kind == "c":
                flat = flat + 1j * self.numpy.standard_normal(count)
        return flat.astype(dtype).reshape(shape)

    def record_type(self):
        fields = [(f"f{i}", self.random.choice([*TYPES, "S3", "U2", ">U2", "M8[s]", ">m8[ms]"]),
                   *([(self.random.randint(1, 3),)] if self.chance(0.3) else [])) for i in range(self.random.randint(1, 4))]
        return np.dtype(fields, align=self.chance(0.3))

    def records(self, shape, dtype):
        """Values that every type of a field can hold: small numbers, and texts of digits."""
        values = np.zeros(shape, dtype)
        for name in dtype.names or [None]:
            field = values if name is None else values[name]
            numbers = self.numpy.integers(0, 2 if field.dtype.kind == "b" else 100, field.shape)
            if field.dtype.kind in "SU":
                field[...] = numbers.astype("U2")
            elif field.dtype.kind in "mM":
                field[...] = numbers.astype(np.int64).view(field.dtype.newbyteorder("="))
            else:
                field[...] = numbers
        return values

    def hdf5_options(self, values):
        shape = values.shape
        if not shape or not all(shape) or self.chance(0.3):
            return {}
        chunks = tuple(self.random.randint(1, length) for length in shape)
        if values.dtype.kind in "iu" and self.chance(0.2):
            return {"chunks": chunks, "scaleoffset": 0}  # which only libhdf5 reads
        return {"chunks": chunks, "shuffle": self.chance(0.3), "compression": self.random.choice([None, "gzip", "lzf"]),
                "fletcher32": self.chance(0.3)}

    def written(self, name, values, may_transpose=True):
        """Writes an array to a file of a random format. Returns how pinflow names the array."""
        if may_transpose and values.ndim and self.chance(0.2):
            values = np.asfortranarray(values)
        kind = self.random.choice(["npy", "npz", "deflated"] + (["hdf5"] if h5py and values.dtype.kind in "biufc" else []))
        if kind == "npy":
            np.save(f"{self.folder}/{name}.npy", values)
            return f"{self.folder}/{name}.npy"
        if kind == "hdf5":
            with h5py.File(f"{self.folder}/{name}.h5", "w", libver=("earliest", "v110") if self.chance(0.5) else None) as file:
                file.create_dataset("group/x", data=values, **self.hdf5_options(values))
            return f"{self.folder}/{name}.h5:group/x"
        (np.savez if kind == "npz" else np.savez_compressed)(f"{self.folder}/{name}.npz", x=values, other=np.arange(3))
        return f"{self.folder}/{name}.npz:x"

    def index(self, shape):
        """Numbers, slices of step 1, a list of numbers and an ellipsis for the first axes."""
        chosen = []
        for length in shape[:self.random.randint(0, len(shape))]:
            if length and self.chance(0.3):
                chosen.append(self.random.randrange(-length, length))
            elif self.chance(0.1):
                return (*chosen, Ellipsis)
            elif length and self.chance(0.15) and not any(isinstance(each, list) for each in chosen):
                chosen.append([self.random.randrange(-length, length) for _ in range(self.random.randint(0, 3))])
            else:
                chosen.append(slice(*(self.random.choice([None, self.random.randint(-length - 2, length + 2)])
                                      for _ in range(2))))
        return tuple(chosen)


def check_equal(got, expected, what):
    """The same shape, the same type except for its byte order, and the same bits."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape} instead of {expected.shape}"
    native = expected.dtype.newbyteorder("=")
    assert got.dtype.newbyteorder("=") == native, f"{what}: {got.dtype} instead of {expected.dtype}"
    if native.names:
        for name in native.names:
            check_equal(got[name], expected[name], f"{what}, field {name}")
        return
    same = np.ascontiguousarray(got.astype(native)).tobytes() == np.ascontiguousarray(expected.astype(native)).tobytes()
    assert same, f"{what}: other elements"


def try_array(trial):
    values = trial.array(trial.shape())
    name = trial.written("a", values)
    array = pinflow.open(name)
    check_equal(array, values, name)
    if not values.ndim:
        return
    for index in (*(trial.index(values.shape) for _ in range(3)), np.s_[::-2], np.s_[1:3]):
        check_equal(array[index], values[index], f"{name}[{index}]")
    if len(values):
        ids = trial.numpy.integers(0, len(values), trial.random.randint(0, 9))
        try:
            rows = array.rows(ids)
        except pinflow.Unsupported as failure:
            assert "Fortran order" in str(failure), failure
            return
        check_equal(rows, values[ids], f"rows of {name}")


def try_records(trial):
    dtype = trial.random.choice([trial.record_type(), *map(np.dtype, ("S5", "U3", ">U3", "M8[ns]", ">m8[s]"))])
    values = trial.records((trial.random.choice([1, 3, 17, 200]), *trial.shape(axes=2)), dtype)
    name = trial.written("a", values, may_transpose=False)
    array = pinflow.open(name)
    check_equal(array, values, name)
    ids = trial.numpy.integers(0, len(values), 7)
    check_equal(array.rows(ids), values[ids], f"rows of {name}")
    for batch, numbers in pinflow.Loader(name, np.arange(len(values)), batch=50, device="host", epochs=1):
        check_equal(batch.numpy(), values[numbers.numpy()], f"batch of {name}")
    pinflow.convert(name, f"{trial.folder}/out.npz")
    with np.load(f"{trial.folder}/out.npz") as converted:
        check_equal(converted[converted.files[0]], values, f"{name} converted")


def try_concatenation(trial):
    inner, dtype = trial.shape(axes=2), trial.random.choice(TYPES)
    parts = [trial.array((trial.random.randint(0, 20), *inner), dtype) for _ in range(trial.random.randint(1, 5))]
    names = [trial.written(f"part{i}", part, may_transpose=False) for i, part in enumerate(parts)]
    whole, joined = np.concatenate(parts), pinflow.concatenate(names)
    check_equal(joined, whole, names)
    mask = trial.numpy.random(len(whole)) < 0.5
    for index in (np.s_[2:9], np.s_[::-3], mask, np.flatnonzero(mask)):
        check_equal(joined[index], whole[index], f"{names}[{index}]")


def try_table(trial):
    rows = trial.random.choice([1, 10, 300])
    values = trial.array(trial.shape(rows, axes=3), trial.random.choice([each for each in TYPES if each[0] != ">"]))
    expected, table = values.copy(), pinflow.RowTable(values, device="host")
    for _ in range(4):
        ids = trial.numpy.permutation(rows)[:trial.random.randint(0, rows)]
        new = trial.array((len(ids), *values.shape[1:]), values.dtype)
        table.scatter(ids, new)
        expected[ids] = new
        check_equal(values, expected, "the table after a scatter")
        ids = trial.numpy.integers(0, rows, trial.random.randint(0, 50))
        check_equal(table.gather(ids), expected[ids], "gathered rows")


def loader_options(trial, rows):
    """Options, and how many rows an epoch has."""
    options = {"batch": trial.random.choice([1, 2, 3, 7, 16, 64, 300]), "seed": trial.random.randrange(1 << 40),
               "device": "host", "tail": trial.random.choice(["partial", "drop"]),
               "slots": trial.random.choice([None, None, 2, 3, 9]), "threads": trial.random.choice([None, 1, 2, 5]),
               "order": trial.random.choice(["sequential", "shuffled", "windowed", "weighted", "numbers"])}
    if options["order"] == "windowed" and trial.chance(0.5):
        options["window"] = trial.random.randint(1, 2 * rows)
    if options["order"] == "numbers":
        options["order"] = trial.numpy.integers(0, rows, trial.random.randint(1, 2 * rows))
        return options, len(options["order"])
    if options["order"] == "weighted":
        options["weights"] = trial.numpy.random(rows) * (trial.numpy.random(rows) < 0.7)
        options["weights"][trial.random.randrange(rows)] = 1
        options["draws"] = trial.random.choice([None, trial.random.randint(1, 3 * rows)])
        return options, options["draws"] or rows
    return options, rows


def take_epochs(loader, arrays, epochs):
    """The epoch and the row numbers of each batch, and the state after it. Checks the contents."""
    taken = []
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            ids = batch[0].numpy().copy()
            for tensor, values in zip(batch, arrays):
                check_equal(tensor.numpy(), values[ids], "a batch")
            taken.append((epoch, ids, json.dumps(loader.state_dict())))
    return taken


def try_loader(trial):
    rows, epochs, world = trial.random.choice([1, 2, 3, 10, 37, 64, 100, 257]), trial.random.randint(1, 3), 1
    arrays = [np.arange(rows), *(trial.array(trial.shape(rows)) for _ in range(trial.random.randint(0, 3)))]
    sources = [values.astype(values.dtype.newbyteorder("=")) if trial.chance(0.2)
               else trial.written(f"s{i}", values, may_transpose=False) for i, values in enumerate(arrays)]
    options, expected = loader_options(trial, rows)
    if trial.chance(0.5):
        world = trial.random.choice([1, 2, 3, 5])
    delivered = [[] for _ in range(epochs)]
    for rank in range(world):
        made = dict(options, rank=rank, world=world, epochs=epochs)
        loader = pinflow.Loader(*sources, **made)
        taken = take_epochs(loader, arrays, epochs)
        assert len(taken) == len(loader) * epochs, f"{made}: {len(taken)} batches"
        for epoch, ids, _ in taken:
            delivered[epoch].append(ids)
        if taken:
            at = trial.random.randrange(len(taken))
            resumed = pinflow.Loader(*sources, **dict(made, slots=None, threads=trial.random.choice([None, 1, 3])))
            resumed.load_state_dict(json.loads(taken[at][2]))
            rest = [(epoch, ids.tolist()) for epoch, ids, _ in take_epochs(resumed, arrays, epochs)]
            wanted = [(epoch, ids.tolist()) for epoch, ids, _ in taken[at + 1:]]
            assert rest == wanted, f"{made}, resumed after {at + 1} batches: other rows"
    step = options["batch"] * world
    count = expected if options["tail"] == "partial" else expected // step * step
    for epoch, parts in enumerate(delivered):
        ids = np.concatenate([np.zeros(0, np.int64), *parts])
        assert len(ids) == count, f"{options}: epoch {epoch} has {len(ids)} rows instead of {count}"
        order = options["order"]
        if isinstance(order, np.ndarray):
            assert world > 1 or (ids == order[:count]).all(), f"{options}: another order"
        elif order == "weighted":
            assert (options["weights"][ids] > 0).all(), f"{options}: a row of weight 0"
        else:
            assert len(np.unique(ids)) == len(ids), f"{options}: a row twice"
            assert order != "sequential" or world > 1 or (ids == np.arange(count)).all(), f"{options}: another order"


def try_load(trial):
    kinds = ["npz", "deflated"] + ["hdf5"] * (h5py is not None) + ["safetensors"] * (save_safetensors is not None)
    kind = trial.random.choice(kinds)
    types = TYPES if kind != "safetensors" else [each for each in TYPES if each[0] != ">" and "c" not in each]
    tensors = {trial.random.choice(["w", "layer.", "a b", "ü", "x.y."]) + str(i):
               trial.array(trial.shape(), trial.random.choice(types)) for i in range(trial.random.randint(1, 6))}
    path = f"{trial.folder}/t." + {"deflated": "npz", "hdf5": "h5"}.get(kind, kind)
    if kind == "safetensors":
        save_safetensors(tensors, path)
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            for name, values in tensors.items():
                file.create_dataset(name, data=values, **trial.hdf5_options(values))
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, **tensors)
    out = f"{trial.folder}/out." + trial.random.choice(["npz", "h5"] if h5py else ["npz"])
    pinflow.convert(path, out)
    for each in (path, out):
        loaded = pinflow.load_file(each, framework="np")
        assert set(loaded) == set(tensors), f"{each}: {sorted(loaded)}"
        for name, values in tensors.items():
            check_equal(loaded[name], values, f"{name} of {each}")
    with pinflow.safe_open(path, framework="np") as opened:
        for name, values in tensors.items():
            for index in [trial.index(values.shape) for _ in range(3)] if values.ndim else []:
                check_equal(opened.get_slice(name)[index], values[index], f"{name}[{index}] of {kind}, {values.shape}")


def try_cast(trial):
    values = trial.array(trial.shape(), trial.random.choice(TYPES[:12]))
    if values.dtype.kind == "f" and values.size:
        values.reshape(-1)[trial.random.randrange(values.size)] = trial.random.choice([np.nan, np.inf, -np.inf, 0.5, 2.5])
    to = np.dtype(trial.random.choice(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]))
    np.save(f"{trial.folder}/a.npy", values)
    pinflow.convert(f"{trial.folder}/a.npy", f"{trial.folder}/b.npy", "--dtype", to.name)
    with np.errstate(all="ignore"):
        expected = values.astype(to)
    if to.kind != "f":  # saturated, and NaN is 0
        limits = np.iinfo(to)

        def clamped(value):
            if value != value:
                return 0
            return limits.min if value <= limits.min else limits.max if value >= limits.max else int(value)

        expected = np.array([clamped(each) for each in values.reshape(-1).tolist()], object).astype(to).reshape(values.shape)
    got = np.load(f"{trial.folder}/b.npy")
    nothing = np.isnan(expected) if to.kind == "f" else np.zeros(expected.shape, bool)
    assert to.kind != "f" or (np.isnan(got) == nothing).all(), f"{values.dtype} to {to}: NaNs elsewhere"
    check_equal(got[~nothing], expected[~nothing], f"{values.dtype} to {to}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first trial")
    parser.add_argument("--only", default="", help="names of kinds of trials, separated by commas")
    arguments = parser.parse_args()
    kinds = {name[len("try_"):]: value for name, value in globals().items() if name.startswith("try_")}
    chosen = arguments.only.split(",") if arguments.only else list(kinds)
    end, seed, failures = time.monotonic() + arguments.seconds, arguments.seed, set()
    while time.monotonic() < end:
        kind = random.Random(seed).choice(chosen)
        folder = tempfile.mkdtemp()
        try:
            kinds[kind](Trial(seed, folder))
        except Exception as failure:
            lines = [each.lineno for each in traceback.extract_tb(failure.__traceback__) if each.name == f"try_{kind}"]
            place = (kind, type(failure), *lines)
            if place not in failures:
                print(f"--seed {seed}, {kind}: {type(failure).__name__}: {str(failure)[:1000]}", flush=True)
            failures.add(place)
        finally:
            shutil.rmtree(folder)
        seed += 1
    print(f"{seed - arguments.seed} trials, {len(failures)} kinds of failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
