"""Converts a solver and its net to a recipe, and writes the folder of an import."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from firecaffe.caffe import text
from firecaffe.caffe.graph import layers_of
from firecaffe.caffe.message import CaffeError, Message
from firecaffe.data.datasets import GIVEN
from firecaffe.errors import RecipeError, RunError
from firecaffe.files import replace_together
from firecaffe.from_caffe import Report, net_settings, nets
from firecaffe.from_caffe.net_settings import NetSettings
from firecaffe.from_caffe.nets import NetFile, NetSamples
from firecaffe.from_caffe.solver import TrainSettings, read_training, read_update
from firecaffe.recipe.checked_recipe import check_recipe, recipe_from
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.training.given_parts import ABOUT, NOTHING, About
from firecaffe.user_code import CAFFE

NET, WEIGHTS = "net.prototxt", "weights.safetensors"

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ImportRequest:
    folder: str
    root: str = ""
    """The folder to which paths in the files are relative; if empty, paths are searched."""
    input_shape: tuple[int, ...] = ()
    """The shape of one sample; if empty, that of the data or the net."""
    weights: str = ""


@dataclass(frozen=True)
class Imported:
    """The result of an import: file contents, empty if a file is not needed."""

    sections: Sections
    """The settings of the recipe, by section."""
    net: bytes
    solver: bytes
    weights: bytes
    report: Report

    @property
    def recipe(self) -> Recipe:
        return recipe_from(self.sections)


def read(path: Path, asked: ImportRequest) -> Imported:
    """Convert the file of a solver or net. Raises CaffeError (one line with place) or DataError."""
    message, report = text.read(path), Report()
    if nets.is_net(message):
        return _net_alone(nets.read_net(path), asked, report)
    around = read_training(message, report)
    update = read_update(message, around.iter_size, report)
    file = nets.find_net(message, path, asked.root, around.states, report)
    net = _net(file, asked, "weight_decay" in update, report)
    sections = _sections(asked, net, report)
    sections["train"] = _batch(net, around.iter_size, report) | around.words["train"]
    sections["solver"] = update | net.described.solver
    sections["checkpoint"] = around.words["checkpoint"]
    _report_tests(message, around, net.samples, report)
    weights = _weights(net, asked.weights or _named_weights(message, path, asked.root), report)
    _report_unread(message, report)
    _finish(sections, asked, bool(weights), message)
    return Imported(sections, file.content, path.read_bytes(), weights, report)


def _net_alone(file: NetFile, asked: ImportRequest, report: Report) -> Imported:
    net = _net(file, asked, False, report)
    sections = _sections(asked, net, report)
    if net.samples.batch_size and net.described.losses:
        sections["train"] = _batch(net, 1, report)
    sections["solver"] = net.described.solver
    report.changed.append(
        file.note("there is no solver: the rate and the length are a recipe's defaults")
    )
    weights = _weights(net, asked.weights, report)
    _finish(sections, asked, bool(weights), file.net)
    return Imported(sections, file.content, b"", weights, report)


@dataclass(frozen=True)
class _Net:
    file: NetFile
    samples: NetSamples
    described: NetSettings


def _net(file: NetFile, asked: ImportRequest, has_decay: bool, report: Report) -> _Net:
    report.changed += file.upgrades
    for phase, layers in file.phases.items():
        if layers != layers_of(file.net, phase):
            notes = report.needed if phase == "TRAIN" else report.changed
            what = f"{phase} has no data layer, so the network is the other phase's in both"
            notes.append(file.note(what))
    samples = nets.read_samples(file, asked.root, asked.input_shape, report)
    described = net_settings.describe(file, samples, has_decay, report)
    what = f"{described.num_parameters:,} parameters"
    if described.losses:
        losses = [f"{blob} (weight {weight:g})" for blob, weight in described.losses.items()]
        what += f"; losses {', '.join(losses)}"
    report.understood.append(file.note(what))
    _report_multipliers(file, described, report)
    return _Net(file, samples, described)


def _report_multipliers(file: NetFile, described: NetSettings, report: Report) -> None:
    for word, patterns in described.solver.items():
        listed = ", ".join(f"{pattern} {value:g}" for pattern, value in patterns.items())
        report.understood.append(file.note(f"solver.{word}: {listed}"))
    if described.freeze:
        listed = ", ".join(described.freeze)
        report.understood.append(file.note(f"lr_mult 0 is model.freeze: {listed}"))


def _sections(asked: ImportRequest, net: _Net, report: Report) -> Sections:
    name, samples, described = f"{CAFFE}{asked.folder}/{NET}", net.samples, net.described
    shape = samples.shapes[samples.input]
    model: dict[str, Any] = {"name": name, "args": {"input_CHW": list(shape)}}
    if described.freeze:
        model["freeze"] = described.freeze
    sections: Sections = {"model": model, "data": {"name": GIVEN}, "task": {}, "train": {}}
    if samples.are_named:
        sections["data"] = {"name": name} | ({"path": samples.root} if samples.root else {})
    else:
        what = "no data layer that can be read: say --data.name when you train or evaluate"
        report.needed.append(net.file.note(what))
    if described.losses:
        sections["task"] = {"name": name}
    elif described.softmax:
        what = f"the task takes the values before Softmax {described.softmax!r}, and applies it"
        report.changed.append(net.file.note(what))
    else:
        what = (
            "no loss: task.name is classification, which takes values before a softmax; say "
            "another one if that is not what comes out"
        )
        report.needed.append(net.file.note(what))
    return sections


def _batch(net: _Net, iter_size: int, report: Report) -> dict[str, int]:
    if not net.samples.batch_size:
        what = "no data layer says a batch_size; say --train.global_batch_size when you train"
        report.needed.append(net.file.note(what))
        return {}
    batch, mixing = net.samples.batch_size, net.described.mixing
    whole, micro = batch * iter_size, net_settings.micro_batch_of(batch, mixing)
    what = f"batch_size {batch}"
    if iter_size > 1:
        what += f" times iter_size {iter_size}"
    what += (
        f" is train.global_batch_size {whole}, over all workers; Caffe's is one GPU's, and grows "
        f"with them. train.micro_batch_size {micro}"
    )
    what += f": {mixing}" if mixing else ""
    report.understood.append(net.file.note(what))
    return {
        "global_batch_size": whole,
        "micro_batch_size": micro,
        "eval_batch_size": net.samples.test_batch_size,
    }


def _report_tests(
    solver: Message, around: TrainSettings, samples: NetSamples, report: Report
) -> None:
    for count in around.test_iter[:1]:
        seen = count * samples.test_batch_size
        report.differs(
            solver,
            "test_iter",
            f"{count} batches of {samples.test_batch_size} are {seen:,} samples; here every test "
            "goes once through all of them",
        )
    if len(around.test_iter) > 1:
        report.lacks(solver, "test_iter", "several nets to test; one is tested")


def _named_weights(solver: Message, path: Path, root: str) -> str:
    names = solver.texts("weights")
    if not names:
        return ""
    line = solver.line_of("weights")
    if len(names) > 1:
        raise solver.error(f"{len(names)} weights; expected one file, or {option('weights')}", line)
    taken, _ = nets.find_file(names[0], path, root)
    if taken is None:
        where = nets.where_searched(names[0], path, root)
        raise solver.error(f'weights "{names[0]}" is not there; {where}', line)
    return str(taken)


def _weights(net: _Net, file: str, report: Report) -> bytes:
    if not file:
        return b""
    built = net_settings.nets_of(net.file, net.samples, Report())
    return net_settings.first_weights(next(iter(built.values())), Path(file), report)


def _report_unread(solver: Message, report: Report) -> None:
    for name, line in solver.unread():
        if "net_param." not in name:
            report.add_unread(solver, line, name)


def _finish(sections: Sections, asked: ImportRequest, has_weights: bool, file: Message) -> None:
    if has_weights:
        sections["model"]["weights"] = f"{asked.folder}/{WEIGHTS}"
    try:
        check_recipe(recipe_from(sections))
    except CaffeError:
        raise
    except RecipeError as error:
        place = file.place(str(error).partition(" ")[0].rpartition(".")[2])
        raise CaffeError(f"{place}: {error}") from error


RECIPE, SOLVER, REPORT = "recipe.toml", "solver.prototxt", "report.md"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise RunError if the folder is a file, or has files that must not be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{option('out')} {folder}: is a file; expected a folder, or a new name")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise RunError(
            f"{option('out')} {folder}: is there already; {option('overwrite')} writes over its "
            "files"
        )


def files_of(imported: Imported, source: Path) -> dict[str, bytes]:
    """Return the folder's files by name, the recipe last. `source`: the imported file."""
    comment = f"From {source.name} by firecaffe import; {REPORT} says what became of each word."
    report = imported.report.markdown(source.name)
    files = {
        NET: imported.net,
        SOLVER: imported.solver,
        WEIGHTS: imported.weights,
        ABOUT: json.dumps(asdict(_about(imported)), indent=2).encode(),
        REPORT: report.encode(),
        RECIPE: as_toml(imported.sections, comment).encode(),
    }
    return {name: content for name, content in files.items() if content}


def _about(imported: Imported) -> About:
    shape = tuple(imported.sections["model"]["args"]["input_CHW"])
    return replace(NOTHING, input_shape=shape, input_dtype="float32")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name: all of them, or none. Raises OSError."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with replace_together([folder / name for name in files]) as asides:
            for aside, content in zip(asides, files.values(), strict=True):
                aside.write_bytes(content)
    except BaseException:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise


def as_toml(sections: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    parts = [f"# {line}" for line in comment.splitlines()]
    for section, settings in sections.items():
        if settings:
            parts += ["", f"[{section}]"]
            parts += [f"{word} = {_value(value)}" for word, value in settings.items()]
    return "\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else json.dumps(key, ensure_ascii=False)
