"""Whether a run's first steps come to what it has recorded of them, once more on one worker.

Each step's loss is compared, to the last bit; the digests of the weights that the run has written
at evaluations and checkpoints; those of all tensors after each step, if it has written them
(run.digests); and every tensor of its checkpoints that are still there. A run that ends within
these steps is compared with its result, too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from firecaffe.cluster.world import World
from firecaffe.errors import NotIdenticalError, RunError
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.folder import DIGESTS, METRICS, WEIGHTS, read_run_file
from firecaffe.runs.recorded import Recorded, recorded_of
from firecaffe.training.again import Again, train_again
from firecaffe.training.checkpoint import checkpoint_name, list_checkpoints, load_checkpoint
from firecaffe.training.parts import Parts
from firecaffe.training.replay import digests_of_result

FACTS = ("cpu", "cpu_capability", "gpus", "torch", "cuda", "source")
"""Facts of an environment that may change bits."""


@dataclass
class Verified:
    """What a run's first steps were compared with."""

    last: int
    """The last step that the run has recorded."""
    steps: int = 0
    """The number of steps that were trained once more."""
    updates: int = 0
    """Those of a server; 0 if there is none."""
    losses: int = 0
    """The number of losses that were compared."""
    weights: list[int] = field(default_factory=list)
    """The steps after which the weights were, by their digest."""
    tensors: list[int] = field(default_factory=list)
    """The steps after which each tensor was."""
    result: bool = False
    """Whether the run's end was."""


def verify_run(
    folder: Path, recipe: CheckedRecipe, world: World, steps: int, parts: Parts | None = None
) -> Verified:
    """Trains the first steps of a run once more, and compares.

    Args:
        folder: The run's folder.
        recipe: The run's recipe.
        world: This process alone.
        steps: At least so many steps: replicas that are apart go on until they are averaged. A
            shorter run is trained to its end.
        parts: What was given to the run in Python.

    Raises: NotIdenticalError with the first place that differs; RunError if the run has recorded
        nothing of these steps, or a file of it was damaged, with the line of the log of events;
        CheckpointError if a checkpoint was.
    """
    recorded = recorded_of(folder)
    until = min(steps, recorded.last)
    if not any(step <= until for step in recorded.losses):
        first = min(recorded.losses, default=0)
        raise RunError(
            f"{folder}: begins with step {first}, where it was resumed, so --steps must be at "
            f"least {first}"
            if first
            else f"{folder}: has recorded no step"
        )
    is_finished = (folder / "result.json").is_file()
    checkpoints = list_checkpoints(folder / "checkpoints")
    found = Verified(recorded.last)
    with train_again(folder, recipe, world, parts or Parts()) as again:
        while again.done < until:
            _compare_losses(folder, recorded, again.advance(), found)
            _compare_digests(folder, recorded, again, found)
            if checkpoint_name(again.done) in checkpoints:
                _compare_checkpoint(folder, again, found)
        if is_finished and again.done == digests_of_result(folder).step:
            _compare_result(folder, again)
            found.result = True
        found.steps, found.updates = again.done, again.updates
    return found


def _compare_losses(
    folder: Path, recorded: Recorded, losses: dict[int, float], found: Verified
) -> None:
    for step, ours in losses.items():
        if step < min(recorded.losses):
            continue  # of the run that this one was resumed from
        if step not in recorded.losses:
            raise RunError(f"{folder / METRICS}: has no loss of step {step}")
        found.losses += 1
        theirs = recorded.losses[step]
        if ours != theirs:
            _differs(folder, f"in step {step}: loss {theirs!r} in {METRICS}, {ours!r} here")


def _compare_digests(folder: Path, recorded: Recorded, again: Again, found: Verified) -> None:
    step = again.done
    if step in recorded.tensors:
        _compare_tensors(folder, again, recorded.tensors[step], DIGESTS)
        found.tensors.append(step)
    if step in recorded.weights:
        ours, theirs = again.state.compare_weights()[0], recorded.weights[step]
        if ours != theirs:
            words = f"weights {theirs[:12]} in {WEIGHTS}, {ours[:12]} here"
            _differs(folder, f"after step {step}: {words}")
        found.weights.append(step)


def _compare_checkpoint(folder: Path, again: Again, found: Verified) -> None:
    where = f"checkpoints/{checkpoint_name(again.done)}"
    theirs = again.state.digest_each_of(load_checkpoint(folder / where))
    _compare_tensors(folder, again, theirs, where)
    found.tensors.append(again.done)


def _compare_tensors(folder: Path, again: Again, theirs: dict[str, str], where: str) -> None:
    ours = again.state.digest_each()
    names = [*ours, *(theirs.keys() - ours.keys())]
    name = next((name for name in names if ours.get(name) != theirs.get(name)), "")
    if name:
        _differs(folder, f"after step {again.done}: first in {name}, by {where}")


def _compare_result(folder: Path, again: Again) -> None:
    theirs = digests_of_result(folder)
    ours = again.state.compare_weights()[0], again.state.sha256()
    for what, our, their in zip(
        ("weights", "state"), ours, (theirs.weights, theirs.state), strict=True
    ):
        if our != their:
            words = f"{what} {their[:12]} in result.json, {our[:12]} here"
            _differs(folder, f"at its end, after step {again.done}: {words}")


def _differs(folder: Path, where: str) -> NoReturn:
    """Raises: NotIdenticalError, with the reasons that are known."""
    why = "; ".join(_reasons(folder))
    raise NotIdenticalError(
        f"{folder} differs from its steps on one worker {where}; {why or 'no reason is known'}"
    )


def _reasons(folder: Path) -> list[str]:
    ours, theirs = describe_environment(), read_run_file(folder, "environment.json")
    unlike = [fact for fact in FACTS if ours[fact] != theirs.get(fact)]
    found = [f"this machine is another in {', '.join(unlike)}"] if unlike else []
    if (folder / "result.json").is_file():
        found += map(str, read_run_file(folder, "result.json").get("identity_doubts", ()))
    return found
