"""Converts a net's properties: multipliers, frozen parameters, initial weights, mixed samples."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from firecaffe.caffe import caffemodel
from firecaffe.caffe.graph import layers_of, read_graph, shapes_of
from firecaffe.caffe.judge import Judge, non_mean_losses, read_judges
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape, ignore_other_types
from firecaffe.caffe.message import CaffeError, Field, Message, Note
from firecaffe.caffe.net import Net
from firecaffe.caffe.trained import TrainedNet
from firecaffe.data.caffe_layers import REFUSED
from firecaffe.from_caffe import Report
from firecaffe.from_caffe.nets import NetFile, NetSamples, sources_of
from firecaffe.meta_kernels import on_meta


def as_patterns(values: Mapping[str, float]) -> dict[str, float]:
    """Return patterns for the multipliers of parameters, such as `{"*.bias": 2.0}`.

    The last pattern that matches counts. A parameter that matches no pattern has 1.
    """
    patterns = {}
    for kind in dict.fromkeys(map(_kind, values)):  # weight, bias
        of_kind = [value for name, value in values.items() if _kind(name) == kind]
        most = Counter(of_kind).most_common(1)[0][0]
        if most != 1:
            patterns[f"*.{kind}"] = most
    if len(set(values.values())) == 1 and patterns:
        return {"*": next(iter(patterns.values()))}
    usual = {name: patterns.get(f"*.{_kind(name)}", 1.0) for name in values}
    others = {name: value for name, value in values.items() if value != usual[name]}
    for value in dict.fromkeys(others.values()):
        names = [name for name, given in others.items() if given == value]
        equal_names = {name for name, given in values.items() if given == value}
        patterns.update(dict.fromkeys(grouped(names, list(values), equal_names), value))
    return patterns


def grouped(names: Sequence[str], among: Sequence[str], may: Collection[str] = ()) -> list[str]:
    """Return patterns for names: a layer's if all of it is in `names` or `may`, else the name."""
    patterns: list[str] = []
    wanted = {*names, *may}
    for name in names:
        layer = name.rpartition(".")[0]
        of_layer = [other for other in among if other.startswith(f"{layer}.")]
        is_whole = layer and len(of_layer) > 1 and wanted.issuperset(of_layer)
        patterns.append(f"{plain(layer)}.*" if is_whole else plain(name))
    return list(dict.fromkeys(patterns))


def plain(name: str) -> str:
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


MIXING = {
    "BatchNorm": "BatchNorm takes its statistics over a batch",
    "BatchReindex": "BatchReindex takes samples of a batch in another order",
}
"""Layers that make a sample's result depend on other samples, and why."""

OF_LAYERS = ("name", "type", "top", "phase", "include", "exclude")


@dataclass(frozen=True)
class NetSettings:
    solver: dict[str, Any]
    """lr_mult and decay_mult of the section [solver]."""
    freeze: list[str]
    mixing: str
    """The reason not to split a batch into micro-batches; empty if it may be split."""
    losses: dict[str, float]
    num_parameters: int
    softmax: str = ""
    """The Softmax at the end of a net without losses, which its task applies."""


def describe(file: NetFile, samples: NetSamples, has_decay: bool, report: Report) -> NetSettings:
    """Build the net in both phases on the meta device. Raises CaffeError if a layer is invalid."""
    for layers in file.phases.values():
        if sources_of(layers):
            read_graph(layers, LAYERS)
    with on_meta():
        nets = nets_of(file, samples, report)
        trained = TrainedNet(file.net, samples.shapes[samples.input])
    parameters, last = dict(trained.named_parameters()), trained.prediction_path().loss
    whole = next(iter(nets.values()))
    judge = read_judges(file.net)[0] if whole.losses else None
    _report_unread(file, report)
    multipliers = {
        name: multiplier for name, multiplier in whole.multipliers.items() if name in parameters
    }
    rates = {name: multiplier.lr for name, multiplier in multipliers.items()}
    decays = {name: multiplier.decay for name, multiplier in multipliers.items() if multiplier.lr}
    still = [name for name, rate in rates.items() if not rate]
    solver = {
        "lr_mult": as_patterns({name: rate for name, rate in rates.items() if rate}),
        "decay_mult": as_patterns(decays) if has_decay else {},
    }
    return NetSettings(
        {word: patterns for word, patterns in solver.items() if patterns},
        [] if len(still) == len(rates) else grouped(still, list(rates)),
        _mixing(file.phases["TRAIN"], judge),
        whole.losses,
        sum(parameter.numel() for parameter in parameters.values()),
        last.name if last is not None and not whole.losses else "",
    )


def nets_of(file: NetFile, samples: NetSamples, report: Report) -> dict[str, Net]:
    """Build the net of each phase with its own layers, TRAIN first. Raises CaffeError."""
    return {
        phase: _built(file.net, phase, layers, samples, report)
        for phase, layers in file.phases.items()
        if layers == layers_of(file.net, phase)
    }


def _built(
    net: Message, phase: str, layers: Sequence[Message], samples: NetSamples, report: Report
) -> Net:
    batch = samples.batch_size if phase == "TRAIN" else samples.test_batch_size
    inputs: dict[str, Shape] = {}
    unknown: set[str] = set()
    for layer in sources_of(layers):
        for top, said in zip(layer.texts("top"), shapes_of(layer), strict=True):
            if said is not None and said[1:] == samples.shapes.get(top):
                continue  # keep the net's own batch sizes: they may differ by input
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
        layer.ignore(*(field.name for field in layer.fields))
    fields = [Field("layer", layer, layer.line) for layer in there]
    return Net(Message(fields, net.line, net.where), phase=phase, inputs=inputs)


def _without(layers: Iterable[Message], unknown: set[str]) -> tuple[list[Message], list[Message]]:
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


def _report_unread(file: NetFile, report: Report) -> None:
    net = file.net
    for name, line in net.unread():
        if not name.startswith("layer."):
            report.add_unread(net, line, name)
    layers = {id(layer): layer for of_phase in file.phases.values() for layer in of_phase}
    for layer in layers.values():
        if not layer.has("bottom"):
            layer.ignore(*OF_LAYERS)
            if layer.text("type") in REFUSED:  # reported for the layer as a whole
                continue
            ignore_other_types(layer)
        for name, line in layer.unread():
            report.add_unread(net, line, f"{layer.text('name')}: {name}")


def _mixing(layers: Sequence[Message], judge: Judge | None) -> str:
    for layer in layers:
        kind = layer.text("type")
        if kind in MIXING and not layer.message("batch_norm_param").flag("use_global_stats"):
            return MIXING[kind]
    if judge is not None and non_mean_losses(judge):
        return "a loss is no mean over its samples, but over a batch's labels that count, or a sum"
    return ""


def micro_batch_of(batch: int, mixing: str) -> int:
    """Return Caffe's batch if samples mix, else a divisor of up to a quarter, for more workers."""
    if mixing:
        return batch
    most = max(1, batch // 4)
    small = [divisor for divisor in range(1, isqrt(batch) + 1) if batch % divisor == 0]
    return max(size for size in (*small, *(batch // divisor for divisor in small)) if size <= most)


def first_weights(net: Net, path: Path, report: Report) -> bytes:
    """Return a file's tensors for a net, as safetensors. Raises CaffeError if it does not fit."""
    blobs = caffemodel.read(path)
    loaded = net.load({name: list(map(torch.from_numpy, arrays)) for name, arrays in blobs.items()})
    place = str(path)
    if not loaded.filled:
        raise CaffeError(
            f"{path}: no layer of the net has a name that the file knows; it has "
            f"{', '.join(loaded.unused[:4])} …"
        )
    report.understood.append(Note(place, f"weights of {', '.join(loaded.filled)}"))
    if loaded.fresh:
        report.changed.append(
            Note(
                place,
                f"not in the file, so they start as their fillers say: {', '.join(loaded.fresh)}",
            )
        )
    if loaded.unused:
        report.changed.append(Note(place, f"in the file alone: {', '.join(loaded.unused)}"))
    filled = {
        id(tensor)
        for name in loaded.filled
        for tensor in net.layers[name].state_dict(keep_vars=True).values()
    }
    return save(
        {
            name: tensor.detach().contiguous().clone()
            for name, tensor in net.state_dict(keep_vars=True).items()
            if id(tensor) in filled
        }
    )
