"""Sources of images to pack, recognized by the files at a path; hold-out of a test part.

The images with the smallest `hash64(Stream.HOLD_OUT, number)` of each class are held out, so a
folder always gives the same parts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from firecaffe.data.dataset import TensorDataset, reading
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.image_folder import TESTS, ImageFolder, class_names, is_image, listed, notes_of
from firecaffe.data.pack_archives import PART_WORDS, is_lmdb, open_lmdbs, open_tars
from firecaffe.data.pack_images import Part, Source
from firecaffe.data.published_formats import ARCHIVE, TRAIN_FILES, open_cifar10, open_idx
from firecaffe.errors import DataError, RecipeError
from firecaffe.resume_advice import option

PARTS = ("train", *TESTS)


def open_source(path: Path, channel_order: str | None = None) -> Source:
    """Open what is at a path. `channel_order` is of LMDBs alone. Raises DataError, RecipeError."""
    with reading(path):
        for is_there, opened in _FORMATS:
            if is_there(path):
                if channel_order is not None:
                    raise RecipeError(
                        f"{option('channel_order')} is of Caffe's LMDBs, and {path} is none; leave "
                        "it out"
                    )
                return opened(path)
        if databases := _lmdbs(path):
            return open_lmdbs(databases, path, channel_order != "rgb")
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    raise DataError(
        f"{path}: nothing in it can be packed; expected a folder of images (train/CLASS/*.jpg, or "
        "CLASS/*.jpg), "
        "tar files, idx files, CIFAR-10's binary files, or Caffe's LMDBs"
    )


def part_of(name: str) -> str:
    """Return the part that the name of a file or folder mentions; train if it mentions none."""
    name_parts = re.split(r"[^a-z]+", name.lower())
    return next((part for word, part in PART_WORDS.items() if word in name_parts), "train")


def _is_folder(path: Path) -> bool:
    return any((path / name).is_dir() and not is_lmdb(path / name) for name in PARTS)


def _open_folder(path: Path) -> Source:
    first = "train" if (path / "train").is_dir() else next(n for n in PARTS if (path / n).is_dir())
    classes = class_names(path / first)
    parts: dict[str, Part] = {}
    unread: dict[str, Counter[str]] = {}
    for name in PARTS:
        if (path / name).is_dir():
            if part_of(name) in parts:
                raise DataError(f"{path}: holds both val and validation; one of them is to go")
            images = ImageFolder(path / name, classes)
            parts[part_of(name)] = _part(images, [f"{name}/{file}" for file in images.files])
            unread[name] = images.unread
    return Source("jpeg", (), classes, parts, f"the folder {path.name}", notes_of(unread))


def _is_classes(path: Path) -> bool:
    return path.is_dir() and any(
        is_image(file.name)
        for folder in listed(path)
        if folder.is_dir()
        for file in listed(folder.path)
    )


def _open_classes(path: Path) -> Source:
    classes = class_names(path)
    images = ImageFolder(path, classes)
    parts, notes = {"train": _part(images, images.files)}, notes_of({path.name: images.unread})
    return Source("jpeg", (), classes, parts, f"the folder {path.name}", notes)


def _part(images: ImageFolder, names: list[str]) -> Part:
    sizes = [images.size(number) for number in range(len(images))]
    return Part(names, images.labels_N.tolist(), sizes, images.read)


def _tars(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".tar" else []
    if not path.is_dir():
        return []
    return [Path(entry.path) for entry in listed(path) if entry.name.endswith(".tar")]


def _open_tars(path: Path) -> Source:
    by_part: dict[str, list[Path]] = {}
    for file in _tars(path):
        by_part.setdefault(part_of(file.name), []).append(file)
    return open_tars(by_part, path.name)


def _is_idx(path: Path) -> bool:
    return any(path.glob("train-images-idx3-ubyte*")) if path.is_dir() else False


def _open_idx(path: Path) -> Source:
    return _held(open_idx(path, 256), f"the idx files of {path.name}")


def _is_cifar(path: Path) -> bool:
    inside = (path, path / "cifar-10-batches-bin")
    return (
        path.name == ARCHIVE
        or (path / ARCHIVE).is_file()
        or any((folder / TRAIN_FILES[0]).is_file() for folder in inside)
    )


def _open_cifar(path: Path) -> Source:
    return _held(open_cifar10(path), f"CIFAR-10 of {path.name}")


def _held(sets: tuple[TensorDataset, TensorDataset], about: str) -> Source:
    num_classes = 1 + max(int(dataset.targets.max()) for dataset in sets)
    parts = {}
    for name, dataset in zip(("train", "test"), sets, strict=True):
        parts[name] = raw_part(name, dataset.inputs.numpy(), dataset.targets.tolist())
    shape = sets[0].sample_CHW
    return Source("raw", shape, list(map(str, range(num_classes))), parts, about)


def raw_part(name: str, images_NCHW: np.ndarray, labels: Sequence[int]) -> Part:
    size = int(images_NCHW[0].nbytes)
    names = [f"{name}/{number}" for number in range(len(labels))]
    return Part(
        names, list(labels), [size] * len(labels), lambda number: images_NCHW[number].tobytes()
    )


def _lmdbs(path: Path) -> dict[str, Path]:
    # Caffe's names: FOLDER itself, FOLDER/train, FOLDER/ilsvrc12_train_lmdb …
    if is_lmdb(path):
        return {part_of(path.name): path}
    inside = sorted(child for child in path.iterdir() if is_lmdb(child)) if path.is_dir() else []
    databases: dict[str, Path] = {}
    for database in inside:
        if part_of(database.name) in databases:
            raise DataError(
                f"{path}: two databases of one part, {database.name} and "
                f"{databases[part_of(database.name)].name}"
            )
        databases[part_of(database.name)] = database
    return databases


_FORMATS: tuple[tuple[Callable[[Path], object], Callable[[Path], Source]], ...] = (
    (_is_cifar, _open_cifar),
    (_is_idx, _open_idx),
    (_is_folder, _open_folder),
    (_tars, _open_tars),
    (_is_classes, _open_classes),
)


HELD_OUT_SHARE = 0.1
"""The default share of each class that becomes the test part."""


def with_test_part(source: Source, share: float | None) -> tuple[Source, str]:
    """Split a test part off the training images if there is none, and return a line that says so.

    `share` is that of each class, at least one image of two or more. None: 0.1; 0: no test part.
    Raises RecipeError if `share` is given with a test part, DataError if no class has two images.
    """
    tests = [name for name in TESTS if name in source.parts]
    if tests:
        if share is not None:
            raise RecipeError(
                f"{option('hold_out')} is {share:g}, and {source.about} has a part {tests[0]} "
                "already; "
                "leave it out"
            )
        return source, ""
    if share == 0:
        return source, f"{source.about} has no test part, which a training needs"
    whole = source.parts["train"]
    held = _held_out(whole.labels, HELD_OUT_SHARE if share is None else share)
    if not held:
        raise DataError(
            f"{source.about}: has no test part, and no class has two images to hold one out of"
        )
    rest = sorted(set(range(len(whole))) - held)
    parts = {"train": _some(whole, rest), "test": _some(whole, sorted(held))}
    line = (
        f"{source.about} has no test part: {len(held):,} of its {len(whole):,} images are held "
        f"out as one, of every class alike ({option('hold_out')} says another share, 0 none)"
    )
    return replace(source, parts=parts), line


def _held_out(labels: Sequence[int], share: float) -> set[int]:
    by_class: dict[int, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        by_class[label].append(number)
    hashes = hash64(int(Stream.HOLD_OUT), torch.arange(len(labels))).tolist()
    held: set[int] = set()
    for numbers in by_class.values():
        count = min(len(numbers) - 1, max(1, round(share * len(numbers))))
        held |= set(sorted(numbers, key=hashes.__getitem__)[:count])
    return held


def _some(part: Part, numbers: Sequence[int]) -> Part:
    return Part(
        [part.names[number] for number in numbers],
        [part.labels[number] for number in numbers],
        [part.sizes[number] for number in numbers],
        lambda number: part.read(numbers[number]),
    )
