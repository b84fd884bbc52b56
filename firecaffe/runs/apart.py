"""Folders of a run on hosts that do not see rank 0's: whose they are, and what is there alone."""

from collections.abc import Iterable
from pathlib import Path

from firecaffe.errors import RunError
from firecaffe.runs.folder import ENVIRONMENT, read_run_file

MARK = "run"
"""The fact of environment.json that tells runs apart."""

APART = "apart"
"""That of rank 0's which says, by rank, on which host and where its timings are, if not there."""


def mark_of(folder: Path) -> str:
    """The mark of the run whose folder it is; empty if it is none, or not to be seen from here."""
    try:
        return str(read_run_file(folder, ENVIRONMENT).get(MARK, ""))
    except RunError:
        return ""


def apart_mark(mark: str) -> str:
    """The mark of a folder that stands for that of rank 0 on a host which does not see it."""
    return f"{mark} apart"


def elsewhere(folder: Path, here: Iterable[int]) -> list[str]:
    """Where the timings of the other ranks are. here: the ranks whose timings are in the folder.

    Raises: RunError if its environment.json is damaged.
    """
    if not (folder / ENVIRONMENT).is_file():
        return []
    known, places = set(here), dict[tuple[str, str], list[str]]()
    for rank, (host, place) in read_run_file(folder, ENVIRONMENT).get(APART, {}).items():
        if int(rank) not in known:
            places.setdefault((host, place), []).append(rank)
    return [
        f"timings of rank {', '.join(ranks)} are on {host} in {place}/timings; copied to "
        f"{folder}/timings they are counted, too"
        for (host, place), ranks in places.items()
    ]
