"""A Caffe net as a torch module, with Caffe's names for its layers, blobs and parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.caffe import caffemodel
from firecaffe.caffe.assemble import Call, assemble, run, set_inplace, with_last_uses
from firecaffe.caffe.binary import Array
from firecaffe.caffe.graph import layers_of, read_graph
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Kind, Shape, shown
from firecaffe.caffe.message import Message
from firecaffe.caffe.upgrade import current_net


class Multipliers(NamedTuple):
    """The factors of a parameter's learning rate and weight decay."""

    lr: float = 1.0
    decay: float = 1.0


def blobs_of(kind: Kind, module: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers in the order of Caffe's blobs, by torch name."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensors[name] for name in kind.blobs if name in tensors}


def share(calls: Iterable[Call], modules: Mapping[str, nn.Module]) -> None:
    """Let params of the same name share a tensor. Raises CaffeError if their shapes differ."""
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
    """Return multipliers by parameter; the first layer that sets one counts. Raises CaffeError."""
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
            rates = [next(reversed(param.numbers(f"{w}_mult")), None) for w in Multipliers._fields]
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


@dataclass
class Loaded:
    filled: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    """Layers whose blobs keep the values of their fillers."""
    unused: list[str] = field(default_factory=list)


def load(
    calls: Sequence[Call],
    modules: Mapping[str, nn.Module],
    blobs: Mapping[str, Sequence[Tensor | Array]],
) -> Loaded:
    """Fill layers with the blobs of their name. Raises CaffeError (shapes; an ambiguous name)."""
    loaded = Loaded()
    seen: set[str] = set()
    by_name: dict[str, Call] = {}
    for call in calls:
        tensors = blobs_of(call.step.kind, modules[call.module])
        name = call.step.layer.text("name")
        if not tensors or call.module in seen:
            continue
        seen.add(call.module)
        if name not in blobs:
            loaded.fresh.append(name)
            continue
        _check_name(call, by_name.setdefault(name, call), modules)
        _check_fits(call, tensors, blobs[name])
        with torch.no_grad():
            for (place, tensor), values in zip(tensors.items(), blobs[name], strict=True):
                tensor.copy_(torch.as_tensor(values).reshape(tensor.shape))
                loaded.tensors.append(f"{call.module}.{place}")
        loaded.filled.append(name)
    known = {call.step.layer.text("name") for call in calls}
    loaded.unused = [name for name, held in blobs.items() if held and name not in known]
    return loaded


def _check_name(call: Call, first: Call, modules: Mapping[str, nn.Module]) -> None:
    tensors, others = (blobs_of(c.step.kind, modules[c.module]) for c in (call, first))
    if not {*map(id, tensors.values())} <= {*map(id, others.values())}:
        raise call.step.layer.error(
            f"{call.step.layer.text('name')!r} is the name of line {first.step.layer.line} too, "
            "and a file has weights by names; expected another name"
        )


def _check_fits(
    call: Call, tensors: Mapping[str, Tensor], stored: Sequence[Tensor | Array]
) -> None:
    shapes = [tensor.shape for tensor in tensors.values()], [blob.shape for blob in stored]
    if list(map(_without_ones, shapes[0])) != list(map(_without_ones, shapes[1])):
        expected, given = (", ".join(map(shown, shape)) or "none" for shape in shapes)
        raise call.step.layer.error(
            f"the weights of {call.step.type} {call.step.name!r} are blobs of {given}; the layer "
            f"has {expected}; a layer that is to start afresh needs another name"
        )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop leading ones, which blobs in older files have, since these always have four sizes."""
    sizes = list(shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return tuple(sizes)


class Net(nn.Module):
    """One phase of a Caffe net.

    Args:
        where: A prototxt file, or its parsed message.
        weights: A caffemodel. Without it the fillers set the weights.
        phase: TRAIN or TEST. The module starts in the matching mode.
        stages: The stages that are set, for include and exclude rules.
        level: The level, for include and exclude rules.
        inputs: Shapes of inputs by blob. They replace those in the file.
        keep_blobs: Whether `blobs` has every blob after a forward. It keeps them in memory.

    Raises: CaffeError, one line with the fault and its place in the file.
    """

    inputs: list[str]
    """The input blobs, in the file's order: tops of layers that read samples."""
    outputs: list[str]
    """The blobs that forward returns: the losses, and the blobs that no later layer takes."""
    losses: dict[str, float]
    shapes: dict[str, Shape]
    """The final shape of every blob, with the file's batch size."""
    blobs: dict[str, Tensor]
    multipliers: dict[str, Multipliers]
    """lr_mult and decay_mult of each parameter, by its name."""
    keep_blobs: bool
    training: bool

    def __init__(
        self,
        where: str | Path | Message,
        weights: str | Path | None = None,
        *,
        phase: str = "TEST",
        stages: Sequence[str] = (),
        level: int = 0,
        inputs: Mapping[str, Shape] | None = None,
        keep_blobs: bool = True,
    ) -> None:
        super().__init__()
        net = current_net(where)
        graph = read_graph(layers_of(net, phase, stages, level), LAYERS)
        if not graph.sources and not graph.steps:
            raise net.error(f"no layer in {phase}; expected a net", 0)
        self.inputs = [source.blob for source in graph.sources]
        self.outputs, self.losses = [*graph.outputs], graph.losses
        for blob in inputs or {}:
            if blob not in self.inputs:
                raise net.error(
                    f"a shape is given for {blob!r}, which is no input; they are "
                    f"{', '.join(self.inputs)}"
                )
        made = assemble(graph, inputs or {}, phase, Net)
        self.shapes, self.keep_blobs, self.blobs = made.shapes, keep_blobs, {}
        self._net, self._sources, self._calls = net, graph.sources, made.calls
        self._runs: dict[tuple[str, ...], list[Call]] = {}
        for name, module in made.modules.items():
            self.add_module(name, module)
        share(made.calls, made.modules)
        self.multipliers = multipliers(made.calls, made.modules)
        set_inplace(made.calls, made.modules)
        self.train(phase == "TRAIN")
        if weights is not None:
            self.load(caffemodel.read(Path(weights)))

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The module of each layer, by its name in the file, which may differ from torch's name."""
        return {call.step.name: self.get_submodule(call.module) for call in self._calls}

    def forward(self, *values: Tensor | None) -> dict[str, Tensor]:
        """Return the outputs by blob; `values` are the inputs in order.

        If an input is missing or None, all layers that depend on it are skipped, so a net for
        training runs without labels.
        """
        if len(values) > len(self.inputs):
            raise ValueError(
                f"{len(values)} inputs are given; the net has {', '.join(self.inputs)}"
            )
        by_blob = {
            blob: value
            for blob, value in zip(self.inputs, values, strict=False)
            if value is not None
        }
        given = tuple(by_blob)
        if given not in self._runs:
            self._runs[given] = self._runnable(given)
        run(self._modules, self._runs[given], by_blob)
        if self.keep_blobs and not torch.compiler.is_compiling():
            self.blobs = dict(by_blob)
        return {blob: by_blob[blob] for blob in self.outputs if blob in by_blob}

    def loss(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of the losses in `outputs`. Raises CaffeError without any."""
        parts = [
            outputs[blob].sum() * weight for blob, weight in self.losses.items() if blob in outputs
        ]
        if not parts:
            raise self._net.error(
                f"no loss among the outputs ({', '.join(outputs)}); the net's are "
                f"{', '.join(self.losses) or 'none'}"
            )
        return torch.stack(parts).sum()

    def load(self, blobs: Mapping[str, Sequence[Tensor | Array]]) -> Loaded:
        """Fill layers with the blobs of their name. Raises CaffeError if the shapes differ."""
        modules = {call.module: self.get_submodule(call.module) for call in self._calls}
        return load(self._calls, modules, blobs)

    def unread(self) -> list[tuple[str, int]]:
        """Return path and line of each field that was not understood, except in data layers."""
        return [
            (f"{call.step.name}.{path}", line)
            for call in self._calls
            for path, line in call.step.layer.unread()
        ]

    def _runnable(self, given: Sequence[str]) -> list[Call]:
        there, calls = {*given}, []
        for call in self._calls:
            if there.issuperset(call.step.bottoms):
                there.update(call.step.tops)
                calls.append(call)
            else:  # an overwritten blob is no longer available
                there.difference_update(call.step.tops)
        return calls if self.keep_blobs else with_last_uses(calls, self.outputs)
