"""The training loop, from the first step to the result."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn, optim

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.data import DataConfig, Dataset
from firecaffe.errors import CheckpointError, FirecaffeError, LauncherLostError, PreemptedError
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.config import CheckpointConfig, TrainConfig
from firecaffe.runs.folder import RunConfig
from firecaffe.runs.record import JsonLines, Metrics
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.policy import batch_scale, learning_rate
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.evaluate import Evaluation, evaluate
from firecaffe.training.finite import explained
from firecaffe.training.outcome import StepResult, Votes
from firecaffe.training.progress import RunProgress
from firecaffe.training.saver import SaveCosts, Saver
from firecaffe.training.state import State
from firecaffe.training.step import Stepper
from firecaffe.training.stop import LAUNCHER, StopRequest

FEW_RANKS = 8
"""Each of which is told of by itself."""


@dataclass
class Training:
    """Everything built that a training needs, and where it stands."""

    world: World
    model: nn.Module
    optimizer: optim.Optimizer
    stepper: Stepper
    reducer: GradientReducer
    test: Dataset
    """Seen once, at the end."""
    validation: Dataset | None
    """Seen on the way, to choose by."""
    data: DataConfig
    config: TrainConfig
    solver: SolverConfig
    checkpoint: CheckpointConfig
    run: RunConfig
    steps: int
    """Steps in all; the training goes from `first_step` to here."""
    first_step: int
    state: State
    """What a checkpoint holds and digests tell apart."""
    identity: dict[str, Any]
    probe: str
    folder: Path
    goes_on: bool
    """Whether the folder holds the records of an earlier attempt at this run."""
    saver: Saver
    title: str
    doubts: list[str]
    """Why other numbers of workers may not end in the same bits."""
    notes: list[str]
    """What the run tells before it starts."""
    broken: Sequence[Mapping[int, str]]
    """Images that could not be decoded so far, by number: of each part of the data."""


@dataclass(frozen=True)
class Result:
    """What a finished training came to. Rates leave out the first step, which warms up."""

    steps: int
    timed_samples: int
    timed_s: float
    images_per_s: float
    exposed_communication: float
    """Share of the step time that ranks waited for communication, mean over ranks."""
    data_wait: float
    """Share of the step time that ranks waited for data, mean over ranks."""
    data_wait_by_rank: list[float]
    sent_bytes_per_step_by_rank: list[float | None]
    """Of gradients, to other ranks; None where they went through a collective of the backend's."""
    loss: float | None
    """Mean loss of the last step; None where a resumed run had none left to do."""
    test_loss: float
    metrics: dict[str, float]
    """Of the task, by name, on the test samples."""
    largest_class_share: float | None
    """Of the test set's classes: the top-1 of a network that has learned nothing."""
    validation: dict[str, float] | None
    """The metrics on the validation samples at the end; None where there are none."""
    test_samples: int
    weights_sha256: str
    """Over all parameters and buffers, by name."""
    state_sha256: str
    """Over weights, optimizer state and the losses of all steps."""
    drifted_ranks: list[int]
    """Ranks that ended with other weights than most: their updates came to other bits."""
    checkpoints: SaveCosts
    """What saving has cost, on rank 0."""
    broken_images: list[str]
    """That another image stood in for, and why."""
    identity_doubts: list[str]
    """Why other numbers of workers, or another run, may not end in the same bits; of all ranks."""

    @property
    def top1(self) -> float:
        """Of images of classes: the share whose label came first."""
        return self.metrics["top1"]

    @property
    def top5(self) -> float:
        """Of images of classes: the share whose label was among the first five."""
        return self.metrics["top5"]

    def as_row(self) -> dict[str, Any]:
        """As result.json has it: a name for each metric."""
        row = asdict(self)
        metrics, validation = row.pop("metrics"), row.pop("validation")
        row |= {f"validation_{name}": (validation or {}).get(name) for name in metrics}
        return {**row, **metrics}


def train(t: Training) -> Result:
    """Trains from `first_step` to `steps`; all ranks return the same result.

    Raises: PreemptedError where the run was asked to stop, LauncherLostError where its launcher is
    gone; its checkpoint is saved then. NotFiniteError on all ranks.
    """
    with ExitStack() as stack:
        progress = stack.enter_context(
            RunProgress(t.title, t.first_step, t.steps, shown=t.world.is_first)
        )
        stop = stack.enter_context(StopRequest())
        timings = stack.enter_context(
            JsonLines(t.folder / f"timings/rank-{t.world.rank}.jsonl", t.goes_on)
        )
        trips = stack.enter_context(
            JsonLines(t.folder / f"timings/round-trips-{t.world.rank}.jsonl", t.goes_on)
        )
        metrics = digests = None
        if t.world.is_first:
            after = t.first_step if t.goes_on else None
            metrics = stack.enter_context(Metrics(t.folder, t.run.tensorboard, after))
            if t.run.digests:
                digests = stack.enter_context(JsonLines(t.folder / "digests.jsonl", t.goes_on))
        known = list(t.doubts)
        for note in t.notes:
            progress.say(f"{t.title}  {note}")
        t.saver.warn = lambda line: progress.say(f"{t.title}  {line}")
        sums = Sums()
        scale = batch_scale(t.solver, t.config.global_batch_size)
        saved_s = time.monotonic()

        def rate_under_way() -> float:
            return learning_rate(t.solver, t.world.place.step - 1, t.steps, scale)

        checkpoints = t.folder / "checkpoints"
        stack.enter_context(explained(t.world, t.saver, checkpoints, rate_under_way))

        def vote() -> Votes:
            is_due = t.checkpoint.every_s and time.monotonic() - saved_s >= t.checkpoint.every_s
            return Votes(stop=bool(stop.reason), save=bool(is_due) and t.world.is_first)

        for step in range(t.first_step, t.steps):
            start = time.perf_counter()
            t.world.place.step = step + 1
            rate = learning_rate(t.solver, step, t.steps, scale)
            result = t.stepper.run(step, rate, vote).read()
            t.state.losses.add(result.loss)
            done = step + 1
            timings.write(asdict(result.timings))
            for trip in t.world.watch.take_round_trips() if t.world.watch is not None else ():
                trips.write(asdict(trip))
            progress.step(done, rate, result)
            if metrics is not None:
                metrics.write("train", done, {"learning_rate": rate, **_numbers(result)})
            tensors = t.state.digest_each() if t.run.digests else {}
            if digests is not None:
                digests.write({"step": done, "tensors": tensors})
            is_due = bool(t.checkpoint.every) and done % t.checkpoint.every == 0
            if done < t.steps and (is_due or result.votes.save or result.votes.stop):
                _save(t, done)
                saved_s = time.monotonic()
            sums.add(result, time.perf_counter() - start, is_first=step == t.first_step)
            if done < t.steps and result.votes.stop:
                reason = stop.reason  # before others may be asked to end
                _finish_saving(t)
                raise _stopped(reason, done, t.folder)
            if done < t.steps and t.config.eval_every and done % t.config.eval_every == 0:
                _validate(t, done, metrics, progress)
        if t.first_step < t.steps:
            _save(t, t.steps)  # before the evaluation, which may fail
        validation = _validate(t, t.steps, metrics, progress)
        evaluation = _evaluate(t, t.test, "test", t.steps, metrics, progress)
        _finish_saving(t)
        if t.checkpoint.every or t.checkpoint.every_s:
            progress.say(f"{t.title}  {t.saver.costs.line}")
        final = _result(t, sums, validation, evaluation)
        new = [doubt for doubt in final.identity_doubts if doubt not in known]
        for line in [*_about_data(final), *(f"warning: {doubt}" for doubt in new)]:
            progress.say(f"{t.title}  {line}")
        for rank in final.drifted_ranks:
            progress.say(f"{t.title}  warning: rank {rank} ended with other weights than most")
        return final


def _finish_saving(t: Training) -> None:
    """Returns on all ranks once rank 0 has the last checkpoint on the disk: nobody leaves before,
    for a launcher ends the others of a rank that has left.

    Raises: CheckpointError, on all ranks, where it is not there.
    """
    problem = ""
    try:
        t.saver.finish()
    except CheckpointError as error:
        problem = str(error)
    said = gather_text(t.world, problem)
    if said[0]:
        unsaved = CheckpointError(said[0])
        unsaved.goes_along = not t.world.is_first  # which alone writes
        raise unsaved


def _stopped(reason: str, done: int, folder: Path) -> FirecaffeError:
    words = (
        f"stopped after step {done} ({reason or 'another rank was asked to'}); "
        f"a checkpoint is saved, resume with --resume {folder}"
    )
    if reason == LAUNCHER:
        return LauncherLostError(words)
    error = PreemptedError(words)
    error.goes_along = not reason
    return error


@dataclass
class Sums:
    """What the result needs of all steps. Times leave out the first step, which warms up."""

    samples: int = 0
    train_s: float = 0.0
    exposed_communication_s: float = 0.0
    data_s: float = 0.0
    loss: float | None = None

    def add(self, result: StepResult, step_s: float, is_first: bool) -> None:
        self.loss = result.loss
        if not is_first:
            self.samples += result.samples
            self.train_s += step_s
            self.exposed_communication_s += result.timings.exposed_communication_s
            self.data_s += result.timings.data_s


def _validate(
    t: Training, done: int, metrics: Metrics | None, progress: RunProgress
) -> Evaluation | None:
    if t.validation is None:
        return None
    return _evaluate(t, t.validation, "validation", done, metrics, progress)


def _evaluate(
    t: Training,
    dataset: Dataset,
    split: str,
    done: int,
    metrics: Metrics | None,
    progress: RunProgress,
) -> Evaluation:
    evaluation = evaluate(t.model, t.stepper.forward.task, dataset, t.data, t.config, t.world)
    progress.evaluation(split, done, evaluation)
    if metrics is not None:
        metrics.write(split, done, evaluation.row)
    return evaluation


def _about_data(result: Result) -> list[str]:
    """What a user should know of the input, a line each."""
    waits = result.data_wait_by_rank
    lines = []
    if len(waits) <= FEW_RANKS:
        each = ", ".join(f"{wait:.1%} on rank {rank}" for rank, wait in enumerate(waits))
        lines.append(f"waited for data: {each}")
    else:
        worst = waits.index(max(waits))
        lines.append(f"waited for data: {min(waits):.1%} to {max(waits):.1%}, most on rank {worst}")
    broken = result.broken_images
    if broken:
        lines.append(
            f"warning: {len(broken)} broken images, for each the next whole one stood in; the "
            f"first: {broken[0]}"
        )
    return lines


def _save(t: Training, done: int) -> None:
    about = Checkpoint(step=done, identity=t.identity, probe=t.probe, doubts=list(t.doubts))
    t.saver.save(about, t.state)


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        "samples": result.samples,
        "loss": result.loss,
        **result.metrics,
        "images_per_s": result.samples / result.timings.step_s,
    }


def _result(
    t: Training,
    sums: Sums,
    validation: Evaluation | None,
    evaluation: Evaluation,
) -> Result:
    weights_sha256, drifted_ranks = t.state.compare_weights()
    shares = {
        "communication": _share(sums.exposed_communication_s, sums.train_s),
        "data": _share(sums.data_s, sums.train_s),
    }
    stated = {
        **shares,
        "checkpoints": asdict(t.saver.costs),
        "sent": t.world.traffic.sent_bytes,
        "broken": [each for of_set in t.broken for each in of_set.values()],
        "doubts": t.doubts,
    }
    ranks = [json.loads(text) for text in gather_text(t.world, json.dumps(stated))]
    return Result(
        steps=t.steps,
        timed_samples=sums.samples,
        timed_s=sums.train_s,
        images_per_s=_share(sums.samples, sums.train_s),
        exposed_communication=statistics.fmean(rank["communication"] for rank in ranks),
        data_wait=statistics.fmean(rank["data"] for rank in ranks),
        data_wait_by_rank=[rank["data"] for rank in ranks],
        sent_bytes_per_step_by_rank=[
            None if rank["sent"] is None else _share(rank["sent"], t.steps - t.first_step)
            for rank in ranks
        ],
        loss=sums.loss,
        test_loss=evaluation.loss,
        metrics=evaluation.metrics,
        largest_class_share=evaluation.largest_class_share,
        validation=None if validation is None else validation.metrics,
        test_samples=evaluation.samples,
        weights_sha256=weights_sha256,
        state_sha256=t.state.sha256(),
        drifted_ranks=drifted_ranks,
        checkpoints=SaveCosts(**ranks[0]["checkpoints"]),
        broken_images=sorted({name for rank in ranks for name in rank["broken"]}),
        identity_doubts=list(dict.fromkeys(doubt for rank in ranks for doubt in rank["doubts"])),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
