"""Map Caffe's blobs of layers to a net's parameters: sharing, multipliers, filling by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.caffe.assemble import Call
from firecaffe.caffe.blob import Array
from firecaffe.caffe.layers.shape import shown
from firecaffe.caffe.layers.spec import Kind
from firecaffe.caffe.message import CaffeError, Message


class Multipliers(NamedTuple):
    """The factors of a parameter's learning rate and weight decay."""

    lr: float = 1.0
    decay: float = 1.0


def blobs_of(kind: Kind, module: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers in the order of Caffe's blobs, by module name."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensors[name] for name in kind.blobs if name in tensors}


def share(calls: Iterable[Call], modules: Mapping[str, nn.Module]) -> None:
    """Let params of one name share the first's tensor. Raises CaffeError if their shapes differ."""
    owners: dict[str, tuple[Tensor, Call]] = {}
    for call in calls:
        blobs = blobs_of(call.step.kind, modules[call.module])
        specs = call.step.layer.messages("param")
        for (name, tensor), param in zip(blobs.items(), specs, strict=False):
            param.ignore("share_mode")
            shared = param.text("name")
            if not shared:
                continue
            owner, by = owners.setdefault(shared, (tensor, call))
            if owner.shape != tensor.shape:
                raise param.error(
                    f"{call.step.name!r} shares {shared!r} with {by.step.name!r}, whose shape is "
                    f"{shown(owner.shape)}; its own is {shown(tensor.shape)}"
                )
            put(modules[call.module], name, owner)


def tie(kind: Kind, module: nn.Module, other: nn.Module) -> bool:
    """Give a module the tensors of another one of the same layer. Return whether they fit."""
    blobs, others = blobs_of(kind, module), blobs_of(kind, other)
    if [(n, t.shape) for n, t in blobs.items()] != [(n, t.shape) for n, t in others.items()]:
        return False
    for name, tensor in others.items():
        put(module, name, tensor)
    return True


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, tensor)


def multipliers(calls: Iterable[Call], modules: Mapping[str, nn.Module]) -> dict[str, Multipliers]:
    """Return every parameter's multipliers, by its name in the net.

    A shared parameter has those of the first layer that says some. Raises CaffeError if layers
    disagree, or if one has more `param` than blobs.
    """
    names: dict[Tensor, str] = {}
    by_name: dict[str, Multipliers] = {}
    said: dict[tuple[str, str], float] = {}
    for call in calls:
        blobs = blobs_of(call.step.kind, modules[call.module])
        specs = call.step.layer.messages("param")
        if len(specs) > len(blobs):
            raise specs[len(blobs)].error(
                f"{call.step.type} {call.step.name!r} has {len(specs)} param for {len(blobs)} blobs"
            )
        for place, (name, tensor) in enumerate(blobs.items()):
            param = specs[place] if place < len(specs) else Message()
            rates = [_said(param, word) for word in Multipliers._fields]
            if not isinstance(tensor, nn.Parameter):
                continue
            whole = names.setdefault(tensor, f"{call.module}.{name}")
            for word, rate in zip(Multipliers._fields, rates, strict=True):
                if rate is None:
                    continue
                if said.setdefault((whole, word), rate) != rate:
                    raise param.error(
                        f"{call.step.name!r} shares {whole} and says {word}_mult: {rate:g}; "
                        f"another layer says {said[whole, word]:g}"
                    )
            by_name[whole] = Multipliers(*(said.get((whole, w), 1.0) for w in Multipliers._fields))
    return by_name


def _said(param: Message, word: str) -> float | None:
    return param.number(f"{word}_mult") if param.has(f"{word}_mult") else None


@dataclass
class Loaded:
    filled: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    """Layers with blobs that keep their fillers' values."""
    unused: list[str] = field(default_factory=list)


def load(
    calls: Sequence[Call],
    modules: Mapping[str, nn.Module],
    blobs: Mapping[str, Sequence[Tensor | Array]],
) -> Loaded:
    """Fill layers from the blobs of their names. Raises CaffeError if a layer has other shapes."""
    loaded = Loaded()
    seen: set[str] = set()
    for call in calls:
        tensors = blobs_of(call.step.kind, modules[call.module])
        name = call.step.layer.text("name")
        if not tensors or call.module in seen:
            continue
        seen.add(call.module)
        if name not in blobs:
            loaded.fresh.append(name)
            continue
        _check_fits(call, tensors, blobs[name])
        with torch.no_grad():
            for (place, tensor), values in zip(tensors.items(), blobs[name], strict=True):
                tensor.copy_(torch.as_tensor(values).reshape(tensor.shape))
                loaded.tensors.append(f"{call.module}.{place}")
        loaded.filled.append(name)
    known = {call.step.layer.text("name") for call in calls}
    loaded.unused = [name for name, held in blobs.items() if held and name not in known]
    return loaded


def _check_fits(
    call: Call, tensors: Mapping[str, Tensor], stored: Sequence[Tensor | Array]
) -> None:
    shapes = [tensor.shape for tensor in tensors.values()], [blob.shape for blob in stored]
    if list(map(_without_ones, shapes[0])) != list(map(_without_ones, shapes[1])):
        expected, given = (", ".join(map(shown, shape)) or "none" for shape in shapes)
        raise _unfit(call, f"blobs of {given}; the layer has {expected}")


def _unfit(call: Call, what: str) -> CaffeError:
    return call.step.layer.error(
        f"the weights of {call.step.type} {call.step.name!r} are {what}; a layer that is to start "
        "afresh needs another name"
    )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop leading ones. Blobs in older files have them, as they always have four sizes."""
    sizes = list(shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return tuple(sizes)
