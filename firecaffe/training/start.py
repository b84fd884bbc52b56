"""Finds the start of a training: the beginning, a checkpoint, or the end of a lost attempt.

It also tells the fault that ends an attempt: to the other ranks, and in the run folder.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from firecaffe.cluster.agree import gather_text, text_of_first
from firecaffe.cluster.world import FOLDER, World
from firecaffe.errors import CheckpointError, MemoryFullError
from firecaffe.faults import ANOTHER, GOES_ON, TOGETHER, Fault
from firecaffe.runs.fault import UNKNOWN_NEXT, fault_of, known_in, write_fault
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.pass_on import pass_on

SHARED_S = 10.0
"""Seconds that a shared file system may take to show what another host has written."""

_calls = count()
"""Numbers the trainings of a script: each has its own folder, the same in every attempt."""


@dataclass(frozen=True)
class Start:
    """The step at which a training begins, and what it goes on from."""

    key: str
    """The name under which the launcher's store has the run folder."""
    checkpoint: Checkpoint | None = None
    resumed_from: str = ""
    folder: Path | None = None
    """The run folder of an earlier attempt at this run, which goes on in it."""
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_start(world: World, resume: str | Path | None) -> Start:
    """Finds the newest checkpoint that verifies: of an earlier attempt at this run, else of
    `resume`.

    Raises: CheckpointError if `resume` holds none.
    """
    # Rank 0's number: another rank may have failed in an earlier training before it came here.
    key = text_of_first(world, f"{FOLDER}/{next(_calls)}")
    folder = _earlier_folder(world, key)
    if folder is not None and any((folder / "checkpoints").glob("step-*")):
        checkpoint, damaged = _load_together(world, folder)
        notes = [*map(_warn, damaged), f"going on after step {checkpoint.step}"]
        return Start(key, checkpoint, str(folder), folder, notes)
    if resume:
        checkpoint, damaged = _load_together(world, Path(resume))
        notes = [*map(_warn, damaged), f"going on after step {checkpoint.step} of {resume}"]
        return Start(key, checkpoint, str(resume), folder, notes)
    return Start(key, folder=folder)


def _load_together(world: World, where: Path) -> tuple[Checkpoint, list[str]]:
    """Loads a checkpoint that rank 0 chooses, verifies and passes on, and why newer ones are no
    good.
    """
    found: Checkpoint | None = None
    damaged: list[str] = []
    problem: CheckpointError | None = None
    if world.is_first:
        try:
            found, damaged = load_newest(where)
        except CheckpointError as error:
            problem = error
    is_there = gather_text(world, "" if found is None else "yes")[0]
    if problem is not None:
        raise problem
    if not is_there:
        none = CheckpointError(f"{where}: rank 0 found no checkpoint there")
        none.goes_along = True
        raise none
    checkpoint = pass_on(world, found)
    _wait_for(checkpoint.piece_files.values())
    return checkpoint, damaged


def _wait_for(paths: Iterable[Path]) -> None:
    """Waits for files: a shared file system may show other hosts an older listing for a while.

    Raises: CheckpointError.
    """
    until = time.monotonic() + SHARED_S
    for path in paths:
        while not path.is_file():
            if time.monotonic() > until:
                raise CheckpointError(f"{path}: is missing")
            time.sleep(0.2)


def remember_folder(world: World, start: Start, folder: Path) -> None:
    """Tells the launcher, and with it the ranks of a next attempt, where this run is recorded."""
    if world.store is not None:
        world.store.set(start.key, str(folder))


def _earlier_folder(world: World, key: str) -> Path | None:
    if world.store is None or not world.store.check([key]):
        return None
    return Path(world.store.get(key).decode())


def _warn(reason: str) -> str:
    return f"warning: {reason}; an older checkpoint is taken"


class FaultTeller:
    """Writes the faults of this rank, and the verdicts on others, into the run folder."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder: Path | None = None

    def write_into(self, folder: Path) -> None:
        """Sets the run folder, as soon as there is one."""
        self._folder = folder
        if self._world.watch is not None:
            self._world.watch.when_lost(self.write)

    def write(self, fault: Fault, goes_on: bool = False) -> Fault:
        """Writes a fault into the run folder, if there is one. The fault returned says if it could
        not, and whether there is a checkpoint. goes_on: whether this rank goes on all the same.
        """
        fault, then = known_in(self._folder, fault), GOES_ON if goes_on else UNKNOWN_NEXT
        problem = "" if self._folder is None else write_fault(self._folder, fault, then)
        return dataclasses.replace(fault, detail=f"{fault.detail}; {problem}") if problem else fault


@contextmanager
def tell_faults(world: World) -> Iterator[FaultTeller]:
    """Tells the other ranks what ends this one in the block, and writes it into the run folder.

    Raises: what the block has raised, with its `fault`; MemoryFullError if memory was full.
    """
    teller = FaultTeller(world)
    try:
        yield teller
    # Also what a script may catch of those that end a process: others would wait for this rank.
    except BaseException as error:
        fault = fault_of(error, world.rank, world.host, world.place.step)
        watch = world.watch
        # All stop together if they were asked to; and what another has told is told.
        is_new = fault is not None and fault.kind not in TOGETHER and fault.seen != ANOTHER
        if watch is not None and watch.fault is None and fault is not None and is_new:
            watch.tell(fault)
        if fault is None or fault.kind == "other":
            raise  # a wrong recipe, ranks that differ: it has words and a code of its own
        if fault.seen != ANOTHER:
            fault = teller.write(fault)
        if fault.kind == "out_of_memory" and not isinstance(error, MemoryFullError):
            full = MemoryFullError(fault.line)
            full.fault = fault
            raise full from error
        error.fault = fault  # type: ignore[attr-defined]
        raise
