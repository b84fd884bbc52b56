"""The result of a finished training: measured while it went on, put together by all ranks."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import nn

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.errors import RunError
from firecaffe.models.extra_state import let_go_of_extra_state
from firecaffe.runs.folder import METRICS
from firecaffe.runs.measure import Measure
from firecaffe.runs.peak_memory import peak_memory_bytes
from firecaffe.runs.schemas import MetricsRow
from firecaffe.schema import read_rows
from firecaffe.training.best import Best
from firecaffe.training.evaluate import Evaluation
from firecaffe.training.load import load
from firecaffe.training.outcome import StepResult
from firecaffe.training.parallel.mesh import check_is_whole
from firecaffe.training.saver import SaveCosts
from firecaffe.training.state import State

MOST_LISTED_RANKS = 8
"""The most drifted ranks that are listed one by one."""

LIVE = "_live"
"""The attribute of a result that has the network, in the process that has trained it."""

MAKE = "_make"
"""The attribute that has the function by which a network was given of which each rank has a part,
in such a process.
"""


@dataclass(frozen=True)
class Result:
    """The result of a finished training. Rates leave out the first step, which warms up."""

    steps: int
    """The steps of the whole training, with those before it was resumed."""
    timed_samples: int
    """The training samples of the timed steps, of all ranks."""
    timed_s: float
    """Seconds that the timed steps took, with all that the loop does after each."""
    images_per_s: float
    """Training samples per second, of all ranks."""
    exposed_communication: float
    """Share of the step time that ranks waited for communication, mean over ranks."""
    data_wait: float
    """Share of the step time that ranks waited for data, mean over ranks."""
    data_wait_by_rank: list[float]
    """The same of each rank."""
    sent_bytes_per_step_by_rank: list[float | None]
    """Bytes of gradients, and of a split model's activations, sent to other ranks in a step, by
    rank; None for those that went through a collective of the backend's."""
    idle_by_stage: list[float] | None
    """Share of a step in which each stage of a network waited for others, mean over its ranks; None
    without stages."""
    peak_memory_bytes_by_rank: list[int]
    """The most memory that each rank has had: on a CPU the process, with its libraries; on a GPU
    the tensors."""
    optimizer_bytes_by_rank: list[int]
    """The optimizer's tensors that each rank has at the end."""
    loss: float | None
    """Mean loss of the last step; None if a resumed run had no step left to do."""
    test_loss: float
    """Mean loss of the test samples."""
    metrics: dict[str, float]
    """The task's metrics on the test samples, by name."""
    measure: Measure
    """The metric that the run is judged by."""
    shares: list[str]
    """The metrics that are shares of 1."""
    largest_class_share: float | None
    """The top-1 of a network that has learned nothing, on the test set."""
    validation: dict[str, float] | None
    """The metrics on the validation samples at the end; None without such samples."""
    best: dict[str, Any] | None
    """The best evaluation on the validation samples: metric, value, step, and the path of its
    checkpoint, if that is kept; None without such samples."""
    stopped_early: bool
    """Whether it ended because evaluations came to nothing better."""
    test_of_best: dict[str, Any] | None
    """Of one that did, what the weights of the best checkpoint came to on the test samples, with
    their step; all else of the test is of the last weights. None if no checkpoint of them is
    kept."""
    evaluated: str
    """What evaluations took: "weights", or "ema", their moving average."""
    test_samples: int
    """The number of test samples."""
    weights_sha256: str
    """The SHA-256 of all parameters and buffers, by name."""
    state_sha256: str
    """The SHA-256 of weights, optimizer state and the losses of all steps."""
    drifted_ranks: list[int]
    """Ranks that ended with other weights than most: their updates came to other bits."""
    checkpoints: SaveCosts
    """The costs of saving, on rank 0."""
    broken_images: list[str]
    """Images that could not be decoded, for which another stood in, and why."""
    identity_doubts: list[str]
    """Reasons of all ranks why other numbers of workers, or another run, may not end in the same
    bits."""
    folder: Path
    """Where the run is recorded."""

    @property
    def model(self) -> nn.Module:
        """The trained network in evaluation mode, as evaluations take it: on its device, or, of a
        result from another process, or of a network of which ranks had parts, from the run's folder
        and on the CPU.

        Raises: as `firecaffe.load`; in another process a network that was given in Python is loaded
        with model=.
        """
        live: nn.Module | None = self.__dict__.get(LIVE)
        if live is None:
            return load(self.folder, self.__dict__.get(MAKE), trust_code=True)
        return live

    @property
    def history(self) -> list[dict[str, Any]]:
        """What the run has recorded: a row for each step (kind "train") and each evaluation
        (kind "validation" or "test"), with its step, loss and metrics.

        Raises: RunError if the folder is not there, as on another host.
        """
        path = self.folder / METRICS
        if not path.exists():
            raise RunError(f"{path}: there is no such file")
        kind: Any = MetricsRow
        return list(read_rows(path, kind))

    def hold(self, model: nn.Module) -> None:
        """Keeps the network that was trained, which does not go to other processes."""
        model.zero_grad(set_to_none=True)
        let_go_of_extra_state(model)
        self.__dict__[LIVE] = model.eval()

    def hold_function(self, make: Callable[[], nn.Module]) -> None:
        """Keeps the function by which the network was given; it does not go to other processes."""
        self.__dict__[MAKE] = lambda: check_is_whole(make())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in (LIVE, MAKE)}

    def as_message(self) -> dict[str, Any]:
        """The result as JSON, for `of_message` of another process."""
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def of_message(cls, row: dict[str, Any]) -> Self:
        measure, costs = Measure(**row["measure"]), SaveCosts(**row["checkpoints"])
        folder = Path(row["folder"])
        return cls(**{**row, "measure": measure, "checkpoints": costs, "folder": folder})

    @property
    def top1(self) -> float:
        """The share of the test samples whose label came first.

        Raises: AttributeError if the run has no such metric, as that of another task.
        """
        return self._metric("top1")

    @property
    def top5(self) -> float:
        """The share of the test samples whose label was among the first five.

        Raises: AttributeError if the run has no such metric, as one of five classes or fewer.
        """
        return self._metric("top5")

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            known = ", ".join(self.metrics) or "none"
            raise AttributeError(f"this run has no {name}; its metrics are {known}")
        return self.metrics[name]

    def as_row(self) -> dict[str, Any]:
        """The result as result.json has it: a name for each metric."""
        row = asdict(self)
        metrics, validation = row.pop("metrics"), row.pop("validation")
        del row["measure"], row["folder"]
        return {
            **metrics,
            **{f"validation_{name}": (validation or {}).get(name) for name in metrics},
            **row,
            "metrics": list(metrics),
            "metric": self.measure.name,
            "higher_is_better": self.measure.higher_is_better,
        }

    def lines(self, known_doubts: Iterable[str]) -> list[str]:
        """Lines with what a user should know beside the figures. known_doubts: doubts that were
        said already.
        """
        lines = [f"weights sha256 {self.weights_sha256[:12]}", self._waits()]
        if self.broken_images:
            lines.append(
                f"warning: {len(self.broken_images)} broken images, for each the next whole one "
                f"stood in; the first: {self.broken_images[0]}"
            )
        new = (doubt for doubt in self.identity_doubts if doubt not in set(known_doubts))
        lines += [f"warning: {doubt}" for doubt in new]
        drifted = "warning: rank {} ended with other weights than most"
        lines += [drifted.format(rank) for rank in self.drifted_ranks]
        return lines

    def _waits(self) -> str:
        waits = self.data_wait_by_rank
        if len(waits) <= MOST_LISTED_RANKS:
            each = ", ".join(f"{wait:.1%} on rank {rank}" for rank, wait in enumerate(waits))
            return f"waited for data: {each}"
        worst = waits.index(max(waits))
        return f"waited for data: {min(waits):.1%} to {max(waits):.1%}, most on rank {worst}"


@dataclass
class StepSums:
    """Sums over this rank's steps that the result needs, without the first, which warms up."""

    first_step: int
    """The number of the first step, counted from 1."""
    samples: int = 0
    train_s: float = 0.0
    exposed_communication_s: float = 0.0
    data_s: float = 0.0
    idle_s: float = 0.0
    stage: int | None = None
    """This rank's, of a network in stages."""
    loss: float | None = None
    broken: Sequence[dict[int, str]] = field(default_factory=list)
    """The numbers of the samples that could not be decoded so far, for each part of the data."""

    def add(self, result: StepResult) -> None:
        self.loss = result.loss
        if result.timings.step != self.first_step:
            self.samples += result.samples
            self.exposed_communication_s += result.timings.exposed_communication_s
            self.data_s += result.timings.data_s
            self.idle_s += result.timings.idle_s or 0.0
            self.stage = result.timings.stage

    def add_time(self, step: int, seconds: float) -> None:
        """Adds the time of a step with all that the loop does after it."""
        if step != self.first_step:
            self.train_s += seconds


def result_of(
    world: World,
    state: State,
    sums: StepSums,
    steps: int,
    costs: SaveCosts,
    doubts: Sequence[str],
    measure: Measure,
    validation: Evaluation | None,
    test: Evaluation,
    best: Best,
    test_of_best: Evaluation | None,
    stopped_early: bool,
    folder: Path,
) -> Result:
    """Puts the result together, the same on all ranks; all ranks call it."""
    weights_sha256, drifted_ranks = state.compare_weights()
    stated = json.dumps(_stated(world, state, sums, costs, doubts))
    ranks = [json.loads(text) for text in gather_text(world, stated)]
    return Result(
        **_of_ranks(ranks, steps - sums.first_step + 1),
        steps=steps,
        timed_samples=sums.samples,
        timed_s=sums.train_s,
        images_per_s=_share(sums.samples, sums.train_s),
        loss=sums.loss,
        test_loss=test.loss,
        metrics=test.metrics,
        measure=measure,
        shares=test.shares,
        largest_class_share=test.largest_class_share,
        validation=None if validation is None else validation.metrics,
        best=best.row,
        stopped_early=stopped_early,
        test_of_best=None if test_of_best is None else {"step": best.step, **test_of_best.row},
        evaluated="ema" if "ema" in state.pieces else "weights",
        test_samples=test.samples,
        weights_sha256=weights_sha256,
        state_sha256=state.sha256(),
        drifted_ranks=drifted_ranks,
        folder=folder,
    )


def _stated(
    world: World, state: State, sums: StepSums, costs: SaveCosts, doubts: Sequence[str]
) -> dict[str, Any]:
    """What a rank tells the others of its part of the training."""
    return {
        "communication": _share(sums.exposed_communication_s, sums.train_s),
        "data": _share(sums.data_s, sums.train_s),
        "idle": [sums.stage, _share(sums.idle_s, sums.train_s)],
        "checkpoints": asdict(costs),
        "sent": world.traffic.sent_bytes,
        "memory": peak_memory_bytes(world.device),
        "optimizer": state.own_bytes("optimizer"),
        "broken": [each for of_part in sums.broken for each in of_part.values()],
        "doubts": list(doubts),
    }


def _of_ranks(ranks: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """What of a result the ranks have told, by its fields. steps: that were done."""
    return {
        "exposed_communication": statistics.fmean(rank["communication"] for rank in ranks),
        "data_wait": statistics.fmean(rank["data"] for rank in ranks),
        "data_wait_by_rank": [rank["data"] for rank in ranks],
        "sent_bytes_per_step_by_rank": [
            None if rank["sent"] is None else _share(rank["sent"], steps) for rank in ranks
        ],
        "idle_by_stage": _by_stage(rank["idle"] for rank in ranks),
        "peak_memory_bytes_by_rank": [rank["memory"] for rank in ranks],
        "optimizer_bytes_by_rank": [rank["optimizer"] for rank in ranks],
        "checkpoints": SaveCosts(**ranks[0]["checkpoints"]),
        "broken_images": sorted({name for rank in ranks for name in rank["broken"]}),
        "identity_doubts": list(dict.fromkeys(each for rank in ranks for each in rank["doubts"])),
    }


def _by_stage(stated: Iterable[tuple[int | None, float]]) -> list[float] | None:
    """Means over the ranks of each stage. stated: of each rank, its stage and its idle share."""
    by_stage: dict[int, list[float]] = {}
    for stage, idle in stated:
        if stage is not None:
            by_stage.setdefault(stage, []).append(idle)
    return [statistics.fmean(by_stage[stage]) for stage in sorted(by_stage)] or None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
