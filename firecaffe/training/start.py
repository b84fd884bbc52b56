"""Finds where a training starts, and reports the fault that ends an attempt at it."""

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from firecaffe.cluster.agree import gather_text, text_of_first
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.world import FOLDER, World, own_folder_key
from firecaffe.errors import AgreementError, CheckpointError, MemoryFullError, RunError
from firecaffe.faults import ANOTHER, GOES_ON, TOGETHER, Fault
from firecaffe.resume_advice import option, resume_word
from firecaffe.runs.fault import UNKNOWN_NEXT, fault_of, known_in, write_fault
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.pass_on import pass_on

# Numbers the trainings of a script: each has its own folder, the same in every attempt.
_calls = count()


@dataclass(frozen=True)
class Start:
    """The step at which a training begins, and what it resumes."""

    key: str
    """The name of the run folder in the launcher's store."""
    checkpoint: Checkpoint | None = None
    resumed_from: str = ""
    folder: Path | None = None
    """The run folder of an earlier attempt at this run, which continues in it."""
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_start(world: World, resume: str | Path | None) -> Start:
    """Find the newest checkpoint that verifies, of an earlier attempt at this run or of `resume`.

    Rank 0 decides, because others may not see its disk. Raises: CheckpointError if `resume` holds
    none; AgreementError if only some ranks resume; RunError if the host that has the run's folder
    is no longer rank 0's.
    """
    # Rank 0's number: another rank may have failed in an earlier training before it came here.
    key = text_of_first(world, f"{FOLDER}/{next(_calls)}")
    folder = _earlier_folder(world, key)
    checkpoints = None if folder is None else folder / "checkpoints"
    if checkpoints is not None and world.is_first and not checkpoints.is_dir():
        raise RunError(
            f"{checkpoints}: is not on {world.host}, on which rank 0 is now; go on from the host "
            f"that has it ({resume_word()}), or take a run.folder on a disk that all hosts share"
        )
    has_any = checkpoints is not None and any(checkpoints.glob("step-*"))
    if text_of_first(world, "yes" if has_any else ""):
        assert folder is not None  # all ranks read it in one store
        checkpoint, damaged = load_together(world, folder)
        notes = [*map(_warn, damaged), f"going on after step {checkpoint.step}"]
        return Start(key, checkpoint, str(folder), folder, notes)
    given = [rank for rank, text in enumerate(gather_text(world, "yes" * bool(resume))) if text]
    if 0 < len(given) < world.world_size:
        raise AgreementError(
            f"{option('resume')} is given on rank {given[0]} and not on all; give it on every host"
        )
    if resume:
        checkpoint, damaged = load_together(world, Path(resume))
        notes = [*map(_warn, damaged), f"going on after step {checkpoint.step} of {resume}"]
        return Start(key, checkpoint, str(resume), folder, notes)
    return Start(key, folder=folder)


def load_together(world: World, where: Path) -> tuple[Checkpoint, list[str]]:
    """Load the checkpoint that rank 0 chooses, and return why newer ones are damaged."""
    checkpoint: Checkpoint | None = None
    damaged: list[str] = []
    problem: CheckpointError | None = None
    if world.is_first:
        try:
            checkpoint, damaged = load_newest(where)
        except CheckpointError as error:
            problem = error
    is_there = gather_text(world, "" if checkpoint is None else "yes")[0]
    if problem is not None:
        raise problem
    if not is_there:
        none = CheckpointError(f"{where}: rank 0 found no checkpoint there")
        none.goes_along = True
        raise none
    return pass_on(world, checkpoint), damaged


def announce_folder(world: World, start: Start, folder: Path) -> bool:
    """Tell a next attempt that this one is about to make `folder`, if it does not exist.

    Returns whether an earlier attempt has announced it. Then it is this run's, however far that
    attempt had come when it was killed.
    """
    key, folder = f"{start.key}/announced", folder.absolute()
    if world.store is None:
        return False
    if world.store.check([key]) and (announced := world.store.get(key)):
        return Path(os.fsdecode(announced)) == folder
    if not folder.exists():
        world.store.set(key, os.fsencode(folder))  # type: ignore[arg-type]
    return False


def withdraw_folder(world: World, start: Start) -> None:
    """Take the announcement back, because the folder is another run's."""
    if world.store is not None:
        world.store.set(f"{start.key}/announced", b"")  # type: ignore[arg-type]


def remember_folder(world: World, start: Start, folder: Path) -> None:
    """Tell the launcher, and with it the ranks of a next attempt, where this run is recorded."""
    if world.store is not None:
        # Torch's stores take bytes as well.
        world.store.set(start.key, os.fsencode(folder))  # type: ignore[arg-type]


def remember_own_folder(world: World, start: Start, folder: Path) -> None:
    """Tell this host's launcher which folder replaces the run's on this host."""
    if world.store is not None and LAUNCHED in os.environ:
        launcher = own_folder_key(start.key, socket.gethostname(), os.environ[LAUNCHED])
        world.store.set(launcher, os.fsencode(folder))  # type: ignore[arg-type]


def _earlier_folder(world: World, key: str) -> Path | None:
    if world.store is None or not world.store.check([key]):
        return None
    return Path(os.fsdecode(world.store.get(key)))


def _warn(reason: str) -> str:
    return f"warning: {reason}; an older checkpoint is taken"


class FaultTeller:
    """Writes the faults of this rank, and the verdicts on others, into the run folder."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder: Path | None = None

    def write_into(self, folder: Path) -> None:
        self._folder = folder
        if self._world.watch is not None:
            self._world.watch.when_lost(self.write)

    def write(self, fault: Fault, goes_on: bool = False) -> Fault:
        """Write a fault, and return it with any problem, and whether there is a checkpoint."""
        fault, then = known_in(self._folder, fault), GOES_ON if goes_on else UNKNOWN_NEXT
        problem = "" if self._folder is None else write_fault(self._folder, fault, then)
        return dataclasses.replace(fault, detail=f"{fault.detail}; {problem}") if problem else fault


@contextmanager
def tell_faults(world: World) -> Iterator[FaultTeller]:
    """Tell the other ranks what ends this rank in the block, and write it into the run folder.

    Raises: the block's error, with its `fault`; MemoryFullError if memory was full.
    """
    teller = FaultTeller(world)
    try:
        yield teller
    # Also exceptions that end a process: a script may catch them, and others would wait.
    except BaseException as error:
        fault = fault_of(error, world.rank, world.host, world.place.step)
        watch = world.watch
        # Not if all were asked to stop, which they do together, or if another rank has told it.
        is_new = fault is not None and fault.kind not in TOGETHER and fault.seen != ANOTHER
        if watch is not None and watch.fault is None and fault is not None and is_new:
            watch.tell(fault)
        if fault is None or fault.kind == "other":
            raise  # such as a wrong recipe: the error has its own message and exit code
        if fault.seen != ANOTHER:
            fault = teller.write(fault)
        elif watch is not None and fault.kind not in TOGETHER:
            # Its own rank tells it. Leaving first would let the launcher end that rank unheard.
            fault = watch.verdict(timed_out=False) or fault
        if fault.kind == "out_of_memory" and not isinstance(error, MemoryFullError):
            full = MemoryFullError(fault.line)
            full.fault = fault
            raise full from error
        error.fault = fault  # type: ignore[attr-defined]
        raise
