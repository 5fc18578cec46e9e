#!/usr/bin/env python3
"""Makes the reference trajectories of tests/api/train/trajectories_test.cpp with PyTorch 2.11 (for single tensors, on
the CPU):

    python3 tests/train/trajectories.py

Writes beside itself settings.txt (the names, in order), gradients.npy (steps x elements, float32), first.npy (the
parameters before the first step), torch32.npy and torch64.npy (settings x recorded steps x elements), average64.npy
(the averaged parameters of "asgd averaging"), late_state.npy (3 x elements, float32), and late64.npy (settings of
LATE_STATES x late steps x elements): the parameters after a single step, which counts as the 1,500th, the 20,000th or
the millionth. That step begins with the parameters of first.npy. Row k of late_state.npy is state k of every setting,
as LATE_STATES names them.
"""
import pathlib

import numpy
import torch

STEPS = 200
RECORDED = (1, 10, 100, 200)
ELEMENTS = 64
LATE = (1_500, 20_000, 1_000_000)

SETTINGS = {
    "sgd": (torch.optim.SGD, dict(lr=1e-2)),
    "sgd decay maximize": (torch.optim.SGD, dict(lr=1e-2, weight_decay=0.1, maximize=True)),
    "sgd momentum": (torch.optim.SGD, dict(lr=1e-2, momentum=0.9)),
    "sgd dampening decay": (torch.optim.SGD, dict(lr=1e-2, momentum=0.8, dampening=0.3, weight_decay=0.05)),
    "sgd nesterov": (torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adagrad": (torch.optim.Adagrad, dict(lr=1e-2)),
    "adagrad decay": (torch.optim.Adagrad, dict(lr=1e-2, lr_decay=0.02, weight_decay=0.1, initial_accumulator_value=0.5,
                                                maximize=True)),
    "adadelta": (torch.optim.Adadelta, dict()),
    "adadelta decay": (torch.optim.Adadelta, dict(lr=0.5, rho=0.95, eps=1e-5, weight_decay=0.1)),
    "rmsprop": (torch.optim.RMSprop, dict()),
    "rmsprop centered": (torch.optim.RMSprop, dict(centered=True, weight_decay=0.01)),
    "rmsprop momentum": (torch.optim.RMSprop, dict(lr=1e-3, momentum=0.9, alpha=0.9)),
    "rmsprop centered momentum": (torch.optim.RMSprop, dict(lr=1e-3, momentum=0.9, centered=True, maximize=True)),
    "rprop": (torch.optim.Rprop, dict()),
    "rprop steps": (torch.optim.Rprop, dict(lr=0.1, etas=(0.4, 1.5), step_sizes=(1e-4, 0.5))),
    "adam": (torch.optim.Adam, dict()),
    "adam decay": (torch.optim.Adam, dict(lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)),
    "adam low betas": (torch.optim.Adam, dict(lr=1e-2, betas=(0.0, 0.4))),
    "adam slow": (torch.optim.Adam, dict(betas=(0.99, 0.9999))),
    "adam amsgrad": (torch.optim.Adam, dict(amsgrad=True, maximize=True)),
    "adamw": (torch.optim.AdamW, dict()),
    "adamw amsgrad": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.3, amsgrad=True)),
    "adamax": (torch.optim.Adamax, dict()),
    "adamax decay": (torch.optim.Adamax, dict(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)),
    "adamax low betas": (torch.optim.Adamax, dict(betas=(0.3, 0.9))),
    "nadam": (torch.optim.NAdam, dict()),
    "nadam decay": (torch.optim.NAdam, dict(lr=1e-2, momentum_decay=0.02, weight_decay=0.1)),
    "nadam decoupled": (torch.optim.NAdam, dict(weight_decay=0.1, decoupled_weight_decay=True, maximize=True)),
    "radam": (torch.optim.RAdam, dict()),
    "radam decay": (torch.optim.RAdam, dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)),
    "radam decoupled": (torch.optim.RAdam, dict(weight_decay=0.1, decoupled_weight_decay=True)),
    "asgd": (torch.optim.ASGD, dict()),
    "asgd averaging": (torch.optim.ASGD, dict(lr=0.1, lambd=1e-2, alpha=0.6, t0=50, weight_decay=0.01)),
    "sparse_adam": (torch.optim.SparseAdam, dict()),
    "sparse_adam betas": (torch.optim.SparseAdam, dict(lr=1e-2, betas=(0.8, 0.99), eps=1e-4)),
}
# The settings for late steps, with the names of their states. Their rules depend on the number of the step, as do those
# of some other settings.
LATE_STATES = {
    "adagrad decay": ["sum"],
    "adam": ["exp_avg", "exp_avg_sq"],
    "adam slow": ["exp_avg", "exp_avg_sq"],
    "adam amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "adamax": ["exp_avg", "exp_inf"],
    "nadam": ["exp_avg", "exp_avg_sq"],
    "radam": ["exp_avg", "exp_avg_sq"],
    "asgd averaging": ["ax"],
    "sparse_adam": ["exp_avg", "exp_avg_sq"],
}


def optimizer_of(name, parameter):
    kind, options = SETTINGS[name]
    options = dict(options)
    if kind is not torch.optim.SparseAdam:
        options["foreach"] = False
    return kind([parameter], **options)


def gradient_for(name, values, dtype):
    gradient = torch.from_numpy(values).to(dtype)
    if SETTINGS[name][0] is torch.optim.SparseAdam:  # a sparse gradient with every element
        return torch.sparse_coo_tensor(torch.arange(len(values)).reshape(1, -1), gradient, is_coalesced=True)
    return gradient


def trajectory(name, first, gradients, dtype):
    torch.set_default_dtype(dtype)  # some states are of this type
    parameter = torch.nn.Parameter(torch.from_numpy(first).to(dtype).clone())
    optimizer = optimizer_of(name, parameter)
    recorded = []
    for step in range(1, STEPS + 1):
        parameter.grad = gradient_for(name, gradients[step - 1], dtype)
        optimizer.step()
        if step in RECORDED:
            recorded.append(parameter.detach().numpy().copy())
    state = optimizer.state[parameter]
    return numpy.stack(recorded), state["ax"].numpy().copy() if "ax" in state else None


def late_step(name, number, first, gradients, states, dtype):
    torch.set_default_dtype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(first).to(dtype).clone())
    optimizer = optimizer_of(name, parameter)
    parameter.grad = gradient_for(name, gradients[0], dtype)
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(first))
    state = optimizer.state[parameter]
    for key, values in zip(LATE_STATES[name], states):
        state[key].copy_(torch.from_numpy(values))
    is_number = not isinstance(state["step"], torch.Tensor)
    state["step"] = number - 1 if is_number else torch.tensor(float(number - 1), dtype=torch.float64)
    if "mu_product" in state:
        state["mu_product"].fill_(0.0)  # in a double, the product of so many factors is 0
    if "eta" in state:
        group = optimizer.param_groups[0]
        state["eta"].fill_(group["lr"] / (1 + group["lambd"] * group["lr"] * (number - 1)) ** group["alpha"])
        state["mu"].fill_(1 / max(1, number - 1 - group["t0"]))
    parameter.grad = gradient_for(name, gradients[1], dtype)
    optimizer.step()
    return parameter.detach().numpy().copy()


def main():
    torch.sparse.check_sparse_tensor_invariants.disable()
    here = pathlib.Path(__file__).resolve().parent
    random = numpy.random.default_rng(26)
    scales = 10.0 ** random.uniform(-4, 1, ELEMENTS)
    drift = random.normal(size=ELEMENTS)
    gradients = ((random.normal(size=(STEPS, ELEMENTS)) + drift) * scales).astype(numpy.float32)
    gradients[random.uniform(size=gradients.shape) < 0.02] = 0
    first = random.normal(size=ELEMENTS).astype(numpy.float32)
    states = numpy.abs(random.normal(size=(3, ELEMENTS))).astype(numpy.float32) * 0.1
    states[2] += states[1]

    numpy.save(here / "gradients.npy", gradients)
    numpy.save(here / "first.npy", first)
    numpy.save(here / "late_state.npy", states)
    for dtype, bits in ((torch.float32, 32), (torch.float64, 64)):
        made = {name: trajectory(name, first, gradients, dtype) for name in SETTINGS}
        numpy.save(here / f"torch{bits}.npy", numpy.stack([rows for rows, _ in made.values()]))
    numpy.save(here / "average64.npy", made["asgd averaging"][1])
    numpy.save(here / "late64.npy", numpy.stack([
        numpy.stack([late_step(name, number, first, gradients, states, torch.float64) for number in LATE])
        for name in LATE_STATES]))
    (here / "settings.txt").write_text("".join(name + "\n" for name in SETTINGS))


if __name__ == "__main__":
    main()
