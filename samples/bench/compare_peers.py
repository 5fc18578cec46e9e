#!/usr/bin/env python3
"""Compares pinflow with what users would pick instead, in one run: same work, same sizes, same file.

    python3 compare_peers.py PINFLOW [--dir DIR] [--gib 8] [--results RESULTS.md] [--skip-peers]

Runs baselines.py, which is in the same folder, then `pinflow bench` (PINFLOW is the program), and prints one table of
both. With --results it replaces the table between the two marks in that file, unless something failed or peers were
skipped. The streamed files, the first of GIB GiB in samples of 256 KiB, are made in a folder of the run's own below
DIR, which is removed at the end. The output of baselines.py is printed as it comes, that of `pinflow bench` when it
ends.
"""
import argparse
import atexit
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

here = os.path.dirname(os.path.abspath(__file__))
begin, end = "<!-- compare_peers: begin -->", "<!-- compare_peers: end -->"


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("pinflow", help="the program")
parser.add_argument("--dir", default=".", help="where the folder of this run is made (default: here)")
parser.add_argument("--gib", type=positive, default=8, help="size of the first streamed file (default: 8)")
parser.add_argument("--results", default="", help="the file whose table is replaced")
parser.add_argument("--skip-peers", action="store_true", help="measures pinflow alone")
options = parser.parse_args()


def refuse(why):
    """Ends the run before anything is measured."""
    print(f"compare_peers.py: {why}", file=sys.stderr)
    sys.exit(2)


def around_the_table():
    """The text of --results before and after the table."""
    with open(options.results, "r+") as file:  # "r+" also checks that it can be written
        text = file.read()
    before, begin_found, rest = text.partition(begin)
    _, end_found, after = rest.partition(end)
    if not begin_found or not end_found:
        raise ValueError(f"it has no line {begin} followed by a line {end}")
    return before + begin + "\n", end + after


if options.results:
    try:
        around_the_table()  # before anything is measured
    except (OSError, ValueError) as failure:
        refuse(f"cannot put the table into {options.results}: {failure}")
try:
    version = subprocess.run([options.pinflow, "--version"], capture_output=True, text=True, errors="replace").stdout
except OSError as failure:
    refuse(f"cannot run {options.pinflow}: {failure}")
if not version.startswith("pinflow "):
    refuse(f"{options.pinflow} is not the program pinflow: `--version` prints {version[:60]!r}")
for package in ["numpy"] if options.skip_peers else ["numpy", "torch"]:
    if importlib.util.find_spec(package) is None:
        refuse(f"{sys.executable} has no module {package}" +
               ("; with --skip-peers it is not needed" if package == "torch" else ""))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM removes the folder, too
try:
    os.makedirs(options.dir, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="compare_peers-", dir=options.dir)
except OSError as failure:
    refuse(f"cannot make a folder in {options.dir}: {failure}")
atexit.register(shutil.rmtree, folder)
stream_file = os.path.join(folder, "baseline_stream.npy")  # baselines.py calls it that
failures = []
links, links_back = [], []  # to the device and back, of each run of the bench


def run_peers():
    """Runs baselines.py. @return its figures: {work: [(gbps, peer), ...]}, the best first."""
    found = {}
    command = [sys.executable, os.path.join(here, "baselines.py"), "--dir", folder, "--gib", str(options.gib),
               "--keep", "--only", "link,pin,stream,shuffled,rows"]
    print("$", " ".join(command[1:]), flush=True)
    # frameworks print many warnings: they are shown only if the program fails
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                try:
                    figure = json.loads(line)
                except ValueError:
                    continue
                if figure.get("gbps"):
                    found.setdefault(figure["work"], []).append((figure["gbps"], figure["peer"]))
        if process.returncode != 0:
            errors.seek(0)
            last_lines = errors.read().splitlines()[-20:] or ["it printed no error"]
            print("\n".join(last_lines), flush=True)
            failures.append(f"baselines.py ended with status {process.returncode}: {last_lines[-1]}")
    return {work: sorted(figures, reverse=True) for work, figures in found.items()}


def bench(work, *arguments):
    """The results of one `pinflow bench WORK`."""
    command = [options.pinflow, "bench", work, "--json", *arguments]
    print("$ pinflow", " ".join(command[1:]), flush=True)
    finished = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": folder})
    if finished.returncode != 0:
        print(finished.stderr, end="", flush=True)
        failures.append(f"bench {work} {' '.join(arguments)}: {finished.stderr.strip()}")
        return []
    answer = json.loads(finished.stdout)
    for result in answer["results"]:
        print("   ", json.dumps(result), flush=True)
    links.append(answer["link_gbps"])
    links_back.append(answer["link_to_host_gbps"])
    return answer["results"]


peers = {} if options.skip_peers else run_peers()
rows = []


def add(title, results, work, peer_work=None, of_link=True):
    """Adds a line to the table: the result called `work` and the best peer; "-" for a rate that was not measured."""
    result = next((each for each in results if each["work"] == work), None)
    if result is None:
        if results:
            failures.append(f"`pinflow bench` printed no rate of {work!r}")
        rows.append((title, "failed", "", "", "", ""))
        return
    rate, of_link = result["gbps"], result["of_link"] if of_link else None
    best_rate, which = peers.get(peer_work, [(0, "")])[0]
    rows.append((title, f"{rate:.1f}" if rate else "-", f"{of_link:.2f}" if of_link else "",
                 f"{best_rate:.1f}" if best_rate else "", f"{rate / best_rate:.1f}" if rate and best_rate else "", which))


if not os.path.exists(stream_file):
    import numpy
    made = numpy.lib.format.open_memmap(stream_file, mode="w+", dtype=numpy.float32, shape=(options.gib * 4096, 256, 256))
    random = numpy.random.default_rng(1)
    for first in range(0, len(made), 256):  # all samples differ, so that a misplaced sample is detected
        made[first:first + 256] = random.random(made[first:first + 256].shape, dtype=numpy.float32)
    del made
size = f"{options.gib} GiB"
streamed = bench("stream", "--file", stream_file)
add(f"stream {size}, 64 rows of 256 KiB a batch, epoch 1", streamed, "stream, epoch 1, opening and registering included")
add("the same, epochs 2 to 5", streamed, "stream, later epochs", "stream")
shuffled = bench("shuffled", "--file", stream_file)
add("shuffled, the same file, epoch 1", shuffled, "shuffled, epoch 1, opening and registering included")
add("the same, epochs 2 to 5", shuffled, "shuffled, later epochs", "shuffled")
pinned = bench("pin", "--file", stream_file)
add("register that file in place", pinned, "pin, a file in place", "pin", of_link=False)
os.unlink(stream_file)  # DIR may be memory, which the tables below need
for order in ("stream", "shuffled"):
    small = bench(order, "--table", "8GiB", "--row-bytes", "4096", "--batch", "16384")
    add(f"{order} 8 GiB, 16384 rows of 4 KiB a batch, epochs 2 to 5", small, f"{order}, later epochs")
gathered = bench("gather")
add("gather 64 x 131072 of 10M rows of 512 B, 8 known", gathered, "gather", "gather 64")
add("one such gather, waited for", gathered, "gather, one call, waited for", "gather")
for table, row_bytes in (("16GiB", "512"), ("48GiB", "512"), ("16GiB", "1024")):
    gathered = bench("gather", "--table", table, "--row-bytes", row_bytes)
    add(f"gather, rows of {row_bytes} B from {table}", gathered, "gather")
scattered = bench("scatter")
add("scatter 64 x 131072 to 10M rows of 512 B, 8 known (of LINK back)", scattered, "scatter", "scatter 64")
for table in ("16GiB", "48GiB"):
    scattered = bench("scatter", "--table", table)
    add(f"scatter, rows of 512 B to {table} (of LINK back)", scattered, "scatter")
both = bench("duplex")
add("gather and scatter at once, 10M rows of 512 B, in total", both, "duplex, gather and scatter in total", "duplex 64")
bench("plan")


def range_of(rates):
    slowest, fastest = f"{min(rates, default=0):.1f}", f"{max(rates, default=0):.1f}"
    return slowest if slowest == fastest else f"{slowest} to {fastest}"


title = f"{datetime.date.today().isoformat()}, LINK {range_of(links)} GB/s, back {range_of(links_back)}"
table = [f"| {title} | pinflow, GB/s | of LINK | best peer, GB/s | times | which |", "|---|---|---|---|---|---|"]
table += ["| " + " | ".join(row) + " |" for row in rows]
print("\n".join(table), flush=True)
if options.results and (failures or options.skip_peers):
    why = "something failed" if failures else "peers were skipped"
    print(f"compare_peers.py: {options.results} keeps its table: {why}", file=sys.stderr)
elif options.results:
    before, after = around_the_table()
    with open(options.results, "w") as file:
        file.write(before + "\n".join(table) + "\n" + after)
for failure in failures:
    print("FAILED:", failure, flush=True)
sys.exit(1 if failures else 0)
