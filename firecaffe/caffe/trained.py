"""A Caffe net as a module with its trained weights, and its deploy.prototxt.

Losses, accuracies and all other layers that need labels belong to the task (`tasks/caffe.py`),
which takes blobs of this network. The net has two graphs, TRAIN and TEST, over the same weights.
The module's mode selects the graph that runs.

deploy.prototxt has an Input layer instead of the data layers, the layers of TEST that lead to the
prediction, and a Softmax if the loss had one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree

from firecaffe.caffe.assemble import (
    Assembled,
    Call,
    assemble,
    run,
    set_inplace,
    unknown_shape,
    with_last_uses,
)
from firecaffe.caffe.caffemodel import TrainedLayer
from firecaffe.caffe.graph import PHASES, Graph, GraphStep, read_phases
from firecaffe.caffe.judge import NetParts, judged
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.message import CaffeError, Field, Message
from firecaffe.caffe.net import Net, blobs_of, share, tie
from firecaffe.caffe.upgrade import current_net


@dataclass(frozen=True)
class Heads:
    """The output of a network whose losses and accuracies take several blobs."""

    blobs: dict[str, Tensor]
    main: str
    """The blob that the main loss takes, which is the prediction."""
    phase: str

    @property
    def logits(self) -> Tensor:
        return self.blobs[self.main]


def _leaves(heads: Heads) -> tuple[list[Any], Any]:
    return [*heads.blobs.values()], (*heads.blobs, heads.main, heads.phase)


def _of_leaves(leaves: Iterable[Any], names: Any) -> Heads:
    *blobs, main, phase = names
    return Heads(dict(zip(blobs, leaves, strict=True)), main, phase)


_pytree.register_pytree_node(
    Heads,
    _leaves,
    _of_leaves,
    serialized_type_name="firecaffe.caffe.Heads",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)


@dataclass(frozen=True)
class PredictionPath:
    """The part of the TEST graph that leads from `source` to `blob`, the prediction."""

    name: str
    source: str
    shape: tuple[int, ...]
    calls: tuple[Call, ...]
    blob: str
    loss: GraphStep | None
    """The main loss, or the Softmax at the end of a net without losses."""


class TrainedNet(nn.Module):
    """A network from samples to the blob that losses and accuracies take, or to Heads of several.

    Args:
        where: A prototxt file, or its parsed message. Raises CaffeError if it is invalid.
        input_CHW: The shape of one sample: required if the file has none, else replaces it.
    """

    def __init__(self, where: str | Path | Message, input_CHW: Sequence[int] | None = None) -> None:
        super().__init__()
        net = current_net(where)
        graphs = read_phases(net, LAYERS)
        for phase, graph in graphs.items():
            if not graph.sources:
                raise net.error(f"no layer reads samples in {phase}; expected one, as Input", 0)
        parts = {phase: judged(graph) for phase, graph in graphs.items()}
        self._blobs, self._mains = _wanted(net, parts)
        self._name = net.text("name")
        self._inputs: dict[str, str] = {}
        made: dict[str, Assembled] = {}
        for phase, graph in graphs.items():
            _check_not_overwritten(graph, parts[phase])
            sample, shape = graph.sources[0], {}
            if input_CHW is not None:
                batch = sample.shape[0] if sample.shape else 1
                shape = {sample.blob: (batch, *input_CHW)}
            steps = _leading_to(parts[phase].network, self._blobs[phase])
            alone = Graph((sample,), steps)
            made[phase] = assemble(alone, shape, phase, Net, made.get("TRAIN"))
            self._inputs[phase] = sample.blob
            if sample.blob not in made[phase].shapes:
                raise unknown_shape(sample)
        train, test = made["TRAIN"], made["TEST"]
        self._shape = test.shapes[self._inputs["TEST"]]
        self._loss = parts["TEST"].main_loss or parts["TRAIN"].main_loss or parts["TEST"].softmax
        modules = train.modules | test.modules
        for name, module in modules.items():
            self.add_module(name, module)
        _tie(train, test)
        calls = [*train.calls, *test.calls]
        share(calls, modules)
        set_inplace(calls, modules)
        self._calls: dict[str, list[Call]] = {
            phase: with_last_uses(made[phase].calls, self._blobs[phase]) for phase in PHASES
        }

    def prediction_path(self) -> PredictionPath:
        calls = self._calls["TEST"]
        steps = _leading_to([call.step for call in calls], (self._mains["TEST"],))
        needed = {id(step) for step in steps}
        kept = tuple(call for call in calls if id(call.step) in needed)
        source = self._inputs["TEST"]
        return PredictionPath(
            self._name, source, self._shape, kept, self._mains["TEST"], self._loss
        )

    def forward(self, samples: Tensor) -> Tensor | Heads:
        phase = "TRAIN" if self.training else "TEST"
        values = {self._inputs[phase]: samples}
        run(self._modules, self._calls[phase], values)
        names, main = self._blobs[phase], self._mains[phase]
        if all(blobs == (self._mains[phase],) for phase, blobs in self._blobs.items()):
            return values[main]
        return Heads({name: values[name] for name in names}, main, phase)


def _wanted(
    net: Message, parts: dict[str, NetParts]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the output blobs of each phase, and its main one: the main loss's, else the first."""
    train, test = parts["TRAIN"], parts["TEST"]
    made = {phase: of_phase.made for phase, of_phase in parts.items()}
    wanted = {"TRAIN": train.blobs, "TEST": test.blobs}
    if not test.blobs:  # without judges: the blobs of TRAIN that exist here
        wanted["TEST"] = tuple(blob for blob in train.blobs if blob in made["TEST"])
    for phase, blobs in wanted.items():
        if not blobs:  # a net without losses: its outputs
            wanted[phase] = tuple(
                blob for blob in Graph((), parts[phase].network).outputs if blob in made[phase]
            )
    main = _main(train) or _main(test)
    if not main:
        return wanted, {phase: next(iter(blobs), "") for phase, blobs in wanted.items()}
    for phase, blobs in wanted.items():
        if main not in blobs:
            if main not in made[phase]:
                raise net.error(f"{phase} does not make {main!r}, which the main loss takes", 0)
            wanted[phase] = (*blobs, main)
    return wanted, dict.fromkeys(PHASES, main)


def _main(parts: NetParts) -> str:
    taken = parts.main_loss.bottoms if parts.main_loss is not None else ()
    return next((blob for blob in taken if blob in parts.made), "")


def _leading_to(steps: Sequence[GraphStep], blobs: Iterable[str]) -> tuple[GraphStep, ...]:
    needed, leading = set(blobs), []
    for step in reversed(steps):
        if needed.intersection(step.tops):
            needed.update(step.bottoms)
            leading.append(step)
    return tuple(leading[::-1])


def _check_not_overwritten(graph: Graph, parts: NetParts) -> None:
    judges = {id(step) for step in parts.judges}
    taken: dict[str, GraphStep] = {}
    for step in graph.steps:
        if id(step) in judges:
            taken.update((blob, step) for blob in step.bottoms)
            continue
        for blob in step.tops:
            if blob in taken:
                raise step.layer.error(
                    f"{step.type} {step.name!r} writes over {blob!r}, which {taken[blob].name!r} "
                    "has taken before; expected its own top"
                )


def _tie(train: Assembled, test: Assembled) -> None:
    """Give a layer that the file has once per phase a single set of weights."""
    by_name = {call.step.name: call for call in train.calls}  # ties the n-th of a name
    for call in test.calls:
        other = by_name.get(call.step.name)
        if other is None or other.module == call.module:
            continue
        module, trained = test.modules[call.module], train.modules[other.module]
        if not tie(call.step.kind, module, trained):
            raise call.step.layer.error(
                f"{call.step.type} {call.step.name!r} has other weights in TEST than in TRAIN "
                f"(line {other.step.layer.line}); expected the same shapes, or another name"
            )


WITH_SOFTMAX = ("SoftmaxWithLoss", "Softmax")
PROBABILITIES = "prob"

OF_TRAINING = ("include", "exclude", "phase", "loss_weight", "propagate_down")


class Deployed(NamedTuple):
    net: Message
    layers: list[TrainedLayer]
    output: str
    softmax_axis: int | None


def deployed(network: TrainedNet) -> Deployed:
    """Build the contents of both files. Raises CaffeError if a layer differs from its prototxt."""
    answer = network.prediction_path()
    fields = [Field("name", answer.name, 0)] if answer.name else []
    shape = Message([Field("dim", size, 0) for size in answer.shape])
    param = Field("input_param", Message([Field("shape", shape, 0)]), 0)
    fields.append(_layer(answer.source, "Input", [], [answer.source], param))
    layers: list[TrainedLayer] = []
    for call in answer.calls:
        fields.append(Field("layer", call.step.layer.changed(OF_TRAINING), 0))
        module = network.get_submodule(call.module)
        blobs = blobs_of(call.step.kind, module)
        _check_whole(call.step.name, module, bool(blobs))
        if blobs:
            if any(layer.name == call.step.layer.text("name") for layer in layers):
                raise call.step.layer.error(
                    f"a layer before has the name {call.step.layer.text('name')!r} too, and Caffe "
                    "finds weights by names; expected another name"
                )
            arrays = [blob.detach().cpu().float().numpy() for blob in blobs.values()]
            layers.append(TrainedLayer(call.step.layer.text("name"), call.step.type, arrays))
    output, axis = answer.blob, None
    if answer.loss is not None and answer.loss.type in WITH_SOFTMAX:
        axis = answer.loss.layer.message("softmax_param").integer("axis", 1)
        output = PROBABILITIES
        while any(output in (call.step.name, *call.step.tops) for call in answer.calls):
            output += "_"
        param = Field("softmax_param", Message([Field("axis", axis, 0)]), 0)
        fields.append(_layer(output, "Softmax", [answer.blob], [output], param))
    return Deployed(Message(fields), layers, output, axis)


def _layer(name: str, kind: str, bottoms: list[str], tops: list[str], param: Field) -> Field:
    fields = [Field("name", name, 0), Field("type", kind, 0)]
    fields += [Field("bottom", bottom, 0) for bottom in bottoms]
    fields += [Field("top", top, 0) for top in tops]
    return Field("layer", Message([*fields, param]), 0)


def _check_whole(name: str, module: nn.Module, has_blobs: bool) -> None:
    if not has_blobs and next(module.parameters(), None) is not None:
        raise CaffeError(
            f"layer {name!r} is no longer as its prototxt says (model.low_rank makes two of it); "
            "Caffe has no such layer"
        )
