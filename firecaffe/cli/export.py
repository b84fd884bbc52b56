"""`firecaffe export RUN --to FORMAT`: write a run's network as a file for other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.cli.arguments import Parser
from firecaffe.cli.console import check_target
from firecaffe.errors import RecipeError
from firecaffe.user_code import caffe_file, is_caffe

if TYPE_CHECKING:
    from torch import Tensor

    from firecaffe.cli.typed_run import OfRun
    from firecaffe.training.run_facts import About


def make_parser() -> Parser:
    parser = Parser(
        "export",
        "RUN --to safetensors|onnx|torch_export|caffemodel [--best] [--out FILE] [--overwrite]",
        "A run's network as a file for other programs, compared with the network before it has "
        "its name.",
        takes_recipe=True,
    )
    add = parser.add
    add(
        "--to",
        choices=["safetensors", "onnx", "torch_export", "caffemodel"],
        default=None,
        help="weights alone, the whole network, or files for Caffe",
    )
    parser.add_best()
    parser.add_trust()
    add("--out", type=str, default="", metavar="FILE", help="else model.SUFFIX in the run's folder")
    parser.add_overwrite()
    return parser


SAMPLES = 8
"""Number of samples on which the file and the network are compared."""


def main(argv: list[str]) -> int:
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.training.export_file import FORMATS, check_installed
    from firecaffe.training.load import load_run
    from firecaffe.training.named import check_named
    from firecaffe.training.prediction import AS_PREDICTED, meaning
    from firecaffe.training.records import say

    typed = parse_run(make_parser(), argv)
    options = typed.options
    if not options.to:
        raise RecipeError(f"--to says the format: {', '.join(FORMATS)}")
    form = FORMATS[options.to]
    check_installed(options.to)
    path = Path(options.out) if options.out else _beside(typed.where, form.suffix)
    check_target("--out", str(path), options.overwrite, (form.suffix,))
    if form.beside:
        beside = path.with_suffix(form.beside)
        _check_not_its_net(beside, typed.recipe.model.name)
        check_target("--out", str(beside), options.overwrite)
    check_named(typed.where, typed.recipe, ("model",))
    trained = load_run(typed.where, best=options.best, recipe=typed.recipe)
    for note in trained.notes:
        print(f"warning: {note}", file=sys.stderr)
    inputs = _inputs(typed, trained.about) if form.takes_inputs else None
    written = form.write(trained.model, inputs, path)
    which = "moving average" if trained.evaluated == "ema" else "weights"
    of = typed.where if trained.step is None else f"step {trained.step}"
    say(f"{path}: {which} of {of}; {written.compared}")
    if form.takes_inputs:
        means = meaning(typed.recipe.task.name)
        say(f"outputs: {AS_PREDICTED.get(means, 'as the network gives them')}")
    return 0


def _beside(where: Path, suffix: str) -> Path:
    from firecaffe.training.coded import is_coded
    from firecaffe.training.load import run_of

    if is_coded(where):
        return where.with_suffix(suffix)
    return (run_of(where) or where) / f"model{suffix}"


def _check_not_its_net(path: Path, name: str) -> None:
    """Raise RecipeError if the file would overwrite the prototxt of the network called `name`."""
    if is_caffe(name) and path.exists() and path.samefile(caffe_file("model.name", name)):
        raise RecipeError(
            f"--to caffemodel writes {path} too, and that is the network's own prototxt; give the "
            "files another name by --out"
        )


def _inputs(typed: OfRun, about: About) -> Tensor:
    """Return the first test samples, or random inputs if the run's data were given in Python."""
    import torch
    from torch import Tensor

    from firecaffe.data import eval_batches, open_test
    from firecaffe.data.datasets import GIVEN
    from firecaffe.training.records import say

    config = typed.recipe.data
    if config.name == GIVEN:
        if not about.input_shape:
            raise RecipeError(
                "the run's data were given in Python, and its inputs are no one tensor; "
                "--data.name names data to compare on"
            )
        say("note: the run's data were given in Python; compared on random inputs of their shape")
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, about.input_dtype)
        if not dtype.is_floating_point:
            return torch.zeros(SAMPLES, *about.input_shape, dtype=dtype)
        return torch.randn(SAMPLES, *about.input_shape, generator=generator, dtype=dtype)
    test = open_test(config).test
    _, inputs, _ = next(iter(eval_batches(test, min(SAMPLES, len(test)), 0, 1, config=config)))
    if not isinstance(inputs, Tensor):
        raise RecipeError(
            f"--to {typed.options.to}: the network takes inputs of several tensors; expected one "
            "(--to safetensors writes the weights of any)"
        )
    return inputs.contiguous()
