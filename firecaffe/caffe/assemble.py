"""Make the modules of a graph, infer the shapes of its blobs, and run the modules.

Each module is made for the shapes of its bottoms. It runs once on the meta device, which uses no
memory, to infer the shapes of its tops.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from firecaffe.caffe.graph import Graph, GraphStep, InputBlob
from firecaffe.caffe.layers.spec import Shape, ignore_other_types, shown
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.meta_kernels import on_meta, without_compiler

MAX_NUMBERS = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """A step and its module's name. `last_uses` are the blobs that no later call needs."""

    step: GraphStep
    module: str
    flattens: bool
    """Whether the bottom is flattened to (batch, rest) first: plain nn.Linear accepts no images."""
    detached: tuple[int, ...]
    """Indices of the bottoms that receive no gradient (propagate_down: false)."""
    last_uses: tuple[str, ...] = ()


@dataclass
class Assembled:
    calls: list[Call] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)


def assemble(
    graph: Graph,
    given: Mapping[str, Shape],
    phase: str,
    reserved: type[nn.Module],
    others: Assembled | None = None,
) -> Assembled:
    """Make the modules of a graph's steps. Raises CaffeError.

    Args:
        given: Shapes of sources. They replace those in the file.
        phase: TRAIN or TEST, passed to the layers.
        reserved: The class whose attribute names are not available to modules.
        others: The same net in another phase. Layers that are in both share one module.
    """
    assembled, before = Assembled(), others or Assembled()
    earlier = {id(call.step.layer): call.module for call in before.calls}
    values = _sources(graph, given)
    with without_compiler():
        for step in graph.steps:
            bottoms = [values[blob] for blob in step.bottoms]
            name = earlier.get(id(step.layer))
            if name is None:
                name = _module_name(step.name, reserved, before.modules | assembled.modules)
                module = _make(step, bottoms, phase)
            else:
                module = before.modules[name]
            assembled.modules[name] = module
            flattens = type(module) is nn.Linear and bottoms[0].dim() > 2
            call = Call(step, name, flattens, _detached(step))
            values.update(_outline(call, module, bottoms))
            assembled.calls.append(call)
    assembled.shapes = {blob: tuple(value.shape) for blob, value in values.items()}
    return assembled


def run(
    modules: Mapping[str, nn.Module | None], calls: Iterable[Call], values: dict[str, Tensor]
) -> None:
    for call in calls:
        bottoms = [values[blob] for blob in call.step.bottoms]
        module = modules[call.module]
        assert module is not None
        values.update(_tops(call, module, bottoms))
        for blob in call.last_uses:
            del values[blob]


def _tops(call: Call, module: Callable[..., Any], bottoms: list[Tensor]) -> dict[str, Tensor]:
    for place in call.detached:
        bottoms[place] = bottoms[place].detach()
    if call.flattens:
        bottoms = [bottoms[0].flatten(1)]
    made = module(*bottoms)
    names = call.step.tops
    if not isinstance(made, tuple):
        is_one = isinstance(made, Tensor) or len(names) == 1
        made = (made,) if is_one else tuple(made[place] for place in range(len(names)))
    return dict(zip(names, made, strict=True))


def with_last_uses(calls: Sequence[Call], kept: Iterable[str]) -> list[Call]:
    """Return the calls with `last_uses` set, so that each frees the blobs no later call needs."""
    later = set(kept)
    backward = []
    for call in reversed(calls):
        names = dict.fromkeys((*call.step.bottoms, *call.step.tops))
        backward.append(replace(call, last_uses=tuple(n for n in names if n not in later)))
        later.update(names)
    return backward[::-1]


def set_inplace(calls: Iterable[Call], modules: Mapping[str, nn.Module]) -> None:
    """Make each ReLU work in place if all its calls allow it."""
    may: dict[str, bool] = {}
    for call in calls:
        may[call.module] = may.get(call.module, True) and call.step.may_overwrite
    for name, is_safe in may.items():
        module = modules[name]
        if isinstance(module, nn.ReLU | nn.LeakyReLU) and is_safe:
            module.inplace = getattr(module, "negative_slope", 0) >= 0


def _sources(graph: Graph, given: Mapping[str, Shape]) -> dict[str, Tensor]:
    needed = {blob for step in graph.steps for blob in step.bottoms}
    values = {}
    for source in graph.sources:
        shape = given.get(source.blob, source.shape)
        if shape is not None:
            _check_size(source.layer, source.blob, shape)
            values[source.blob] = torch.empty(tuple(shape), device="meta")
        elif source.blob in needed:
            raise unknown_shape(source)
    return values


def unknown_shape(source: InputBlob) -> CaffeError:
    return source.layer.error(
        f"{source.layer.text('type')} does not say the shape of {source.blob!r}; give it, as "
        "inputs of the Net or as input_CHW in a recipe's model.args"
    )


def _make(step: GraphStep, bottoms: list[Tensor], phase: str) -> nn.Module:
    layer, kind = step.layer, step.kind
    spec = step.spec([tuple(bottom.shape) for bottom in bottoms], phase)
    try:
        with on_meta():  # a file may ask for more memory than there is
            made = kind.make(spec)
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise layer.error(
            f"{step.type} {step.name!r} cannot be made: {_first_line(error)}"
        ) from error
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        _check_size(layer, name, tensor.shape)
    if torch.get_default_device().type != "meta":
        made = kind.make(spec)
    ignore_other_types(layer)
    return made


def _check_size(layer: Message, name: str, shape: Shape) -> None:
    if min(shape, default=0) < 0 or math.prod(shape) > MAX_NUMBERS:
        raise layer.error(
            f"{layer.text('type')} {layer.text('name')!r} has {name!r} of {shown(shape)}; expected "
            f"at most {MAX_NUMBERS:,} numbers, as in Caffe"
        )


def _outline(call: Call, module: nn.Module, bottoms: list[Tensor]) -> dict[str, Tensor]:
    step = call.step
    shadows = {name: tensor.detach().to("meta") for name, tensor in module.named_parameters()}
    shadows |= {name: tensor.detach().to("meta") for name, tensor in module.named_buffers()}
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            tops = _tops(call, lambda *values: functional_call(module, shadows, values), bottoms)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        taken = ", ".join(shown(bottom.shape) for bottom in bottoms) or "nothing"
        raise step.layer.error(
            f"{step.type} {step.name!r} cannot take {taken} for {len(step.tops)} tops: "
            f"{_first_line(error)}"
        ) from error
    finally:
        module.train(was_training)
    for blob, top in tops.items():
        _check_size(step.layer, blob, top.shape)
    return tops


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]


def _module_name(name: str, reserved: type[nn.Module], taken: Mapping[str, nn.Module]) -> str:
    """Make a free module name: no dots, and no slashes, at which checkpoints split names."""
    attributes = {*dir(reserved), *inspect.get_annotations(reserved)}
    module_name = re.sub(r"[./]", "_", name) or "_"
    while module_name in taken or module_name in attributes:
        module_name += "_"
    return module_name


def _detached(step: GraphStep) -> tuple[int, ...]:
    goes = step.layer.flags("propagate_down")
    if len(goes) > len(step.bottoms):
        raise step.layer.error(
            f"{step.type} {step.name!r} has {len(goes)} propagate_down for {len(step.bottoms)} "
            "bottoms",
            "propagate_down",
        )
    return tuple(place for place, flag in enumerate(goes) if not flag)
