"""A folder of images, one folder per class, decoded when they are asked for.

Every image becomes RGB, `resize` x `resize`, whatever its proportions were: Caffe's warp
(`convert_imageset --resize_width --resize_height`). Threads decode, not processes: Pillow lets go
of the interpreter's lock while it decodes and resizes.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from firecaffe.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MAX_THREADS = 8


def _num_threads() -> int:
    """The cores that this process may use: ranks that are bound to cores keep to them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(_MAX_THREADS, cores or 1)


def class_names(folder: Path) -> list[str]:
    """Names of the class folders in `folder`, sorted by code point; hidden ones are left out.

    Raises:
        DataError: there is no such folder, or there are no classes in it.
    """
    try:
        names = sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read, {error.strerror}; "
            "expected a folder with one folder per class"
        ) from error
    if not names:
        raise DataError(f"{folder}: holds no folders, expected one folder per class")
    return names


class ImageFolder:
    """The images of `folder`/class/*, labeled by the place of their class in `classes`.

    Samples are numbered class by class, by sorted file name within a class. Files are listed when
    the data set is opened, and read only when a batch asks for them.

    Raises:
        DataError: a class of the folder is not in `classes`, or holds no images.
    """

    def __init__(self, folder: Path, classes: list[str], resize: int) -> None:
        labels = {name: label for label, name in enumerate(classes)}
        self._folder = folder
        self._files: list[str] = []
        label_of_file: list[int] = []
        for name in class_names(folder):
            if name not in labels:
                raise DataError(
                    f"{folder / name}: class {name!r} is not among the {len(classes)} training "
                    "classes, expected the same folder names as in train"
                )
            files = sorted(
                entry.name
                for entry in os.scandir(folder / name)
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
            )
            if not files:
                raise DataError(
                    f"{folder / name}: holds no images, expected files ending in "
                    f"{', '.join(SUFFIXES)}"
                )
            self._files += [os.path.join(name, file) for file in files]
            label_of_file += [labels[name]] * len(files)
        self._labels_N = torch.tensor(label_of_file)
        self._pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="decode")
        self.num_classes = len(classes)
        self.sample_CHW = (3, resize, resize)

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Decode the samples of a batch.

        Raises:
            DataError: an image is missing or broken; the message names its file.
        """
        images_BCHW = torch.empty(len(indices_B), *self.sample_CHW, dtype=torch.uint8)
        paths = [self._folder / self._files[index] for index in indices_B.tolist()]
        for image_CHW, decoded_CHW in zip(
            images_BCHW, self._pool.map(self._decode, paths), strict=True
        ):
            image_CHW.copy_(decoded_CHW)
        return images_BCHW, self._labels_N[indices_B]

    def _decode(self, path: Path) -> Tensor:
        _, rows, columns = self.sample_CHW
        try:
            with Image.open(path) as image:
                resized = image.convert("RGB").resize((columns, rows), Image.Resampling.BILINEAR)
        # Pillow reports a broken PNG as a SyntaxError, and other broken headers as ValueError.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: not a whole image, {error}") from error
        pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
        return pixels.view(rows, columns, 3).permute(2, 0, 1)


def open_folder(path: Path, resize: int) -> tuple[ImageFolder, ImageFolder]:
    """Open `path`/train and `path`/test (or `path`/val); the classes are those of train.

    Raises:
        DataError: as `class_names` and `ImageFolder`.
    """
    classes = class_names(path / "train")
    test = path / "test" if (path / "test").is_dir() else path / "val"
    if not test.is_dir():
        raise DataError(f"{path}: holds no folder test or val, expected one with the test images")
    return ImageFolder(path / "train", classes, resize), ImageFolder(test, classes, resize)
