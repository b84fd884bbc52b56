"""The training loop, from the first step to the result."""

import hashlib
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn, optim

from firecaffe.comm.agree import differing_ranks, gather_text
from firecaffe.comm.digest import digest, digest_each
from firecaffe.comm.world import World
from firecaffe.data import DataConfig, Dataset
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.runs.folder import RunConfig
from firecaffe.runs.record import JsonLines, Metrics
from firecaffe.train.checkpoint import (
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
    notes: list[str]
    """What the run tells before it starts."""


@dataclass(frozen=True)
class Result:
    """What a finished training came to. Rates leave out the first step, which warms up."""

    steps: int
    samples: int
    train_s: float
    images_per_s: float
    exposed_communication: float
    """Share of the step time that ranks waited for communication, mean over ranks."""
    data_wait: float
    """Share of the step time that ranks waited for data, mean over ranks."""
    loss: float
    """Mean loss of the last step."""
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
        history, evaluation, results = t.history, None, []
        train_s = 0.0
        t.model.train()
        for step in range(t.first_step, t.steps):
            start = time.perf_counter()
            rate = learning_rate(t.solver, step, t.steps)
            result = t.stepper.run(step, rate, t.optimizer, t.reducer, t.solver.clip_gradients)
            history = extend_history(history, result.loss)
            results.append(result)
            done = step + 1
            timings.write(asdict(result.timings))
            progress.step(done, rate, result)
            if metrics is not None:
                metrics.write("train", done, {"learning_rate": rate, **_numbers(result)})
            if digests is not None:
                digests.write({"step": done, "tensors": _state_digests(t, history)})
            if step > t.first_step:
                train_s += time.perf_counter() - start
            evaluation = None
            if done == t.steps or (t.config.eval_every and done % t.config.eval_every == 0):
                evaluation = _evaluate(t, done, metrics, progress)
            if done == t.steps or (t.checkpoint.every and done % t.checkpoint.every == 0):
                _save(t, done, history)
        if evaluation is None:  # a resumed run with nothing left to do
            evaluation = _evaluate(t, t.steps, metrics, progress)
        final = _result(t, results, train_s, evaluation, history)
        for rank in final.drifted_ranks:
            progress.say(f"{t.title}  warning: rank {rank} ended with other weights than most")
        return final


def _evaluate(t: Training, done: int, metrics: Metrics | None, progress: RunProgress) -> Evaluation:
    evaluation = evaluate(t.model, t.stepper.loss, t.test, t.data, t.config, t.world)
    progress.evaluation(done, evaluation)
    if metrics is not None:
        metrics.write("test", done, asdict(evaluation))
        metrics.flush()
    return evaluation


def _save(t: Training, done: int, history: str) -> None:
    if t.world.is_first:
        checkpoint = Checkpoint(
            step=done,
            identity=t.identity,
            probe=t.probe,
            history=history,
            tensors=state_tensors(t.model, t.optimizer),
            scalars=state_scalars(t.model, t.optimizer),
            scaler=t.stepper.scaler.state_dict(),
        )
        save_checkpoint(t.folder / "checkpoints", checkpoint)


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


def _result(
    t: Training,
    results: list[StepResult],
    train_s: float,
    evaluation: Evaluation,
    history: str,
) -> Result:
    tensors = state_tensors(t.model, t.optimizer)
    weights = digest((k, v) for k, v in tensors.items() if not k.startswith("optimizer/"))
    drifted = differing_ranks(gather_text(t.world, weights))
    state = hashlib.sha256(f"{digest(tensors.items())} {history}".encode()).hexdigest()
    counted = results[1:]
    shares = {
        "communication": _share(sum(r.timings.exposed_communication_s for r in counted), train_s),
        "data": _share(sum(r.timings.data_s for r in counted), train_s),
    }
    ranks = [json.loads(text) for text in gather_text(t.world, json.dumps(shares))]
    samples = sum(result.samples for result in counted)
    return Result(
        steps=t.steps,
        samples=samples,
        train_s=train_s,
        images_per_s=_share(samples, train_s),
        exposed_communication=statistics.fmean(rank["communication"] for rank in ranks),
        data_wait=statistics.fmean(rank["data"] for rank in ranks),
        loss=results[-1].loss if results else float("nan"),
        test_loss=evaluation.loss,
        top1=evaluation.top1,
        top5=evaluation.top5,
        weights_sha256=weights,
        state_sha256=state,
        drifted_ranks=drifted,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
