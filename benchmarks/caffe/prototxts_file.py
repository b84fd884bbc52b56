"""One prototxt: what it is, whose layers it has, and the shapes that our net of it has."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from firecaffe.caffe import text
from firecaffe.caffe.fillers import FILLERS
from firecaffe.caffe.graph import layers_of
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.caffe.net import Net, blobs_of
from firecaffe.caffe.upgrade import current
from firecaffe.errors import FirecaffeError
from firecaffe.from_caffe import Report
from firecaffe.from_caffe.nets import TEST_NETS, TRAIN_NETS, find_file, sources_of
from firecaffe.from_caffe.recipe import ImportRequest, read
from firecaffe.from_caffe.solver import read_training, read_update

Schema = Mapping[str, Mapping[str, str | None]]
"""The message of a field, by the names of message and field, as a real Caffe knows them."""

OF_CAFFE = frozenset(
    [
        "AbsVal",
        "Accuracy",
        "ArgMax",
        "BatchNorm",
        "BatchReindex",
        "Bias",
        "BNLL",
        "Clip",
        "Concat",
        "ContrastiveLoss",
        "Convolution",
        "Crop",
        "Data",
        "Deconvolution",
        "Dropout",
        "DummyData",
        "ELU",
        "Eltwise",
        "Embed",
        "EuclideanLoss",
        "Exp",
        "Filter",
        "Flatten",
        "HDF5Data",
        "HDF5Output",
        "HingeLoss",
        "Im2col",
        "ImageData",
        "InfogainLoss",
        "InnerProduct",
        "Input",
        "Log",
        "LRN",
        "LSTM",
        "LSTMUnit",
        "MemoryData",
        "MultinomialLogisticLoss",
        "MVN",
        "Parameter",
        "Pooling",
        "Power",
        "PReLU",
        "Python",
        "Reduction",
        "ReLU",
        "Reshape",
        "RNN",
        "Scale",
        "Sigmoid",
        "SigmoidCrossEntropyLoss",
        "Silence",
        "Slice",
        "Softmax",
        "SoftmaxWithLoss",
        "Split",
        "SPP",
        "Swish",
        "TanH",
        "Threshold",
        "Tile",
        "WindowData",
    ]
)
"""The types of layers that Caffe itself has (caffe.berkeleyvision.org, Layer Catalogue)."""

TAKEN_ON = {
    "DetectionOutput": "detection_output_param",
    "Interp": "interp_param",
    "Normalize": "norm_param",
    "Permute": "permute_param",
    "PriorBox": "prior_box_param",
    "PSROIPooling": "psroi_pooling_param",
    "ROIPooling": "roi_pooling_param",
    "SmoothL1Loss": "smooth_l1_loss_param",
}
"""Types of forks that firecaffe means to read all the same, and the message of each."""

IMAGES = {"siamese": (2, 28, 28), "mnist": (1, 28, 28), "cifar": (3, 32, 32), "": (3, 224, 224)}
"""The shape of samples whose files are not here, where the net does not say it either: by what the
path has in it.
"""
MAX_TOLD = 5
FILLER = "filler "
"""Before its type, where that is a word of a fork."""
UNKNOWN: dict[str, list[str]] = {
    "python": [],
    "types_of_forks": [],
    "taken_on": [],
    "fields_of_forks": [],
    "phases": [],
}
"""Of a net that was not looked at."""
NET_FIELDS = {"layer", "layers"}
SOLVER_FIELDS = {"base_lr", "lr_policy", "max_iter", "net", "train_net"}
TEMPLATE = re.compile(r"\$\{|\{\{|\{%|<%")


def image_of(path: Path) -> tuple[int, int, int]:
    """The shape to take where nothing says it."""
    return next(shape for word, shape in IMAGES.items() if word in str(path).lower())


def kind_of(path: Path) -> tuple[str, Message | None, str]:
    """net, solver, other, template or broken; the message, if it is one; and what is wrong."""
    try:
        message = text.read(path)
    except CaffeError as error:
        content = path.read_bytes().decode(errors="replace")
        is_template = TEMPLATE.search(content) is not None
        return "template" if is_template else "broken", None, str(error)
    names = {each.name for each in message.fields}
    if "template" in str(path).lower():
        return "template", None, "its path says so"
    if names & NET_FIELDS:
        return "net", message, ""
    return ("solver" if len(names & SOLVER_FIELDS) > 1 else "other"), message, ""


def whose(message: Message, schema: Schema) -> dict[str, list[str]]:
    """What a net has that Caffe has not: Python layers, types of forks, fields of forks."""
    net, _ = current(message)
    layers = net.messages("layer")
    types = {each.text("type") for each in layers}
    params = [each.message("python_param") for each in layers if each.text("type") == "Python"]
    python = {f"{each.text('module')}.{each.text('layer')}" for each in params}
    own = OF_CAFFE | TAKEN_ON.keys()
    kinds = {each.text("type", "constant") for each in _fillers(net)}
    fields = set(_unknown(message, "NetParameter", "", schema)) if schema else set()
    return {
        "python": sorted(python),
        "types_of_forks": sorted(types - own),
        "taken_on": sorted(types & TAKEN_ON.keys()),
        "fields_of_forks": sorted(fields | {f"{FILLER}{each}" for each in kinds - FILLERS.keys()}),
    }


def _fillers(message: Message) -> Iterator[Message]:
    for each in message.fields:
        if isinstance(each.value, Message):
            if each.name.endswith("filler"):
                yield each.value
            yield from _fillers(each.value)


def _unknown(message: Message, kind: str, path: str, schema: Schema) -> Iterator[str]:
    known = schema[kind]
    for each in message.fields:
        name = f"{path}.{each.name}" if path else each.name
        inner = known.get(each.name)
        if each.name not in known:
            if each.name not in TAKEN_ON.values():
                yield name
        elif inner is not None and isinstance(each.value, Message):
            yield from _unknown(each.value, inner, name, schema)


def shapes(path: Path, phase: str, inputs: Mapping[str, list[int]]) -> dict[str, Any]:
    """Of every blob by its name, and of every parameter by its layer's, in Caffe's order; and the
    count of numbers in them, with shared ones counted once. Of tops that the file does not name
    there is nothing.

    Raises: CaffeError.
    """
    with torch.device("meta"):
        net = Net(path, phase=phase, inputs={n: tuple(s) for n, s in inputs.items()})
    params: dict[str, Any] = {}
    count: dict[int, int] = {}
    for call in net._calls:
        blobs = blobs_of(call.step.kind, net.get_submodule(call.module))
        if blobs:
            params[call.step.layer.text("name")] = [list(each.shape) for each in blobs.values()]
        count |= {id(each): each.numel() for each in blobs.values()}
    named = {top for layer in net._net.messages("layer") for top in layer.texts("top")}
    found = {name: list(shape) for name, shape in net.shapes.items() if name in named}
    return {"blobs": found, "params": params, "count": sum(count.values())}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Of what `shapes` gives and what a real Caffe says; empty if they are equal."""
    found = []
    for what in ("blobs", "params"):
        for name in dict.fromkeys([*theirs[what], *ours[what]]):
            own, other = ours[what].get(name), theirs[what].get(name)
            if own != other:
                found.append(f"{what} {name}: {own}; Caffe has {other}")
    if ours["count"] != theirs["count"]:
        found.append(f"count {ours['count']}; Caffe has {theirs['count']}")
    return found


def look(
    folder: Path, path: Path, answers: Mapping[str, Mapping[str, Any]], schema: Schema
) -> dict[str, Any]:
    """What a file is and what came of it, as a row.

    answers: what a real Caffe makes of it, by phase; empty where it was not asked.
    """
    kind, message, wrong = kind_of(path)
    row: dict[str, Any] = {"path": str(path.relative_to(folder)), "what": kind, "sha": sha_of(path)}
    if message is None or kind == "other":
        return row | {"wrong": _placeless(wrong, folder)}
    if kind == "net":
        row |= _of_net(folder, path, message, answers, schema)
    else:
        fields = set(_unknown(message, "SolverParameter", "", schema)) if schema else set()
        row |= {"fields_of_forks": sorted(fields), "words": _words(path, folder)}
        row["net"] = _net_of(message, path)
    return row | _import(path, folder)


def sha_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _net_of(solver: Message, path: Path) -> str:
    """The sha256 of the net to train; empty if it is not there, or is no file."""
    for name in ("net", "train_net"):
        for each in solver.texts(name):
            found, _ = find_file(each, str(path), "")
            return "" if found is None else sha_of(Path(found))
    return ""


def _of_net(
    folder: Path,
    path: Path,
    message: Message,
    answers: Mapping[str, Mapping[str, Any]],
    schema: Schema,
) -> dict[str, Any]:
    row: dict[str, Any] = {**UNKNOWN, "refused": {}, "equal": {}, "phases": list(answers)}
    with suppress(CaffeError):  # then the import says it
        row |= whose(message, schema)
        net, _ = current(message)
        row["phases"] = [phase for phase in answers if sources_of(layers_of(net, phase))]
    # Fillers are taken away before a real Caffe is asked, and it refuses one that it has not.
    fillers = [each for each in row["fields_of_forks"] if each.startswith(FILLER)]
    for phase, answer in answers.items():
        if answer and fillers:
            row["refused"][phase] = f"Unknown {fillers[0]}"
        elif "error" in answer:
            row["refused"][phase] = answer["error"]
        elif answer:
            try:
                inputs = {name: answer["blobs"][name] for name in answer["inputs"]}
                found = differences(shapes(path, phase, inputs), answer)
            except CaffeError as error:
                found = [_placeless(str(error), folder)]
            row["equal"][phase] = found[:MAX_TOLD]
    return row


def _import(path: Path, folder: Path) -> dict[str, Any]:
    """What `firecaffe import` leaves out, or why it does not take the file."""
    shape: tuple[int, ...] = ()
    while True:
        try:
            found = read(path, ImportRequest(folder="imported", input_shape=shape))
        except FirecaffeError as error:
            if not shape and "--input-shape" in str(error):
                shape = image_of(path)
                continue
            return {"error": _placeless(str(error), folder), "shape_given": bool(shape)}
        left = [note.what for note in found.report.left_out]
        unseen = sum("not looked at" in note.what for note in found.report.needed)
        return {"left_out": left, "unseen": unseen, "shape_given": bool(shape)}


def _words(path: Path, folder: Path) -> list[str]:
    """What is left out of a solver's own words, without its net."""
    message, report = text.read(path), Report()
    try:
        read_update(message, read_training(message, report).iter_size, report)
    except CaffeError as error:
        return [_placeless(str(error), folder)]
    message.ignore(*TRAIN_NETS, *TEST_NETS, "weights")
    unread = [name for name, _ in message.unread()]
    return [note.what for note in report.left_out] + [
        f"{each} is not understood" for each in unread
    ]


def _placeless(line: str, folder: Path) -> str:
    """Without the file and the line that it begins with, which may be another file's."""
    return re.sub(r"^.*?\.(prototxt|pt)(:\d+)?: ", "", line).replace(f"{folder}/", "")
