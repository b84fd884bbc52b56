"""Trains a run again on one worker, and compares its steps or its end with what it recorded.

`verify_run` compares the loss of each step, to the last bit, the recorded digests of weights and of
all tensors, the remaining checkpoints, and the result, if the run ends within these steps.

`replay` computes a run with a server again, and compares its end. No clock is needed: events.jsonl
has who computed what at which version, and all else is a function of the recipe.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from firecaffe.cluster.agree import digest
from firecaffe.cluster.process_settings import exclusive_in_process
from firecaffe.cluster.world import World
from firecaffe.errors import NotIdenticalError, RunError
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.run import Run
from firecaffe.resume_advice import option
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.run_folder import DIGESTS, METRICS, Recorded, read_run_file, recorded_of
from firecaffe.runs.run_folder import WEIGHTS as WEIGHTS_FILE
from firecaffe.runs.schemas import DigestsResult
from firecaffe.synchrony.log import EVENTS, LogReader
from firecaffe.training.checkpoint import Checkpoint, checkpoint_name, load_checkpoint, load_newest
from firecaffe.training.given_parts import Parts
from firecaffe.training.learner import Learner, build_alone, connect, make_steps
from firecaffe.training.modes.mode import Mode, PendingStep
from firecaffe.training.modes.served.served_mode import leaves_of
from firecaffe.training.modes.served.server_steps import keep_lines
from firecaffe.training.saver import Saver
from firecaffe.training.state import WEIGHTS, State, state_digest


@dataclass(frozen=True)
class Digests:
    """SHA-256 digests after a step: of the weights, and of all state with all losses."""

    step: int
    weights: str
    state: str


@dataclass
class Again:
    """A run that is trained again, step by step."""

    run: Run
    learner: Learner
    stepper: Mode
    log: LogReader | None
    done: int = 0
    """The number of steps that are done."""

    @property
    def state(self) -> State:
        return self.learner.state

    @property
    def digests(self) -> Digests:
        return Digests(self.done, self.state.compare_weights()[0], self.state.sha256())

    @property
    def updates(self) -> int:
        """The number of a server's updates so far; 0 without a server."""
        return 0 if self.log is None else self.log.version

    def advance(self) -> dict[int, float]:
        """Train a step, or several until replicas are averaged. Returns losses by step, from 1."""
        run = self.run
        outcomes: dict[int, PendingStep] = {}
        while not outcomes or not run.rounds.is_whole(self.done):
            outcome = self.stepper.run(self.done, run.learning_rate(self.done))
            self.done += 1
            outcomes[self.done] = outcome
        losses = {step: outcome.read().loss for step, outcome in outcomes.items()}
        for loss in losses.values():
            self.state.losses.add(loss)
        return losses


@contextmanager
def train_again(folder: Path, recipe: CheckedRecipe, world: World, parts: Parts) -> Iterator[Again]:
    """Train a run again in the block, on this process alone. Raises: RunError if none can."""
    if recipe.synchrony.is_lockless:
        raise RunError(
            f"{folder}: synchrony.lock none, so that workers wrote to the same weights at times "
            "that nobody knows; such a run cannot be computed again"
        )
    log = LogReader(folder / EVENTS) if recipe.synchrony.is_served else None
    recipe = replace(recipe, parallel=recipe.parallel.over(1, 1))
    with ExitStack() as resources:
        resources.enter_context(exclusive_in_process("verify"))
        learners = 0 if log is None else log.learners
        run, learner = build_alone(recipe, parts, world, learners, resources)
        if log is not None:
            log.expect(leaves_of(run.order, recipe.synchrony.warm_steps, run.steps))
        run, reducers, _ = connect(run, learner, learner.mode.summed(), resources)
        steps = make_steps(
            run, learner, reducers, (), 0, is_repeatable=True, resources=resources, source=log
        )
        yield Again(run, learner, steps.stepper, log)


@dataclass(frozen=True)
class Replayed:
    """A run's digests, and those that came out when it was computed again."""

    recorded: Digests
    computed: Digests
    updates: int

    @property
    def is_same(self) -> bool:
        return self.recorded == self.computed


def replay(
    folder: Path,
    recipe: CheckedRecipe,
    world: World,
    to: Path | None = None,
    parts: Parts | None = None,
) -> Replayed:
    """Replay a run up to its end; one that did not finish, up to its newest checkpoint.

    to: a new folder for a checkpoint of the replayed state. parts: what was given to the run in
    Python. Raises: RunError if the run wrote no events, or its log was damaged, with the line.
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
        computed = again.digests
        if checkpoint is None:
            recorded = digests_of_result(folder)
        else:
            recorded = _of_checkpoint(checkpoint, again.state)
        if to is not None:
            about = Checkpoint(last, dict(again.run.deciding), again.learner.probe.digest)
            _keep(to, again, about)
            assert again.log is not None
            keep_lines(folder / EVENTS, to / EVENTS, again.log.number)
    return Replayed(recorded, computed, again.updates)


def digests_of_result(folder: Path) -> Digests:
    """Return the digests of a finished run. Raises: RunError."""
    row = read_run_file(folder, "result.json", DigestsResult)
    return Digests(row["steps"], row["weights_sha256"], row["state_sha256"])


def _of_checkpoint(checkpoint: Checkpoint, state: State) -> Digests:
    # `state` gives the order in which tensors are digested (others last), and the results.
    stored, order = checkpoint.tensors, list(state.tensors_held_by_all())
    every = [*(name for name in order if name in stored), *sorted(stored.keys() - set(order))]
    others = {name for name, piece in state.pieces.items() if not piece.is_result}
    names = [name for name in every if name.partition("/")[0] not in others]
    weights = (name for name in names if name.partition("/")[0] in WEIGHTS)
    tensors = digest((name, stored[name]) for name in names)
    return Digests(
        checkpoint.step,
        digest((name, stored[name]) for name in weights),
        state_digest(tensors, checkpoint.history),
    )


def _keep(folder: Path, again: Again, about: Checkpoint) -> None:
    learner = again.learner
    with learner.update.evaluating():
        learner.norms.estimate(learner.state.world, about.step)
    (folder / "checkpoints").mkdir(parents=True)
    with closing(Saver(folder / "checkpoints", 0)) as saver:
        saver.save(about, learner.state)
        saver.finish(learner.state.world)


FACTS = ("cpu", "cpu_capability", "gpus", "torch", "cuda", "source")
"""Facts of an environment that may change bits."""


@dataclass
class Verified:
    """Comparisons with a run; `weights` and `tensors` list the steps after which each was made."""

    last: int
    """The last step that the run has recorded."""
    steps: int = 0
    """The number of steps that were trained again."""
    updates: int = 0
    """A server's updates; 0 without a server."""
    losses: int = 0
    weights: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    result: bool = False
    """Whether the run's end was compared."""


def verify_run(
    folder: Path, recipe: CheckedRecipe, world: World, steps: int, parts: Parts | None = None
) -> Verified:
    """Train the first steps of a run again, and compare; a shorter run is trained to its end.

    steps: the least number, for replicas continue until they are averaged. parts: what was given to
    the run in Python. Raises: NotIdenticalError with the first place that differs; RunError if the
    run has recorded none of these steps, or a file is damaged, with the line; CheckpointError.
    """
    recorded = recorded_of(folder)
    until = min(steps, recorded.last)
    if not any(step <= until for step in recorded.losses):
        first = min(recorded.losses, default=0)
        raise RunError(
            f"{folder}: begins with step {first}, where it was resumed, so {option('steps')} must "
            "be at "
            f"least {first}"
            if first
            else f"{folder}: has recorded no step"
        )
    is_finished = (folder / "result.json").is_file()
    verified = Verified(recorded.last)
    with train_again(folder, recipe, world, parts or Parts()) as again:
        while again.done < until:
            _compare_losses(folder, recorded, again.advance(), verified)
            _compare_digests(folder, recorded, again, verified)
            _compare_checkpoint(folder, again, verified)
        if is_finished and again.done == digests_of_result(folder).step:
            _compare_result(folder, again)
            verified.result = True
        verified.steps, verified.updates = again.done, again.updates
    return verified


def _compare_losses(
    folder: Path, recorded: Recorded, losses: dict[int, float], verified: Verified
) -> None:
    for step, ours in losses.items():
        if step < min(recorded.losses):
            continue  # a step of the run that this one was resumed from
        if step not in recorded.losses:
            raise RunError(f"{folder / METRICS}: has no loss of step {step}")
        verified.losses += 1
        theirs = recorded.losses[step]
        if ours != theirs:
            _raise_at(folder, f"in step {step}: loss {theirs!r} in {METRICS}, {ours!r} here")


def _compare_digests(folder: Path, recorded: Recorded, again: Again, verified: Verified) -> None:
    step = again.done
    if step in recorded.tensors:
        _compare_tensors(folder, again, recorded.tensors[step], DIGESTS)
        verified.tensors.append(step)
    if step in recorded.weights:
        ours, theirs = again.state.compare_weights()[0], recorded.weights[step]
        if ours != theirs:
            text = f"weights {theirs[:12]} in {WEIGHTS_FILE}, {ours[:12]} here"
            _raise_at(folder, f"after step {step}: {text}")
        verified.weights.append(step)


def _compare_checkpoint(folder: Path, again: Again, verified: Verified) -> None:
    where = f"checkpoints/{checkpoint_name(again.done)}"
    if (folder / where).is_dir():
        theirs = again.state.digest_each_of(load_checkpoint(folder / where))
        _compare_tensors(folder, again, theirs, where)
        verified.tensors.append(again.done)


def _compare_tensors(folder: Path, again: Again, theirs: dict[str, str], where: str) -> None:
    ours = again.state.digest_each()
    names = [*ours, *(theirs.keys() - ours.keys())]
    name = next((name for name in names if ours.get(name) != theirs.get(name)), "")
    if name:
        _raise_at(folder, f"after step {again.done}: first in {name}, by {where}")


def _compare_result(folder: Path, again: Again) -> None:
    theirs, ours = digests_of_result(folder), again.digests
    for what in ("weights", "state"):
        their, our = getattr(theirs, what), getattr(ours, what)
        if our != their:
            text = f"{what} {their[:12]} in result.json, {our[:12]} here"
            _raise_at(folder, f"at its end, after step {again.done}: {text}")


def _raise_at(folder: Path, where: str) -> NoReturn:
    why = "; ".join(_reasons(folder))
    raise NotIdenticalError(
        f"{folder} differs from its steps on one worker {where}; {why or 'the cause is unknown'}"
    )


def _reasons(folder: Path) -> list[str]:
    ours, theirs = describe_environment(), read_run_file(folder, "environment.json")
    unlike = [fact for fact in FACTS if ours[fact] != theirs.get(fact)]
    reasons = [f"this machine is another in {', '.join(unlike)}"] if unlike else []
    if (folder / "result.json").is_file():
        reasons += map(str, read_run_file(folder, "result.json").get("identity_doubts", ()))
    return reasons
