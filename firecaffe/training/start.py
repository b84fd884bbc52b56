"""Finds where a training starts, passes its checkpoint to all ranks, and reports what ends it.

Ranks agree on requests to stop, a signal or a lost launcher, at the end of a step.
"""

import dataclasses
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import FrameType
from typing import IO, Self

import torch
from torch import Tensor

from firecaffe.cluster.agree import broadcast, broadcast_text, gather_text
from firecaffe.cluster.handover import LAUNCHED, holds_session
from firecaffe.cluster.process_settings import SAME_S, handlers_kept
from firecaffe.cluster.world import FOLDER, World, own_folder_key
from firecaffe.errors import (
    AgreementError,
    CheckpointError,
    FirecaffeError,
    LauncherLostError,
    MemoryFullError,
    PreemptedError,
    RunError,
)
from firecaffe.faults import ANOTHER, GOES_ON, TOGETHER, Fault
from firecaffe.files import open_regular
from firecaffe.resume_advice import option, resume_option
from firecaffe.runs.fault import UNKNOWN_NEXT, fault_of, with_can_resume, write_fault
from firecaffe.training.checkpoint import Checkpoint, load_newest, sums_digest
from firecaffe.training.tensor_file import Stored, StoredByName

WORDS = ("step", "identity", "probe", "history", "numbers", "doubts", "digest")

# bytes of a file that are sent at once
CHUNK_BYTES = 1 << 24


def broadcast_checkpoint(world: World, found: Checkpoint | None) -> Checkpoint:
    """Give all ranks rank 0's checkpoint. Its tensors follow one at a time, see `BroadcastTensors`.

    A piece held in parts stays in its file: each rank reads its part there, or in a copy if it does
    not see the file. Raises: PeerLostError; CheckpointError if a copy cannot be made.
    """
    if world.group is None:
        assert found is not None
        return found
    said = json.loads(broadcast_text(world, "" if found is None else json.dumps(_words(found))))
    kinds = {name: (tuple(shape), getattr(torch, dtype)) for name, shape, dtype in said["tensors"]}
    passed = Checkpoint(
        tensors=BroadcastTensors(world, kinds, None if found is None else found.tensors),
        piece_files={name: Path(path) for name, path in said["piece_files"].items()},
        folder=Path(said["folder"]),
        **{word: said[word] for word in WORDS},
    )
    if passed.piece_files:
        assert passed.folder is not None  # it was read from there
        sees = sums_digest(passed.folder) == passed.digest
        if not all(gather_text(world, "yes" if sees else "")):
            _copy_pieces(world, passed, sees)
    return passed


def _copy_pieces(world: World, passed: Checkpoint, sees: bool) -> None:
    # All ranks call it. The copies are unnamed files, so none is left behind, however the process
    # ends.
    for name, path in passed.piece_files.items():
        copy = None if sees else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            _send_file(world, path, copy)
        except OSError as error:
            what = "read" if sees else f"copied to {world.host}, which does not see it"
            raise CheckpointError(f"{path}: cannot be {what}: {error.strerror}") from error
        if copy is not None:
            passed.copies.append(copy)
            passed.piece_files[name] = Path(f"/dev/fd/{copy.fileno()}")


def _send_file(world: World, path: Path, copy: IO[bytes] | None) -> None:
    size = torch.tensor([path.stat().st_size if world.is_first else 0])
    broadcast(world, size)
    with open_regular(path) if world.is_first else nullcontext() as source:
        for start in range(0, int(size), CHUNK_BYTES):
            length = min(CHUNK_BYTES, int(size) - start)
            data = bytearray(length if source is None else source.read(length))
            broadcast(world, torch.frombuffer(data, dtype=torch.uint8))
            if copy is not None:
                copy.write(data)
        if copy is not None:
            copy.flush()


class BroadcastTensors(StoredByName):
    """Rank 0's tensors on all ranks. Each is read and broadcast when all ranks ask for it."""

    def __init__(
        self,
        world: World,
        kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        source: Stored | None,
    ) -> None:
        # kinds: shape and type of each tensor, in one order on all ranks. source: on rank 0.
        super().__init__(kinds)
        self._world, self._kinds, self._source = world, kinds, source
        self._numbers = {name: number for number, name in enumerate(kinds)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._kinds[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._kinds[name][1]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. All ranks ask in one order. Raises: AgreementError; CheckpointError."""
        asked = torch.tensor([self._numbers[name]])
        broadcast(self._world, asked)
        if int(asked) != self._numbers[name]:
            first = list(self._kinds)[int(asked)]
            raise AgreementError(
                f"rank 0 asks the checkpoint for {first}, rank {self._world.rank} for {name}; "
                "all ranks load the same tensors in the same order"
            )
        shape, dtype = self._kinds[name]
        if self._source is None:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = self._source[name].contiguous()
        if tensor.numel():
            # As bytes, because the group does not support every type.
            broadcast(self._world, tensor.reshape(-1).view(torch.uint8))
        return tensor


def _words(checkpoint: Checkpoint) -> dict[str, object]:
    stored = checkpoint.tensors
    dtypes = {name: str(stored.dtype(name)).removeprefix("torch.") for name in stored}
    return {
        **{word: getattr(checkpoint, word) for word in WORDS},
        "tensors": [[name, stored.shape(name), dtype] for name, dtype in dtypes.items()],
        # Another host may have another working directory.
        "piece_files": {name: str(p.absolute()) for name, p in checkpoint.piece_files.items()},
        "folder": str(checkpoint.folder and checkpoint.folder.absolute()),
    }


# Numbers the trainings of a script: each has its own folder, the same in every attempt.
_calls = count()


@dataclass(frozen=True)
class Start:
    """The step at which a training begins, and what it resumes."""

    key: str
    """The key of the run folder in the launcher's store."""
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

    Rank 0 decides, because others may not see its disk. Raises: CheckpointError; AgreementError if
    only some ranks resume; RunError if rank 0's host is no longer that of the run's folder.
    """
    # Rank 0's number: another rank may have failed in an earlier training before this call.
    key = broadcast_text(world, f"{FOLDER}/{next(_calls)}")
    folder = _noted(world, key)
    checkpoints = None if folder is None else folder / "checkpoints"
    if checkpoints is not None and world.is_first and not checkpoints.is_dir():
        raise RunError(
            f"{checkpoints}: is not on {world.host}, on which rank 0 is now; go on from the host "
            f"that has it ({resume_option()}), or take a run.folder on a disk that all hosts share"
        )
    has_any = checkpoints is not None and any(checkpoints.glob("step-*"))
    where: str | Path | None = folder
    which = ""
    if not broadcast_text(world, "yes" if has_any else ""):
        where, which = resume, f" of {resume}"
        given = [rank for rank, text in enumerate(gather_text(world, "yes" * bool(resume))) if text]
        if 0 < len(given) < world.world_size:
            raise AgreementError(
                f"{option('resume')} is given on rank {given[0]} and not on all; give it on every "
                "host"
            )
    if not where:
        return Start(key, folder=folder)
    checkpoint, damaged = load_together(world, Path(where))
    notes = [f"warning: {reason}; an older checkpoint is taken" for reason in damaged]
    notes.append(f"going on after step {checkpoint.step}{which}")
    return Start(key, checkpoint, str(where), folder, notes)


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
        none.is_secondary = True
        raise none
    return broadcast_checkpoint(world, checkpoint), damaged


def announce_folder(world: World, start: Start, folder: Path) -> bool:
    """Tell a next attempt that this one is about to make `folder`, if it does not exist.

    Returns whether an earlier one did: then it is this run's, however early that was killed.
    """
    key, folder = f"{start.key}/announced", folder.absolute()
    if announced := _noted(world, key):
        return announced == folder
    if not folder.exists():
        _note(world, key, folder)
    return False


def withdraw_folder(world: World, start: Start) -> None:
    """Take the announcement back, because the folder is another run's."""
    _note(world, f"{start.key}/announced", "")


def remember_folder(world: World, start: Start, folder: Path) -> None:
    """Tell the launcher, and with it the ranks of a next attempt, where this run is recorded."""
    _note(world, start.key, folder)


def remember_own_folder(world: World, start: Start, folder: Path) -> None:
    """Tell this host's launcher which folder replaces the run's on this host."""
    if LAUNCHED in os.environ:
        host = socket.gethostname()
        _note(world, own_folder_key(start.key, host, os.environ[LAUNCHED]), folder)


def _note(world: World, key: str, folder: Path | str) -> None:
    # Torch's stores take bytes as well.
    world.store.set(key, os.fsencode(folder))  # type: ignore[arg-type]


def _noted(world: World, key: str) -> Path | None:
    known = world.store.get(key) if world.store.check([key]) else b""
    return Path(os.fsdecode(known)) if known else None


class FaultWriter:
    """Writes the faults of this rank, and the verdicts on others, into the run folder."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder: Path | None = None

    def write_into(self, folder: Path) -> None:
        self._folder = folder
        self._world.watch.on_verdict(self.write)

    def write(self, fault: Fault, goes_on: bool = False) -> Fault:
        """Write a fault. Return it with whether a checkpoint exists, and any problem of writing."""
        fault, then = with_can_resume(self._folder, fault), GOES_ON if goes_on else UNKNOWN_NEXT
        problem = "" if self._folder is None else write_fault(self._folder, fault, then)
        return dataclasses.replace(fault, detail=f"{fault.detail}; {problem}") if problem else fault


@contextmanager
def report_faults(world: World) -> Iterator[FaultWriter]:
    """Tell the others what ends this rank in the block, and write it into the run folder."""
    writer = FaultWriter(world)
    try:
        yield writer
    # Also SystemExit and the like: a script may catch them, and the other ranks would wait.
    except BaseException as error:
        fault = fault_of(error, world.rank, world.host, world.place.step)
        watch = world.watch
        # Not if all ranks end together, or if another rank has reported the fault.
        is_new = fault is not None and fault.kind not in TOGETHER and fault.seen != ANOTHER
        if watch.fault is None and fault is not None and is_new:
            watch.tell(fault)
        if fault is None or fault.kind == "other":
            raise  # such as a wrong recipe: the error has its own message and exit code
        if fault.seen != ANOTHER:
            fault = writer.write(fault)
        elif fault.kind not in TOGETHER:
            # The other rank reports it. If this one exited first, the launcher would end that one.
            fault = watch.verdict(timed_out=False) or fault
        if fault.kind == "out_of_memory" and not isinstance(error, MemoryFullError):
            full = MemoryFullError(fault.line)
            full.fault = fault
            raise full from error
        error.fault = fault  # type: ignore[attr-defined]
        raise


# Sent by schedulers before they take the machine, by Ctrl-C, and by a terminal that is closed. A
# second one, `SAME_S` seconds later or more, ends the process at once. Without a launcher a second
# Ctrl-C always does, because a person presses it; in a notebook it ends the training alone.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

CTRL_C = b"\nfirecaffe: stops after this step, with a checkpoint; Ctrl-C again ends it at once\n"

LAUNCHER = "its launcher is gone"


class StopRequest:
    """Listens for requests to stop in a `with` block. Signals need the main thread."""

    def __init__(self) -> None:
        self._asked = ""
        self._kept = ExitStack()
        self._heard_s = 0.0
        # firecaffe's launcher passes its process id, because it may be gone already.
        self._parent: int | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._parent = int(os.environ.get(LAUNCHED, os.getppid()))

    @property
    def reason(self) -> str:
        """The reason why this rank is to stop; empty if it is not."""
        if not self._asked and self._parent is not None and os.getppid() != self._parent:
            self._asked = LAUNCHER
        return self._asked

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        is_person = number == signal.SIGINT and "RANK" not in os.environ
        if self._asked and (is_person or now - self._heard_s > SAME_S):
            if is_person and holds_session():
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            self._asked, self._heard_s = signal.Signals(number).name, now
            if is_person:
                with suppress(OSError):
                    os.write(2, CTRL_C)  # not by print, which the signal may interrupt

    def __enter__(self) -> Self:
        for number in self._kept.enter_context(handlers_kept(SIGNALS)):
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()


def stopped(reason: str, done: int, folder: Path) -> FirecaffeError:
    """Return the error that ends a run that was asked to stop after `done` steps."""
    message = (
        f"stopped after step {done} ({reason or 'another rank was asked to'}); "
        f"a checkpoint is saved, resume with {resume_option(folder)}"
    )
    if reason == LAUNCHER:
        return LauncherLostError(message)
    error = PreemptedError(message)
    error.is_secondary = not reason
    return error
