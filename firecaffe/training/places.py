"""Where a run is recorded: in rank 0's folder, and on a host that does not see that, in its own.

Rank 0 marks the run's folder with a name that no other run has. A rank that does not find the mark
there shares no disk with rank 0. It takes a folder on its own host, for what it writes by itself:
its timings, and the faults that it hears of. Checkpoints and the result are rank 0's.
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
from firecaffe.runs.folder import (
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    continue_run_folder,
    mark_of,
)

MOST_NAMED = 4
"""Folders of other hosts that are named in a line."""


@dataclass(frozen=True)
class Places:
    """The folders of a run, as one rank sees them."""

    first: Path
    """Rank 0's."""
    own: Path
    """Where this rank records: rank 0's, or one on its own host."""
    is_apart: bool = False
    """Whether this rank does not see rank 0's; its own may have the same path all the same."""
    apart: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Host and folder of each rank that does not see rank 0's."""

    def notes(self, host: str) -> list[str]:
        """What a user has to know before the first step. host: rank 0's."""
        if not self.apart:
            return []
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, where in self.apart.items():
            ranks.setdefault(where, []).append(rank)
        said = [
            f"{name} keeps the timings of rank {', '.join(map(str, own))} in {folder}"
            for (name, folder), own in list(ranks.items())[:MOST_NAMED]
        ]
        if len(ranks) > MOST_NAMED:
            said.append(f"{len(ranks) - MOST_NAMED} others in theirs")
        return [
            f"checkpoints are in {self.first / 'checkpoints'} on {host} alone, for no disk with "
            f"that folder is shared: {'; '.join(said)}"
        ]


def find_places(world: World, words: RunConfig, first: Path, mark: str, goes_on_at: int) -> Places:
    """Finds where each rank records; makes the folders of hosts that do not see rank 0's, `first`.
    All ranks call it. mark: of this run, on all ranks. goes_on_at: the step after which rows of an
    earlier attempt are done again.

    Raises: RunError if such a folder cannot be made, or is another run's.
    """
    sees, marks = mark_of(first) == mark, (mark, apart_mark(mark))
    own = first if sees else Path(words.folder or Path("runs", first.name)).absolute()
    if not sees:
        _make(own, first, mark, goes_on_at, world.host)
    said = gather_text(world, "" if sees else json.dumps([world.host, str(own)]))
    # Another rank of this host may have made it, and has marked it by now; or it is rank 0's, which
    # a slow shared disk shows late.
    if mark_of(own) not in marks:
        raise RunError(
            f"run.folder {own} exists already on {world.host}, which does not see {first} of rank "
            "0; two runs never write into one folder"
        )
    apart = {rank: tuple(json.loads(text)) for rank, text in enumerate(said) if text}
    return Places(first, own, not sees, apart)


def _make(own: Path, first: Path, mark: str, goes_on_at: int, host: str) -> None:
    """Makes a host's own folder, or takes that of an earlier attempt back to a step."""
    try:
        own.mkdir(parents=True)
        (own / "timings").mkdir()
        facts = {**describe_environment(), MARK: apart_mark(mark), "folder_of_rank_0": str(first)}
        write_json(own / ENVIRONMENT, facts)
    except FileExistsError:
        if mark_of(own) == apart_mark(mark):
            with alone_in(own):
                continue_run_folder(own, goes_on_at)
    except OSError as error:
        raise RunError(f"run.folder {own} on {host}: {error.strerror}") from error
