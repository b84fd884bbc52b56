"""The judges of a net: its losses, its accuracies, and all other layers that need targets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from firecaffe.caffe import text
from firecaffe.caffe.graph import Graph, GraphStep, InputBlob, read_phases
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.loss import DEFAULTS, VALID, Accuracy, normalization_of
from firecaffe.caffe.message import Message
from firecaffe.caffe.upgrade import current_net


@dataclass(frozen=True)
class NetParts:
    """A net in one phase: `network`, the layers that need only samples; `judges`, the others."""

    network: tuple[GraphStep, ...]
    judges: tuple[GraphStep, ...]
    blobs: tuple[str, ...]
    """The blobs that the judges take from the network, in the order of first use."""
    targets: tuple[InputBlob, ...]
    softmax: GraphStep | None = None
    """The Softmax at the end of a net without judges. It is not in `network`, since a task takes
    the values before it."""

    @property
    def made(self) -> set[str]:
        return {top for step in self.network for top in step.tops}

    @property
    def labels(self) -> tuple[str, ...]:
        """The targets with one number per sample, as far as the file states their shape."""
        shaped = [(target.blob, target.shape) for target in self.targets]
        return tuple(blob for blob, shape in shaped if shape and prod(shape[1:]) == 1)

    @property
    def maps(self) -> tuple[str, ...]:
        """The targets that have their own data layer, as label images do."""
        return tuple(target.blob for target in self.targets if target.is_first)

    @property
    def losses(self) -> tuple[GraphStep, ...]:
        return tuple(judge for judge in self.judges if judge.is_loss)

    @property
    def main_loss(self) -> GraphStep | None:
        """The loss with the largest weight (the last of equals); None if there is no loss."""
        main = None
        for loss in self.losses:
            if main is None or max(loss.loss_weights) >= max(main.loss_weights):
                main = loss
        return main


def judged(graph: Graph) -> NetParts:
    targets = graph.sources[1:]
    theirs = {target.blob for target in targets}
    network: list[GraphStep] = []
    judges: list[GraphStep] = []
    blobs: dict[str, None] = {}
    for step in graph.steps:
        needs_target = theirs.intersection(step.bottoms)
        if not (needs_target or step.is_loss or step.kind.is_loss or step.kind.takes_targets):
            network.append(step)
            continue
        blobs.update(dict.fromkeys(bottom for bottom in step.bottoms if bottom not in theirs))
        theirs.update(step.tops)
        judges.append(step)
    softmax = None
    ends_in_softmax = bool(network) and network[-1].type == "Softmax"
    if not judges and ends_in_softmax and graph.outputs == network[-1].tops:
        softmax = network.pop()
        blobs = dict.fromkeys(softmax.bottoms)
    return NetParts((*network,), (*judges,), (*blobs,), targets, softmax)


Blobs = Mapping[str, Tensor]
Values = dict[str, Tensor]


class Judge:
    """The judges of one phase. Their modules are made once their bottoms' shapes are known."""

    def __init__(self, net: Message, phase: str, parts: NetParts) -> None:
        self.net, self.phase, self.parts = net, phase, parts
        self._targets = [target.blob for target in parts.targets]
        self._modules: dict[int, nn.Module] = {}

    @property
    def accuracies(self) -> list[GraphStep]:
        """The accuracies in the file's order, those on the main loss's output first."""
        main = self.parts.main_loss
        accuracies = [judge for judge in self.parts.judges if judge.type == "Accuracy"]
        return sorted(
            accuracies, key=lambda accuracy: main is None or accuracy.bottoms[0] != main.bottoms[0]
        )

    def loss(self, blobs: Blobs, targets: Any) -> Tensor:
        values = self._run(blobs, targets, lambda step: step.type != "Accuracy")
        total: Tensor | None = None
        for step in self.parts.losses:
            for top, weight in zip(step.tops, step.loss_weights, strict=True):
                if weight:
                    term = values[top].sum() if weight == 1 else values[top].sum() * weight
                    total = term if total is None else total + term
        if total is None:
            raise self.net.error(f"no loss layer in {self.phase}", 0)
        return total

    def sums(self, step: GraphStep, blobs: Blobs, targets: Any) -> Tensor:
        """Return an accuracy's number of correct labels and of labels that count, int64 (2,)."""
        values = self._run(
            blobs, targets, lambda other: other.type != "Accuracy" and not other.is_loss
        )
        bottoms = [values[blob] for blob in step.bottoms]
        module = self._module(step, bottoms)
        assert isinstance(module, Accuracy)
        return module.sums(*bottoms)

    def _run(self, blobs: Blobs, targets: Any, is_wanted: Callable[[GraphStep], bool]) -> Values:
        values = self._given(blobs, targets)
        for step in self.parts.judges:
            if is_wanted(step) and values.keys() >= {*step.bottoms}:
                bottoms = [values[blob] for blob in step.bottoms]
                module = self._module(step, bottoms)
                goes = chain(step.layer.flags("propagate_down"), repeat(True))
                pairs = zip(bottoms, goes, strict=False)
                tops = module(*(value if flag else value.detach() for value, flag in pairs))
                tops = tops if isinstance(tops, tuple) else (tops,)
                values.update(zip(step.tops, tops, strict=True))
        return values

    def _module(self, step: GraphStep, bottoms: Sequence[Tensor]) -> nn.Module:
        module = self._modules.get(id(step))
        if module is not None:
            return module
        made = step.kind.make(step.spec([tuple(bottom.shape) for bottom in bottoms], self.phase))
        if any(True for _ in made.parameters()):
            raise step.layer.error(
                f"{step.type} {step.name!r} has weights and takes a target, or what comes of one; "
                "expected weights in the network alone, which takes the first top of the first "
                "data layer"
            )
        self._modules[id(step)] = made
        return made

    def named(self, targets: Any) -> Values:
        if isinstance(targets, Mapping):
            return {**targets}
        values = targets if isinstance(targets, tuple | list) else (targets,)
        return dict(zip(self._targets, values, strict=False))

    def _given(self, blobs: Blobs, targets: Any) -> Values:
        names, values = self._targets, self.named(targets)
        needed = {blob for step in self.parts.judges for blob in step.bottoms}
        for name in names:
            if name in needed and name not in values:
                raise self.net.error(
                    f"a layer takes the target {name!r}, which the data do not give; the net's "
                    f"targets are, in their order, {', '.join(names)}",
                    0,
                )
        return values | {name: blobs[name] for name in self.parts.blobs}


def read_judges(where: Path | Message) -> tuple[Judge, Judge]:
    """Read the judges of TRAIN and of TEST. Raises CaffeError if the file is no net or has no loss.

    If TEST has no loss or no accuracy, it uses those of TRAIN whose blobs it has. If no phase has
    an accuracy, one is made for a main loss of type SoftmaxWithLoss.
    """
    net = current_net(where)
    train, test = map(judged, read_phases(net, LAYERS).values())
    if not train.losses:
        raise net.error("no loss layer in TRAIN; expected one, as SoftmaxWithLoss", 0)
    test = _with(test, train, lambda step: step.is_loss)
    if not test.losses:
        raise net.error(
            "no loss layer in TEST, and those of TRAIN take what TEST has not: "
            f"{', '.join(train.blobs)}; expected a loss layer without include {{ phase: TRAIN }}",
            0,
        )
    test = _with(test, train, lambda step: step.type == "Accuracy")
    if not any(judge.type == "Accuracy" for judge in test.judges):
        test = _with_accuracy(test)
    return Judge(net, "TRAIN", train), Judge(net, "TEST", test)


def non_mean_losses(judge: Judge) -> list[str]:
    """Describe, a line each, the losses that are not the mean of the losses of a batch's parts."""
    lines = []
    for step in judge.parts.losses:
        if step.type in DEFAULTS:
            normalization = normalization_of(step.layer)
            if not normalization.is_mean:
                by = "the labels that count" if normalization.how == VALID else "nothing"
                lines.append(
                    f"{step.layer.place()}: {step.type} {step.name!r} divides by "
                    f"{by}, of each micro-batch: Caffe's loss is that of train.micro_batch_size = "
                    "its batch_size"
                )
    return lines


def _with(parts: NetParts, others: NetParts, is_wanted: Callable[[GraphStep], bool]) -> NetParts:
    if any(is_wanted(judge) for judge in parts.judges):
        return parts
    main = others.main_loss
    given = {*(parts.blobs or others.blobs)} | ({main.bottoms[0]} if main is not None else set())
    theirs = {target.blob for target in parts.targets}
    theirs |= {top for judge in parts.judges for top in judge.tops}
    there = (given & (parts.made | {*parts.blobs})) | theirs
    added = [e for e in others.judges if is_wanted(e) and there.issuperset(e.bottoms)]
    taken = {blob: None for judge in added for blob in judge.bottoms if blob not in theirs}
    blobs = dict.fromkeys((*parts.blobs, *taken))
    return replace(parts, judges=(*parts.judges, *added), blobs=(*blobs,))


def _with_accuracy(parts: NetParts) -> NetParts:
    loss = parts.main_loss
    if loss is None or loss.type != "SoftmaxWithLoss":
        return parts
    axis = loss.layer.message("softmax_param").integer("axis", 1)
    param = loss.layer.message("loss_param")
    ignored = param.integer("ignore_label")
    settings = f"axis: {axis}" + (f" ignore_label: {ignored}" if param.has("ignore_label") else "")
    layer = text.parse(f"accuracy_param {{ {settings} }}", loss.layer.where)
    step = replace(
        loss,
        name="accuracy",
        type="Accuracy",
        layer=layer,
        kind=LAYERS["Accuracy"],
        bottoms=loss.bottoms[:2],
        tops=("accuracy",),
        loss_weights=(0.0,),
    )
    return replace(parts, judges=(*parts.judges, step))
