"""The optimizer of an EmbeddingTable, as PyTorch's tools expect one."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from ._embedding_inputs import import_torch
from ._errors import InvalidArgument, Unsupported
from ._train import _DEFAULTS

if TYPE_CHECKING:
    from ._embedding import EmbeddingTable

_classes: Dict[str, Any] = {}
#: settings of rules that a group of torch.optim may have, without lr
_SETTINGS = {name for settings in _DEFAULTS.values() for name in settings} - {"lr"}


def embedding_optimizer(table: EmbeddingTable) -> Any:
    """What EmbeddingTable.optimizer returns. PyTorch is imported here, not with pinflow."""
    if "optimizer" not in _classes:
        _classes["optimizer"] = _make_class()
    return _classes["optimizer"](table)


def _make_class() -> Any:
    torch = import_torch()

    class EmbeddingOptimizer(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
        """Steps an EmbeddingTable: see EmbeddingTable.optimizer. It has one group, whose `params` are the gradients of the
        backward passes since the last step: parameters that have these as their `grad`. `lr` can change."""

        def __init__(self, table: EmbeddingTable) -> None:
            self._table = table
            self._groups: List[Dict[str, Any]] = []
            self._rate: float = table._table.rate  # the last one that a step has set
            super().__init__([torch.zeros((), requires_grad=True)], {"lr": self._rate})

        @property
        def param_groups(self) -> List[Dict[str, Any]]:
            if self._groups:
                self._groups[0]["params"] = [_parameter_with(each) for each in self._table.gradients]
            return self._groups

        @param_groups.setter
        def param_groups(self, groups: List[Dict[str, Any]]) -> None:
            self._groups = groups

        def add_param_group(self, param_group: Dict[str, Any]) -> None:
            if self._groups:
                raise Unsupported("a group cannot be added: this optimizer steps one EmbeddingTable")
            super().add_param_group(param_group)

        def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            fixed = sorted(_SETTINGS.intersection(self._groups[0]))
            if fixed:
                raise InvalidArgument(f"the group has {', '.join(fixed)}: only lr of an EmbeddingTable's optimizer can change")
            rate = float(self._groups[0]["lr"])
            if rate != self._rate:
                self._table.set_rate(rate)
                self._rate = rate
            self._table.step()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Drops the gradients, whatever `set_to_none` is."""
            self._table.zero_grad()

        def state_dict(self) -> Dict[str, Any]:
            """What schedulers have set. `save` of the table is for weights and state."""
            kept = {name: value for name, value in self._groups[0].items() if name != "params"}
            return {"state": {}, "param_groups": [{**kept, "params": []}]}

        def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
            try:
                (group,) = state_dict["param_groups"]
                is_right = not group["params"] and not state_dict["state"] and isfinite(group["lr"])
            except (TypeError, KeyError, ValueError):
                is_right = False
            if not is_right:
                raise InvalidArgument("this is no state of an EmbeddingTable's optimizer, which has one group without params, "
                                      "and a finite lr")
            self._groups[0].update({name: value for name, value in group.items() if name != "params"})

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._table.__reduce_ex__(protocol)

    return EmbeddingOptimizer


def _parameter_with(gradient: Any) -> Any:
    """A parameter of the shape of a gradient, which is its `grad`. It takes no memory: it shares that of the gradient."""
    parameter = import_torch().nn.Parameter(gradient)
    parameter.grad = gradient
    return parameter
