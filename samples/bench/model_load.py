#!/usr/bin/env python3
"""Loads a whole model to the first GPU: pinflow beside the loaders that people use.

    python3 samples/bench/model_load.py [--dir DIR] [--gb N] [--only WORDS] [--cold]

Writes 270 tensors of a transformer in bfloat16 to DIR, in three files (10.6 GB), and reads them once, so that they are
in the page cache. Then each loader loads all of them six times. If a peer fails or is not installed, its error is
printed and the others go on; if a load of pinflow fails, the program ends. Between loads there is a pause of half a
second. Prints the seconds of the first load and the median rate of the others in GB/s, beside the rate of the link: the
median of 9 copies of 256 MiB from page-locked memory. The first load is checked by a checksum of each tensor. Last come
half of every matrix along axis 1, 20,000 tensors of 64 KiB in one file (of the first load, every 97th is compared), and
save_file. With --cold, only pinflow and `dd` read the files, which the page cache forgets before each run; `dd` has 1
to 16 readers, through the page cache and past it.
"""

import argparse
import gc
import os
import statistics
import subprocess
import time

import pinflow
import torch

ROUNDS = 5
#: Every load is measured by itself: pinflow unlocks pages, and CUDA clears freed memory, in the background.
PAUSE_SECONDS = 0.5
BLOCK = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024), "o": (4096, 4096), "up": (11008, 4096),
         "gate": (11008, 4096), "down": (4096, 11008), "ln1": (4096,), "ln2": (4096,)}


def write_models(folder, layers):
    """Writes three files whose tensors hold different numbers. Returns the paths, and for each tensor and for its half
    along axis 1 what `checked` gives."""
    torch.manual_seed(28)
    noise = torch.randn(11008 * 4096 + len(BLOCK) * layers).to(torch.bfloat16)
    on_device = noise.cuda()
    paths, sums, half_sums = [], {}, {}
    for part in range(3):
        tensors, copies = {}, {}
        for layer in range(part * layers // 3, (part + 1) * layers // 3):
            for number, (name, shape) in enumerate(BLOCK.items()):
                begin, size = layer * len(BLOCK) + number, torch.Size(shape).numel()
                tensors[f"layers.{layer}.{name}"] = noise[begin:begin + size].view(shape)
                copies[f"layers.{layer}.{name}"] = on_device[begin:begin + size].view(shape)
        for name, tensor in copies.items():
            sums[name] = checked(tensor)
            if tensor.dim() > 1:
                half_sums[name] = checked(tensor[:, :tensor.shape[1] // 2])
        paths.append(os.path.join(folder, f"model_load-{part}.safetensors"))
        pinflow.save_file(tensors, paths[-1])
    return paths, sums, half_sums


def checked(tensor):
    """The shape, and the sum of the 16-bit words, weighted by their position, so that words in another order are
    detected."""
    words = tensor.flatten().view(torch.int16).to(torch.int64)
    total = int((words * (torch.arange(words.numel(), device=words.device) % 8191 + 1)).sum())
    return tuple(tensor.shape), total


def read_once(paths):
    for path in paths:
        with open(path, "rb") as file:
            while file.read(1 << 26):
                pass


def forget(paths):
    """Removes the files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd_rate(paths, readers, flags):
    """GB/s of dd: the files are read one after the other, each by `readers` processes that read a part of it."""
    forget(paths)
    block = 4 << 20
    commands = []
    for path in paths:
        blocks = -(-os.path.getsize(path) // block)
        share = -(-blocks // readers)
        commands += [["dd", f"if={path}", "of=/dev/null", f"bs={block}", f"skip={i * share}", f"count={share}", *flags]
                     for i in range(readers)]
    size = sum(os.path.getsize(path) for path in paths)
    start = time.perf_counter()
    for i in range(0, len(commands), readers):
        running = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in commands[i:i + readers]]
        for each in running:
            assert each.wait() == 0
    return size / (time.perf_counter() - start) / 1e9


def measure_cold(paths, size, link, check):
    """The rate of dd, then that of pinflow, with files that are not in the page cache."""
    best = 0
    for readers in (1, 2, 4, 8, 16):
        for flags in ([], ["iflag=direct"]):
            rate = statistics.median(dd_rate(paths, readers, flags) for _ in range(3))
            print(f"dd, {readers} readers{', past the page cache' if flags else ''}: {rate:.2f} GB/s", flush=True)
            best = max(best, rate)
    measure("pinflow, cold", lambda: pinflow.load_files(paths, device="cuda"), size, link, check, lambda: forget(paths))
    print(f"the best of dd: {best:.2f} GB/s", flush=True)


def link_rate():
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (1 << 28) / statistics.median(seconds[1:]) / 1e9


def measure(name, load, size, link, check, prepare=lambda: None):
    seconds = []
    for _ in range(ROUNDS + 1):
        gc.collect()
        torch.cuda.empty_cache()
        prepare()
        time.sleep(PAUSE_SECONDS)
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            tensors = load()
            torch.cuda.synchronize()
        except Exception as failure:  # of a peer: the others are measured all the same
            if name.startswith("pinflow"):
                raise
            print(f"{name:44} failed: {failure!r:.100}", flush=True)
            return
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            check(tensors)
        del tensors
    rate = size / statistics.median(seconds[1:]) / 1e9
    spread = f"{size / max(seconds[1:]) / 1e9:.1f} to {size / min(seconds[1:]) / 1e9:.1f}"
    print(f"{name:44} {rate:6.2f} GB/s  {rate / link:5.2f} LINK  ({spread}; first call {seconds[0]:.3f} s)", flush=True)


def peers_of(paths):
    def safetensors_torch():
        from safetensors.torch import load_file
        loaded = {}
        for path in paths:
            loaded.update(load_file(path, device="cuda"))
        return loaded

    def instant(**how):
        from instanttensor import safe_open
        with safe_open(paths, framework="pt", device=0, **how) as opened:
            return dict(opened.tensors())

    def instant_buffered():
        from instanttensor import BackendPolicy
        return instant(backend=BackendPolicy.BUFFERED)

    def instant_mmap():
        from instanttensor import Backend
        return instant(backend=Backend.MMAP)

    def fast():
        from fastsafetensors import fastsafe_open
        with fastsafe_open(filenames=paths, nogds=True, device="cuda:0") as opened:
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}

    def run_ai():
        from runai_model_streamer import SafetensorsStreamer
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths)
            return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}

    return {"safetensors.torch load_file": safetensors_torch, "Run:ai model streamer": run_ai,
            "fastsafetensors, no GDS": fast, "InstantTensor, its own choice": instant,
            "InstantTensor, buffered": instant_buffered, "InstantTensor, mmap": instant_mmap}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm", help="where the files are written")
    parser.add_argument("--gb", type=float, default=10.6, help="the size of the model")
    parser.add_argument("--only", default="",
                        help="measure only peers whose name contains one of these words, separated by commas")
    parser.add_argument("--cold", action="store_true", help="measure only loads of files outside the page cache, and dd")
    arguments = parser.parse_args()
    layers = max(3, round(arguments.gb / 10.6 * 30 / 3) * 3)
    torch.zeros(1).cuda()
    paths, sums, half_sums = write_models(arguments.dir, layers)
    read_once(paths)
    size = sum(os.path.getsize(path) for path in paths)
    link = link_rate()
    print(f"{torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} cores, {arguments.dir}: {size / 1e9:.2f} GB, "
          f"{len(sums)} tensors; LINK {link:.1f} GB/s", flush=True)

    def check(tensors):
        assert len(tensors) == len(sums), f"{len(tensors)} of {len(sums)} tensors"
        for name, expected in sums.items():
            assert checked(tensors[name].contiguous()) == expected, f"{name} differs"

    if arguments.cold:
        if subprocess.run(["stat", "-f", "-c", "%T", arguments.dir], capture_output=True, text=True).stdout == "tmpfs\n":
            parser.error("files on tmpfs are never cold: name another --dir")
        measure_cold(paths, size, link, check)
        for path in paths:
            os.unlink(path)
        return
    for route in ("auto", "staged"):
        measure(f"pinflow, {route}", lambda route=route: pinflow.load_files(paths, device="cuda", route=route), size, link,
                check)
    report = {}
    pinflow.load_files(paths, device="cuda", report=report)
    print(report["reason"], flush=True)
    for name, load in peers_of(paths).items():
        if not arguments.only or any(word in name for word in arguments.only.split(",")):
            measure(name, load, size, link, check)

    def halves():
        with pinflow.safe_open(paths, framework="pt", device="cuda") as model:
            axes = {name: (1, 0, model.get_slice(name).get_shape()[1] // 2) for name in half_sums}
            return model.get_slices(axes)

    def check_halves(tensors):
        for name, expected in half_sums.items():
            assert checked(tensors[name].contiguous()) == expected, f"half of {name} differs"

    measure("pinflow, half of each along axis 1", halves, size / 2, link, check_halves)
    for path in paths:
        os.unlink(path)

    many = os.path.join(arguments.dir, "model_load-many.safetensors")
    noise = torch.randint(0, 255, (20_000, 1 << 16), dtype=torch.uint8)
    pinflow.save_file({f"t{i}": row for i, row in enumerate(noise)}, many)
    read_once([many])

    def check_many(tensors):
        assert all(torch.equal(tensors[f"t{i}"].cpu(), noise[i]) for i in range(0, 20_000, 97))

    measure("pinflow, 20,000 tensors of 64 KiB", lambda: pinflow.load_file(many, device="cuda"), noise.numel(), link,
            check_many)
    loaded = pinflow.load_file(many, device="cuda")
    start = time.perf_counter()
    pinflow.save_file(loaded, many)
    seconds = time.perf_counter() - start
    print(f"{'pinflow, save_file of them':44} {noise.numel() / seconds / 1e9:6.2f} GB/s", flush=True)
    os.unlink(many)


if __name__ == "__main__":
    main()
