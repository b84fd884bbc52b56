"""Tar files as a source: WebDataset's (KEY.jpg with KEY.cls), or with a folder per class."""

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from firecaffe.data.image_folder import SUFFIXES, is_hidden, is_image, kind_of, notes_of
from firecaffe.data.limited import DAMAGED, limited
from firecaffe.data.packing.part import MOST_CLASSES, Part, Source
from firecaffe.errors import DataError
from firecaffe.files import open_regular

LABEL = ".cls"
MOST_LABEL_BYTES = 64
PARTS = {"train": "train", "test": "test", "val": "validation", "validation": "validation"}


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
        named = next((PARTS[folder] for folder in folders if folder in PARTS), part)
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
    # By name, since the last of several members of one name counts, as it does for tar.
    images: dict[str, _Member] = {}
    labels: dict[str, _Member] = {}
    try:
        with open_regular(file) as opened:
            file_bytes = os.fstat(opened.fileno()).st_size
            archive = tarfile.open(fileobj=limited(opened, file_bytes), mode="r:")  # noqa: SIM115
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
    if member.length > MOST_LABEL_BYTES:
        raise DataError(
            f"{member.file}: {member.name} has {member.length:,} bytes; expected a number"
        )
    text = _read(member).decode("ascii", "replace").strip()
    if not text.isdecimal() or int(text) >= MOST_CLASSES:
        raise DataError(
            f"{member.file}: {member.name} is {text[:40]!r}; expected a class's number below "
            f"{MOST_CLASSES:,}"
        )
    return int(text)


def _read_one(members: Sequence[_Member], number: int) -> bytes:
    return _read(members[number])


def _read(member: _Member) -> bytes:
    try:
        with open_regular(member.file) as file:
            content = os.pread(file.fileno(), member.length, member.start)
    except OSError as error:
        raise DataError(f"{member.file}: cannot be read, {error.strerror}") from error
    if len(content) != member.length:
        raise DataError(f"{member.file}: {member.name} is cut, the tar file is truncated")
    return content
