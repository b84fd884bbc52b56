"""`firecaffe predict RUN IMAGES…`: the predictions of a run's network for images."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.cli.arguments import Parser
from firecaffe.cli.console import check_target
from firecaffe.errors import DataError, RecipeError
from firecaffe.files import write_atomically

if TYPE_CHECKING:
    import torch

    from firecaffe.training.prediction import Prediction


def make_parser() -> Parser:
    parser = Parser(
        "predict",
        "RUN [IMAGE|FOLDER …] [--best] [--top 5] [--csv FILE|-] [--out FOLDER] [--overwrite]",
        "What a run's network says of images, or, without any, of the run's test samples.",
        takes_recipe=True,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--top", type=int, default=5, metavar="K", help="classes of each image")
    add("--csv", type=str, default="", metavar="FILE", help="a table of all; -: printed")
    add("--out", type=str, default="", metavar="FOLDER", help="for masks of a segmentation")
    parser.add_overwrite()
    return parser


MOST_CLASSES = 256
"""Most classes of a mask: a gray PNG has eight bits."""


def main(argv: list[str]) -> int:
    from firecaffe.cli.launched import check_alone
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.world import join
    from firecaffe.data import open_test
    from firecaffe.training.forward import arithmetic
    from firecaffe.training.load import load_run
    from firecaffe.training.named import check_named
    from firecaffe.training.prediction import (
        list_files,
        meaning,
        of_files,
        of_samples,
        predictions,
        reader_of,
    )

    check_alone("predict")
    typed = parse_run(make_parser(), argv, takes_files=True)
    options, recipe = typed.options, typed.recipe
    if options.top < 1:
        raise RecipeError(f"--top is {options.top}; it must be at least 1")
    check_target("--csv", "" if options.csv == "-" else options.csv, options.overwrite)
    masks = _mask_folder(meaning(recipe.task.name), options.out)
    check_named(typed.where, recipe, ("model",) if typed.others else ("model", "data"))
    broken: list[DataError] = []
    exchange = recipe.exchange
    with (
        join(recipe.train.device, exchange.timeout_s, exchange.silent_s) as world,
        arithmetic(recipe.train, world.device),
    ):
        trained = load_run(typed.where, best=options.best, recipe=recipe)
        for note in trained.notes:
            print(f"warning: {note}", file=sys.stderr)
        size = recipe.train.eval_batch_size
        if typed.others:
            paths, notes = list_files(typed.others)
            read = reader_of(paths, trained.about, recipe.data)
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
            _check_names(paths, masks)
            told = read, trained.about, recipe.data, size, world.device
            batches = of_files(paths, *told, _Teller(broken))
            count = len(paths)
        else:
            test = open_test(recipe.data).test
            batches = of_samples(test, recipe.data, size, world.device)
            count = len(test)
        model = trained.model.to(world.device)
        found = predictions(model, recipe, batches, world.device)
        names = trained.about.class_names
        if options.csv:
            _write((_row(each, names, options.top, masks) for each in found), options.csv)
        else:
            for each in found:
                print(_line(each, _row(each, names, options.top, masks), names, options.top))
    if broken:
        raise DataError(f"{len(broken)} of {count} images could not be read; they are named above")
    return 0


Row = dict[str, str | float]


def _row(prediction: Prediction, names: Sequence[str], top: int, masks: Path | None) -> Row:
    row: Row = {"sample": prediction.sample}
    if prediction.mask_HW is not None and masks is not None:
        row["mask"] = str(_write_mask(prediction.sample, prediction.mask_HW, masks))
    elif prediction.classes:
        best = list(zip(prediction.classes, prediction.probabilities, strict=True))[:top]
        for place, (label, probability) in enumerate(best, 1):
            row[f"class_{place}"] = _name(label, names)
            row[f"probability_{place}"] = probability
    elif prediction.probabilities:
        for label, probability in enumerate(prediction.probabilities):
            row[_name(label, names)] = probability
    else:
        row |= {f"value_{place}": value for place, value in enumerate(prediction.values, 1)}
    return row


def _line(prediction: Prediction, row: Row, names: Sequence[str], top: int) -> str:
    if prediction.classes:
        best = list(zip(prediction.classes, prediction.probabilities, strict=True))[:top]
        return f"{prediction.sample}  " + ", ".join(f"{_name(k, names)} {p:.2%}" for k, p in best)
    if prediction.probabilities:
        best = list(enumerate(prediction.probabilities))
        return f"{prediction.sample}  " + ", ".join(f"{_name(k, names)} {p:.2%}" for k, p in best)
    return "  ".join(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row.values())


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)


def _write(rows: Iterable[Row], target: str) -> None:
    text = io.StringIO()
    table: csv.DictWriter[str] | None = None
    for row in rows:
        if table is None:
            table = csv.DictWriter(text, list(row), lineterminator="\n")
            table.writeheader()
        table.writerow(row)
    if target == "-":
        print(text.getvalue(), end="")
    else:
        write_atomically(Path(target), text.getvalue())


class _Teller:
    def __init__(self, broken: list[DataError]) -> None:
        self._broken = broken

    def __call__(self, error: DataError) -> None:
        self._broken.append(error)
        print(error, file=sys.stderr)


def _mask_folder(task: str, out: str) -> Path | None:
    if task != "segmentation":
        if out:
            raise RecipeError(f"--out is for masks of a segmentation; this run's task is {task}")
        return None
    if not out:
        raise RecipeError("the run's task is segmentation; --out FOLDER says where masks go")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_names(paths: Sequence[Path], masks: Path | None) -> None:
    seen: dict[str, Path] = {}
    for path in paths if masks is not None else ():
        if path.stem in seen:
            raise RecipeError(f"{path} and {seen[path.stem]} would have one mask, {path.stem}.png")
        seen[path.stem] = path


def _write_mask(sample: str, mask_HW: torch.Tensor, folder: Path) -> Path:
    """Write labels as a gray PNG. Raises DataError if a label is too large."""
    import torch
    from PIL import Image

    most = int(mask_HW.max())
    if most >= MOST_CLASSES:
        raise DataError(f"{sample}: has class {most}; a mask has classes below {MOST_CLASSES}")
    path = folder / f"{Path(sample).stem}.png"
    Image.fromarray(mask_HW.to(torch.uint8).numpy()).save(path)
    return path
