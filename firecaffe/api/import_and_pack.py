"""`firecaffe.pack` and `firecaffe.import_caffe`: convert images and Caffe's nets to our formats."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any, Self

import torch

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_number, path_of, wrong
from firecaffe.api.recipe_argument import parse_input
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.process_settings import compute_threads
from firecaffe.data.decode import MAX_PIXELS, cores
from firecaffe.data.pack_images import Packing, PackOptions
from firecaffe.data.pack_images import verify as verify_shards
from firecaffe.data.pack_sources import open_source, with_test_part
from firecaffe.data.packed import PackedPart, PackedSet, read_list
from firecaffe.data.shard_files import open_files
from firecaffe.errors import RunError
from firecaffe.from_caffe import Report
from firecaffe.from_caffe.recipe import (
    NET,
    RECIPE,
    REPORT,
    ImportRequest,
    check_folder,
    files_of,
    read,
    write_folder,
)
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.user_code import shown
from firecaffe.value_checks import MAX_THREADS

MAX_BROKEN = 20
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}

Progress = Callable[[int, int], None]
"""Called with the number of images done since the last call, and the number of all images."""


@dataclass(frozen=True, repr=False)
class PackedFolder(Answer):
    """A packed data set."""

    folder: Path
    """The folder with the shards."""
    contents: PackedSet
    """The list of its shards and classes."""
    held_out: str = ""
    """How a test part was held out of the source, in words; empty if the source has one."""
    remarks: Sequence[str] = ()
    """Lines about the source."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Images of each class, by part; empty if they were not counted."""

    def to_dict(self) -> dict[str, Any]:
        """Return the number of images, shards and bytes by part, and what was left out."""
        packed = self.contents
        return {
            "folder": str(self.folder),
            "kind": packed.kind,
            "source": packed.source,
            "classes": list(packed.classes),
            "parts": {
                name: {
                    "images": packed.count(name),
                    "shards": len(infos),
                    "bytes": sum(info.num_bytes for info in infos),
                    "images_by_class": self.counts.get(name),
                }
                for name, infos in packed.parts.items()
            },
            "skipped": list(packed.skipped),
        }

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the list of a packed data set, and no shard. Raises: DataError."""
        return cls(Path(folder), read_list(str(folder)))

    def counted(self) -> Self:
        """Return the data set with the images of each class counted. Raises: DataError."""
        packed, files = self.contents, open_files(str(self.folder))
        counts = dict[str, dict[str, int]]()
        for name in packed.parts:
            part = PackedPart(packed, name, files)
            labels = Counter(part.labels(torch.arange(len(part))).tolist())
            counts[name] = {packed.classes[label]: labels[label] for label in sorted(labels)}
        return replace(self, counts=counts)

    def verify(self, progress: Progress = lambda done, total: None) -> str:
        """Compare the shards with their checksums; return a line. Raises: DataError."""
        packed = self.contents
        total = sum(map(packed.count, packed.parts))
        verify_shards(str(self.folder), lambda images: progress(images, total))
        return f"{self.folder}: {sum(map(len, packed.parts.values()))} shards are what was packed"

    def _parts(self) -> Iterator[str]:
        if self.held_out:
            yield self.held_out
        yield from describe(self.contents, str(self.folder))
        yield from self.remarks
        for name, by_class in self.counts.items():
            said = ", ".join(f"{label} {count}" for label, count in by_class.items())
            yield f"{name}: {said:.2000}"


@from_script
def pack(
    source: str | Path,
    dest: str | Path,
    *,
    resize: int = 0,
    quality: int = 0,
    raw: bool = False,
    hold_out: float | None = None,
    shard_size: str = "256MB",
    threads: int = 0,
    channel_order: str | None = None,
    progress: Progress = lambda done, total: None,
) -> PackedFolder:
    """Pack images into shards, which are read at random as fast as large files.

    Args:
        source: A folder of images, a tar of one, WebDataset's tar files, idx files, CIFAR-10's
            binary files, or Caffe's LMDBs.
        dest: The folder for the shards. A packing that was stopped continues there.
        resize: Shrink the shorter side of larger images to it; 0 keeps them.
        quality: JPEG quality; 0 is 90 for resized images, else images stay as they are.
        raw: Store pixels, of images of one size or of resize x resize.
        hold_out: The share that becomes the test part, if the source has none; 0.1 without it.
        shard_size: Bytes of the source in a shard, as "256MB".
        threads: Threads that pack; 0 is one for each core.
        channel_order: "bgr" or "rgb", the order of channels of raw color LMDBs.
        progress: Called as images are done, with their number and that of all.

    Raises: RecipeError for a wrong argument; DataError for a source that cannot be read.
    """
    limits = {"resize": isqrt(MAX_PIXELS), "quality": 100, "threads": MAX_THREADS}
    for word, given in {"resize": resize, "quality": quality, "threads": threads}.items():
        if type(given) is not int or not 0 <= given <= limits[word]:
            raise wrong(word, shown(given), f"1 to {limits[word]}, or 0")
    if channel_order not in (None, "bgr", "rgb"):
        raise wrong("channel_order", shown(channel_order), "bgr or rgb")
    packing = PackOptions(resize, quality, raw, _bytes(shard_size))
    path, folder = path_of("source", source).expanduser(), path_of("dest", dest).expanduser()
    if hold_out is not None:
        check_number("hold_out", hold_out)
        if not 0 <= hold_out < 1:
            raise wrong("hold_out", f"{hold_out:g}", "a share, from 0 up to 1, as 0.1")
    opened, said = with_test_part(open_source(path, channel_order), hold_out)
    total = sum(len(part) for part in opened.parts.values())
    with compute_threads(1):  # the packing threads share the cores
        run = Packing(
            opened, folder, packing, threads or cores(), lambda images: progress(images, total)
        )
        packed = run.run()
    remarks = [*opened.notes, *run.seen.notes]
    least, most = run.seen.least, run.seen.most
    if most[0]:
        remarks.append(
            f"sizes: from {least[0]} to {most[0]} rows, from {least[1]} to {most[1]} columns"
        )
    return PackedFolder(folder, packed, said, remarks)


def _bytes(typed: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", str(typed).strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise wrong("shard_size", repr(typed), "as 256MB or 1GB")
    return size


def describe(packed: PackedSet, root: str) -> list[str]:
    lines = [f"{root}: {packed.kind} images of {packed.source}, {len(packed.classes)} classes"]
    if packed.shape:
        lines[0] += f", {' x '.join(map(str, packed.shape))}"
    for name, infos in packed.parts.items():
        held = sum(info.num_bytes for info in infos)
        count = packed.count(name)
        lines.append(
            f"{name}: {count:,} images in {len(infos)} shards, {held / 1e6:,.1f} MB"
            + (f", {held / count / 1e3:.3g} kB each" if count else "")
        )
    if packed.skipped:
        lines.append(f"broken and left out: {len(packed.skipped)}")
        lines += [f"  {line}" for line in packed.skipped[:MAX_BROKEN]]
        if len(packed.skipped) > MAX_BROKEN:
            lines.append(f"  and {len(packed.skipped) - MAX_BROKEN} more, in dataset.json")
    return lines


@dataclass(frozen=True, repr=False)
class ImportedNet(Answer):
    """A folder with a recipe, and the report on what was understood."""

    folder: Path
    """The folder that was written."""
    recipe: Recipe
    """The recipe, as it is in the folder."""
    report: Report
    """The settings that were understood, changed, and left out, each with its line."""

    @property
    def recipe_path(self) -> Path:
        """The file of the recipe."""
        return self.folder / RECIPE

    def to_dict(self) -> dict[str, Any]:
        """Return the report: lists of places and what became of them."""
        return {"recipe": str(self.recipe_path), **asdict(self.report)}

    def _parts(self) -> Iterator[str]:
        yield from self.report.lines()
        yield f"written: {self.recipe_path}, with {NET} and {REPORT}"
        if not self.report.left_out:
            yield f"next: firecaffe train {self.recipe_path}"


@from_script
def import_caffe(
    file: str | Path,
    *,
    weights: str | Path = "",
    out: str | Path = "",
    root: str | Path = "",
    input_shape: str = "",
    overwrite: bool = False,
) -> ImportedNet:
    """Convert a solver of Caffe's, or a net alone, to a folder with a recipe.

    Settings without a counterpart are left out, and are in the answer's `report.left_out`.

    Args:
        file: The solver's or the net's .prototxt.
        weights: A .caffemodel with first weights.
        out: The folder to write; else one here with the name of the file.
        root: The folder that paths in the files start from.
        input_shape: The shape of one sample, as "3x227x227", if the data are missing.
        overwrite: Write over files that exist.

    Raises: RecipeError or CaffeError, with the file and the line, if the net cannot be built;
    RunError for a missing folder.
    """
    path = path_of("file", file)
    folder = path_of("out", out or path.stem)
    if root and not path_of("root", root).is_dir():
        raise RunError(f"{option('root')} {root}: there is no such folder")
    shape = parse_input(input_shape, option("input_shape")) if input_shape else ()
    check_folder(folder, overwrite)
    imported = read(path, ImportRequest(str(folder), str(root), shape, str(weights)))
    write_folder(folder, files_of(imported, path))
    return ImportedNet(folder, imported.recipe, imported.report)
