"""An optimizer's state as pieces of a training: tensors and numbers, by parameter and key."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.errors import CheckpointError
from firecaffe.transport.collect import HeldPart

GROUPS = "groups"
"""The prefix of numbers in groups: groups/PLACE/KEY. Names of parameters have no slash."""


class OptimizerTensors:
    """The tensors of an optimizer's state, by PARAMETER/KEY; see `training.piece.Piece`."""

    held_by_all = True
    is_result = True

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def parts(self) -> dict[str, HeldPart]:
        return {
            f"{name}/{key}": HeldPart(value)
            for name, parameter in self._model.named_parameters()
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        }

    def load(self, stored: Mapping[str, Tensor]) -> None:
        for path in stored:
            parameter, key = _find(self._model, path, f"optimizer/{path}")
            # No variable for the tensor: it would keep the memory until the next tensor is read.
            self._optimizer.state[parameter][key] = _as_made(parameter, key, stored[path])


class OptimizerNumbers:
    """The numbers and Nones of an optimizer's state, by PARAMETER/KEY; see `piece.Numbers`.

    A user's optimizer may change numbers in groups, stored under groups/PLACE/KEY; ours do not.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        is_own = not type(optimizer).__module__.startswith(("torch.optim", "firecaffe."))
        self._made = [dict(group) for group in optimizer.param_groups] if is_own else []

    def state_dict(self) -> dict[str, Any]:
        of_groups = {
            f"{GROUPS}/{place}/{key}": value
            for place, made in enumerate(self._made)
            for key, value in self._optimizer.param_groups[place].items()
            if key not in ("params", "lr") and (key not in made or made[key] != value)
        }
        return of_groups | {
            f"{name}/{key}": value
            for name, parameter in self._model.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for path, value in state.items():
            # A parameter may also be named "groups"; then only a key follows the name.
            if path.startswith(f"{GROUPS}/") and path.count("/") > 1:
                _, place, key = path.split("/", 2)
                # JSON has lists but no tuples.
                kept = tuple(value) if isinstance(value, list) else value
                self._optimizer.param_groups[int(place)][key] = kept
                continue
            parameter, key = _find(self._model, path, path)
            self._optimizer.state[parameter][key] = value


def _find(model: nn.Module, path: str, full_name: str) -> tuple[nn.Parameter, str]:
    name, _, key = path.rpartition("/")
    parameters = dict(model.named_parameters())
    if name not in parameters:
        raise CheckpointError(f"checkpoint holds {full_name}, which the model does not have")
    return parameters[name], key


def _as_made(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    if key == "step":  # torch keeps an optimizer's count of steps on the CPU
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
