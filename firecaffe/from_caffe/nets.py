"""Find the net that a solver trains, as InitTrainNet and InitTestNets of Caffe's solver.cpp do."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from firecaffe.caffe import text
from firecaffe.caffe.graph import PHASES, layers_of
from firecaffe.caffe.message import Field, Message, Word
from firecaffe.caffe.text import as_text
from firecaffe.caffe.upgrade import current
from firecaffe.from_caffe.import_report import Note, Report
from firecaffe.from_caffe.solver import SolverStages

OF_A_NET = ("layer", "layers", "input")

OF_A_SOLVER = ("base_lr", "lr_policy", "max_iter", "solver_type", "type", "solver_mode")
"""Fields of a solver, besides those that name its nets. Hardly any solver lacks them all."""

TO_TRAIN = ("net", "net_param", "train_net", "train_net_param")
"""The fields that may name the net to train. A solver has exactly one of them."""

TO_TEST = ("test_net", "test_net_param")

MOST_NAMED = 4


@dataclass(frozen=True)
class NetFile:
    """A net in today's form, and the content of its file in the imported folder."""

    net: Message
    content: bytes
    path: Path
    """The file with the net: its own, or the solver's."""
    upgrades: list[str]


def is_net(message: Message) -> bool:
    """Whether a file is a net rather than a solver. Raises CaffeError if it is neither."""
    if any(message.has(name) for name in OF_A_NET):
        return True
    if not any(message.has(name) for name in (*OF_A_SOLVER, *TO_TRAIN, *TO_TEST)):
        names = [*dict.fromkeys(field.name for field in message.fields)]
        says = f"says {', '.join(names[:MOST_NAMED])}" if names else "says nothing"
        raise message.error(
            f"the file {says}{' …' if len(names) > MOST_NAMED else ''}; expected a solver, which "
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
    """Return a solver's net. Paths are relative to `root`; if it is empty, they are searched."""
    said = [name for name in TO_TRAIN if solver.has(name)]
    if len(said) != 1:
        described = " and ".join(said) or "none"
        raise solver.error(
            f"found {described}; expected one of {', '.join(TO_TRAIN)}, which says what to train"
        )
    train = _named(solver, said[0], path, root, report)[0]
    tests = [net for name in TO_TEST for net in _named(solver, name, path, root, report)]
    if said[0] in ("net", "net_param"):
        for name in TO_TEST:
            if solver.has(name):
                report.lacks(solver, name, "one net is tested, that of the solver's net")
        return _resolved(train, states, report)
    for name in TO_TEST:
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
                f'{name} "{file_name}" is not there; {looked_for(file_name, path, root)}', line
            )
        nets.append(read_net(taken))
        report.became(solver, name, f"{taken}, from {folder}")
    return nets


def find_file(name: str, beside: str | Path, root: str) -> tuple[Path | None, str]:
    """Return a file that a prototxt names, and the folder of its path; None if it is missing.

    Caffe's paths are relative to the folder that it is started in, usually Caffe's own root. So the
    folders above the prototxt are searched too.
    """
    for folder in folders(beside, root):
        path = os.path.expanduser(os.path.join(folder, name))
        if os.path.exists(path):  # it also accepts invalid paths
            return Path(path), folder
    return None, ""


def folders(beside: str | Path, root: str) -> list[str]:
    if root:
        return [root]
    folder = Path(os.path.abspath(beside)).parent
    searched = [".", os.path.relpath(folder), *map(str, folder.parents)]
    here = os.getcwd()
    return [
        place for place in dict.fromkeys(searched) if place == "." or os.path.abspath(place) != here
    ]


def looked_for(name: str, beside: str | Path, root: str) -> str:
    folder = Path(os.path.abspath(beside)).parent
    if os.path.isabs(name):
        return "expected a file there"
    if root:
        return f"looked in --root {root}"
    places = ", ".join(map(str, dict.fromkeys((Path.cwd(), folder))))
    return f"looked in {places} and each folder above; --root says another"


def _joined(train: NetFile, test: NetFile, states: dict[str, SolverStages]) -> NetFile:
    layers = [
        _only_in(phase, layer)
        for phase, of in (("TRAIN", train), ("TEST", test))
        for layer in _layers(of, phase, states)
    ]
    return _of_layers(train, layers)


def _resolved(file: NetFile, states: dict[str, SolverStages], report: Report) -> NetFile:
    """Return the net reduced to the layers that the solver's stages and levels choose, if any."""
    if all(state == SolverStages() for state in states.values()):
        return file
    report.changed.append(
        Note(
            str(file.path),
            "net.prototxt has the layers that the solver's stages and levels choose, without these",
        )
    )
    train, test = (_layers(file, phase, states) for phase in PHASES)
    in_both = {id(layer) for layer in train} & {id(layer) for layer in test}
    layers = []
    for message in file.net.messages("layer"):
        if id(message) in in_both:
            layers.append(_without_rules(message))
        elif any(message is other for other in (*train, *test)):
            layers.append(_only_in(PHASES[not any(message is other for other in train)], message))
    return _of_layers(file, layers)


def _layers(file: NetFile, phase: str, states: dict[str, SolverStages]) -> list[Message]:
    state = states.get(phase, SolverStages())
    return layers_of(file.net, phase, state.stages, state.level)


def _of_layers(file: NetFile, layers: Sequence[Message]) -> NetFile:
    fields = [Field("layer", layer, layer.line) for layer in layers]
    net = Message(fields, file.net.line, str(file.path))
    return replace(file, net=net, content=as_text(net).encode())


def _only_in(phase: str, layer: Message) -> Message:
    rule = Message([Field("phase", Word(phase), layer.line)], layer.line, layer.where)
    kept = _without_rules(layer).fields
    return Message([*kept, Field("include", rule, layer.line)], layer.line, layer.where)


def _without_rules(layer: Message) -> Message:
    rules = ("include", "exclude")
    kept = [field for field in layer.fields if field.name not in rules]
    return Message(kept, layer.line, layer.where)
