"""Computes a run with a server again, on one worker, from its recipe and its log of events alone.

Nothing is asked of a clock: who computed what at which version, and what was dropped, is in
events.jsonl. All else is a function of the recipe, so the same bits have to come out.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.digest import digest
from firecaffe.cluster.world import World
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import RunError
from firecaffe.recipe.run import Ranks, resolve
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.folder import read_run_file
from firecaffe.synchrony.log import EVENTS, LogReader
from firecaffe.training.arithmetic import set_arithmetic
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import data_workers
from firecaffe.training.facts import describe_training
from firecaffe.training.learner import Learner, build_learner
from firecaffe.training.parts import Parts, open_parts
from firecaffe.training.saver import Saver
from firecaffe.training.state import WEIGHTS, state_digest
from firecaffe.training.step import Stepper


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
    folder: Path, recipe: Recipe, world: World, to: Path | None = None, parts: Parts | None = None
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
    parts = parts or Parts()
    log = LogReader(folder / EVENTS)
    set_arithmetic(recipe.train, world.device)
    data = open_parts(recipe, parts)
    described = describe_training(recipe, data)
    is_finished = (folder / "result.json").is_file()
    checkpoint = None if is_finished else load_newest(folder)[0]
    last = _of_result(folder).step if checkpoint is None else checkpoint.step
    with ExitStack() as resources:
        run = resolve(recipe, data, Ranks(), described=described)
        learner = build_learner(run, parts, data, world, None, (), log.learners)
        run, reducer, _ = connect(run, learner, world, None, resources)
        served = learner.served
        assert served is not None
        leaves = run.route.order(run.num_leaves, run.shares[0])
        ahead = BatchesAhead(learner.batches, leaves, 0, served.leaves.first_step)
        resources.enter_context(closing(ahead))
        resources.enter_context(data_workers(data))
        clip = recipe.solver.clip_gradients
        warm = Stepper(learner.forward, ahead, learner.optimizer, reducer, leaves, clip)
        warm.momentum, warm.ema = run.momentum, learner.ema
        stepper = served.stepper(warm, learner.batches, log)
        for step in range(last):
            outcome = stepper.run(step, run.learning_rate(step))
            learner.state.losses.add(outcome.read().loss)
        state = learner.state
        found = Digests(last, state.compare_weights()[0], state.sha256())
        recorded = (
            _of_result(folder)
            if checkpoint is None
            else _of_checkpoint(checkpoint, list(state.tensors_held_by_all()))
        )
        if to is not None:
            _keep(to, learner, Checkpoint(last, dict(run.deciding), learner.probe.digest))
    return Replayed(recorded, found, log.version)


def _of_result(folder: Path) -> Digests:
    """What a finished run has come to."""
    row = read_run_file(folder, "result.json")
    try:
        return Digests(int(row["steps"]), str(row["weights_sha256"]), str(row["state_sha256"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / 'result.json'}: has no digests ({error!r})") from error


def _of_checkpoint(checkpoint: Checkpoint, order: Sequence[str]) -> Digests:
    """What a checkpoint holds. order: the names of a state's tensors, in which they are digested;
    others come last.
    """
    stored = checkpoint.tensors
    names = [*(name for name in order if name in stored), *sorted(stored.keys() - set(order))]
    weights = (name for name in names if name.partition("/")[0] in WEIGHTS)
    tensors = digest((name, stored[name]) for name in names)
    return Digests(
        checkpoint.step,
        digest((name, stored[name]) for name in weights),
        state_digest(tensors, checkpoint.history),
    )


def _keep(folder: Path, learner: Learner, about: Checkpoint) -> None:
    """Saves a checkpoint of what came out."""
    (folder / "checkpoints").mkdir(parents=True)
    with closing(Saver(folder / "checkpoints", 0)) as saver:
        saver.save(about, learner.state)
        saver.finish()
