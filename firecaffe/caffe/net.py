"""A net of Caffe's as a module of torch, with Caffe's names for its layers and blobs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from firecaffe.caffe import parameters, text
from firecaffe.caffe import weights as caffemodel
from firecaffe.caffe.assemble import Call, assemble, forgetting, run, write_over
from firecaffe.caffe.blob import Array
from firecaffe.caffe.graph import read_graph
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import Message
from firecaffe.caffe.phase import layers_of
from firecaffe.caffe.upgrade import current


class Net(nn.Module):
    """One phase of a net.

    Args:
        where: A prototxt, or what one says.
        weights: A caffemodel; without it the fillers' values.
        phase: TRAIN or TEST. The module starts in the mode that goes with it.
        stages: Those that hold, for rules that ask for them.
        level: The level, for rules that ask for it.
        inputs: Shapes of inputs, by blob, instead of those that the file says.
        keep_blobs: Whether `blobs` has every blob after a forward. It keeps them in memory.

    Raises: CaffeError, a line about what cannot be and where it stands.
    """

    inputs: list[str]
    """The blobs that it is given, in the file's order: tops of the layers that read samples."""
    outputs: list[str]
    """The blobs that it returns: those that no later layer takes, and the losses."""
    losses: dict[str, float]
    """The weight of each loss, by blob."""
    shapes: dict[str, Shape]
    """The shape of every blob in the end, with the file's batch."""
    blobs: dict[str, Tensor]
    """After a forward, every blob as it was written last."""
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
        self.inputs = [each.blob for each in graph.sources]
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
        """The module of each layer, by the layer's name. Among the modules of torch it is called so
        too, with _ for dots and slashes, and behind what Net itself has a word for.
        """
        return {call.step.name: self.get_submodule(call.module) for call in self._calls}

    def forward(self, *values: Tensor | None) -> dict[str, Tensor]:
        """The outputs, by blob.

        values: The inputs, in their order. Layers that need one that is not given, or is None, are
        left out, and so are those behind them: a net for training runs without labels.
        """
        if len(values) > len(self.inputs):
            raise ValueError(
                f"{len(values)} inputs are given; the net has {', '.join(self.inputs)}"
            )
        found = {
            blob: value
            for blob, value in zip(self.inputs, values, strict=False)
            if value is not None
        }
        given = tuple(found)
        if given not in self._runs:
            self._runs[given] = self._runnable(given)
        run(self._modules, self._runs[given], found)
        if self.keep_blobs and not torch.compiler.is_compiling():
            self.blobs = dict(found)
        return {blob: found[blob] for blob in self.outputs if blob in found}

    def loss(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses among the outputs, each times its weight.

        Raises: CaffeError if there is none.
        """
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
        """Fills layers with the blobs under their names, and says which.

        Raises: CaffeError if a layer has blobs of other shapes.
        """
        modules = {call.module: self.get_submodule(call.module) for call in self._calls}
        return parameters.load(self._calls, modules, blobs)

    def unread(self) -> list[tuple[str, int]]:
        """Path and line of each word of its layers that was not understood. Those of the layers
        that read samples are not looked at.
        """
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
            else:  # what is written over is not there any more
                there.difference_update(call.step.tops)
        return calls if self.keep_blobs else forgetting(calls, self.outputs)


def _check_inputs(inputs: Mapping[str, Shape], known: Sequence[str], net: Message) -> None:
    for blob in inputs:
        if blob not in known:
            raise net.error(
                f"a shape is given for {blob!r}, which is no input; they are {', '.join(known)}"
            )
