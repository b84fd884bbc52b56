"""`firecaffe.export` and `firecaffe.unpack`: a trained network in files of other programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_target, path_of
from firecaffe.api.run_argument import RunInUse, open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.compression import fcz
from firecaffe.data import eval_batches, open_test
from firecaffe.data.datasets import GIVEN
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.files import atomic_replace
from firecaffe.resume_advice import option
from firecaffe.training.export_file import FORMATS, check_installed
from firecaffe.training.fcz_description import is_coded
from firecaffe.training.given_parts import About
from firecaffe.training.load import run_of
from firecaffe.training.prediction import OUTPUT_NOTES, meaning
from firecaffe.training.tensor_file import write_tensors
from firecaffe.transport.collect import Whole
from firecaffe.user_code import caffe_file, is_caffe

SAMPLES = 8
"""Number of samples on which the file and the network are compared."""


@dataclass(frozen=True, repr=False)
class Exported(Answer):
    """A file with a run's network, and how it was compared with the network."""

    path: str
    """The file."""
    evaluated: str
    """The weights: "weights", or "ema", their moving average."""
    step: int | None
    """The step of the weights; None for a file."""
    run: str
    """The run, as it was given."""
    compared: str
    """Describes what the file was compared with, and by how much it differed."""
    outputs: str
    """The network's outputs, in words; empty if the file has weights alone."""
    inputs: str
    """A note on the inputs, if the network was compared on random ones."""
    notes: Sequence[str]
    """Lines about newer checkpoints that are damaged."""

    def to_dict(self) -> dict[str, Any]:
        """Return the file's path and what is known about the file."""
        return {name: value for name, value in asdict(self).items() if name != "notes"}

    def _parts(self) -> Iterator[str]:
        which = "moving average" if self.evaluated == "ema" else "weights"
        of = self.run if self.step is None else f"step {self.step}"
        if self.inputs:
            yield f"note: {self.inputs}"
        yield f"{self.path}: {which} of {of}; {self.compared}"
        if self.outputs:
            yield f"outputs: {self.outputs}"


@from_script
def export(
    run: str | Path,
    to: str,
    *,
    best: bool = False,
    trust_code: bool = False,
    out: str | Path = "",
    overwrite: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a run's network as a file for other programs, and compare it with the network.

    Args:
        run: A run's folder, a checkpoint in it, or a .fcz file.
        to: The format: safetensors (weights alone), onnx, torch_export, or caffemodel.
        best: Take the best checkpoint, not the newest.
        trust_code: Run code that the folder or the file names.
        out: The file; without it, model.SUFFIX in the run's folder.
        overwrite: Replace the file if it exists.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: RecipeError, RunError, DataError, CheckpointError; NotIdenticalError if the file gives
    other outputs than the network; then the file is not written.
    """
    used = open_run(run, replace, trust_code)
    if not isinstance(to, str) or to not in FORMATS:
        what = f" is {to!r}; it must be one of" if to else " says the format:"
        raise RecipeError(f"{option('to')}{what} {', '.join(FORMATS)}")
    form, where, recipe = FORMATS[to], used.where, used.recipe
    check_installed(to)
    path = path_of("out", out) if str(out) else _beside(where, form.suffix)
    check_target(option("out"), str(path), overwrite, (form.suffix,))
    if form.beside:
        beside = path.with_suffix(form.beside)
        _check_not_its_net(beside, recipe.model.name)
        check_target(option("out"), str(beside), overwrite)
    used.check_named(["model"])
    trained = used.load(best)
    inputs, note = _inputs(used, to, trained.about) if form.takes_inputs else (None, "")
    written = form.write(trained.model, inputs, path)
    meant = OUTPUT_NOTES.get(meaning(recipe.task.name), "as the network gives them")
    return Exported(
        path=str(path),
        evaluated=trained.evaluated,
        step=trained.step,
        run=str(where),
        compared=written.compared,
        outputs=meant if form.takes_inputs else "",
        inputs=note,
        notes=trained.notes,
    )


def _beside(where: Path, suffix: str) -> Path:
    if is_coded(where):
        return where.with_suffix(suffix)
    return (run_of(where) or where) / f"model{suffix}"


def _check_not_its_net(path: Path, name: str) -> None:
    if is_caffe(name) and path.exists() and path.samefile(caffe_file("model.name", name)):
        raise RecipeError(
            f"caffemodel writes {path} too, and that is the network's own prototxt; give the files "
            f"another name by {option('out')}"
        )


def _inputs(used: RunInUse, to: str, about: About) -> tuple[Tensor, str]:
    """Return the first test samples; random inputs and a note if data were given in Python."""
    config = used.recipe.data
    if config.name == GIVEN:
        if not about.input_shape:
            raise RecipeError(
                "the run's data were given in Python, and its inputs are no one tensor; "
                "data.name names data to compare on"
            )
        note = "the run's data were given in Python; compared on random inputs of their shape"
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, about.input_dtype)
        if not dtype.is_floating_point:
            return torch.zeros(SAMPLES, *about.input_shape, dtype=dtype), note
        return torch.randn(SAMPLES, *about.input_shape, generator=generator, dtype=dtype), note
    test = open_test(config).test
    _, inputs, _ = next(iter(eval_batches(test, min(SAMPLES, len(test)), 0, 1, config=config)))
    if not isinstance(inputs, Tensor):
        raise RecipeError(
            f"{option('to')} {to}: the network takes inputs of several tensors; expected one "
            "(safetensors writes the weights of any)"
        )
    return inputs.contiguous(), ""


METADATA = "__metadata__"
"""The entry that safetensors reads as metadata of the file, and not as a tensor."""


def write_unpacked(file: fcz.FczFile, target: Path) -> None:
    """Write all tensors. The file is never seen in part under its final name.

    Raises: CheckpointError if the .fcz file is damaged, or safetensors cannot have a tensor;
    OSError.
    """
    if any(outline.name == METADATA for outline in file.outlines):
        raise CheckpointError(f"{target}: safetensors cannot have a tensor called {METADATA}")
    listed = [
        Whole(outline.name, outline.shape, getattr(torch, outline.dtype), ())
        for outline in file.outlines
    ]
    with atomic_replace(target) as aside:
        problem = write_tensors(aside, listed, _decoded(file))
        if problem is not None:
            raise problem


def _decoded(file: fcz.FczFile) -> Iterator[tuple[str, Tensor]]:
    for name, array in file.tensors():
        yield name, torch.from_numpy(array)
        del array  # free it before the next one is decoded


@dataclass(frozen=True, repr=False)
class Unpacked(Answer):
    """A file of weights, and what the .fcz file says about its network."""

    path: Path
    """The file of weights."""
    tensors: int
    """The number of tensors."""
    bytes: int
    """The bytes of the file of weights."""
    coded_bytes: int
    """The bytes of the .fcz file."""
    network: dict[str, Any]
    """The facts about the network in the .fcz file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {**self.__dict__, "path": str(self.path)}

    def _parts(self) -> Iterator[str]:
        yield (
            f"{self.path}: {self.tensors} tensors, {self.bytes:,} bytes; as .fcz "
            f"{self.coded_bytes:,}"
        )
        yield f"network: {json.dumps(self.network)}"


@from_script
def unpack(file: str | Path, *, to: str | Path = "", overwrite: bool = False) -> Unpacked:
    """Write the weights of a .fcz file as safetensors, bit for bit. No code of the file is run.

    Args:
        file: The .fcz file.
        to: The file to write; else the same name with .safetensors.
        overwrite: Write over a file that exists.

    Raises: RecipeError for a wrong argument; RunError; CheckpointError for a damaged file.
    """
    path = path_of("file", file)
    target = path.with_suffix(".safetensors") if to == "" else path_of("to", to)
    with fcz.read(path) as opened:
        check_target(option("to"), str(target), overwrite, (".safetensors",))
        write_unpacked(opened, target)
        network, count = dict(opened.network), len(opened.outlines)
    return Unpacked(target, count, target.stat().st_size, path.stat().st_size, network)
