"""Find the net that a solver trains, as InitTrainNet and InitTestNets of Caffe's solver.cpp do.

Also find its samples: batch size, files and shapes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from firecaffe.caffe import text
from firecaffe.caffe.graph import PHASES, both_phases, layers_of, shapes_of
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import CaffeError, Field, Message, Note, Word
from firecaffe.caffe.text import as_text
from firecaffe.caffe.upgrade import current
from firecaffe.data import DataConfig
from firecaffe.data.caffe_layers import CONVERT, INPUT_LAYERS, data_layers
from firecaffe.data.caffe_source import open_phases
from firecaffe.data.dataset import Layout
from firecaffe.errors import DataError, RecipeError
from firecaffe.from_caffe import Report, note_of
from firecaffe.from_caffe.solver import SolverStages
from firecaffe.resume_advice import option
from firecaffe.user_code import CAFFE

Phases = Mapping[str, Sequence[Message]]
"""The layers of each phase, TRAIN and TEST."""

NET_FIELDS = ("layer", "layers", "input")

SOLVER_FIELDS = ("base_lr", "lr_policy", "max_iter", "solver_type", "type", "solver_mode")
"""Fields of a solver, besides those that name its nets. Nearly every solver has some of them."""

TRAIN_NETS = ("net", "net_param", "train_net", "train_net_param")
"""Fields that may name the net to train. A solver has exactly one of them."""

TEST_NETS = ("test_net", "test_net_param")

MAX_NAMED = 4


@dataclass(frozen=True)
class NetFile:
    """A net in current form, and the content of its file in the imported folder."""

    net: Message
    content: bytes
    path: Path
    """The file with the net: its own, or the solver's."""
    upgrades: list[Note]

    @cached_property
    def phases(self) -> Phases:
        return both_phases(self.net, LAYERS)

    def note(self, what: str) -> Note:
        return Note(str(self.path), what)


def is_net(message: Message) -> bool:
    """Whether a file is a net rather than a solver. Raises CaffeError if it is neither."""
    if any(message.has(name) for name in NET_FIELDS):
        return True
    if not any(message.has(name) for name in (*SOLVER_FIELDS, *TRAIN_NETS, *TEST_NETS)):
        names = [*dict.fromkeys(field.name for field in message.fields)]
        says = f"says {', '.join(names[:MAX_NAMED])}" if names else "says nothing"
        raise message.error(
            f"the file {says}{' …' if len(names) > MAX_NAMED else ''}; expected a solver, which "
            "has base_lr and lr_policy, or a net, which has layer { … }",
            0,
        )
    return False


def read_net(path: Path) -> NetFile:
    return _of(text.read(path), path, path.read_bytes())


def _of(message: Message, path: Path, content: bytes) -> NetFile:
    net, upgrades = current(message)
    return NetFile(net, content, path, upgrades)


def find_net(
    solver: Message, path: Path, root: str, states: dict[str, SolverStages], report: Report
) -> NetFile:
    """Return a solver's net. Paths are relative to `root`; if that is empty, they are searched."""
    said = [name for name in TRAIN_NETS if solver.has(name)]
    if len(said) != 1:
        described = " and ".join(said) or "none"
        raise solver.error(
            f"found {described}; expected one of {', '.join(TRAIN_NETS)}, which says what to train"
        )
    train = _named(solver, said[0], path, root, report)[0]
    tests = [net for name in TEST_NETS for net in _named(solver, name, path, root, report)]
    if said[0] in ("net", "net_param"):
        for name in TEST_NETS:
            if solver.has(name):
                report.lacks(solver, name, "one net is tested, that of the solver's net")
        return _resolved(train, states, report)
    for name in TEST_NETS:
        if len(tests) > 1 and solver.has(name):
            report.lacks(solver, name, f"{len(tests)} nets to test; the first is tested")
    if not tests or tests[0].content == train.content:
        return _resolved(train, states, report)
    report.differs(
        solver,
        said[0],
        f"{train.path} and {tests[0].path} are one net.prototxt, with include {{ phase }} in each "
        "layer",
    )
    return _joined(train, tests[0], states)


def _named(solver: Message, name: str, path: Path, root: str, report: Report) -> list[NetFile]:
    if name.endswith("_param"):
        inside = solver.messages(name)
        if inside:
            report.differs(solver, name, "the solver's own net is a file now, net.prototxt")
        return [_of(message, path, as_text(message).encode()) for message in inside]
    nets = []
    for file_name in solver.texts(name):
        line = solver.line_of(name)
        taken, folder = find_file(file_name, path, root)
        if taken is None:
            raise solver.error(
                f'{name} "{file_name}" is not there; {where_searched(file_name, path, root)}', line
            )
        nets.append(read_net(taken))
        report.became(solver, name, f"{taken}, from {folder}")
    return nets


def find_file(name: str, prototxt: str | Path, root: str) -> tuple[Path | None, str]:
    """Return a file that a prototxt names, and the folder it is relative to; None if it is missing.

    Caffe's paths are relative to the folder where it is started, usually Caffe's root. So the
    folders above the prototxt are searched, too.
    """
    for folder in folders(prototxt, root):
        path = os.path.expanduser(os.path.join(folder, name))
        if os.path.exists(path):  # it also accepts invalid paths
            return Path(path), folder
    return None, ""


def folders(prototxt: str | Path, root: str) -> list[str]:
    if root:
        return [root]
    folder = Path(os.path.abspath(prototxt)).parent
    searched = [".", os.path.relpath(folder), *map(str, folder.parents)]
    here = os.getcwd()
    return [
        place for place in dict.fromkeys(searched) if place == "." or os.path.abspath(place) != here
    ]


def where_searched(name: str, prototxt: str | Path, root: str) -> str:
    folder = Path(os.path.abspath(prototxt)).parent
    if os.path.isabs(name):
        return "expected a file there"
    if root:
        return f"looked in {option('root')} {root}"
    places = ", ".join(map(str, dict.fromkeys((Path.cwd(), folder))))
    return f"looked in {places} and each folder above; {option('root')} says another"


def _joined(train: NetFile, test: NetFile, states: dict[str, SolverStages]) -> NetFile:
    layers = [
        _only_in(phase, layer)
        for phase, of in (("TRAIN", train), ("TEST", test))
        for layer in _layers(of, phase, states)
    ]
    return _of_layers(train, layers)


def _resolved(file: NetFile, states: dict[str, SolverStages], report: Report) -> NetFile:
    """Return the net with the layers that the solver's stages and levels select, if it has any."""
    if all(state == SolverStages() for state in states.values()):
        return file
    report.changed.append(
        file.note(
            "net.prototxt has the layers that the solver's stages and levels choose, without these"
        )
    )
    chosen = {phase: set(map(id, _layers(file, phase, states))) for phase in PHASES}
    layers = []
    for layer in file.net.messages("layer"):
        phases = [phase for phase in PHASES if id(layer) in chosen[phase]]
        if phases == [*PHASES]:
            layers.append(layer.changed(RULES))
        else:
            layers += [_only_in(phase, layer) for phase in phases]
    return _of_layers(file, layers)


def _layers(file: NetFile, phase: str, states: dict[str, SolverStages]) -> list[Message]:
    state = states.get(phase, SolverStages())
    return layers_of(file.net, phase, state.stages, state.level)


def _of_layers(file: NetFile, layers: Sequence[Message]) -> NetFile:
    fields = [Field("layer", layer, layer.line) for layer in layers]
    net = Message(fields, file.net.line, str(file.path))
    return replace(file, net=net, content=as_text(net).encode())


RULES = ("include", "exclude")


def _only_in(phase: str, layer: Message) -> Message:
    rule = Message([Field("phase", Word(phase), layer.line)], layer.line, layer.where)
    return layer.changed(RULES, [Field("include", rule, layer.line)])


FILES = ("source", "mean_file")


@dataclass(frozen=True)
class NetSamples:
    batch_size: int
    """Caffe's batch size of TRAIN per GPU; 0 if the file states none."""
    test_batch_size: int
    input: str
    """The network's input: the first top of the first data layer."""
    shapes: dict[str, Shape]
    """The known shapes of the sample blobs, without the batch."""
    root: str
    """The folder to which the data's paths are relative; empty if it is not needed."""
    are_named: bool
    """Whether data layers name the data to train on."""


def sources_of(layers: Iterable[Message]) -> list[Message]:
    return [
        layer
        for layer in layers
        if not layer.has("bottom") and layer.has("top") and layer.text("type") not in LAYERS
    ]


def read_samples(file: NetFile, root: str, given: Shape, report: Report) -> NetSamples:
    """Read both phases' samples. Raises CaffeError on an invalid data layer or unknown shape."""
    path, net = str(file.path), file.net
    sources = {phase: sources_of(layers) for phase, layers in file.phases.items()}
    first = (sources["TRAIN"] or sources["TEST"])[:1]
    if not first:
        raise CaffeError(f"{path}: no layer gives samples; expected a data layer, or Input")
    blob = first[0].texts("top")[0]
    unread: list[str] = []
    can_be_read = {phase: _can_read(layers, report, unread) for phase, layers in sources.items()}
    are_named = can_be_read["TRAIN"]
    files, missing = _find_files(path, sources, root, report)
    shapes = _guessed(sources)
    if are_named and not missing:
        try:
            shapes |= _of_data(path, files, net, sources["TRAIN"])
        except CaffeError:
            raise
        except (DataError, RecipeError) as error:
            missing = [f"the data cannot be read: {error}"]
            report.needs(sources["TRAIN"][0], "type", missing[0])
    elif first[0].text("type") != "Input" and not given:
        _report_guess(first[0], shapes, report)
    if given:
        shapes[blob] = given
    if blob not in shapes:
        why = next(iter([*missing, *unread]), "nothing says it")
        raise first[0].error(
            f"the shape of the samples is not known: {why}; {option('input_shape')}, as "
            "1x28x28, says it, too"
        )
    train, test = (_batch_size(sources[phase]) for phase in ("TRAIN", "TEST"))
    return NetSamples(train, test or train, blob, shapes, files, are_named)


def _batch_size(sources: Sequence[Message]) -> int:
    for layer in sources:
        for field in layer.fields:
            if isinstance(field.value, Message) and field.value.has("batch_size"):
                return max(1, field.value.integer("batch_size", 1))
        shape = shapes_of(layer)[0]
        if shape:
            return shape[0]
    return 0


def _can_read(sources: Sequence[Message], report: Report, unread: list[str]) -> bool:
    try:
        layers = data_layers(sources)
    except CaffeError as error:
        kinds = {source.text("type") for source in sources}
        if not kinds.issubset(INPUT_LAYERS):
            report.left_out.append(note_of(error))
            unread.append(str(error))
        elif kinds != {"Input"}:
            report.needed.append(note_of(error))
        return False
    for layer in layers:
        if layer.backend != "LMDB":
            report.needs(layer.layer, "type", CONVERT)
    return bool(layers)


def _find_files(path: str, sources: Phases, root: str, report: Report) -> tuple[str, list[str]]:
    folders: dict[str, None] = {}
    missing = []
    for phase, layers in sources.items():
        for param, name in _naming(layers):
            value = param.text(name)
            taken, folder = find_file(value, path, root)
            if taken is not None:
                report.became(param, name, f"{phase} {name}: {taken}")
                if not os.path.isabs(value):
                    folders.setdefault(folder)
                continue
            missing.append(
                f'{phase} {name} "{value}" is not there; {where_searched(value, path, root)}'
            )
            report.needs(param, name, f"{missing[-1]}, or --data.path when you train")
    return next(iter(folders), root), missing


def _naming(layers: Sequence[Message]) -> list[tuple[Message, str]]:
    return [
        (field.value, name)
        for layer in layers
        for field in layer.fields
        if isinstance(field.value, Message)
        for name in FILES
        if field.value.text(name)
    ]


def _guessed(sources: Phases) -> dict[str, Shape]:
    return {
        top: tuple(shape[1:])
        for layers in (sources["TEST"], sources["TRAIN"])
        for layer in layers
        for top, shape in zip(layer.texts("top"), shapes_of(layer), strict=True)
        if shape is not None
    }


def _of_data(path: str, root: str, net: Message, sources: Sequence[Message]) -> dict[str, Shape]:
    # The file at `path` may have other layers: stages select layers, or the solver has the net.
    phases = {phase: layers_of(net, phase) for phase in PHASES}
    data = open_phases(phases, DataConfig(name=f"{CAFFE}{path}", path=root))
    layout = Layout.of(data.train.batch(torch.tensor([0])))
    tops = [top for layer in sources for top in layer.texts("top")]
    leaves = tree_leaves((layout.inputs, layout.targets))
    return dict(zip(tops, (leaf.shape for leaf in leaves), strict=False))


def _report_guess(layer: Message, shapes: Mapping[str, Shape], report: Report) -> None:
    shape = shapes.get(layer.texts("top")[0])
    if shape is not None:
        report.differs(
            layer,
            "type",
            f"samples of {'x'.join(map(str, shape))}, as the layer's words allow, for the data are "
            f"not there; {option('input_shape')} says another",
        )
