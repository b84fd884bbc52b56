"""The folders that record a run: rank 0's, and one on each host that does not see it.

Rank 0 marks the run's folder with a name that no other run has. A rank that does not see the mark
shares no disk with rank 0. It records its timings, and the faults that it hears of, in a folder on
its own host. Checkpoints and the result are rank 0's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.errors import RunError
from firecaffe.files import alone_in, write_json
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.run_folder import (
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    continue_run_folder,
    mark_of,
)

MOST_NAMED = 4


@dataclass(frozen=True)
class Places:
    first: Path
    """Rank 0's folder."""
    own: Path
    """The folder in which this rank records: rank 0's, or one on its own host."""
    is_apart: bool = False
    """Whether this rank does not see rank 0's folder, even if its own has the same path."""
    apart: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Host and folder of each rank that does not see rank 0's."""

    def notes(self, host: str) -> list[str]:
        if not self.apart:
            return []
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, where in self.apart.items():
            ranks.setdefault(where, []).append(rank)
        said = [
            f"{name} keeps the timings of rank {', '.join(map(str, numbers))} in {folder}"
            for (name, folder), numbers in list(ranks.items())[:MOST_NAMED]
        ]
        if len(ranks) > MOST_NAMED:
            said.append(f"{len(ranks) - MOST_NAMED} others in theirs")
        return [
            f"checkpoints are in {self.first / 'checkpoints'} on {host} alone, for no disk with "
            f"that folder is shared: {'; '.join(said)}"
        ]


def find_places(world: World, words: RunConfig, first: Path, mark: str, goes_on_at: int) -> Places:
    """Find where each rank records; make folders on hosts that do not see `first`, rank 0's.

    All ranks call it. Rows of an earlier attempt after step `goes_on_at` are done again. Raises:
    RunError if such a folder cannot be made, or is another run's.
    """
    sees, marks = mark_of(first) == mark, (mark, apart_mark(mark))
    local_folder = first if sees else Path(words.folder or Path("runs", first.name)).absolute()
    if not sees:
        _make(local_folder, first, mark, goes_on_at, world.host)
    said = gather_text(world, "" if sees else json.dumps([world.host, str(local_folder)]))
    # Another rank of this host may have made and marked it by now. Or it is rank 0's, which a slow
    # shared disk shows late.
    if mark_of(local_folder) not in marks:
        raise RunError(
            f"run.folder {local_folder} exists already on {world.host}, which does not see "
            f"{first} of rank 0; two runs never write into one folder"
        )
    apart = {rank: tuple(json.loads(text)) for rank, text in enumerate(said) if text}
    return Places(first, local_folder, not sees, apart)


def _make(folder: Path, first: Path, mark: str, goes_on_at: int, host: str) -> None:
    try:
        folder.mkdir(parents=True)
        (folder / "timings").mkdir()
        facts = {**describe_environment(), MARK: apart_mark(mark), "folder_of_rank_0": str(first)}
        write_json(folder / ENVIRONMENT, facts)
    except FileExistsError:
        if mark_of(folder) == apart_mark(mark):
            with alone_in(folder):
                continue_run_folder(folder, goes_on_at)
    except OSError as error:
        raise RunError(f"run.folder {folder} on {host}: {error.strerror}") from error
