"""What a run's network says of images, or of a data set's test samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.data import DataConfig, Dataset, eval_batches
from firecaffe.errors import DataError
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import is_caffe
from firecaffe.tasks.outputs import prediction_of
from firecaffe.training.about import About
from firecaffe.training.arithmetic import seed_random
from firecaffe.training.forward import AUTOCAST, laid_out
from firecaffe.training.image_files import Read, as_inputs


@dataclass(frozen=True)
class Prediction:
    """What the network says of one sample."""

    sample: str
    """The image's path, or the sample's number in its data set."""
    classes: tuple[int, ...] = ()
    """Of a classification, the labels, the most probable first."""
    probabilities: tuple[float, ...] = ()
    """Theirs; of several labels, that of each."""
    values: tuple[float, ...] = ()
    """Of a regression, and of a task of one's own: the outputs."""
    mask_HW: Tensor | None = None
    """Of a segmentation, the label of each pixel."""


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
    """Yields batches of the samples of files. broken: told of each file that cannot be read and is
    left out.
    """
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
    """Yields batches of a data set's samples, which are called by their numbers, from 0."""
    batches = eval_batches(dataset, batch_size, 0, 1, config=config, device=device)
    for number, inputs, _ in batches:
        start = number * batch_size
        stop = min(start + batch_size, len(dataset))
        yield [str(sample) for sample in range(start, stop)], inputs


def predictions(
    model: nn.Module, recipe: Recipe, batches: Iterator[Named], device: torch.device
) -> Iterator[Prediction]:
    """Yields what the network says of each sample, in order."""
    read = READERS.get(meaning(recipe.task.name), _values)
    for number, (names, inputs) in enumerate(batches):
        seed_random(recipe.train.seed, "evaluation", number)
        outputs = outputs_of(model, inputs, recipe.train, device)
        yield from map(read, names, outputs.float().cpu())


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Any, config: TrainConfig, device: torch.device) -> Tensor:
    """The network's prediction, in the arithmetic of the run's evaluation."""
    dtype = AUTOCAST.get(config.autocast)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        return prediction_of(model(laid_out(inputs, config)))


def meaning(task: str) -> str:
    """The task of ours whose outputs mean what those of a task do, by name; a name that is not in
    READERS if there is none.

    Raises: RecipeError if it is a net of Caffe's that cannot be read.
    """
    if not is_caffe(task):
        return task
    from firecaffe.tasks.caffe import meaning_of  # for those who have such a net

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
"""What an output means, by `meaning`; of a task of one's own, its numbers."""

AS_PREDICTED = {
    "classification": "logits; predict's probabilities are outputs.softmax(1)",
    "multilabel": "logits; predict's probabilities are outputs.sigmoid()",
    "segmentation": "logits; predict's masks are outputs.argmax(1)",
}
"""What the outputs are, and how the prediction is made of them, in words, by `meaning`; others are
the prediction.
"""
