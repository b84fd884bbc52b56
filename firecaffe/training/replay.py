"""Computes a run with a server again, on one worker, and compares what comes out at its end."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.digest import digest
from firecaffe.cluster.world import World
from firecaffe.errors import RunError
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.runs.folder import read_run_file
from firecaffe.runs.schemas import DigestsResult
from firecaffe.training.again import Again, train_again
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.parts import Parts
from firecaffe.training.saver import Saver
from firecaffe.training.state import WEIGHTS, State, state_digest


@dataclass(frozen=True)
class Digests:
    """What a training has come to after a step."""

    step: int
    weights: str
    """The SHA-256 of all parameters and buffers, by name."""
    state: str
    """The SHA-256 of all state, and of the losses of all steps."""


@dataclass(frozen=True)
class Replayed:
    """A run, and what came out when it was computed again."""

    recorded: Digests
    found: Digests
    updates: int
    """The version that was reached."""

    @property
    def is_same(self) -> bool:
        return self.recorded == self.found


def replay(
    folder: Path,
    recipe: CheckedRecipe,
    world: World,
    to: Path | None = None,
    parts: Parts | None = None,
) -> Replayed:
    """Replays a run up to its end; one that did not finish, up to its newest checkpoint.

    Args:
        folder: The run's folder.
        recipe: The run's recipe.
        world: This process alone.
        to: A folder for the checkpoint of what came out, which must not exist; None: none is kept.
        parts: What was given to the run in Python.

    Raises: RunError if the run wrote no events, or its log was damaged, with the line.
    """
    if not recipe.synchrony.is_served:
        raise RunError(
            f"{folder}: synchrony.mode {recipe.synchrony.mode} writes no events, for its result "
            "depends on its recipe alone; train it again, or compare workers with verify"
        )
    if to is not None and to.exists():
        raise RunError(f"{to} exists already; what is replayed goes into a new folder")
    is_finished = (folder / "result.json").is_file()
    checkpoint = None if is_finished else load_newest(folder)[0]
    last = digests_of_result(folder).step if checkpoint is None else checkpoint.step
    with train_again(folder, recipe, world, parts or Parts()) as again:
        while again.done < last:
            again.advance()
        state = again.state
        found = Digests(last, state.compare_weights()[0], state.sha256())
        recorded = (
            digests_of_result(folder) if checkpoint is None else _of_checkpoint(checkpoint, state)
        )
        if to is not None:
            about = Checkpoint(last, dict(again.run.deciding), again.learner.probe.digest)
            _keep(to, again, about)
    return Replayed(recorded, found, again.updates)


def digests_of_result(folder: Path) -> Digests:
    """What a finished run has come to. Raises: RunError."""
    row = read_run_file(folder, "result.json", DigestsResult)
    return Digests(row["steps"], row["weights_sha256"], row["state_sha256"])


def _of_checkpoint(checkpoint: Checkpoint, state: State) -> Digests:
    """What a checkpoint holds. state: what it is compared with, which says in which order tensors
    are digested, and which are no results; tensors that it does not have come last.
    """
    stored, order = checkpoint.tensors, list(state.tensors_held_by_all())
    every = [*(name for name in order if name in stored), *sorted(stored.keys() - set(order))]
    beside = {name for name, piece in state.pieces.items() if not piece.is_result}
    names = [name for name in every if name.partition("/")[0] not in beside]
    weights = (name for name in names if name.partition("/")[0] in WEIGHTS)
    tensors = digest((name, stored[name]) for name in names)
    return Digests(
        checkpoint.step,
        digest((name, stored[name]) for name in weights),
        state_digest(tensors, checkpoint.history),
    )


def _keep(folder: Path, again: Again, about: Checkpoint) -> None:
    """Saves a checkpoint of what came out."""
    learner = again.learner
    if learner.norms is not None:
        with again.evaluating():
            learner.norms.estimate(learner.state.world, about.step)
    (folder / "checkpoints").mkdir(parents=True)
    with closing(Saver(folder / "checkpoints", 0)) as saver:
        saver.save(about, learner.state)
        saver.finish()
