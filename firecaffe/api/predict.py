"""`firecaffe.predict`: the predictions of a run's network for images, or for its test samples."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from firecaffe.api.answer import Answer, check_target
from firecaffe.api.argument_checks import check_count, paths_of
from firecaffe.api.run_argument import RunInUse, open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.process_settings import alone_in_process
from firecaffe.cluster.world import World, join
from firecaffe.data import open_test
from firecaffe.errors import DataError, RecipeError
from firecaffe.files import finite, write_atomically
from firecaffe.resume_advice import option
from firecaffe.training.forward import arithmetic
from firecaffe.training.load import Trained, load_run
from firecaffe.training.named import check_named
from firecaffe.training.prediction import (
    Prediction,
    list_files,
    meaning,
    of_files,
    of_samples,
    predictions,
    reader_of,
)

MOST_CLASSES = 256
"""Most classes of a mask: a gray PNG has eight bits."""

Row = dict[str, str | float]


@dataclass(frozen=True, repr=False)
class Predicted(Answer):
    """The predictions of a run's network, in the order of the images."""

    rows: list[Row]
    """A row for each image: its name in `sample`, then classes and probabilities, values, or the
    path of its mask."""
    lines: list[str]
    """A line for each image, as it is printed."""
    broken: list[str]
    """A line for each image that could not be read."""
    skipped: list[str]
    """Lines about files that are no images."""
    notes: Sequence[str]
    """Lines about newer checkpoints that are damaged."""

    def to_dict(self) -> list[Row]:
        """Return the rows."""
        rows: list[Row] = finite(self.rows)
        return rows

    def to_csv(self) -> str:
        """Return the rows as a table, with a line of headers."""
        text = io.StringIO()
        if self.rows:
            table = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(self.rows)
        return text.getvalue()

    def _parts(self) -> Iterator[str]:
        yield from self.lines
        yield from self.broken


@from_script
def predict(
    run: str | Path,
    images: str | Path | Sequence[str | Path] | None = None,
    *,
    best: bool = False,
    trust_code: bool = False,
    top: int = 5,
    csv: str | Path = "",
    out: str | Path = "",
    overwrite: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> Predicted:
    """Predict with a run's network: for images, or without any for the run's test samples.

    Args:
        run: A run's folder, a checkpoint in it, or a .fcz file.
        images: Images, .npy files of samples, and folders of them; None for the test samples.
        best: Take the best checkpoint, not the newest.
        trust_code: Run code that the folder or the file names.
        top: The number of classes of each image.
        csv: A file for the table of all rows.
        out: The folder for masks of a segmentation.
        overwrite: Replace the file of `csv` if it exists.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Images that cannot be read are left out, and named in the answer's `broken`. Raises:
    RecipeError, RunError, CheckpointError; DataError, also if no image can be read.
    """
    check_alone("predict")
    used = open_run(run, replace, trust_code)
    check_count("top", top, 1)
    check_target(option("csv"), str(csv), overwrite)
    masks = _mask_folder(meaning(used.recipe.task.name), out)
    paths = _paths(images)
    check_named(used.where, used.recipe, ("model",) if paths else ("model", "data"))
    exchange = used.recipe.exchange
    with (
        alone_in_process("predict"),
        join(used.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world,
        arithmetic(used.recipe.train, world.device),
    ):
        trained = load_run(used.where, best=best, recipe=used.recipe)
        answer = _predict(used, trained, paths, masks, top, world)
    if csv:
        write_atomically(Path(csv), answer.to_csv())
    return answer


def _predict(
    used: RunInUse,
    trained: Trained,
    files: Sequence[str],
    masks: Path | None,
    top: int,
    world: World,
) -> Predicted:
    recipe, size = used.recipe, used.recipe.train.eval_batch_size
    broken: list[DataError] = []
    skipped: list[str] = []
    if files:
        paths, skipped = list_files(files)
        read = reader_of(paths, trained.about, recipe.data)
        _check_names(paths, masks)
        batches = of_files(
            paths, read, trained.about, recipe.data, size, world.device, broken.append
        )
    else:
        batches = of_samples(open_test(recipe.data).test, recipe.data, size, world.device)
    names, rows, lines = trained.about.class_names, [], []
    model = trained.model.to(world.device)
    for prediction in predictions(model, recipe, batches, world.device):
        rows.append(_row(prediction, names, top, masks))
        lines.append(_line(prediction, rows[-1], names, top))
    if broken and not rows:
        more = f" (and {len(broken) - 1} more that cannot be read)" if len(broken) > 1 else ""
        raise DataError(f"{broken[0]}{more}")
    return Predicted(rows, lines, [str(error) for error in broken], skipped, trained.notes)


def _paths(images: Any) -> list[str]:
    if images is None:
        return []
    paths = [str(path) for path in paths_of("images", images)]
    if not paths:
        raise RecipeError(
            "images is empty; expected a path, or several; leave it out for the run's test samples"
        )
    return paths


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
        shares = enumerate(prediction.probabilities)
        return f"{prediction.sample}  " + ", ".join(f"{_name(k, names)} {p:.2%}" for k, p in shares)
    return "  ".join(
        f"{value:.4g}" if isinstance(value, float) else value for value in row.values()
    )


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)


def _mask_folder(task: str, out: str | Path) -> Path | None:
    if task != "segmentation":
        if out:
            raise RecipeError(
                f"{option('out')} is for masks of a segmentation; this run's task is {task}"
            )
        return None
    if not out:
        raise RecipeError(
            f"the run's task is segmentation; {option('out')} says in which folder masks go"
        )
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
    most = int(mask_HW.max())
    if most >= MOST_CLASSES:
        raise DataError(f"{sample}: has class {most}; a mask has classes below {MOST_CLASSES}")
    path = folder / f"{Path(sample).stem}.png"
    Image.fromarray(mask_HW.to(torch.uint8).numpy()).save(path)
    return path
