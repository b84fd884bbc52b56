"""The state that a network declares, sorted by kind: parameters, buffers and extra state."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError

EXTRA_STATE = "_extra_state"

EXTRA_STATE_BYTES = "extra_state_bytes"
"""The buffer that holds extra state while a network is trained; see `models.extra_state`."""


@dataclass(frozen=True)
class Kinds:
    trained: list[str]
    frozen: list[str]
    shared: list[list[str]]
    """All names of each parameter or buffer that has several."""
    averaged: list[str]
    """Floating-point buffers; a step averages their changes over its micro-batches."""
    counted: list[str]
    """Whole-number buffers; they change once a step, as the first micro-batch changes them."""
    extra: list[str]


def kinds_of(network: nn.Module) -> Kinds:
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    return Kinds(
        trained=[name for name, parameter in parameters.items() if parameter.requires_grad],
        frozen=[name for name, parameter in parameters.items() if not parameter.requires_grad],
        shared=_shared(network),
        averaged=[name for name, buffer in buffers.items() if buffer.is_floating_point()],
        counted=[
            name
            for name, buffer in buffers.items()
            if not buffer.is_floating_point() and not name.endswith(EXTRA_STATE_BYTES)
        ],
        extra=[name for name, _ in modules_with_extra_state(network)],
    )


def modules_with_extra_state(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in network.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def check_state(network: nn.Module) -> None:
    """Raise RecipeError, with a remedy, for state that depends on the number of workers."""
    for name, parameter in network.named_parameters():
        _check_tensor("parameter", name, parameter)
    for name, buffer in network.named_buffers():
        _check_tensor("buffer", name, buffer)
    _check_memory(network)
    for name, module in network.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise RecipeError(
                f"module {name} is a SyncBatchNorm, whose statistics are those of all ranks' "
                "samples, so that the number of ranks decides them; expected a BatchNorm, whose "
                "batch is the micro-batch on any number"
            )
    _check_state_dict(network)


def _check_tensor(what: str, name: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        real = str(tensor.real.dtype).removeprefix("torch.")
        raise RecipeError(
            f"{what} {name} is {_kind(tensor)}; keep it as pairs of {real}, "
            "torch.view_as_real(values), and take torch.view_as_complex of them in forward"
        )
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise RecipeError(
            f"{what} {name} is {_kind(tensor)}; a training takes dense tensors that are not "
            "quantized (quantize the trained network)"
        )


def _check_memory(network: nn.Module) -> None:
    """Refuse parameters that share memory, because an update would change it twice."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in network.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        last = int(sum((size - 1) * step for size, step in steps))
        if last + 1 < parameter.numel():
            raise RecipeError(
                f"parameter {name} has {parameter.numel()} elements in the memory of {last + 1} "
                "(of expand); clone it first"
            )
        begin = int(parameter.storage_offset())
        memory = spans.setdefault(parameter.untyped_storage().data_ptr(), [])
        for start, stop, other in memory:
            if max(start, begin) < min(stop, begin + last + 1):
                raise RecipeError(
                    f"parameters {other} and {name} share memory and are two; tie them as one: the "
                    "same nn.Parameter under both names"
                )
        memory.append((begin, begin + last + 1, name))


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout == torch.strided:
        return dtype
    return f"{dtype}, {str(tensor.layout).removeprefix('torch.')}"


def _check_state_dict(network: nn.Module) -> None:
    known = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in network.named_buffers(remove_duplicate=False)}
    # A user may override state_dict of the whole network, so each module is asked.
    for name, module in network.named_modules():
        state: dict[str, object] = {}
        prefix = f"{name}." if name else ""
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        module._save_to_state_dict(state, prefix, keep_vars=True)
        left = [key for key in state if key not in known and not key.endswith(EXTRA_STATE)]
        if left:
            raise RecipeError(
                f"module {name or 'network'} ({type(module).__name__}) keeps {left[0]} "
                "otherwise; expected parameters, buffers, or get_extra_state and set_extra_state"
            )


def _shared(network: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for listed in (network.named_parameters, network.named_buffers):
        for name, tensor in listed(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]
