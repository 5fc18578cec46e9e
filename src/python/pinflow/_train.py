"""Every parameter of a model in one buffer, updated by one kernel."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import _native
from ._errors import Error, InvalidArgument, SystemFailure, Unsupported, shown
from ._streams import consumer_stream

_TYPES = {"torch.float32": "<f4", "torch.float64": "<f8", "torch.float16": "<f2", "torch.bfloat16": "bfloat16"}
#: Settings of torch.optim that are pairs, and our names of their parts.
_PAIRS = {"betas": ("beta1", "beta2"), "etas": ("eta1", "eta2"), "step_sizes": ("min_step", "max_step")}
#: Default values of torch.optim, so that schedulers which look for a setting find it.
_DEFAULTS: Dict[str, Dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "adadelta": {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "rprop": {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False},
    "adamax": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "nadam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3,
              "decoupled_weight_decay": False},
    "radam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False},
    "asgd": {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
    "sparse_adam": {"betas": (0.9, 0.999), "eps": 1e-8},
}
#: Entries of a group that are no settings of its rule. Schedulers add initial_lr.
_NO_SETTINGS = {"params", "param_names", "initial_lr"}
_classes: Dict[Any, Any] = {}


class _View:
    """A parameter or its gradient, for torch.from_dlpack."""

    def __init__(self, flat: Any, index: int, gradient: bool) -> None:
        self._flat, self._index, self._gradient = flat, index, gradient

    def __dlpack_device__(self) -> Tuple[int, int]:
        device: Tuple[int, int] = self._flat.dlpack_device()
        return device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: Any = None) -> Any:
        return self._flat.export(self._index, self._gradient, stream, max_version, dl_device, copy)


def _settings_of(group: Dict[str, Any]) -> Dict[str, Any]:
    """The settings of a group that cannot change."""
    return {name: value for name, value in group.items() if name not in _NO_SETTINGS and name != "lr"}


def _numbers(settings: Dict[str, Any]) -> Dict[str, float]:
    numbers: Dict[str, float] = {}
    for name, value in settings.items():
        if name in _PAIRS:
            try:
                first, second = (float(each) for each in value)
            except (TypeError, ValueError):
                raise InvalidArgument(f"the setting {name} must be two numbers, not {shown(value)}") from None
            numbers.update(zip(_PAIRS[name], (first, second)))
        elif isinstance(value, (bool, int, float)) or hasattr(value, "__float__"):
            numbers[name] = float(value)
        else:
            raise InvalidArgument(f"the setting {name} must be a number, not {shown(value)}")
    return numbers


def _without(path: str, failure: Error) -> Error:
    """The same error about "the state" instead of a path."""
    if isinstance(failure, OSError) and failure.errno is not None:
        return type(failure)(failure.errno, str(failure.strerror).replace(path, "the state"))
    return type(failure)(str(failure).replace(path, "the state"))


class FlatParameters:
    """An optimizer over one buffer that holds all parameters of a PyTorch model, and a second one for their gradients. One
    kernel updates the whole model; `clip_grad_norm`, nonfinite='skip' and nonfinite='refuse' take a second kernel. The
    object is a torch.optim.Optimizer, for torch.amp.GradScaler and for schedulers of `lr`. All other settings are fixed
    when it is made.

        optimizer = pinflow.FlatParameters(model.parameters(), rule="adamw", lr=1e-3)
        for x, y in loader:
            loss_of(model(x.torch()), y.torch()).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()

    The parameters keep their values, and become views of the buffers: their `data` and their `grad` are replaced. Make
    it after the model has been moved to its device, and keep it as long as the model. Parameters that do not require a
    gradient when it is made are left alone: to freeze or unfreeze some later, make a new optimizer. All others are
    updated in each step: where torch.optim skips a parameter without a gradient, its gradient is zero here, so that
    decay and momentum still change it. Autograd does not notice that a step has changed the parameters: a second
    backward through values from before a step gives wrong gradients, and no error. Each parameter begins at a multiple
    of 256 bytes. So cuDNN's recurrent layers (LSTM, GRU) copy their weights into one buffer in each call, and PyTorch
    warns about it.

    Args:
        params: parameters, pairs of a name and a parameter (`model.named_parameters()`), or dictionaries with "params" and
            settings of a group, as torch.optim takes them. All are on one device, and contiguous float32, float64,
            float16 or bfloat16 tensors. Arithmetic and state are float32, or float64 for float64 parameters.
        rule: 'sgd', 'adagrad', 'adadelta', 'rmsprop', 'rprop', 'adam', 'adamw', 'adamax', 'nadam', 'radam', 'asgd' or
            'sparse_adam': the rules of torch.optim, but 'asgd' takes a new rate at once, not a step later.
        nonfinite: what a step does if a gradient is infinite or NaN: 'update' (the parameters become so, too), 'skip' (it
            changes nothing, and is counted) or 'refuse' (likewise, and `check` raises).
        master_copies: updates float32 copies of 16-bit parameters, and rounds them to the parameters.
        settings: those of the rule in torch.optim, with its names and default values: lr, betas, eps, weight_decay, ...

    Raises:
        InvalidArgument: rules, settings or names that do not work; parameters that share memory or are not contiguous.
        Unsupported: types and devices that cannot be used.
        SystemFailure, DeviceError: memory is short.

    Not for several threads at a time. Work is enqueued on PyTorch's current stream.
    """

    # what torch.amp.GradScaler sets around `step`
    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any
    param_groups: List[Dict[str, Any]]

    def __new__(cls, params: Iterable[Any], rule: str = "adam", **options: Any) -> FlatParameters:
        import torch

        if cls not in _classes:
            _classes[cls] = type(cls.__name__, (cls, torch.optim.Optimizer), {"__doc__": cls.__doc__,
                                                                              "__module__": cls.__module__})
        made: FlatParameters = object.__new__(_classes[cls] if not issubclass(cls, torch.optim.Optimizer) else cls)
        return made

    def __init__(self, params: Iterable[Any], rule: str = "adam", *, nonfinite: str = "update",
                 master_copies: bool = False, **settings: Any) -> None:
        import torch

        if isinstance(params, torch.Tensor):
            raise InvalidArgument("parameters are given as an iterable, such as a list, not as one tensor")
        groups = [dict(each) if isinstance(each, dict) else each for each in params]
        if not groups:
            raise InvalidArgument("there are no parameters")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        names: List[str] = []
        for group in groups:
            members = group["params"]
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            for member in members:
                names.append(member[0] if isinstance(member, tuple) else str(len(names)))
            group["params"] = [member[1] if isinstance(member, tuple) else member for member in members]
        if rule not in _DEFAULTS:
            raise InvalidArgument(f"there is no rule {shown(rule)}: there are {', '.join(_DEFAULTS)}")
        self._flat: Any = None
        torch.optim.Optimizer.__init__(self, groups, {"lr": None, **_DEFAULTS[rule], "maximize": False, **settings})
        everything = [each for group in self.param_groups for each in group["params"]]
        self._parameters = [each for each in everything if each.requires_grad]
        kept = [name for name, each in zip(names, everything) if each.requires_grad]
        self._device = self._check_parameters(kept)
        self._gpu = (self._device.index or 0) if self._device.type == "cuda" else None
        specs: List[Tuple[str, str, List[int], int]] = []
        for number, group in enumerate(self.param_groups):
            for each in group["params"]:
                if each.requires_grad:
                    specs.append((kept[len(specs)], _TYPES[str(each.dtype)], list(each.shape), number))
        self._settings = [_settings_of(group) for group in self.param_groups]
        given = [{**each, **({} if group["lr"] is None else {"lr": group["lr"]})}
                 for each, group in zip(self._settings, self.param_groups)]
        self._flat = _native.FlatParameters(
            specs, [(rule, _numbers(each)) for each in given],
            "host" if self._gpu is None else f"cuda:{self._gpu}", nonfinite, master_copies, self._stream())
        self._rates = []
        for number, group in enumerate(self.param_groups):
            if group["lr"] is None:
                group["lr"] = self._flat.rate(number)
            self._rates.append(float(group["lr"]))
        with torch.no_grad():
            for index, each in enumerate(self._parameters):
                view = torch.from_dlpack(_View(self._flat, index, False))
                view.copy_(each.data)
                each.data = view
                gradient = torch.from_dlpack(_View(self._flat, index, True))
                if each.grad is not None:
                    gradient.copy_(each.grad)
                each.grad = gradient
        self._addresses = [(each.data_ptr(), each.grad.data_ptr()) for each in self._parameters]
        self._next = [0]  # in a list: torch.compile refuses to set attributes of an optimizer
        self._checked = False

    def _check_parameters(self, names: List[str]) -> Any:
        """The device of the parameters, if they can be used."""
        ranges: List[Tuple[int, int, str]] = []
        for name, each in zip(names, self._parameters):
            if str(each.dtype) not in _TYPES:
                raise Unsupported(f"parameter {name} has the type {each.dtype}")
            if not each.is_contiguous():
                raise InvalidArgument(f"parameter {name} is not contiguous: its strides are {each.stride()}")
            if each.numel() > 0:
                ranges.append((each.data_ptr(), each.data_ptr() + each.numel() * each.element_size(), name))
        ranges.sort()
        for (_, end, first), (begin, _, second) in zip(ranges, ranges[1:]):
            if begin < end:
                raise InvalidArgument(f"the parameters {first} and {second} share memory: give one of them, and let the "
                                      "model use the same Parameter in both places")
        devices = {each.device for each in self._parameters}
        if not devices:
            raise InvalidArgument("none of the parameters requires a gradient")
        if len(devices) != 1:
            raise InvalidArgument(f"all parameters must be on one device, not on {len(devices)}")
        device = devices.pop()
        if device.type not in ("cpu", "cuda"):
            raise Unsupported(f"parameters on {device} cannot be used: they are on the CPU or on a CUDA device")
        return device

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Raises Unsupported: all groups are given to the constructor."""
        import torch

        if self._flat is not None:
            raise Unsupported("a group cannot be added: the buffers have the size of the parameters that were given")
        torch.optim.Optimizer.add_param_group(self, param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported("an optimizer over buffers cannot be copied or pickled: use state_dict")

    def _stream(self) -> Optional[int]:
        return consumer_stream(None, self._gpu)[0]

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes one step of the rule for every parameter, at the rates of `param_groups`.

        Raises:
            InvalidArgument: a parameter or its gradient has left the buffers. The first step checks all
                parameters, each later step two of them, in turn.
        """
        if self._is_watched():
            return self._watched_step(closure)
        return self._step(closure)

    # PyTorch would wrap it for hooks and profilers: 4.7 us a call, three times the rest of the Python code (NOTEBOOK.md)
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        """Whether the step has hooks, or a profiler runs."""
        mine: Any = self
        try:
            hooks: Any = sys.modules["torch.optim.optimizer"]
            profiler: Any = sys.modules["torch.autograd.profiler"]
            return bool(mine._optimizer_step_pre_hooks or mine._optimizer_step_post_hooks or
                        hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks or
                        profiler._is_profiler_enabled)
        except (AttributeError, KeyError):  # another version of PyTorch
            return True

    def _watched_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        import torch

        return torch.optim.Optimizer.profile_hook_step(type(self)._step)(self, closure)

    def _step(self, closure: Optional[Callable[[], Any]]) -> Any:
        import torch

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_some_views()
        stream = self._stream()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self.set_rates()
        if scale is None and found is None:
            self._flat.step(stream)
            return loss
        # GradScaler may keep them on another device, and drops them after this call
        scale, found = (None if each is None else each.detach().to(self._device, torch.float32) for each in (scale, found))
        self._flat.use_scale(0 if scale is None else scale.data_ptr(), 0 if found is None else found.data_ptr())
        try:
            self._flat.step(stream)
        finally:
            self._flat.use_scale(0, 0)
        return loss

    def set_rates(self) -> None:
        """Enqueues the rates of `param_groups`, as `step` does. Call it before a CUDA graph with a captured step is
        replayed, if a rate has changed, and before capturing.

        Raises:
            InvalidArgument: another setting of a group has changed, or a rate has and the stream is being captured.
        """
        for number, group in enumerate(self.param_groups):
            # schedulers keep numbers of their own in the group
            changed = [name for name, value in self._settings[number].items() if group.get(name) != value]
            if changed:
                advice = "; OneCycleLR needs cycle_momentum=False" if {"betas", "momentum"} & {*changed} else ""
                raise InvalidArgument(f"group {number} has other settings than those that the optimizer was made with: "
                                      f"{', '.join(changed)}; only lr can change{advice}")
            rate = float(group["lr"])
            if rate == self._rates[number]:
                continue
            if self._gpu is not None:
                import torch

                if torch.cuda.is_current_stream_capturing():
                    raise InvalidArgument("the rate has changed, and a CUDA graph is being captured: call set_rates before")
            self._flat.set_rate(number, rate, self._stream())
            self._rates[number] = rate

    def _check_some_views(self) -> None:
        """Checks all parameters in the first step, and two in each later one, in turn: data_ptr of all would take
        longer than the step."""
        count = len(self._addresses)
        for _ in range(min(count, 2) if self._checked else count):
            self._next[0] = chosen = (self._next[0] + 1) % count
            each, addresses = self._parameters[chosen], self._addresses[chosen]
            gradient = each.grad
            if (each.data_ptr(), 0 if gradient is None else gradient.data_ptr()) != addresses:
                self.check_views()
                break
        self._checked = True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets all gradients to zero. They stay views of the buffer, whatever `set_to_none` is."""
        self._flat.zero(self._stream())

    def clip_grad_norm(self, max_norm: float) -> None:
        """Scales the gradients of the next step so that the norm of all of them is at most `max_norm`. Those in memory
        stay as they are. With a GradScaler, gradients are divided by its scale first. The norm stays on the device: see
        `norm`. If that step raises, the one after it is clipped."""
        self._flat.clip_norm(float(max_norm))

    def clip_grad_value(self, clip_value: float) -> None:
        """Limits each element of the gradients to [-clip_value, clip_value] in the next step. Those in memory stay."""
        self._flat.clip_value(float(clip_value))

    def check_views(self) -> None:
        """Raises InvalidArgument if a parameter or gradient is no view of the buffers any more."""
        gradients = [0 if each.grad is None else each.grad.data_ptr() for each in self._parameters]
        try:
            self._flat.check_views([each.data_ptr() for each in self._parameters], gradients)
        except InvalidArgument as failure:
            raise InvalidArgument(f"{failure}. If the model's zero_grad replaced a gradient, call the optimizer's instead. If "
                                  "the model was moved or cast, make the optimizer after that") from None

    @property
    def steps(self) -> int:
        """Steps that have been made. Waits for them."""
        count: int = self._flat.progress(self._stream())[0]
        return count

    @property
    def skipped(self) -> int:
        """Steps that changed nothing because of gradients that were not finite, also those that a GradScaler skipped.
        Waits for them."""
        count: int = self._flat.progress(self._stream())[1]
        return count

    @property
    def norm(self) -> float:
        """The norm of all gradients in the last step with `clip_grad_norm`, 'skip' or 'refuse'. Waits for it."""
        norm: float = self._flat.progress(self._stream())[2]
        return norm

    def check(self) -> None:
        """Raises Error if nonfinite is 'refuse' and a step changed nothing. Waits for all steps."""
        self._flat.check(self._stream())

    def save(self, path: Any) -> None:
        """Writes parameters, state and the number of steps as safetensors, atomically."""
        self._flat.save(os.fspath(path), self._stream())

    def load(self, path: Any) -> None:
        """Reads what `save` wrote. Raises StateMismatch if the parameters or the rule differ."""
        self._flat.load(os.fspath(path), self._stream())

    def state_dict(self) -> Dict[str, Any]:
        """The parameters, the state and the rates, for torch.save. The bytes of a `save` are a tensor in it: they pass
        through a file in the folder for temporary files (TMPDIR)."""
        import torch

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "state")
            self.save(path)
            with open(path, "rb") as file:
                state = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        return {"pinflow": state, "rates": [float(group["lr"]) for group in self.param_groups],
                "initial_rates": [group.get("initial_lr") for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores parameters, state and rates. Other settings stay those of the constructor. The bytes pass through a file
        in the folder for temporary files (TMPDIR), as in `state_dict`. Raises StateMismatch if the parameters or the rule
        differ."""
        import torch

        given: Mapping[str, Any] = state_dict if isinstance(state_dict, Mapping) else {}
        state: Any = given.get("pinflow")
        count = len(self.param_groups)
        is_state = isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1
        try:
            rates = [float(each) for each in given.get("rates", ())]
            initial = [None if each is None else float(each) for each in given.get("initial_rates", [None] * count)]
        except (TypeError, ValueError):
            is_state = False
        if not is_state or len(rates) != count or len(initial) != count:
            raise InvalidArgument(f"this is no state of pinflow.FlatParameters with {count} groups")
        with tempfile.TemporaryFile() as file:
            try:
                file.write(memoryview(state.cpu().contiguous().numpy()))
                file.flush()
            except OSError as failure:
                raise SystemFailure(failure.errno, f"cannot write the state to '{tempfile.gettempdir()}', the folder for "
                                                   f"temporary files (TMPDIR): {failure.strerror}") from None
            path = f"/proc/self/fd/{file.fileno()}"
            try:
                self.load(path)
            except Error as failure:
                raise _without(f"'{path}'", failure) from None
        for group, rate, first in zip(self.param_groups, rates, initial):
            group["lr"] = rate
            if first is not None:
                group["initial_lr"] = first  # for schedulers that resume from it

    def __repr__(self) -> str:
        return f"<pinflow.FlatParameters {self._flat.rule}, {len(self._parameters)} parameters on {self._flat.device}>"
