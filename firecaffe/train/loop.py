"""The training loop, from the first step to the result."""

import hashlib
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn, optim

from firecaffe.comm.agree import differing_ranks, gather_tensors, gather_text
from firecaffe.comm.digest import digest, digest_each
from firecaffe.comm.world import World
from firecaffe.data import DataConfig, Dataset
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.runs.folder import RunConfig
from firecaffe.runs.record import JsonLines, Metrics
from firecaffe.train.checkpoint import (
    COMPRESSOR,
    Checkpoint,
    extend_history,
    save_checkpoint,
    state_scalars,
    state_tensors,
)
from firecaffe.train.config import CheckpointConfig, TrainConfig
from firecaffe.train.evaluate import Evaluation, evaluate
from firecaffe.train.learning_rate import learning_rate
from firecaffe.train.progress import RunProgress
from firecaffe.train.solver import SolverConfig
from firecaffe.train.step import Stepper, StepResult


@dataclass
class Training:
    """Everything built that a training needs, and where it stands."""

    world: World
    model: nn.Module
    optimizer: optim.Optimizer
    stepper: Stepper
    reducer: GradientReducer
    test: Dataset
    data: DataConfig
    config: TrainConfig
    solver: SolverConfig
    checkpoint: CheckpointConfig
    run: RunConfig
    steps: int
    """Steps in all; the training goes from `first_step` to here."""
    first_step: int
    history: str
    """The digest of the losses before `first_step`."""
    identity: dict[str, Any]
    probe: str
    folder: Path
    title: str
    doubts: list[str]
    """Why other numbers of workers may not end in the same bits; see assemble."""
    notes: list[str]
    """What the run tells before it starts."""


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
    loss: float | None
    """Mean loss of the last step; None where a resumed run had none left to do."""
    test_loss: float
    top1: float
    top5: float
    weights_sha256: str
    """Over all parameters and buffers, by name."""
    state_sha256: str
    """Over weights, optimizer state and the losses of all steps."""
    drifted_ranks: list[int]
    """Ranks that ended with other weights than most: their updates came to other bits."""


def train(t: Training) -> Result:
    """Trains from `first_step` to `steps`; all ranks return the same result."""
    with ExitStack() as stack:
        progress = stack.enter_context(
            RunProgress(t.title, t.first_step, t.steps, shown=t.world.is_first)
        )
        timings = stack.enter_context(JsonLines(t.folder / f"timings/rank-{t.world.rank}.jsonl"))
        metrics = digests = None
        if t.world.is_first:
            metrics = stack.enter_context(Metrics(t.folder, t.run.tensorboard))
            if t.run.digests:
                digests = stack.enter_context(JsonLines(t.folder / "digests.jsonl"))
        for note in t.notes:
            progress.say(f"{t.title}  {note}")
        history, sums = t.history, Sums()
        for step in range(t.first_step, t.steps):
            start = time.perf_counter()
            rate = learning_rate(t.solver, step, t.steps)
            result = t.stepper.run(step, rate, t.optimizer, t.reducer, t.solver.clip_gradients)
            history = extend_history(history, result.loss)
            done = step + 1
            timings.write(asdict(result.timings))
            progress.step(done, rate, result)
            if metrics is not None:
                metrics.write("train", done, {"learning_rate": rate, **_numbers(result)})
            if digests is not None:
                digests.write({"step": done, "tensors": _state_digests(t, history)})
            sums.add(result, time.perf_counter() - start, is_first=step == t.first_step)
            if done < t.steps and t.checkpoint.every and done % t.checkpoint.every == 0:
                _save(t, done, history)
            if done < t.steps and t.config.eval_every and done % t.config.eval_every == 0:
                _evaluate(t, done, metrics, progress)
        _save(t, t.steps, history)  # before the evaluation, which may fail
        evaluation = _evaluate(t, t.steps, metrics, progress)
        final = _result(t, sums, evaluation, history)
        for rank in final.drifted_ranks:
            progress.say(f"{t.title}  warning: rank {rank} ended with other weights than most")
        return final


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


def _evaluate(t: Training, done: int, metrics: Metrics | None, progress: RunProgress) -> Evaluation:
    evaluation = evaluate(t.model, t.stepper.loss, t.test, t.data, t.config, t.world)
    progress.evaluation(done, evaluation)
    if metrics is not None:
        metrics.write("test", done, asdict(evaluation))
        metrics.flush()
    return evaluation


def _save(t: Training, done: int, history: str) -> None:
    """Rank 0 saves; the others wait, so that its time is not taken for communication."""
    kept_back: dict[str, Tensor] = {}
    if t.reducer.compressor is not None:
        kept_back = gather_tensors(t.world, t.reducer.compressor.state())
    if t.world.is_first:
        checkpoint = Checkpoint(
            step=done,
            identity=t.identity,
            probe=t.probe,
            history=history,
            doubts=t.doubts,
            tensors={
                **state_tensors(t.model, t.optimizer),
                **{f"{COMPRESSOR}{key}": tensor for key, tensor in kept_back.items()},
            },
            scalars=state_scalars(t.model, t.optimizer),
            scaler=t.stepper.scaler.state_dict(),
        )
        save_checkpoint(t.folder / "checkpoints", checkpoint)
    gather_text(t.world, "saved")


def _state_digests(t: Training, history: str) -> dict[str, str]:
    """Of every tensor in network order, and of the losses, 16 hex digits each."""
    each = digest_each(state_tensors(t.model, t.optimizer).items())
    return {name: value[:16] for name, value in {**each, "losses": history}.items()}


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        "samples": result.samples,
        "loss": result.loss,
        "top1": result.top1,
        "top5": result.top5,
        "images_per_s": result.samples / result.timings.step_s,
    }


def _result(t: Training, sums: Sums, evaluation: Evaluation, history: str) -> Result:
    tensors = state_tensors(t.model, t.optimizer)
    weights = digest((k, v) for k, v in tensors.items() if not k.startswith("optimizer/"))
    drifted = differing_ranks(gather_text(t.world, weights))
    state = hashlib.sha256(f"{digest(tensors.items())} {history}".encode()).hexdigest()
    shares = {
        "communication": _share(sums.exposed_communication_s, sums.train_s),
        "data": _share(sums.data_s, sums.train_s),
    }
    ranks = [json.loads(text) for text in gather_text(t.world, json.dumps(shares))]
    return Result(
        steps=t.steps,
        timed_samples=sums.samples,
        timed_s=sums.train_s,
        images_per_s=_share(sums.samples, sums.train_s),
        exposed_communication=statistics.fmean(rank["communication"] for rank in ranks),
        data_wait=statistics.fmean(rank["data"] for rank in ranks),
        loss=sums.loss,
        test_loss=evaluation.loss,
        top1=evaluation.top1,
        top5=evaluation.top5,
        weights_sha256=weights,
        state_sha256=state,
        drifted_ranks=drifted,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
