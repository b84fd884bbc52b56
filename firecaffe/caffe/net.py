"""A Caffe net as a torch module, with Caffe's names for its layers and blobs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from firecaffe.caffe import caffemodel, parameters, text
from firecaffe.caffe.assemble import Call, assemble, forgetting, run, write_over
from firecaffe.caffe.blob import Array
from firecaffe.caffe.graph import read_graph
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import Message
from firecaffe.caffe.phase import layers_of
from firecaffe.caffe.upgrade import current


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
    """The blobs that the net is given, in the file's order: tops of layers that read samples."""
    outputs: list[str]
    """The blobs that forward returns: the losses, and the blobs that no later layer takes."""
    losses: dict[str, float]
    shapes: dict[str, Shape]
    """The final shape of every blob, with the file's batch size."""
    blobs: dict[str, Tensor]
    multipliers: dict[str, parameters.Multipliers]
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
        message = where if isinstance(where, Message) else text.read(Path(where))
        net, _ = current(message)
        graph = read_graph(layers_of(net, phase, stages, level), LAYERS)
        if not graph.sources and not graph.steps:
            raise net.error(f"no layer in {phase}; expected a net", 0)
        self.inputs = [source.blob for source in graph.sources]
        self.outputs, self.losses = [*graph.outputs], graph.losses
        _check_inputs(inputs or {}, self.inputs, net)
        made = assemble(graph, inputs or {}, phase, Net)
        self.shapes, self.keep_blobs, self.blobs = made.shapes, keep_blobs, {}
        self._net, self._sources, self._calls = net, graph.sources, made.calls
        self._runs: dict[tuple[str, ...], list[Call]] = {}
        for name, module in made.modules.items():
            self.add_module(name, module)
        parameters.share(made.calls, made.modules)
        self.multipliers = parameters.multipliers(made.calls, made.modules)
        write_over(made.calls, made.modules)
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
        """Return the weighted sum of the losses among the outputs. Raises CaffeError if none is."""
        parts = [
            outputs[blob].sum() * weight for blob, weight in self.losses.items() if blob in outputs
        ]
        if not parts:
            raise self._net.error(
                f"no loss among the outputs ({', '.join(outputs)}); the net's are "
                f"{', '.join(self.losses) or 'none'}"
            )
        return torch.stack(parts).sum()

    def load(self, blobs: Mapping[str, Sequence[Tensor | Array]]) -> parameters.Loaded:
        """Fill layers with the blobs of their names. Raises CaffeError if the shapes differ."""
        modules = {call.module: self.get_submodule(call.module) for call in self._calls}
        return parameters.load(self._calls, modules, blobs)

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
        return calls if self.keep_blobs else forgetting(calls, self.outputs)


def _check_inputs(inputs: Mapping[str, Shape], known: Sequence[str], net: Message) -> None:
    for blob in inputs:
        if blob not in known:
            raise net.error(
                f"a shape is given for {blob!r}, which is no input; they are {', '.join(known)}"
            )
