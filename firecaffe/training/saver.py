"""Saves checkpoints while the training runs: a step copies the state, a thread writes it.

A step waits only for the copy. If the previous checkpoint is still being written, all ranks wait
together, so each knows that none is stuck, and after a while put the new one off. Pieces that ranks
hold in parts may be many times larger than the weights: the step writes them itself, tensor by
tensor. If the disk fails, the run goes on and reports it; older checkpoints stay intact.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.cluster.agree import broadcast_text
from firecaffe.cluster.group import Group
from firecaffe.errors import CheckpointError, RunError
from firecaffe.training.checkpoint import (
    BEST,
    Checkpoint,
    mark_checkpoint,
    remove_old,
    save_checkpoint,
)
from firecaffe.training.state import State, weights_digest
from firecaffe.training.tensor_file import InMemory, write_tensors

ROUND_S = 0.5
"""Seconds after which waiting ranks are told again that rank 0 is still writing."""

# rounds between two lines about the wait for the disk
ROUNDS_SAID = 60

PATIENCE_S = 5.0
"""Seconds that a step waits for the previous checkpoint before it puts its own off."""

Write = Callable[[Path, Checkpoint], Path]
"""(folder, checkpoint) -> the path at which it is saved."""


@dataclass
class SaveCosts:
    """The costs of checkpoints. The steps waited only for `copy_s` and `wait_s`."""

    saved: int = 0
    """Checkpoints that were saved."""
    failed: int = 0
    """Checkpoints that could not be saved."""
    put_off: int = 0
    """Checkpoints that were delayed, because the previous one was still being written."""
    copy_s: float = 0.0
    """Seconds of copying the state to the CPU."""
    wait_s: float = 0.0
    """Seconds of waiting for the previous checkpoint, and at the end for the last."""
    write_s: float = 0.0
    """Seconds of writing, in the thread."""

    @property
    def line(self) -> str:
        """The line about checkpoints at the end of a run."""
        waited_s = self.copy_s + self.wait_s
        return (
            f"saved {self.saved} checkpoints: {waited_s:.2f} s of waiting, "
            f"{self.write_s:.2f} s in the background"
        )


class Saver:
    """Saves one training's checkpoints, one at a time."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        write: Write = save_checkpoint,
        warn: Callable[[str], None] = lambda _: None,
        tell_weights: Callable[[int, str], None] | None = None,
    ) -> None:
        # The thread calls warn if a save fails, and tell_weights if every rank holds all weights.
        self.costs = SaveCosts()
        self._warn, self._tell_weights = warn, tell_weights
        self._folder, self._keep_last, self._write = folder, keep_last, write
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[CheckpointError | None] | None = None
        self._copies: dict[str, Tensor] = {}

    def save(self, checkpoint: Checkpoint, state: State, marks: Sequence[str] = ()) -> None:
        """Save a training's state. All ranks call it, rank 0 writes. Tensors may change afterwards.

        marks: `best`, `good`: kept until others get them. Raises: NotFiniteError; PeerLostError.
        """
        state.check_finite()
        self._wait(None)
        start = time.perf_counter()
        piece_files: dict[str, Path] = {}
        problem = None
        for name in state.names_held_in_parts():
            listed = state.listed(name)
            coming = state.collect(name, listed)
            if state.world.is_first:
                # In the checkpoints' folder, until it moves into the checkpoint.
                piece_files[name] = self._folder / f".{name}.partial"
                problem = write_tensors(piece_files[name], listed, coming) or problem
            else:
                deque(coming, 0)  # sends this rank's parts
        numbers = state.collect_numbers()
        if not state.world.is_first:
            return
        tensors = state.tensors_held_by_all()
        self._copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        copied = dataclasses.replace(
            checkpoint,
            history=state.losses.history,
            tensors=InMemory(self._copies),
            numbers=numbers,
            piece_files=piece_files,
        )
        self.costs.copy_s += time.perf_counter() - start
        tell_weights = self._tell_weights if state.has_all_weights else None
        self._last = self._thread.submit(self._save, copied, problem, marks, tell_weights)

    @property
    def is_writing(self) -> bool:
        return self._last is not None and not self._last.done()

    def _is_behind(self, world: Group, patience_s: float) -> bool:
        # All ranks call it and get one answer: whether rank 0 still writes after patience_s.
        self._wait(patience_s)
        word = "writing" if self.is_writing else ""
        if world.is_first and not self._folder.parent.is_dir():
            word = f"{self._folder.parent}: is gone, deleted or moved while the run goes on"
        word = broadcast_text(world, word)
        if word in ("", "writing"):
            return bool(word)
        gone = RunError(word)
        gone.is_secondary = not world.is_first
        raise gone

    def wait(self, world: Group, most_s: float = inf) -> bool:
        """Wait on all ranks, at most `most_s` seconds, until rank 0 has written; return if it has.

        A rank waits for another `ROUND_S` at most: none times out. Raises: RunError on all.
        """
        rounds = 0
        while self._is_behind(world, min(ROUND_S, most_s)):
            rounds += 1
            if rounds * ROUND_S >= most_s:
                return False
            if rounds % ROUNDS_SAID == 0:
                self._warn(f"waits for the disk, {rounds * ROUND_S:.0f} s: a checkpoint is written")
        return True

    def finish(self, world: Group) -> None:
        """Wait on all ranks until rank 0 has the last checkpoint on the disk.

        If one exited earlier, the launcher would end the others. Raises: CheckpointError; RunError.
        """
        self.wait(world)
        error = None if self._last is None else self._last.result()
        said = broadcast_text(world, "" if error is None else str(error))
        if said:
            unsaved = CheckpointError(said)
            unsaved.is_secondary = not world.is_first  # rank 0 alone writes
            raise unsaved

    def mark_best(self, step: int) -> None:
        """Mark the last checkpoint, of step `step`, as the best, if it was saved."""
        self._wait(None)
        if self._last is not None and self._last.result() is None:
            try:
                mark_checkpoint(self._folder, BEST, step)
                remove_old(self._folder, self._keep_last)
            except OSError as error:
                self._warn(f"warning: the best checkpoint could not be marked: {error}")

    def close(self) -> None:
        self._thread.shutdown()

    def _wait(self, most_s: float | None) -> None:
        start = time.perf_counter()
        if self._last is not None:
            wait([self._last], most_s)
        self.costs.wait_s += time.perf_counter() - start

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        # Reuses the memory of the last copy, because the system would have to clear new memory.
        old = self._copies.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            old = torch.empty(tensor.shape, dtype=tensor.dtype)
        return old.copy_(tensor)

    def _save(
        self,
        checkpoint: Checkpoint,
        problem: OSError | None,
        marks: Sequence[str],
        tell_weights: Callable[[int, str], None] | None,
    ) -> CheckpointError | None:
        # Runs in the thread. problem: the error of writing the piece files before, if any.
        start = time.perf_counter()
        try:
            if tell_weights is not None:
                tell_weights(checkpoint.step, weights_digest(checkpoint.tensors))
            if problem is not None:
                raise CheckpointError(f"checkpoint of step {checkpoint.step} not saved: {problem}")
            self._write(self._folder, checkpoint)
            for mark in marks:
                mark_checkpoint(self._folder, mark, checkpoint.step)
            remove_old(self._folder, self._keep_last)
            self.costs.saved += 1
        except BaseException as caught:  # a plug-in may exit, which ends only this thread
            self.costs.failed += 1
            what = f"{type(caught).__name__}: {caught}"
            error = CheckpointError(f"checkpoint of step {checkpoint.step} not saved: {what}")
            if isinstance(caught, CheckpointError):
                error = caught
            self._warn(f"warning: {error}; the run goes on, older checkpoints are whole")
            return error
        finally:
            for path in checkpoint.piece_files.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            self.costs.write_s += time.perf_counter() - start
        return None
