#!/usr/bin/env python3
"""Optimizers over many parameters: the benchmark of contiguous_params, with pinflow.FlatParameters beside it.

    python3 samples/bench/flat.py

On the first GPU, in one process, for 1000 parameters of 4096 float32 and 160 of 160000: Adam of PyTorch for each
parameter (foreach, fused), over one flat parameter (contiguous_params' way), and FlatParameters. Prints the median of
21 steps that are waited for, the time of a step in three runs of 200 that are not (their median), GB/s by 7 times the
bytes of the parameters (Adam reads four arrays and writes three), the host's time for a call, and the rate of a copy of
1 GiB on the device (2 x bytes / time). Every optimizer starts with the same values, and the results after all steps are
compared. The native step alone, called without the optimizer's checks in Python, shows what Python adds. Steps are
NVTX ranges.
"""

import functools
import statistics
import time

import pinflow
import torch

STEPS = 21
MANY = 200


def parameters_of(count, size):
    torch.manual_seed(26)
    parameters = [torch.nn.Parameter(torch.randn(size, device="cuda")) for _ in range(count)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    return parameters


def flat_of(parameters):
    one = torch.nn.Parameter(torch.cat([each.detach() for each in parameters]))
    one.grad = torch.cat([each.grad for each in parameters])
    return [one]


def flat_parameters(parameters):
    return pinflow.FlatParameters(parameters, "adam", lr=1e-3)


def measure(name, step):
    waited, called = [], []
    for number in range(STEPS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda.nvtx.range_push(name)
        step()
        call = time.perf_counter() - start
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        if number >= 3:
            waited.append(time.perf_counter() - start)
            called.append(call)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(MANY):
            step()
        torch.cuda.synchronize()
        rates.append((time.perf_counter() - start) / MANY)
    return statistics.median(waited), statistics.median(rates), statistics.median(called)


def copy_rate():
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * (1 << 30) / statistics.median(times) / 1e9


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, pinflow {pinflow.__version__}")
    print(f"copy of 1 GiB on the device: {copy_rate():.0f} GB/s")
    for count, size in ((1000, 4096), (160, 160_000)):
        print(f"{count} x {size}: ms waited for, ms of {MANY} in a row, GB/s, us of a call, largest difference")
        reference = None
        for name, make in (
                ("torch foreach", lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True)),
                ("torch fused", lambda p: torch.optim.Adam(p, lr=1e-3, fused=True)),
                ("torch for-loop, one flat parameter", lambda p: torch.optim.Adam(flat_of(p), lr=1e-3, foreach=False)),
                ("torch fused, one flat parameter", lambda p: torch.optim.Adam(flat_of(p), lr=1e-3, fused=True)),
                ("pinflow.FlatParameters", flat_parameters),
                ("pinflow.FlatParameters, native step", flat_parameters),
                ("pinflow.FlatParameters, clip and step", flat_parameters)):
            optimizer = make(parameters_of(count, size))
            step = optimizer.step
            if "native" in name:
                step = functools.partial(optimizer._flat.step, optimizer._stream())
            elif "clip" in name:
                def step():
                    optimizer.clip_grad_norm(1e30)
                    optimizer.step()

            waited, many, called = measure(f"{name} {count}", step)
            values = torch.cat([each.detach() for group in optimizer.param_groups for each in group["params"]])
            reference = values if reference is None else reference
            difference = (values - reference).abs().max().item()
            rate = 7 * 4 * count * size / many / 1e9
            print(f"  {name:40} {waited * 1e3:8.4f} {many * 1e3:8.4f} {rate:8.0f} {called * 1e6:8.1f} {difference:.1e}",
                  flush=True)
            if difference > 1e-3:
                raise SystemExit(f"{name}: wrong values")


if __name__ == "__main__":
    main()
