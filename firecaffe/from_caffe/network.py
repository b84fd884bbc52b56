"""What a net says of its parameters and its batch: multipliers, what is held still, what mixes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from firecaffe.caffe.graph import read_graph
from firecaffe.caffe.judge import Judge, no_means, read_judges
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.data import shapes_of
from firecaffe.caffe.layers.spec import Shape, ignore_other_types
from firecaffe.caffe.message import Field, Message
from firecaffe.caffe.net import Net
from firecaffe.caffe.phase import layers_of
from firecaffe.caffe.trained import Trained
from firecaffe.data.caffe_layers import REFUSED
from firecaffe.from_caffe.patterns import as_patterns, grouped
from firecaffe.from_caffe.report import Report
from firecaffe.from_caffe.samples import Phases, Samples, sources_of
from firecaffe.meta_kernels import on_meta

MIXING = {
    "BatchNorm": "BatchNorm takes its statistics over a batch",
    "BatchReindex": "BatchReindex takes samples of a batch in another order",
}
"""Layers that make one sample's numbers depend on others'."""

OF_LAYERS = ("name", "type", "top", "phase", "include", "exclude")
"""Words of a layer that gives samples, which are its place in the net."""


@dataclass(frozen=True)
class Described:
    """A net as far as a recipe needs it."""

    solver: dict[str, Any]
    """lr_mult and decay_mult."""
    freeze: list[str]
    mixing: str
    """Why the whole batch goes through the network at once; empty if it need not."""
    losses: dict[str, float]
    """Weights of the losses of TRAIN, by blob."""
    num_parameters: int


def describe(
    net: Message,
    phases: Phases,
    samples: Samples,
    has_decay: bool,
    report: Report,
) -> Described:
    """Builds the net in both phases, on the meta device.

    Raises: CaffeError if a layer is not known, or cannot be.
    """
    for layers in phases.values():
        if sources_of(layers):
            read_graph(layers, LAYERS)
    with on_meta():
        nets = nets_of(net, phases, samples, report)
        own = dict(Trained(net, samples.shapes[samples.input]).named_parameters())
    whole = next(iter(nets.values()))
    judge = read_judges(net)[0] if whole.losses else None
    _say_unread(net, phases, report)
    multipliers = {name: each for name, each in whole.multipliers.items() if name in own}
    rates = {name: each.lr for name, each in multipliers.items()}
    decays = {name: each.decay for name, each in multipliers.items() if each.lr}
    still = [name for name, rate in rates.items() if not rate]
    solver = {
        "lr_mult": as_patterns({name: rate for name, rate in rates.items() if rate}),
        "decay_mult": as_patterns(decays) if has_decay else {},
    }
    return Described(
        {word: patterns for word, patterns in solver.items() if patterns},
        [] if len(still) == len(rates) else grouped(still, list(rates)),
        _mixing(phases["TRAIN"], judge),
        whole.losses,
        sum(each.numel() for each in own.values()),
    )


def nets_of(net: Message, phases: Phases, samples: Samples, report: Report) -> dict[str, Net]:
    """The net of each phase that has layers of its own, TRAIN first. Raises: CaffeError."""
    return {
        phase: _built(net, phase, layers, samples, report)
        for phase, layers in phases.items()
        if layers == layers_of(net, phase)
    }


def _built(
    net: Message,
    phase: str,
    layers: Sequence[Message],
    samples: Samples,
    report: Report,
) -> Net:
    """The net of one phase; without layers that take what nobody knows the shape of."""
    batch = samples.batch_size if phase == "TRAIN" else samples.test_batch_size
    inputs: dict[str, Shape] = {}
    unknown: set[str] = set()
    for layer in sources_of(layers):
        for top, said in zip(layer.texts("top"), shapes_of(layer), strict=True):
            if said is not None and said[1:] == samples.shapes.get(top):
                continue  # the net says the batch, too: inputs may have several
            if top in samples.shapes:
                inputs[top] = (batch or 1, *samples.shapes[top])
            else:
                unknown.add(top)
    there, left = _without(layers, unknown)
    for layer in left:
        report.needs(
            layer,
            "type",
            f"{layer.text('type')} {layer.text('name')!r} was not looked at: the shape of what it "
            "takes is in the data, which are not there",
        )
        layer.ignore(*(each.name for each in layer.fields))
    fields = [Field("layer", layer, layer.line) for layer in there]
    return Net(Message(fields, net.line, net.where), phase=phase, inputs=inputs)


def _without(layers: Iterable[Message], unknown: set[str]) -> tuple[list[Message], list[Message]]:
    """The layers that can be made, and those that take what is unknown."""
    there, left = [], []
    for layer in layers:
        tops = layer.texts("top")
        if unknown.intersection(layer.texts("bottom")):
            left.append(layer)
            unknown.update(tops)
            continue
        if tops and unknown.issuperset(tops) and not layer.has("bottom"):
            continue
        there.append(layer)
    return there, left


def _say_unread(net: Message, phases: Phases, report: Report) -> None:
    """What nobody has understood: of the net itself, and of the layers of both phases."""
    for name, line in net.unread():
        if not name.startswith("layer."):
            report.did_not_read(net, line, name)
    layers = {id(each): each for of_phase in phases.values() for each in of_phase}
    for layer in layers.values():
        if not layer.has("bottom"):
            layer.ignore(*OF_LAYERS)
            if layer.text("type") in REFUSED:  # which is said of the layer as a whole
                continue
            ignore_other_types(layer)
        for name, line in layer.unread():
            report.did_not_read(net, line, f"{layer.text('name')}: {name}")


def _mixing(layers: Sequence[Message], judge: Judge | None) -> str:
    """Why a batch may not go through the network in parts. judge: of TRAIN, if it has a loss."""
    for layer in layers:
        kind = layer.text("type")
        if kind in MIXING and not layer.message("batch_norm_param").flag("use_global_stats"):
            return MIXING[kind]
    if judge is not None and no_means(judge):
        return "a loss is no mean over its samples, but over a batch's labels that count, or a sum"
    return ""


def micro_batch_of(batch: int, mixing: str) -> int:
    """The samples that go through the network at once: about a quarter of a batch of Caffe's, so
    that there are several workers' work, if it makes no difference.
    """
    if mixing:
        return batch
    most = max(1, batch // 4)
    small = [each for each in range(1, isqrt(batch) + 1) if batch % each == 0]
    return max(each for each in (*small, *(batch // each for each in small)) if each <= most)


def losses_in_words(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{blob} (weight {weight:g})" for blob, weight in losses.items())
