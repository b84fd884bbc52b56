"""The state of a network: what it declares, what modules keep, and what one forward changes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from firecaffe.cluster.agree import as_bytes
from firecaffe.errors import RecipeError
from firecaffe.generators import all_states, changed

EXTRA_STATE = "_extra_state"

EXTRA_STATE_BYTES = "extra_state_bytes"
"""The buffer that holds extra state while a network is trained; see `models.extra_state`."""

AT_FIRST = "if only the first forward does, call the network once where it is made"
"""The remedy for what a network initializes by the data that it first sees (ActNorm, SVGP)."""


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
    in_evaluation: bool
    """Whether the network was given in evaluation mode, which it keeps."""


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
        in_evaluation=not network.training,
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


@dataclass(frozen=True)
class Changes:
    frozen: list[str]
    """Parameters without gradient that forward changes, such as a teacher's moving average."""
    in_places: dict[str, str]
    """Buffers in which forward writes only some rows, with a text that says how many."""
    steps: dict[str, int]
    """Whole-number buffers that move by more than 1, such as a queue pointer, and by how much."""
    draws: list[str]


class ForwardWatch:
    """A network's state before a forward; `changes` compares it with the state after."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._parameters = {
            name: (parameter, parameter._version, checksum(parameter))
            for name, parameter in network.named_parameters()
        }
        self._buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        self._random = all_states()

    def changes(self) -> Changes:
        """Compare right after forward. Raises: RecipeError for changes that cannot be handled."""
        self.check_buffers()
        draws = changed(self._random)
        frozen = self.changed_parameters()
        in_places, steps = {}, {}
        of_batch_norm = {
            f"{name}.{buffer}" if name else buffer
            for name, module in self.network.named_modules()
            if isinstance(module, _NormBase)
            for buffer in module._buffers
        }
        for name, now in self.changed_buffers().items():
            before = self._buffers[name]
            if name in of_batch_norm or name.endswith(EXTRA_STATE_BYTES):
                continue
            if not now.is_floating_point():
                most = int((now.long() - before.long()).abs().max())
                if most > 1:
                    steps[name] = most
            elif now.ndim:
                rows = (before != now).reshape(len(now), -1).any(1)
                if not bool(rows.all()):
                    in_places[name] = f"{int(rows.sum())} of its {len(now)} rows"
        return Changes(frozen, in_places, steps, draws)

    def changed_buffers(self) -> dict[str, Tensor]:
        return {
            name: now
            for name, now in self.network.named_buffers()
            if not torch.equal(self._buffers[name], now)
        }

    def changed(self) -> list[str]:
        return [
            name
            for name, (parameter, version, total) in self._parameters.items()
            if parameter._version != version or checksum(parameter) != total
        ]

    def is_trained(self, name: str) -> bool:
        return self._parameters[name][0].requires_grad

    def changed_parameters(self) -> list[str]:
        """Return frozen parameters that changed. Raises: RecipeError if others did, or are new."""
        now = dict(self.network.named_parameters())
        for name, (parameter, _, _) in self._parameters.items():
            if now.get(name) is not parameter:
                raise RecipeError(
                    f"forward replaces the parameter {name}; expected the "
                    "parameters that the network was made with, which the optimizer updates"
                )
        changed = self.changed()
        if trained := next(filter(self.is_trained, changed), ""):
            raise RecipeError(self._line_of(trained))
        if new := [name for name in now if name not in self._parameters]:
            raise RecipeError(
                f"forward makes the parameter {new[0]}, which no optimizer has; expected all of "
                f"them as the network is made; {AT_FIRST}"
            )
        return changed

    def line_after_backward(self) -> str:
        """Say which parameter forward and backward together have changed; empty if none."""
        changed = (name for name, (p, _, total) in self._parameters.items() if checksum(p) != total)
        if (name := next(changed, None)) is None:
            return ""
        return (
            f"backward changes the parameter {name} (in a hook, as an optimizer in backward "
            "does), so that the number of workers decides it; expected that the optimizer alone "
            "does: keep what changes by itself in a buffer, and leave updates to [solver]"
        )

    def _line_of(self, name: str) -> str:
        path, _, _ = name.rpartition(".")
        module = self.network.get_submodule(path)
        said = f"forward changes the parameter {name}, which is trained, too"
        if getattr(module, "max_norm", None) is not None:
            return (
                f"{said}: {type(module).__name__}(max_norm=…) scales the rows that a micro-batch "
                "looks up, so that the number of workers decides them; scale what is looked up "
                "instead: values * (max_norm / values.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )
        return (
            f"{said}, so that the number of workers decides it; expected that the optimizer alone "
            "does. Freeze what follows others (requires_grad_(False)), compute what forward uses "
            "from the parameter (torch.nn.utils.parametrize), or keep what changes by itself in a "
            f"buffer; {AT_FIRST}"
        )

    def check_buffers(self) -> None:
        """Raise RecipeError if forward made a buffer, or changed a buffer's shape or dtype."""
        now = dict(self.network.named_buffers())
        for name, before in self._buffers.items():
            kind = _shape_and_kind(now[name]) if name in now else "none"
            if kind != _shape_and_kind(before):
                raise RecipeError(
                    f"forward makes another kind of tensor of the buffer {name}: it was "
                    f"{_shape_and_kind(before)}, and is {kind}; expected the same shape and type, "
                    "as large as it will ever be, or a plain attribute, if forward writes it "
                    f"before it reads it; {AT_FIRST}"
                )
        if new := [name for name in now if name not in self._buffers]:
            raise RecipeError(
                f"forward makes the buffer {new[0]}; expected all of them as the network is made; "
                f"{AT_FIRST}"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Sum a tensor's bits: quick for large weights, and enough to notice a few changes."""
    if not tensor.numel():
        return 0
    bits = as_bytes(tensor)
    if bits.storage_offset() % 4:
        bits = bits.clone()  # int32 needs an aligned offset
    whole = len(bits) // 4 * 4
    total = bits[:whole].view(torch.int32).sum(dtype=torch.int64) + bits[whole:].sum()
    return int(total)


def _shape_and_kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
