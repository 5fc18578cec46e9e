#!/usr/bin/env python3
"""Measures the shapes that people train on: on a GPU relative to the link, on the host relative to numpy.

    python3 everyday.py TAKE_BATCHES PINFLOW [--dir DIR] [--cells "NAME;NAME"] [--device cuda|host] [--host-grid]
                        [--gib 8] [--repetitions 3] [--results RESULTS.md] [--skip-peers]

TAKE_BATCHES is the program made from take_batches.cpp, PINFLOW the tool. Every cell makes its files in a folder below
DIR, which is removed at the end, and reads them into the page cache. A GPU cell streams them for five epochs (one in
the cells "one epoch"). The digest reads every batch on the GPU. If a batch has less than 1 MiB, the digest is computed
in a run that is not timed, because its CUDA calls take as long as the batch. A host cell streams them for three epochs,
in turns with one numpy thread that gathers the rows of np.load(mmap_mode="r"). If a cell has many files, numpy reads
one file of 1 GiB instead. The cells "one epoch" and "first of five" count the first epoch, all others the median of the
later epochs. Contents are checked by the digest, which must be that of `pinflow stream --device host --route read`; on
the host in a run that is not timed. LINK is the rate of a 256 MiB copy from pinned memory in the same run. An unknown
name in --cells prints all names. --host-grid measures other cells: images with labels on the host, rows of 3, 12 and
48 KiB, batches of 64, 256 and 1024, sequential and shuffled. With --results the table between two marks in that file
is replaced, unless something failed. After all cells, `baselines.py --only samples` runs if a GPU cell was selected,
unless --skip-peers is given.
"""
import argparse
import atexit
import datetime
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy

here = os.path.dirname(os.path.abspath(__file__))
begin, end = "<!-- everyday: begin -->", "<!-- everyday: end -->"
KIB, MIB = 1024, 1024 * 1024


@dataclass
class Cell:
    """One shape: rows in `files` files, and `labels` further arrays of 8 bytes a row."""
    name: str
    device: str
    row: int
    batch: int
    order: str = "shuffled"
    labels: int = 0
    files: int = 1
    cores: int = 0  # 0: all
    stack: bool = False
    epochs: int = 0
    first: bool = False  # the first epoch counts, not the later ones
    flags: tuple = ()


def cells_of_gpu():
    yield Cell("256K", "cuda", 256 * KIB, 64)
    yield Cell("256K+label", "cuda", 256 * KIB, 64, labels=1)
    yield Cell("256K+4 labels", "cuda", 256 * KIB, 64, labels=4)
    yield Cell("256K+label, sequential by 37", "cuda", 256 * KIB, 37, "sequential", labels=1)
    yield Cell("256K+label, windowed", "cuda", 256 * KIB, 64, "windowed", labels=1)
    yield Cell("256K+label, legacy stream", "cuda", 256 * KIB, 64, labels=1, flags=("--legacy",))
    yield Cell("256K+label, 3 batches leased", "cuda", 256 * KIB, 64, labels=1, flags=("--leased", "3"))
    yield Cell("1M by 16", "cuda", MIB, 16)
    yield Cell("147K+label", "cuda", 147 * KIB, 256, labels=1)
    yield Cell("64K", "cuda", 64 * KIB, 256)
    yield Cell("64K+label", "cuda", 64 * KIB, 256, labels=1)
    yield Cell("32K+label", "cuda", 32 * KIB, 128, labels=1)
    yield Cell("12K+label", "cuda", 12 * KIB, 256, labels=1)
    yield Cell("4K by 64", "cuda", 4 * KIB, 64)
    yield Cell("4K+label by 64", "cuda", 4 * KIB, 64, labels=1)
    yield Cell("3K", "cuda", 3 * KIB, 256)
    yield Cell("3K+label", "cuda", 3 * KIB, 256, labels=1)
    yield Cell("512 by 1024", "cuda", 512, 1024)
    yield Cell("8 by 1024", "cuda", 8, 1024)
    yield Cell("4K, one file, sequential", "cuda", 4 * KIB, 64, "sequential")
    yield Cell("4K, 100 files", "cuda", 4 * KIB, 64, files=100)
    yield Cell("4K, 10000 files, sequential", "cuda", 4 * KIB, 64, "sequential", files=10000)
    yield Cell("4K, 10000 files", "cuda", 4 * KIB, 64, files=10000)
    yield Cell("256K, 8192 files stacked", "cuda", 256 * KIB, 64, files=8192, stack=True)
    for cores in (0, 4, 2):
        yield Cell(f"256K, one epoch, {cores or 'all'} cores", "cuda", 256 * KIB, 64, "sequential", cores=cores,
                   epochs=1, first=True)
    yield Cell("256K, first of five", "cuda", 256 * KIB, 64, "sequential", first=True)


def cells_of_host():
    for row in (3, 12, 48):
        for batch, order in ((64, "sequential"), (64, "shuffled"), (1024, "shuffled")):
            yield Cell(f"host {row}K+label by {batch}, {order}", "host", row * KIB, batch, order, labels=1, cores=2)
    yield Cell("host 8 by 1024", "host", 8, 1024, cores=2)
    yield Cell("host 4K, 10000 files, sequential", "host", 4 * KIB, 64, "sequential", files=10000, cores=2)
    yield Cell("host 4K, 10000 files", "host", 4 * KIB, 64, files=10000, cores=2)


def cells_of_host_grid():
    for row in (3, 12, 48):
        for batch in (64, 256, 1024):
            for order in ("sequential", "shuffled"):
                yield Cell(f"host {row}K+label by {batch}, {order}", "host", row * KIB, batch, order, labels=1, cores=2)


cells = [*cells_of_gpu(), *cells_of_host()]
assert len(cells) <= 40 and len({cell.name for cell in cells}) == len(cells)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("take_batches", help="the program")
parser.add_argument("pinflow", help="the tool")
parser.add_argument("--dir", default=".", help="where the folder of this run is made (default: here)")
parser.add_argument("--cells", default="", help="names, separated by semicolons (default: all)")
parser.add_argument("--device", choices=["cuda", "host"], help="cells of this device only")
parser.add_argument("--host-grid", action="store_true", help="18 cells of the host instead")
parser.add_argument("--gib", type=float, default=8, help="size of a GPU's files of large rows (default: 8)")
parser.add_argument("--repetitions", type=int, default=3, help="runs of each cell (default: 3)")
parser.add_argument("--results", default="", help="the file whose table is replaced")
parser.add_argument("--skip-peers", action="store_true", help="without baselines.py")
options = parser.parse_args()
if options.host_grid:
    cells = [*cells_of_host_grid()]
if options.cells:
    asked = options.cells.split(";")
    unknown = [name for name in asked if name not in {cell.name for cell in cells}]
    if unknown:
        sys.exit(f"everyday.py: there is no cell {unknown[0]!r}; there are: " + "; ".join(cell.name for cell in cells))
    cells = [cell for cell in cells if cell.name in asked]
if options.device:
    cells = [cell for cell in cells if cell.device == options.device]
os.makedirs(options.dir, exist_ok=True)
folder = tempfile.mkdtemp(prefix="everyday-", dir=options.dir)
atexit.register(shutil.rmtree, folder, ignore_errors=True)
all_cores = sorted(os.sched_getaffinity(0))
failures = []


def rows_of(cell):
    """Rows of the dataset of a cell: several GiB for a GPU's large rows, less for small ones and for the host."""
    if cell.stack:
        return cell.files
    if cell.files == 10000:
        return 64 * cell.files
    size = options.gib * 2**30 if cell.device == "cuda" and cell.row >= 64 * KIB else 3 * 2**30
    if cell.device == "host":
        size = 2**30
    return int(min(size // cell.row, 4 * 2**20)) // cell.files * cell.files


made = {}  # files by their content


def files_of(cell):
    """The arguments that name the cell's arrays; the files are made once and read into the page cache."""
    count = rows_of(cell)
    key = (cell.row, count, cell.files, cell.stack)
    if key not in made:
        base = os.path.join(folder, f"{cell.row}-{count}-{cell.files}-{int(cell.stack)}")
        os.makedirs(base)
        random = numpy.random.default_rng(cell.row)
        block = random.integers(0, 256, max(2 * MIB, 4 * cell.row), dtype=numpy.uint8)
        per_file = count // cell.files
        for number in range(cell.files):
            shape = (cell.row,) if cell.stack else (per_file, cell.row)
            array = numpy.lib.format.open_memmap(os.path.join(base, f"rows-{number}.npy"), mode="w+",
                                                 dtype=numpy.uint8, shape=shape)
            flat = array.reshape(-1)
            for at in range(0, flat.size, block.size):
                flat[at:at + block.size] = block[:flat.size - at]
            rows = array.reshape(per_file if not cell.stack else 1, cell.row)
            if cell.row >= 8:  # all rows differ, so that a misplaced row is detected
                numbers = numpy.arange(number * len(rows), (number + 1) * len(rows), dtype=numpy.int64)
                rows[:, :8] = numbers.view(numpy.uint8).reshape(-1, 8)
            del array, flat, rows
        os.sync()
        made[key] = base
    base = made[key]
    names = [os.path.join(base, "rows-*.npy" if cell.files > 1 or cell.stack else "rows-0.npy")]
    for label in range(cell.labels):
        path = os.path.join(base, f"label-{label}.npy")
        if not os.path.exists(path):
            numpy.save(path, numpy.random.default_rng(label).integers(0, 2**62, count))
        names.append(path)
    for name in os.listdir(base):
        with open(os.path.join(base, name), "rb") as file:  # into the page cache
            while file.read(64 * MIB):
                pass
    return names


def run(command, cores):
    finished = subprocess.run(command, capture_output=True, text=True,
                              preexec_fn=lambda: os.sched_setaffinity(0, all_cores[:cores or len(all_cores)]))
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:3])} ...: {finished.stderr.strip()[-500:]}")
    return json.loads(finished.stdout)


expected_digests = {}


def expected_digest(cell, files):
    key = (tuple(files), cell.stack)
    if key not in expected_digests:
        command = [options.pinflow, "stream", *files, "--device", "host", "--route", "read", "--batch", "1024", "--json"]
        expected_digests[key] = int(run(command + (["--stack"] if cell.stack else []), 0)["digest"], 16)
    return expected_digests[key]


def take(cell, files, epochs, *flags):
    command = [options.take_batches, *files, "--device", cell.device, "--batch", str(cell.batch), "--order", cell.order,
               "--epochs", str(epochs), *cell.flags, *flags]
    result = run(command + (["--stack"] if cell.stack else []), cell.cores)
    if "digest" in result and int(result["digest"], 16) != expected_digest(cell, files) * epochs % 2**64:
        raise RuntimeError(f"the digest is {result['digest']}: other rows were delivered")
    return result


def counted(cell, values):
    return values[:1] if cell.first else values[1:]


def numpy_epochs(cell, files, epochs):
    """Seconds and CPU seconds of the epochs after the first: one thread gathers all rows of `files`."""
    arrays = [numpy.load(name, mmap_mode="r") for name in files]
    count = len(arrays[0])
    seconds, cpu = [], []
    for epoch in range(epochs):
        start, cpu_start = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        order = numpy.random.default_rng(epoch).permutation(count) if cell.order == "shuffled" else None
        for first in range(0, count, cell.batch):
            for array in arrays:
                if order is None:
                    numpy.array(array[first:first + cell.batch])
                else:
                    array[order[first:first + cell.batch]]
        now = resource.getrusage(resource.RUSAGE_SELF)
        seconds.append(time.perf_counter() - start)
        cpu.append(now.ru_utime + now.ru_stime - cpu_start.ru_utime - cpu_start.ru_stime)
    return seconds[1:], cpu[1:]


def measure_gpu(cell, link):
    files = files_of(cell)
    epochs = cell.epochs or 5
    check = ["--digest"]
    if cell.row * cell.batch < MIB:
        take(cell, files, 1, *check)
        check = []
    results = [take(cell, files, epochs, *check) for _ in range(options.repetitions)]
    seconds = [s for result in results for s in counted(cell, result["seconds"])]
    result = results[-1]
    size, batches = result["rows"] * result["sample_bytes"], result["batches"]
    rates = sorted(size / s / 1e9 for s in seconds)
    return {"gbps": statistics.median(rates), "low": rates[0], "high": rates[-1],
            "us": statistics.median(seconds) / batches * 1e6, "ratio": statistics.median(rates) / link,
            "how": ", ".join(array["transfer"] for array in result["arrays"])}


def measure_host(cell):
    files = files_of(cell)
    take(cell, files, 1, "--digest")
    one_file = Cell(cell.name, cell.device, cell.row, cell.batch, cell.order, cell.labels, 1, cell.cores)
    peer_files = files_of(one_file) if cell.files > 1 else files
    ours, ours_cpu, theirs, theirs_cpu, one, one_cpu = [], [], [], [], [], []
    for _ in range(options.repetitions):
        os.sched_setaffinity(0, all_cores[:cell.cores or len(all_cores)])
        seconds, cpu = numpy_epochs(cell, peer_files, 3)
        os.sched_setaffinity(0, all_cores)
        theirs += seconds
        theirs_cpu += cpu
        for threads, wall, cpu in ((1, one, one_cpu), (2, ours, ours_cpu)):
            result = take(cell, files, 3, "--threads", str(threads))
            wall += result["seconds"][1:]
            cpu += result["cpu_seconds"][1:]
    # numpy's file may have fewer rows than the loader's files
    share = result["rows"] / rows_of(one_file if cell.files > 1 else cell)
    theirs, theirs_cpu = [s * share for s in theirs], [s * share for s in theirs_cpu]
    median = statistics.median
    size, batches = result["rows"] * result["sample_bytes"], result["batches"]
    rates = sorted(size / s / 1e9 for s in ours)
    return {"gbps": median(rates), "low": rates[0], "high": rates[-1], "us": median(ours) / batches * 1e6,
            "ratio": median(theirs) / median(ours), "one": median(theirs) / median(one),
            "cpu": median(ours_cpu) / median(theirs_cpu), "one_cpu": median(one_cpu) / median(theirs_cpu),
            "how": ", ".join(a["transfer"] for a in result["arrays"])}


link = 0
if any(cell.device == "cuda" for cell in cells):
    link = run([options.pinflow, "bench", "copy", "--json"], 0)["link_gbps"]
    print(f"LINK {link:.1f} GB/s", flush=True)
rows = []
for cell in cells:
    try:
        figures = measure_gpu(cell, link) if cell.device == "cuda" else measure_host(cell)
    except (RuntimeError, OSError, ValueError) as failure:
        failures.append(f"{cell.name}: {failure}")
        print(f"FAILED {cell.name}: {failure}", flush=True)
        continue
    of = f"{figures['ratio']:.2f}" if cell.device == "cuda" else \
        f"{figures['one']:.2f} with one thread, {figures['ratio']:.2f} with two; " \
        f"CPU {figures['one_cpu']:.2f}, {figures['cpu']:.2f}"
    rows.append(f"| {cell.name} | {cell.batch} | {figures['gbps']:.1f} ({figures['low']:.1f} to {figures['high']:.1f}) | "
                f"{figures['us']:.1f} | {of} | {figures['how']} |")
    print(rows[-1], flush=True)
    if cell.stack or cell.files > 100:  # many inodes: not kept
        for key in [key for key in made if key[2] == cell.files and cell.files > 100]:
            if not any(each.files == cell.files for each in cells[cells.index(cell) + 1:]):
                shutil.rmtree(made.pop(key))

peers = []
if not options.skip_peers and link:
    command = [sys.executable, os.path.join(here, "baselines.py"), "--dir", folder, "--only", "samples"]
    finished = subprocess.run(command, capture_output=True, text=True)
    for line in finished.stdout.splitlines():
        figure = json.loads(line)
        if "gbps" in figure:
            peers.append(f"| {figure['peer']} | | {figure['gbps']} | | {figure['gbps'] / link:.2f} | {figure['note']} |")
            print(peers[-1], flush=True)
    if finished.returncode != 0:
        failures.append("baselines.py: " + finished.stderr.strip()[-300:])

title = f"{datetime.date.today().isoformat()}, LINK {link:.1f} GB/s, {len(all_cores)} cores"
table = [f"| {title} | rows a batch | GB/s (lowest to highest epoch) | us a batch | of LINK; on the host: times numpy | transfer of each array |",
         "|---|---|---|---|---|---|", *rows, *peers]
if options.results and failures:
    print(f"everyday.py: {options.results} keeps its table: something failed", file=sys.stderr)
elif options.results:
    with open(options.results) as file:
        before, _, rest = file.read().partition(begin)
    with open(options.results, "w") as file:
        file.write(before + begin + "\n" + "\n".join(table) + "\n" + end + rest.partition(end)[2])
for failure in failures:
    print("FAILED:", failure, flush=True)
sys.exit(1 if failures else 0)
