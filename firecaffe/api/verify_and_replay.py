"""`firecaffe.verify` and `firecaffe.replay`: repeat trainings, and compare them bit by bit."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count, commas, path_of, refuse_beside, wrong
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.api.run_argument import folder_of, open_run
from firecaffe.api.twins import by_workers, check_twins, folder_of_twins, layouts_of, train_twin
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.errors import NotIdenticalError, RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.run_folder import first_difference, read_run_file
from firecaffe.training.verification import Verified, verify_run
from firecaffe.training.verification import replay as replay_run
from firecaffe.value_checks import MAX_STEPS

MAX_LISTED = 4


@dataclass(frozen=True, repr=False)
class SameBits(Answer):
    """Trainings whose tensors were the same, bit for bit, after every step."""

    trainings: list[str]
    """The numbers of workers, or the layouts."""
    what: str
    """The kind of `trainings`: "workers" or "layouts"."""
    steps: int
    """The number of steps of each training."""
    weights_sha256: str
    """The SHA-256 of all parameters and buffers at the end."""
    state_sha256: str
    """The SHA-256 of weights, optimizer state and losses."""
    doubts: list[str]
    """Reasons why other numbers of workers, or another run, may get other bits."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return dataclasses.asdict(self)

    def _parts(self) -> Iterator[str]:
        yield from (f"note: {doubt}" for doubt in self.doubts)
        yield (
            f"identical: {', '.join(self.trainings)} {self.what}, every tensor after each of "
            f"{self.steps} steps; weights {self.weights_sha256[:12]}, state "
            f"{self.state_sha256[:12]}"
        )


@dataclass(frozen=True, repr=False)
class SameAsRecorded(Answer):
    """A run's first steps, which one worker computed again to the recorded bits."""

    verified: Verified
    """The steps, losses and tensors that were compared."""

    def to_dict(self) -> dict[str, Any]:
        """Return what was compared."""
        return dataclasses.asdict(self.verified)

    def _parts(self) -> Iterator[str]:
        yield line(self.verified)


@from_script
def verify(
    recipe: Recipe | str | Path,
    *,
    nproc_per_node: str | Sequence[int] | None = None,
    layouts: str | Sequence[str] = "",
    steps: int = 20,
    trust_code: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> SameBits | SameAsRecorded:
    """Train a recipe on several numbers of workers, and compare every tensor after every step.

    For a run's folder: train its first steps again on one worker, and compare with its records.

    Args:
        recipe: The training, the path of its file, or a run's folder.
        nproc_per_node: Numbers of workers; without them [1, 2]. None for a run.
        layouts: Instead of numbers of workers, layouts of a model that is split or in stages, as
            ["1", "model=2x2"].
        steps: The steps of each training; for a run, its first steps.
        trust_code: Run code that the run's folder names.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: NotIdenticalError with the first step and tensor that differ; RecipeError for a wrong
    argument, or a mode of synchrony whose results depend on the number of workers.
    """
    check_count("steps", steps, 1)
    if steps > MAX_STEPS:
        raise wrong("steps", steps, f"at most {MAX_STEPS:,}")
    if isinstance(recipe, str | Path) and Path(recipe).is_dir():
        if nproc_per_node is not None:
            raise RecipeError(
                f"{option('nproc_per_node')}: verify RUN trains on one worker, and compares "
                "with what the run has recorded; leave it out"
            )
        refuse_beside("a run's folder", layouts=layouts)
        return _verify_run(recipe, steps, trust_code, replace)
    refuse_beside("a recipe", replace=replace, trust_code=trust_code)
    checked = recipe_of(recipe)
    checked = dataclasses.replace(
        checked, train=dataclasses.replace(checked.train, steps=steps, epochs=0)
    )
    named = commas("layouts", layouts)
    if named and nproc_per_node is not None:
        refuse_beside("layouts, which say their workers", nproc_per_node=nproc_per_node)
    numbers = "1,2" if nproc_per_node is None else commas("nproc_per_node", nproc_per_node)
    twins = layouts_of(named, checked) if named else by_workers(checked, _numbers(numbers))
    check_twins(twins)
    with folder_of_twins("verify") as folder:
        runs = {twin.name: train_twin(twin, folder, digests=True) for twin in twins}
        return _compare(runs, steps, "layouts" if named else "workers")


def _compare(runs: dict[str, Path], steps: int, what: str) -> SameBits:
    first, *others = runs
    for number in others:
        difference = first_difference(runs[first], runs[number])
        if difference is not None:
            why = "; ".join(["", *_doubts([runs[first], runs[number]])])
            raise NotIdenticalError(
                f"{first} and {number} {what} differ from step {difference.step} on, "
                f"first in {difference.tensor}{why}"
            )
    result = read_run_file(runs[first], "result.json")
    return SameBits(
        trainings=list(runs),
        what=what,
        steps=steps,
        weights_sha256=result["weights_sha256"],
        state_sha256=result["state_sha256"],
        doubts=_doubts(runs.values()),
    )


def _doubts(runs: Iterable[Path]) -> list[str]:
    results = [read_run_file(run, "result.json") for run in runs]
    return list(dict.fromkeys(doubt for row in results for doubt in row["identity_doubts"]))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(set(numbers)) < 2 or min(numbers) < 1:
        raise RecipeError(
            f"{option('nproc_per_node')} is {text!r}; verify needs two or more different numbers "
            "above 0, as in 1,2,4"
        )
    return list(dict.fromkeys(numbers))


def _verify_run(
    run: str | Path, steps: int, trust_code: bool, replace: Mapping[str, Any] | None
) -> SameAsRecorded:
    check_alone("verify RUN")
    used = open_run(run, replace, trust_code)
    used.check_named()
    with used.join() as world:
        return SameAsRecorded(verify_run(folder_of(used.where), used.recipe, world, steps))


def line(found: Verified) -> str:
    steps = "step" if found.last == 1 else "steps"
    of = f"{found.steps:,} of {found.last:,} {steps} once more on one worker"
    if found.updates:
        of += f", {found.updates:,} updates from the log of events"
    compared = [f"{found.losses:,} losses"]
    if found.tensors:
        compared.append(f"every tensor after {_steps(found.tensors)}")
    if found.weights:
        compared.append(f"the weights after {_steps(found.weights)}")
    if found.result:
        compared.append("the result")
    return f"same: {of}; compared {', '.join(compared)}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > MAX_LISTED:
        return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
    return f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"


@dataclass(frozen=True, repr=False)
class Replay(Answer):
    """A run that was computed again with the same bits."""

    run: Path
    """The run, as it was given."""
    step: int
    """The step up to which it was computed."""
    updates: int
    """The server's updates."""
    weights_sha256: str
    """The digest of the weights."""
    state_sha256: str
    """The digest of all state, and of the losses of all steps."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {**dataclasses.asdict(self), "run": str(self.run)}

    def _parts(self) -> Iterator[str]:
        yield (
            f"same: {self.updates:,} updates of {self.step} steps; weights "
            f"{self.weights_sha256[:12]}, state {self.state_sha256[:12]}"
        )


@from_script
def replay(
    run: str | Path,
    *,
    to: str | Path = "",
    trust_code: bool = False,
    replace: Mapping[str, Any] | None = None,
) -> Replay:
    """Compute a run with a server again, on this process, and compare the digests of its end.

    Args:
        run: A run's folder. If the run did not finish, it is computed up to its newest checkpoint.
        to: A new folder for a checkpoint of the result; without it, none is kept.
        trust_code: Run code that the folder names.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: NotIdenticalError if a digest differs; RunError if the run wrote no events, or a line of
    its log is damaged; RecipeError, DataError, CheckpointError.
    """
    check_alone("replay")
    used = open_run(run, replace, trust_code)
    target = None if to == "" else path_of("to", to)
    used.check_named()
    folder = folder_of(used.where)
    with used.join() as world:
        replayed = replay_run(folder, used.recipe, world, target)
    ours, theirs = replayed.computed, replayed.recorded
    if not replayed.is_same:
        what = "weights" if ours.weights != theirs.weights else "optimizer state or losses"
        raise NotIdenticalError(
            f"{folder} differs from its replay after step {ours.step}: {what}; weights "
            f"{theirs.weights[:12]} in the run, {ours.weights[:12]} in the replay. Other code, "
            "data or hardware than the run's may be why"
        )
    return Replay(used.where, ours.step, replayed.updates, ours.weights, ours.state)
