"""Predictions of a run's network, for images or for a data set's test samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.data import Data, DataConfig, Dataset, eval_batches, is_images, num_classes
from firecaffe.errors import DataError
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import is_caffe
from firecaffe.tasks.outputs import prediction_of
from firecaffe.training.about import About
from firecaffe.training.forward import AUTOCAST, laid_out, seed_random
from firecaffe.training.image_files import Read, as_inputs


@dataclass(frozen=True)
class Prediction:
    sample: str
    """The image's path, or the sample's number in its data set."""
    classes: tuple[int, ...] = ()
    """In classification the labels, the most probable first."""
    probabilities: tuple[float, ...] = ()
    """Probabilities of `classes`; with several labels, of each label."""
    values: tuple[float, ...] = ()
    """In regression, and for a user's task, the outputs."""
    mask_HW: Tensor | None = None
    """In segmentation, the label of each pixel."""


Named = tuple[list[str], Any]
"""The samples of a batch by name, and the network's inputs."""


def of_files(
    paths: Sequence[Path],
    read: Read,
    about: About,
    config: DataConfig,
    batch_size: int,
    device: torch.device,
    broken: Callable[[DataError], None],
) -> Iterator[Named]:
    """Yield batches of files' samples. broken: receives the error of each file that is left out."""
    samples = _samples(paths, read, broken)
    while taken := list(islice(samples, batch_size)):
        names, tensors = zip(*taken, strict=True)
        yield list(names), as_inputs(tensors, about, config, device)


def _samples(
    paths: Sequence[Path], read: Read, broken: Callable[[DataError], None]
) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        try:
            found = read(path)
        except DataError as error:
            broken(error)
        else:
            yield from found


def of_samples(
    dataset: Dataset, config: DataConfig, batch_size: int, device: torch.device
) -> Iterator[Named]:
    """Yield batches of a data set's samples, which are named by their numbers, from 0."""
    batches = eval_batches(dataset, batch_size, 0, 1, config=config, device=device)
    for number, inputs, _ in batches:
        start = number * batch_size
        stop = min(start + batch_size, len(dataset))
        yield [str(sample) for sample in range(start, stop)], inputs


def predictions(
    model: nn.Module, recipe: Recipe, batches: Iterator[Named], device: torch.device
) -> Iterator[Prediction]:
    read = READERS.get(meaning(recipe.task.name), _values)
    for number, (names, inputs) in enumerate(batches):
        seed_random(recipe.train.seed, "evaluation", number)
        outputs = outputs_of(model, inputs, recipe.train, device)
        yield from map(read, names, outputs.float().cpu())


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Any, config: TrainConfig, device: torch.device) -> Tensor:
    """Return the network's prediction, in the arithmetic of the run's evaluation."""
    dtype = AUTOCAST.get(config.autocast)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        return prediction_of(model(laid_out(inputs, config)))


def meaning(task: str) -> str:
    """Return our task with such outputs, or a name that is not in READERS. Raises: RecipeError."""
    if not is_caffe(task):
        return task
    from firecaffe.tasks.caffe import meaning_of  # imported here, because only Caffe nets need it

    return meaning_of(task)


def _classes(name: str, logits: Tensor) -> Prediction:
    if logits.numel() > len(logits):
        return _values(name, logits)
    logits = logits.flatten()  # Caffe's may be of (classes, 1, 1)
    probabilities, classes = logits.softmax(0).sort(descending=True, stable=True)
    return Prediction(name, tuple(classes.tolist()), tuple(probabilities.tolist()))


def _labels(name: str, logits: Tensor) -> Prediction:
    return Prediction(name, probabilities=tuple(logits.sigmoid().tolist()))


def _values(name: str, outputs: Tensor) -> Prediction:
    return Prediction(name, values=tuple(outputs.flatten().tolist()))


def _mask(name: str, logits_CHW: Tensor) -> Prediction:
    return Prediction(name, mask_HW=logits_CHW.argmax(0))


READERS: dict[str, Callable[[str, Tensor], Prediction]] = {
    "classification": _classes,
    "multilabel": _labels,
    "regression": _values,
    "segmentation": _mask,
}
"""Functions that interpret an output, by `meaning`; other outputs are just numbers."""

AS_PREDICTED = {
    "classification": "logits; predict's probabilities are outputs.softmax(1)",
    "multilabel": "logits; predict's probabilities are outputs.sigmoid()",
    "segmentation": "logits; predict's masks are outputs.argmax(1)",
}
"""Explanations of outputs and their predictions, by `meaning`; others are the prediction."""


# classes that a line names
MOST_NAMED = 5


def labels_of_run(about: About, data: Data, config: DataConfig) -> Tensor | None:
    """Return the run's label of each label of the test data, int64 of (classes,).

    None if they are the same, or if either side does not name its classes. Raises: DataError if the
    run does not know a class, or had fewer of them.
    """
    where = config.path or config.name
    names, known = _names(data), about.class_names
    if not names or not known:
        found = num_classes(data.train)
        if found is not None and about.num_classes is not None and found > about.num_classes:
            raise DataError(
                f"{where}: the data have {found} classes, the run was trained on "
                f"{about.num_classes}; expected no more"
            )
        return None
    if names == known[: len(names)]:
        return None
    if unknown := [name for name in names if name not in known]:
        raise DataError(
            f"{where}: the run does not know {_listed(unknown)}; its "
            f"{len(known)} classes are {_listed(known)}"
        )
    if not is_images(data.test):
        raise DataError(
            f"{where}: the classes are {_listed(names)}, the run's {_listed(known)}; "
            "expected them in the same order, as the targets are not one class for each sample"
        )
    return torch.tensor([known.index(name) for name in names])


def _names(data: Data) -> tuple[str, ...]:
    names = _named(data.test) or _named(data.train)
    return names if len(names) >= (num_classes(data.train) or 0) else ()


def _named(dataset: Dataset) -> tuple[str, ...]:
    return tuple(map(str, getattr(dataset, "class_names", ())))


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more
