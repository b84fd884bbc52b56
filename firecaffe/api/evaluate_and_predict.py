"""`firecaffe.evaluate` and `firecaffe.predict`: a run's network applied to samples."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count, check_target, path_of, paths_of
from firecaffe.api.run_argument import RunInUse, open_run
from firecaffe.cluster.agree import gather_json
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.process_settings import exclusive_in_process
from firecaffe.cluster.world import World, is_launched
from firecaffe.data import open_test
from firecaffe.data.decode import replaced_note
from firecaffe.errors import DataError, RecipeError
from firecaffe.files import atomic_replace, finite, write_atomically
from firecaffe.resume_advice import option
from firecaffe.script.launch import launch
from firecaffe.training import evaluation
from firecaffe.training.checkpoint import best_step
from firecaffe.training.data_workers import data_workers
from firecaffe.training.forward import arithmetic
from firecaffe.training.load import Trained
from firecaffe.training.prediction import (
    Prediction,
    labels_of_run,
    list_files,
    meaning,
    of_files,
    of_samples,
    predictions,
    reader_of,
    task_of_run,
)
from firecaffe.training.records import in_words


@dataclass(frozen=True, repr=False)
class Evaluated(Answer):
    """The loss and metrics of a run's network on test data."""

    run: Path
    """The run, as it was given."""
    step: int | None
    """The step of the weights; None for a file."""
    evaluated: str
    """The weights: "weights", or "ema", their moving average."""
    best: bool
    """Whether the best checkpoint was asked for."""
    best_step: int | None
    """The step of the best checkpoint, if the run keeps one."""
    data: str
    """The data, in words."""
    evaluation: evaluation.Evaluation
    """The loss, the metrics and the number of samples."""
    notes: Sequence[str]
    """Lines about newer checkpoints that are damaged, and about damaged images."""

    def to_dict(self) -> dict[str, Any]:
        """Return the loss and each metric by name, with the run, the step and the data."""
        row = {
            "run": str(self.run),
            "step": self.step,
            "evaluated": self.evaluated,
            "best": self.best,
            "best_step": self.best_step,
            "data": self.data,
            **self.evaluation.row,
            "metrics": list(self.evaluation.metrics),
        }
        finite_row: dict[str, Any] = finite(row)
        return finite_row

    def _parts(self) -> Iterator[str]:
        which = " (moving average)" if self.evaluated == "ema" else ""
        at = "" if self.step is None else f" at step {self.step}"
        result = self.evaluation
        yield self.data
        yield (
            f"{self.run}  test{at}{which}: {in_words(result.metrics, result.shares)}"
            f"loss {result.loss:.4f} ({result.samples:,} samples)"
        )
        if self.best_step is None or self.step is None:
            return
        if self.best:
            yield (
                "these weights were the best on the validation samples; without "
                f"{option('best')} it takes the newest"
            )
        elif self.best_step != self.step:
            yield (
                f"these weights are the newest; {option('best')} takes those that were the best "
                f"on the validation samples, of step {self.best_step}"
            )


@from_script
def evaluate(
    run: str | Path,
    *,
    best: bool = False,
    trust_code: bool = False,
    nproc_per_node: int = 1,
    replace: Mapping[str, Any] | None = None,
) -> Evaluated:
    """Evaluate a run's network on its test data, or on other data.

    Args:
        run: A run's folder, a checkpoint in it, or a .fcz file.
        best: Take the best checkpoint, not the newest.
        trust_code: Run code that the folder or the file names.
        nproc_per_node: The number of processes to start on this host. In a launcher's world, each
            rank calls it and gets the same answer.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: RecipeError, RunError, DataError, CheckpointError; what ends a process that was started
    is a RankFailedError.
    """
    used = open_run(run, replace, trust_code)
    check_count("nproc_per_node", nproc_per_node, 1)
    if is_launched() or nproc_per_node == 1:
        return _evaluate(used, best)
    # Check before any rank is started, so that a mistake is reported once.
    used.check_named()
    trained = used.load(best)
    data = open_test(used.recipe.data)
    data.test.batch(torch.tensor([0]))
    task_of_run(trained.about, used.recipe, data)
    labels_of_run(trained.about, data, used.recipe.data)
    return launch(_evaluate, nproc_per_node, (used, best))


def _evaluate(used: RunInUse, best: bool) -> Evaluated:
    """Evaluate on the recipe's test data. All ranks call it and get the same."""
    recipe = used.recipe
    with used.join() as world:
        used.check_named()
        with exclusive_in_process("evaluate"), arithmetic(recipe.train, world.device):
            trained = used.load(best)
            data = open_test(recipe.data)
            task = task_of_run(trained.about, recipe, data)
            labels = labels_of_run(trained.about, data, recipe.data)
            model = trained.model.to(world.device)
            with data_workers(data):
                evaluated = evaluation.evaluate(
                    model, task, data.test, recipe.data, recipe.train, world, labels
                )
        damaged = gather_json(world, list(getattr(data.test, "skipped", {}).values()))
    broken = sorted({line for of_rank in damaged for line in of_rank})
    return Evaluated(
        run=used.where,
        step=trained.step,
        evaluated=trained.evaluated,
        best=best,
        best_step=best_step(used.where),
        data=data.description,
        evaluation=evaluated,
        notes=[*trained.notes, *([replaced_note(broken)] if broken else [])],
    )


MAX_CLASSES = 256
"""Most classes of a mask: a gray PNG has eight bits."""

Row = dict[str, str | float]

MaskWriter = Callable[[Prediction], Path]


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
        overwrite: Replace the file of `csv`, and masks, if they exist.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Images that cannot be read are left out, and named in the answer's `broken`. Raises:
    RecipeError, RunError, CheckpointError; DataError, also if no image can be read.
    """
    check_alone("predict")
    used = open_run(run, replace, trust_code)
    check_count("top", top, 1)
    check_target(option("csv"), str(csv), overwrite)
    mask_writer = _mask_writer(meaning(used.recipe.task.name), out, overwrite)
    paths = _images_of(images)
    used.check_named(["model"] if paths else ["model", "data"])
    with (
        exclusive_in_process("predict"),
        used.join() as world,
        arithmetic(used.recipe.train, world.device),
    ):
        trained = used.load(best)
        answer = _predict(used, trained, paths, mask_writer, top, world)
    if csv:
        write_atomically(Path(csv), answer.to_csv())
    return answer


def _predict(
    used: RunInUse,
    trained: Trained,
    files: Sequence[str],
    mask_writer: MaskWriter | None,
    top: int,
    world: World,
) -> Predicted:
    recipe, about, device = used.recipe, trained.about, world.device
    size = recipe.train.eval_batch_size
    broken: list[DataError] = []
    skipped: list[str] = []
    damaged: dict[int, str] = {}
    if files:
        paths, skipped = list_files(files)
        read = reader_of(paths, about, recipe.data)
        if mask_writer is not None:
            _check_names(paths)
        batches = of_files(paths, read, about, recipe.data, size, device, broken.append)
    else:
        test = open_test(recipe.data).test
        damaged = getattr(test, "skipped", damaged)  # filled as batches are read
        batches = of_samples(test, recipe.data, size, device)
    names, rows, lines = about.class_names, [], []
    for prediction in predictions(trained.model.to(device), recipe, batches, device):
        if damaged and int(prediction.sample) in damaged:  # predicted from a stand-in image
            continue
        mask = None if mask_writer is None else mask_writer(prediction)
        rows.append(_row(prediction, names, top, mask))
        lines.append(_line(prediction, rows[-1], names, top))
    if broken and not rows:
        more = f" (and {len(broken) - 1} more that cannot be read)" if len(broken) > 1 else ""
        raise DataError(f"{broken[0]}{more}")
    unread = [*map(str, broken), *(line for _, line in sorted(damaged.items()))]
    return Predicted(rows, lines, unread, skipped, trained.notes)


def _images_of(images: Any) -> list[str]:
    if images is None:
        return []
    paths = [str(path) for path in paths_of("images", images)]
    if not paths:
        raise RecipeError(
            "images is empty; expected a path, or several; leave it out for the run's test samples"
        )
    return paths


def _row(prediction: Prediction, names: Sequence[str], top: int, mask: Path | None) -> Row:
    row: Row = {"sample": prediction.sample}
    if mask is not None:
        row["mask"] = str(mask)
    elif prediction.classes:
        for place, (label, probability) in enumerate(_shares(prediction, top), 1):
            row[f"class_{place}"] = _name(label, names)
            row[f"probability_{place}"] = probability
    elif prediction.probabilities:
        for label, probability in _shares(prediction, top):
            name = _name(label, names)
            row[f"{name}_{label}" if name in row else name] = probability
    else:
        row |= {f"value_{place}": value for place, value in enumerate(prediction.values, 1)}
    return row


def _line(prediction: Prediction, row: Row, names: Sequence[str], top: int) -> str:
    if shares := _shares(prediction, top):
        return f"{prediction.sample}  " + ", ".join(f"{_name(k, names)} {p:.2%}" for k, p in shares)
    return "  ".join(
        f"{value:.4g}" if isinstance(value, float) else value for value in row.values()
    )


def _shares(prediction: Prediction, top: int) -> list[tuple[int, float]]:
    if prediction.classes:
        return list(zip(prediction.classes, prediction.probabilities, strict=True))[:top]
    return list(enumerate(prediction.probabilities))


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)


def _mask_writer(task: str, out: str | Path, overwrite: bool) -> MaskWriter | None:
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
    (folder := path_of("out", out)).mkdir(parents=True, exist_ok=True)
    return partial(_write_mask, folder, overwrite)


def _check_names(paths: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise RecipeError(f"{path} and {seen[path.stem]} would have one mask, {path.stem}.png")
        seen[path.stem] = path


def _write_mask(folder: Path, overwrite: bool, prediction: Prediction) -> Path:
    """Write labels as a gray PNG; FILE[0].png for FILE.npy[0]. Raises: DataError; RunError."""
    sample, mask_HW = prediction.sample, prediction.mask_HW
    assert mask_HW is not None  # of a segmentation
    if (most := int(mask_HW.max())) >= MAX_CLASSES:
        raise DataError(f"{sample}: has class {most}; a mask has classes below {MAX_CLASSES}")
    row = re.search(r"\[\d+\]$", sample)
    path = folder / f"{Path(sample).stem}{row[0] if row else ''}.png"
    check_target(option("out"), str(path), overwrite)
    with atomic_replace(path) as aside:
        Image.fromarray(mask_HW.to(torch.uint8).numpy()).save(aside, format="png")
    return path
