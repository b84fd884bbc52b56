"""Sources of images to pack that are archives: tar files, and Caffe's LMDBs of Datum messages."""

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath

import numpy as np

from firecaffe.caffe.message import CaffeError
from firecaffe.data.caffe_records import parse_datum
from firecaffe.data.dataset import BrokenSampleError, reading
from firecaffe.data.image_folder import SUFFIXES, is_hidden, is_image, kind_of, notes_of
from firecaffe.data.lmdb_file import FILE, LmdbFile
from firecaffe.data.pack_images import MAX_CLASSES, Part, Source
from firecaffe.errors import DataError
from firecaffe.files import DAMAGED, TarHeader, limited, open_regular

LABEL = ".cls"
MAX_LABEL_BYTES = 64
PART_WORDS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
"""Words in the name of a file or folder, and the part that each names."""


@dataclass(frozen=True)
class _Member:
    file: Path
    name: str
    start: int
    length: int


def open_tars(by_part: Mapping[str, Sequence[Path]], about: str) -> Source:
    """Open the tar files of each part. Raises DataError if one is damaged or labels are missing."""
    images: dict[str, list[tuple[_Member, str | int]]] = {}
    unread: dict[str, Counter[str]] = {}
    for part, files in by_part.items():
        for file in files:
            own_unread = unread.setdefault(file.name, Counter())
            for own_part, member, label in _labeled(file, part, own_unread):
                images.setdefault(own_part, []).append((member, label))
    if not images:
        raise DataError(f"{about}: the tar files hold no images ({', '.join(SUFFIXES)})")
    labels = {label for rows in images.values() for _, label in rows}
    numbered = [label for label in labels if isinstance(label, int)]
    names = sorted(label for label in labels if isinstance(label, str))
    if numbered and names:
        raise DataError(f"{about}: some tar files have {LABEL} files and others class folders")
    if numbered:
        names = [str(number) for number in range(max(numbered) + 1)]
    numbers = {name: number for number, name in enumerate(names)}
    parts = {}
    for part, rows in images.items():
        members = [member for member, _ in rows]
        parts[part] = Part(
            [f"{member.file.name}:{member.name}" for member in members],
            [label if isinstance(label, int) else numbers[label] for _, label in rows],
            [member.length for member in members],
            partial(_read_one, members),
        )
    return Source("jpeg", (), names, parts, f"the tar files of {about}", notes_of(unread))


def _labeled(file: Path, part: str, unread: Counter[str]) -> list[tuple[str, _Member, str | int]]:
    images, labels = _listed(file, unread)
    if labels:
        key_of = _key_of(file, images, labels)
        by_key = {key_of(label.name): label for label in labels}
        return [(part, image, _read_label(by_key[key_of(image.name)])) for image in images]
    samples: list[tuple[str, _Member, str | int]] = []
    for member in images:
        folders = PurePosixPath(member.name).parts[:-1]
        if not folders:
            raise DataError(
                f"{file}: {member.name} has no label; expected {_to_last_dot(member.name)}{LABEL} "
                "in the same folder, or a folder for each class"
            )
        named = next((PART_WORDS[folder] for folder in folders if folder in PART_WORDS), part)
        samples.append((named, member, folders[-1]))
    return samples


Key = Callable[[str], str]
"""A function from the name of a member to the name of its sample."""


def _to_first_dot(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.with_name(path.name.split(".")[0]))


def _to_last_dot(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _key_of(file: Path, images: Sequence[_Member], labels: Sequence[_Member]) -> Key:
    # WebDataset's rule is the name up to its first dot. If that does not give each image one
    # label, the name up to its last dot is tried, which "lens_1.4_001.png" needs.
    for key_of in (_to_first_dot, _to_last_dot):
        of_images, of_labels = (
            Counter(key_of(member.name) for member in members) for members in (images, labels)
        )
        if all(of_images[key] == of_labels[key] == 1 for key in of_images):
            return key_of
    # Up to the last dot, no two images of one suffix share a key, so an image may lack a label.
    alone = next((image for image in images if _to_last_dot(image.name) not in of_labels), None)
    if alone is not None:
        raise DataError(
            f"{file}: {alone.name} has no {_to_last_dot(alone.name)}{LABEL} in its folder"
        )
    key, _ = max(of_images.items(), key=lambda item: item[1])
    first, second, *_ = [image.name for image in images if _to_last_dot(image.name) == key]
    raise DataError(f"{file}: {first} and {second} share a label; expected one image for each")


def _listed(file: Path, unread: Counter[str]) -> tuple[list[_Member], list[_Member]]:
    # Keyed by name: of several members with the same name, the last counts, as for tar.
    images: dict[str, _Member] = {}
    labels: dict[str, _Member] = {}
    try:
        with open_regular(file) as opened:
            file_bytes = os.fstat(opened.fileno()).st_size
            whole = limited(opened, file_bytes)
            archive = tarfile.open(fileobj=whole, mode="r:", tarinfo=TarHeader)  # noqa: SIM115
            for entry in archive:
                path = PurePosixPath(entry.name)
                if not entry.isfile() or any(map(is_hidden, path.parts)):
                    continue
                if entry.issparse() or not 0 <= entry.size <= file_bytes - entry.offset_data:
                    raise DataError(f"{file}: {entry.name} is cut, or is no plain file in the tar")
                member = _Member(file, entry.name, entry.offset_data, entry.size)
                if is_image(path.name):
                    images[entry.name] = member
                elif path.name.endswith(LABEL):
                    labels[entry.name] = member
                else:
                    unread[kind_of(path.name)] += 1
    except DAMAGED as error:
        raise DataError(f"{file}: not a whole tar file, {error}") from error
    return list(images.values()), list(labels.values())


def _read_label(member: _Member) -> int:
    if member.length > MAX_LABEL_BYTES:
        raise DataError(
            f"{member.file}: {member.name} has {member.length:,} bytes; expected a number"
        )
    text = _read(member).decode("ascii", "replace").strip()
    if not text.isdecimal() or int(text) >= MAX_CLASSES:
        raise DataError(
            f"{member.file}: {member.name} is {text[:40]!r}; expected a class's number below "
            f"{MAX_CLASSES:,}"
        )
    return int(text)


def _read_one(members: Sequence[_Member], number: int) -> bytes:
    return _read(members[number])


def _read(member: _Member) -> bytes:
    with reading(member.file), open_regular(member.file) as file:
        content = os.pread(file.fileno(), member.length, member.start)
    if len(content) != member.length:
        raise DataError(f"{member.file}: {member.name} is cut, the tar file is truncated")
    return content


def is_lmdb(path: Path) -> bool:
    return (path / FILE).is_file()


def open_lmdbs(by_part: Mapping[str, Path], about: Path, bgr: bool) -> Source:
    """Open LMDBs. Raises DataError if one is damaged, or images differ in kind or shape."""
    kinds: set[tuple[str, tuple[int, ...]]] = set()
    parts = {}
    largest = 0
    for name, path in by_part.items():
        database = LmdbFile(path)
        labels, sizes = [], []
        for number in range(len(database)):
            try:
                datum = parse_datum(database.value(number))
            except CaffeError as error:
                raise DataError(f"{path}: not a whole LMDB of Datums, {error}") from error
            kinds.add(("jpeg", ()) if datum.encoded else ("raw", datum.shape))
            labels.append(datum.label)
            sizes.append(len(datum.data))
        if not labels:
            raise DataError(f"{path}: holds no images")
        if min(labels) < 0 or max(labels) >= MAX_CLASSES:
            wrong = min(labels) if min(labels) < 0 else max(labels)
            raise DataError(f"{path}: has label {wrong}, expected 0 to {MAX_CLASSES - 1:,}")
        largest = max(largest, *labels)
        parts[name] = Part(
            [
                f"{path.name}:{database.key(number).decode('ascii', 'replace')}"
                for number in range(len(database))
            ],
            labels,
            sizes,
            _reader(database, bgr),
        )
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} {'x'.join(map(str, shape))}" for kind, shape in sorted(kinds))
        raise DataError(f"{about}: its images are not alike ({shown[:200]})")
    kind, shape = kinds.pop()
    order = ", blue first" if kind == "raw" and bgr and shape[0] == 3 else ""
    classes = list(map(str, range(largest + 1)))
    return Source(kind, shape, classes, parts, f"the LMDBs of {about.name}{order}")


def _reader(database: LmdbFile, bgr: bool) -> Callable[[int], bytes]:
    def read(number: int) -> bytes:
        datum = parse_datum(database.value(number))
        if datum.encoded:
            return datum.data
        if len(datum.data) != prod(datum.shape):
            raise BrokenSampleError(
                f"{len(datum.data)} bytes of pixels, expected {prod(datum.shape)}"
            )
        if bgr and datum.shape[0] == 3:
            planes = np.frombuffer(datum.data, np.uint8).reshape(3, -1)
            return planes[::-1].tobytes()
        return datum.data

    return read
