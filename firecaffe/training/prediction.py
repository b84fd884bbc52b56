"""Predictions of a run's network, for image files or for a data set's test samples."""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch import Tensor, nn

from firecaffe.data import Data, DataConfig, Dataset, eval_batches, num_classes
from firecaffe.data.augment import center_crop, middle, normalize
from firecaffe.data.caffe_source import image_reader
from firecaffe.data.dataset import BrokenSampleError, shape_text
from firecaffe.data.decode import FORMATS, decoded, scale
from firecaffe.data.image_folder import (
    SUFFIXES,
    is_image,
    kind_of,
    listed,
    notes_of,
    read_image_file,
)
from firecaffe.errors import DataError, RecipeError
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.resume_advice import replaced
from firecaffe.tasks import Task, task_of
from firecaffe.tasks.outputs import prediction_of
from firecaffe.training.evaluation import autocast
from firecaffe.training.forward import match_format, seed_random
from firecaffe.training.given_parts import About
from firecaffe.user_code import failing_as, is_caffe

GRAY = (19595, 38470, 7471)
"""Weights of red, green and blue in gray, per 65536. Source: ITU-R BT.601, as Pillow rounds it."""

ARRAY = ".npy"

Read = Callable[[Path], list[tuple[str, Tensor]]]
"""Reads the samples of a file, each with its name. Raises: DataError, which names the file."""


def list_files(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """List files, and images and arrays in folders. Add lines on others. Raises: DataError."""
    files: list[Path] = []
    unread: dict[str, Counter[str]] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            inside = sorted(_files_in(path))
            taken = [file for file in inside if is_image(file.name) or _is_array(file)]
            unread[word] = Counter(kind_of(file.name) for file in set(inside) - set(taken))
            if not taken:
                raise DataError(
                    f"{path}: holds no images ({unread[word].total()} other files), expected files "
                    f"in {', '.join(SUFFIXES)}"
                )
            files += taken
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: there is no such image or folder")
    return files, notes_of(unread)


def _files_in(folder: Path) -> Iterator[Path]:
    try:
        inside = listed(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read, {error.strerror}") from error
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_in(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _is_array(path: Path) -> bool:
    return path.suffix.lower() == ARRAY


def reader_of(paths: Sequence[Path], about: About, config: DataConfig) -> Read:
    """Return a reader of such files. Raises: RecipeError if they cannot be the run's inputs."""
    about.check(config)
    if not about.input_shape and any(map(_is_array, paths)):
        raise RecipeError(
            "the run's inputs are several tensors, which no one array has; leave IMAGES out and "
            f"name data: {replaced({'data.name': 'NAME'})}"
        )
    if about.is_decoded and (array := next(filter(_is_array, paths), None)):
        raise RecipeError(f"{array} is an array, and the run's inputs are images that are decoded")
    image = None if all(map(_is_array, paths)) else _image_reader(about, config)

    def read(path: Path) -> list[tuple[str, Tensor]]:
        if image is None or _is_array(path):
            return read_array(path, about, config)
        return [(str(path), image(path))]

    return read


def _image_reader(about: About, config: DataConfig) -> Callable[[Path], Tensor]:
    if is_caffe(config.name):
        make = image_reader(config, about.input_shape[0] if about.input_shape else 3)
        return lambda path: _of_caffe(path, make, about)
    if about.sample_CHW and about.sample_CHW[0] in (1, 3):
        return lambda path: read_image(path, about, config)
    shape = "x".join(map(str, about.input_shape)) or "no one tensor"
    raise RecipeError(
        f"it is not known how an image becomes an input of the run ({shape}): its data set makes "
        "them. Give arrays of that shape (.npy); or name data and no images, with "
        f"{replaced({'data.name': 'NAME'})}; or, for a Caffe net without a data layer, the file "
        f"that has one: {replaced({'data.name': 'caffe:TRAIN_VAL.prototxt'})}"
    )


def _of_caffe(path: Path, make: Callable[[bytes], Tensor], about: About) -> Tensor:
    try:
        image_CHW = make(read_image_file(path))
    except BrokenSampleError as error:
        raise _broken(path, error) from error
    except DataError as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    _check_shape(path, image_CHW, about)
    return image_CHW


def _broken(path: Path, error: BrokenSampleError) -> DataError:
    if isinstance(error.__cause__, UnidentifiedImageError):
        return DataError(f"{path}: is no image that is read ({', '.join(FORMATS)})")
    return DataError(f"{path}: {error}")


def _check_shape(path: Path, sample: Tensor, about: About) -> None:
    if tuple(sample.shape) != about.input_shape:
        has_no_channel = about.input_shape[:1] == (1,) and sample.shape[1:] == about.input_shape[1:]
        hint = " (several gray ones? save array[:, None])" * has_no_channel
        taken = f"{shape_text(about.input_shape)}{hint}"
        raise DataError(f"{path}: comes to {shape_text(sample.shape)}; the network takes {taken}")


def read_array(path: Path, about: About, config: DataConfig) -> list[tuple[str, Tensor]]:
    """Read one sample, or several in rows, as the run's data set gives them. Raises: DataError."""
    content = io.BytesIO(read_image_file(path))
    try:
        array = np.lib.format.read_array(content, allow_pickle=False)
    except Exception as error:  # of any kind, since the bytes may be anything
        said = " ".join(str(error).split())
        raise DataError(f"{path}: is no array that is read ({said:.80})") from error
    expected = "uint8" if about.sample_CHW else about.input_dtype
    if array.dtype.name == "float64" and expected == "float32":
        array = array.astype(np.float32)  # numpy's default
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.name != expected:
        raise DataError(
            f"{path}: is of {array.dtype}; expected {expected}; save samples as the run's data set "
            "gives them to the network"
        )
    if not array.size:
        raise DataError(f"{path}: holds no sample; its shape is {shape_text(array.shape)}")
    is_one = array.ndim == len(about.input_shape)
    if not is_one and array.ndim != len(about.input_shape) + 1:
        raise DataError(
            f"{path}: is {shape_text(array.shape)}; expected {shape_text(about.input_shape)}, or "
            "rows of that"
        )
    samples = torch.from_numpy(np.ascontiguousarray(array[None] if is_one else array))
    is_cut = config.crop or config.pad
    if is_cut and min(samples.shape[-2:]) + 2 * config.pad >= config.crop:
        samples = center_crop(samples, config.crop, config.pad)
    _check_shape(path, samples[0], about)
    if not about.sample_CHW and (config.mean or config.std):
        samples = normalize(samples, config.mean, config.std, "cpu")
    return [(str(path) if is_one else f"{path}[{i}]", sample) for i, sample in enumerate(samples)]


def read_image(path: Path, about: About, config: DataConfig) -> Tensor:
    """Read one image, uint8 of C x H x W, scaled and cropped as in a test. Raises: DataError."""
    try:
        image_CHW = decoded(read_image_file(path), config.exif)
    except BrokenSampleError as error:
        raise _broken(path, error) from error
    if about.is_decoded and config.augment == "inception":
        return middle(image_CHW, config.resize, config.crop)
    channels, rows, columns = about.stored_shape(config)
    if channels == 1:
        image_CHW = _gray(image_CHW)
    image_1CHW = scale(image_CHW, rows, columns).unsqueeze(0)
    return center_crop(image_1CHW, config.crop, config.pad).squeeze(0)


def as_inputs(
    samples: Sequence[Tensor], about: About, config: DataConfig, device: torch.device
) -> Tensor:
    """Return a batch for the network: image bytes become normalized float32 of B x C x H x W."""
    batch = torch.stack(list(samples))
    if about.sample_CHW:
        return normalize(batch, config.mean, config.std, device)
    return batch.to(device)


def _gray(image_CHW: Tensor) -> Tensor:
    weights_C11 = torch.tensor(GRAY).view(3, 1, 1)
    sum_1HW = (image_CHW.to(torch.int64) * weights_C11).sum(0, keepdim=True)
    return ((sum_1HW + (1 << 15)) >> 16).to(torch.uint8)


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
"""The names of a batch's samples, and the network's inputs."""


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
            samples = read(path)
        except DataError as error:
            broken(error)
        else:
            yield from samples


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
        some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        with failing_as(f"the network does not take {some}: it"):
            outputs = outputs_of(model, inputs, recipe.train, device)
        yield from map(read, names, outputs.float().cpu())


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Any, config: TrainConfig, device: torch.device) -> Tensor:
    """Return the network's prediction, in the arithmetic of the run's evaluation."""
    with autocast(config, device):
        return prediction_of(model(match_format(inputs, config)))


def meaning(task: str) -> str:
    """Return the name in `READERS` for a task's outputs, or one not in it. Raises: RecipeError."""
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

OUTPUT_NOTES = {
    "classification": "logits; predict's probabilities are outputs.softmax(1)",
    "multilabel": "logits; predict's probabilities are outputs.sigmoid()",
    "segmentation": "logits; predict's masks are outputs.argmax(1)",
}
"""Explanations of outputs and their predictions, by `meaning`; others are the prediction."""


def task_of_run(about: About, recipe: Recipe, data: Data) -> Task:
    """Return the run's task, for the classes that it was trained on. Raises: RecipeError."""
    classes = num_classes(data.train) if about.num_classes is None else about.num_classes
    return task_of(recipe.task, classes)


# the most classes that a message names
MAX_NAMED = 5


def labels_of_run(about: About, data: Data, config: DataConfig) -> Tensor | None:
    """Return the run's label of each label of the test data, int64 of (classes,).

    None if they are the same, or if either side does not name its classes. Raises: DataError.
    """
    where = config.path or config.name
    names, known = _names(data), about.class_names
    if not names or not known:
        classes = num_classes(data.train)
        if classes is not None and about.num_classes is not None and classes > about.num_classes:
            raise DataError(
                f"{where}: the data have {classes} classes, the run was trained on "
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
    _, targets = data.test.batch(torch.tensor([0]))
    if not isinstance(targets, Tensor) or targets.ndim != 1 or targets.is_floating_point():
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
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(repr, names[:MAX_NAMED])) + more
