"""Download of a published data set. Files must have the known digest, whatever the mirror."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from firecaffe.data.published import FILES, PUBLISHED, Published, fetch
from firecaffe.data.published_formats import read_idx_bytes
from firecaffe.errors import DataError


def get(name: str, destination: Path, report: Callable[[str], None]) -> Path:
    """Put the four gzipped files of a row of `PUBLISHED` into `destination`, and return it.

    Each file is renamed into place, so it is whole. `report` receives lines on the mirrors tried.
    Raises DataError, which lists these, if no mirror has the files.
    """
    data = PUBLISHED[name]
    if _is_right(data, destination):
        report(f"{destination}: already there and complete")
        return destination
    tried = []
    with tempfile.TemporaryDirectory(prefix="firecaffe-get-") as folder:
        for mirror in data.mirrors:
            report(f"trying {mirror}")
            (work := Path(folder, mirror.kind)).mkdir()
            try:
                _install(data, fetch(mirror, list(FILES), work, report), destination)
            except DataError as error:
                report(f"  no: {error}")
                tried.append(f"{mirror} ({error})")
            else:
                report(f"  yes: four files checked and moved to {destination}")
                return destination
    remedy = data.remedy.format(destination=destination)
    raise DataError(f"{name} cannot be had; tried {'; '.join(tried)}. {remedy}")


def _check(data: Published, folder: Path) -> None:
    for (name, num_dims), expected in zip(FILES.items(), data.sha256, strict=True):
        content, _ = read_idx_bytes(folder / name, num_dims)
        digest = hashlib.sha256(content).hexdigest()
        if digest != expected:
            raise DataError(
                f"{folder / name}: content has sha256 {digest}, expected {expected} as published"
            )


def _is_right(data: Published, folder: Path) -> bool:
    try:
        _check(data, folder)
    except DataError:
        return False
    return True


def _install(data: Published, source: Path, destination: Path) -> None:
    _check(data, source)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            aside = destination / f".{name}.{os.getpid()}"
            try:
                shutil.copyfile(source / name, aside)
                os.replace(aside, destination / name)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written, {error.strerror}") from error
