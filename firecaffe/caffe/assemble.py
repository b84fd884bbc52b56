"""The modules of a graph and the shapes of its blobs, and how they are run.

Each module is made from the shapes that come to it, and run once on the meta device for those that
it gives, which takes no memory.
"""

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from firecaffe.caffe.graph import Graph, Source, Step
from firecaffe.caffe.layers.shape import shown
from firecaffe.caffe.layers.spec import Shape, Spec, ignore_other_types
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.caffe.phase import phase_of
from firecaffe.meta_kernels import on_meta, without_compiler

MOST_NUMBERS = 2**31 - 1
"""In a blob, as in Caffe."""


@dataclass(frozen=True)
class Call:
    """A step with its module."""

    step: Step
    module: str
    """Its name among the modules."""
    flattens: bool
    """Whether its bottom becomes (batch, all else) first: a plain nn.Linear takes no images."""
    detached: tuple[int, ...]
    """The bottoms that no gradient goes to: propagate_down: false."""
    last_uses: tuple[str, ...] = ()
    """Blobs that nobody needs afterwards."""


@dataclass
class Assembled:
    """What a graph has become."""

    calls: list[Call] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    """By the names under which they are registered, in the file's order."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of every blob, in the end."""


def assemble(
    graph: Graph,
    given: Mapping[str, Shape],
    phase: str,
    reserved: type[nn.Module],
    others: Assembled | None = None,
) -> Assembled:
    """Makes the modules of a graph's steps.

    Args:
        given: Shapes of sources, instead of those that the file says.
        phase: TRAIN or TEST, as the layers are told.
        reserved: The class whose attributes no module is called as.
        others: The same net in another phase: layers of both have one module.

    Raises: CaffeError.
    """
    found = Assembled()
    before = others or Assembled()
    values = _sources(graph, given)
    with without_compiler():
        _add(found, graph, values, phase, reserved, before)
    found.shapes = {blob: tuple(value.shape) for blob, value in values.items()}
    return found


def _add(
    found: Assembled,
    graph: Graph,
    values: dict[str, Tensor],
    phase: str,
    reserved: type[nn.Module],
    before: Assembled,
) -> None:
    """The modules and calls of the steps, and the outlines of their tops among the values."""
    made = {id(each.step.layer): each.module for each in before.calls}
    for step in graph.steps:
        bottoms = [values[blob] for blob in step.bottoms]
        name = made.get(id(step.layer))
        if name is None:
            name = _module_name(step.name, reserved, {**before.modules, **found.modules})
            found.modules[name] = _make(step, bottoms, phase)
        else:
            found.modules[name] = before.modules[name]
        module = found.modules[name]
        flattens = type(module) is nn.Linear and bottoms[0].dim() > 2
        call = Call(step, name, flattens, _detached(step))
        values.update(_outline(call, module, bottoms))
        found.calls.append(call)


def run(
    modules: Mapping[str, nn.Module | None], calls: Iterable[Call], values: dict[str, Tensor]
) -> None:
    """Runs calls in their order; `values` are the blobs by name, before and afterwards."""
    for call in calls:
        bottoms = [values[blob] for blob in call.step.bottoms]
        module = modules[call.module]
        assert module is not None
        values.update(_tops(call, module, bottoms))
        for blob in call.last_uses:
            del values[blob]


def _tops(call: Call, module: nn.Module, bottoms: list[Tensor]) -> dict[str, Tensor]:
    for place in call.detached:
        bottoms[place] = bottoms[place].detach()
    if call.flattens:
        bottoms = [bottoms[0].flatten(1)]
    made = module(*bottoms)
    tops = made if isinstance(made, tuple) else (made,)
    return dict(zip(call.step.tops, tops, strict=True))


def forgetting(calls: Sequence[Call], kept: Iterable[str]) -> list[Call]:
    """The calls, each of which lets go of the blobs that no later one takes and that are not
    kept.
    """
    later = set(kept)
    backward = []
    for call in reversed(calls):
        names = dict.fromkeys((*call.step.bottoms, *call.step.tops))
        backward.append(replace(call, last_uses=tuple(n for n in names if n not in later)))
        later.update(names)
    return backward[::-1]


def write_over(calls: Iterable[Call], modules: Mapping[str, nn.Module]) -> None:
    """Lets every ReLU that may do so write over what it takes: all its calls must allow it."""
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


def unknown_shape(source: Source) -> CaffeError:
    """An error about an input of which nothing says the shape; to be raised."""
    return source.layer.error(
        f"{source.layer.text('type')} does not say the shape of {source.blob!r}; give it, as "
        "inputs of the Net or as input_CHW in a recipe's model.args"
    )


def _make(step: Step, bottoms: list[Tensor], phase: str) -> nn.Module:
    layer, kind = step.layer, step.kind
    param = layer.message(kind.param) if kind.param else Message(where=layer.where)
    shapes = [tuple(each.shape) for each in bottoms]
    own_phase = phase_of(layer, phase)
    spec = Spec(step.name, step.type, layer, param, shapes, len(step.tops), own_phase)
    try:
        with on_meta():  # its outline first: a file may ask for more than there is
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
    """Raises: CaffeError if Caffe has no blob of that shape."""
    if min(shape, default=0) < 0 or math.prod(shape) > MOST_NUMBERS:
        raise layer.error(
            f"{layer.text('type')} {layer.text('name')!r} has {name!r} of {shown(shape)}; expected "
            f"at most {MOST_NUMBERS:,} numbers, as in Caffe"
        )


def _outline(call: Call, module: nn.Module, bottoms: list[Tensor]) -> dict[str, Tensor]:
    """The tops, on the meta device. Raises: CaffeError if the module cannot take its bottoms."""
    step = call.step
    shadows = {name: each.detach().to("meta") for name, each in module.named_parameters()}
    shadows |= {name: each.detach().to("meta") for name, each in module.named_buffers()}
    was_training = module.training
    module.eval()

    class Outline(nn.Module):
        """So that what a call does besides is done on the meta device too."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *values: Tensor) -> dict[str, Tensor]:
            return _tops(call, self.inner, [*values])

    try:
        with torch.no_grad():
            prefixed = {f"inner.{name}": each for name, each in shadows.items()}
            tops: dict[str, Tensor] = functional_call(Outline(), prefixed, tuple(bottoms))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        taken = ", ".join(shown(each.shape) for each in bottoms) or "nothing"
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
    """A layer's name, as torch lets a module be called: neither with a dot nor as an attribute; and
    with no slash, at which the paths of a training's state are taken apart.
    """
    attributes = {*dir(reserved), *inspect.get_annotations(reserved)}
    found = re.sub(r"[./]", "_", name) or "_"
    while found in taken or found in attributes:
        found += "_"
    return found


def _detached(step: Step) -> tuple[int, ...]:
    goes = step.layer.flags("propagate_down")
    if len(goes) > len(step.bottoms):
        raise step.layer.error(
            f"{step.type} {step.name!r} has {len(goes)} propagate_down for {len(step.bottoms)} "
            "bottoms",
            step.layer.line_of("propagate_down"),
        )
    return tuple(place for place, each in enumerate(goes) if not each)
