"""The result of a finished training: measured while it ran, and combined by all ranks."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Self

from torch import nn

from firecaffe.cluster.agree import gather_json
from firecaffe.data.decode import replaced_note
from firecaffe.errors import RunError
from firecaffe.files import finite
from firecaffe.models.extra_state import release_extra_state
from firecaffe.runs.environment import peak_memory_bytes
from firecaffe.runs.measure import Measure
from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.schemas import MetricsRow
from firecaffe.schema import read_rows
from firecaffe.training.load import load
from firecaffe.training.outcome import StepResult
from firecaffe.training.parallel.mesh import check_is_whole
from firecaffe.training.records import in_words
from firecaffe.training.saver import SaveCosts
from firecaffe.training.state import State

MAX_LISTED_RANKS = 8

# the attribute with the network, in the process that trained it
LIVE = "_live"

# the attribute with the function that makes a network of which each rank has a part
MAKE = "_make"


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a finished training. Its `repr` is a few lines; `to_dict()` has all.

    Rates leave out the first step, which warms up.
    """

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
    """Share of the step time that each rank waited for data."""
    sent_bytes_per_step_by_rank: list[float | None]
    """Bytes of gradients, and of a split model's activations, that a rank sent to others in a step.

    None if they went through a collective of the backend.
    """
    idle_by_stage: list[float] | None
    """Share of a step that each stage waited for others, mean over ranks; None without stages."""
    peak_memory_bytes_by_rank: list[int]
    """Each rank's peak: on a CPU, of the process with its libraries; on a GPU, of tensors."""
    optimizer_bytes_by_rank: list[int]
    """Bytes of the optimizer's tensors that each rank has at the end."""
    loss: float | None
    """Mean loss of the last step; None if a resumed run had no step left."""
    test_loss: float
    """Mean loss of the test samples."""
    metrics: dict[str, float]
    """The task's metrics on the test samples, by name."""
    measure: Measure
    """The metric that the run is judged by."""
    shares: list[str]
    """The metrics that are shares of 1."""
    largest_class_share: float | None
    """The test top-1 of always predicting the most frequent class; None without classes."""
    validation: dict[str, float] | None
    """The metrics on the validation samples at the end; None without such samples."""
    best: dict[str, Any] | None
    """Best validation: metric, value, step, checkpoint's path (if kept). None without samples."""
    stopped_early: bool
    """Whether the training ended because evaluations no longer improved."""
    test_of_best: dict[str, Any] | None
    """The test of the best checkpoint's weights, with their step, if the run stopped early.

    All other test numbers are of the last weights. None if no checkpoint of the best is kept.
    """
    noise_scale: dict[str, Any] | None
    """The gradient noise scale: samples, the low and high ends of an 80 % band, the measured steps.

    At a batch of that many samples, a gradient's noise is as large as the gradient. None if it was
    not measured: see the explanation of batches.
    """
    evaluated: str
    """The weights that evaluations used: "weights" or "ema" (their moving average)."""
    test_samples: int
    """The number of test samples."""
    weights_sha256: str
    """The SHA-256 of all parameters and buffers, by name."""
    state_sha256: str
    """The SHA-256 of weights, optimizer state and the losses of all steps."""
    drifted_ranks: list[int]
    """Ranks that ended with other weights than most: their updates had other bits."""
    checkpoints: SaveCosts
    """The costs of saving, on rank 0."""
    broken_images: list[str]
    """Images that could not be decoded, with the reason. Others were used instead."""
    identity_doubts: list[str]
    """Reasons of all ranks why other numbers of workers, or another run, may get other bits."""
    folder: Path
    """The folder that records the run."""

    @property
    def model(self) -> nn.Module:
        """The trained network in evaluation mode, with the weights that evaluations use.

        It is on the training's device. In another process, or if ranks held parts of the network,
        it is loaded from the run's folder onto the CPU. Raises: as `firecaffe.load`. In another
        process, load a network that was given in Python with `firecaffe.load(…, model)`.
        """
        live: nn.Module | None = self.__dict__.get(LIVE)
        if live is None:
            return load(self.folder, self.__dict__.get(MAKE), trust_code=True)
        return live

    @property
    def history(self) -> list[dict[str, Any]]:
        """The recorded rows: of each step (kind "train"), and of each "validation" and "test".

        Each has a step, loss and metrics. Raises: RunError if this host lacks the folder.
        """
        path = self.folder / METRICS
        if not path.exists():
            raise RunError(f"{path}: there is no such file")
        kind: Any = MetricsRow
        return list(read_rows(path, kind))

    def hold(self, model: nn.Module) -> None:
        """Keep the trained network. It is not passed to other processes."""
        model.zero_grad(set_to_none=True)
        release_extra_state(model)
        self.__dict__[LIVE] = model.eval()

    def hold_function(self, make: Callable[[], nn.Module]) -> None:
        """Keep the function that makes the network, in this process only."""
        self.__dict__[MAKE] = lambda: check_is_whole(make())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in (LIVE, MAKE)}

    def to_message(self) -> dict[str, Any]:
        """Return the result as JSON for `from_message` in another process."""
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def from_message(cls, row: dict[str, Any]) -> Self:
        """Make a result from what `to_message` returned."""
        measure, costs = Measure(**row["measure"]), SaveCosts(**row["checkpoints"])
        folder = Path(row["folder"])
        return cls(**{**row, "measure": measure, "checkpoints": costs, "folder": folder})

    @property
    def top1(self) -> float:
        """Share of test samples whose label is first. Raises: AttributeError in runs without it."""
        return self._metric("top1")

    @property
    def top5(self) -> float:
        """Share of test samples whose label is among the first five. Raises: as `top1`."""
        return self._metric("top5")

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            known = ", ".join(self.metrics) or "none"
            raise AttributeError(f"this run has no {name}; its metrics are {known}")
        return self.metrics[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as result.json has it, with a name for each metric; None for NaN."""
        row = asdict(self)
        metrics, validation = row.pop("metrics"), row.pop("validation")
        del row["measure"], row["folder"]
        finite_row: dict[str, Any] = finite(
            {
                **metrics,
                **{f"validation_{name}": (validation or {}).get(name) for name in metrics},
                **row,
                "metrics": list(metrics),
                "metric": self.measure.name,
                "higher_is_better": self.measure.higher_is_better,
            }
        )
        return finite_row

    def __repr__(self) -> str:
        metrics = in_words(self.metrics, self.shares)
        tested = f"test at step {self.steps}: {metrics}loss {self.test_loss:.4f}"
        return "\n".join([tested, *self.lines(()), f"run folder: {self.folder}"])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def lines(self, known_doubts: Iterable[str]) -> list[str]:
        """Return lines for the user, without `known_doubts`, which were printed before."""
        lines = [
            f"{self.images_per_s:,.0f} samples/s; ranks waited for the exchange "
            f"{self.exposed_communication:.1%} of the time",
            self._waits(),
            f"weights sha256 {self.weights_sha256[:12]}",
        ]
        if self.broken_images:
            lines.append(f"warning: {replaced_note(self.broken_images)}")
        new = (doubt for doubt in self.identity_doubts if doubt not in set(known_doubts))
        lines += [f"warning: {doubt}" for doubt in new]
        drifted = "warning: rank {} ended with other weights than most"
        lines += [drifted.format(rank) for rank in self.drifted_ranks]
        return lines

    def _waits(self) -> str:
        waits = self.data_wait_by_rank
        if len(waits) <= MAX_LISTED_RANKS:
            listed = ", ".join(f"{wait:.1%} on rank {rank}" for rank, wait in enumerate(waits))
            return f"waited for data: {listed}"
        worst = waits.index(max(waits))
        return f"waited for data: {min(waits):.1%} to {max(waits):.1%}, most on rank {worst}"


@dataclass
class StepSums:
    """Sums over this rank's steps for the result, without the first, which warms up."""

    # counted from 1
    first_step: int
    samples: int = 0
    train_s: float = 0.0
    exposed_communication_s: float = 0.0
    data_s: float = 0.0
    idle_s: float = 0.0
    stage: int | None = None
    loss: float | None = None
    # for each part of the data, undecodable samples by number
    broken: Sequence[dict[int, str]] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        self.loss = result.loss
        if result.timings.step != self.first_step:
            self.samples += result.samples
            self.exposed_communication_s += result.timings.exposed_communication_s
            self.data_s += result.timings.data_s
            self.idle_s += result.timings.idle_s or 0.0
            self.stage = result.timings.stage

    def add_time(self, step: int, seconds: float) -> None:
        if step != self.first_step:
            self.train_s += seconds


def facts_of_ranks(
    state: State, sums: StepSums, steps: int, costs: SaveCosts, doubts: Sequence[str]
) -> dict[str, Any]:
    """Combine each rank's facts about a training of `steps` steps. All ranks call it."""
    own = {
        "communication": share(sums.exposed_communication_s, sums.train_s),
        "data": share(sums.data_s, sums.train_s),
        "idle": [sums.stage, share(sums.idle_s, sums.train_s)],
        "checkpoints": asdict(costs),
        "sent": state.world.traffic.sent_bytes,
        "memory": peak_memory_bytes(state.world.device),
        "optimizer": state.own_bytes("optimizer"),
        "broken": [name for of_part in sums.broken for name in of_part.values()],
        "doubts": list(doubts),
    }
    ranks, done = gather_json(state.world, own), steps - sums.first_step + 1
    return {
        "exposed_communication": statistics.fmean(rank["communication"] for rank in ranks),
        "data_wait": statistics.fmean(rank["data"] for rank in ranks),
        "data_wait_by_rank": [rank["data"] for rank in ranks],
        "sent_bytes_per_step_by_rank": [
            None if rank["sent"] is None else share(rank["sent"], done) for rank in ranks
        ],
        "idle_by_stage": _by_stage(rank["idle"] for rank in ranks),
        "peak_memory_bytes_by_rank": [rank["memory"] for rank in ranks],
        "optimizer_bytes_by_rank": [rank["optimizer"] for rank in ranks],
        "checkpoints": SaveCosts(**ranks[0]["checkpoints"]),
        "broken_images": sorted({name for rank in ranks for name in rank["broken"]}),
        "identity_doubts": list(dict.fromkeys(doubt for rank in ranks for doubt in rank["doubts"])),
    }


def _by_stage(stated: Iterable[tuple[int | None, float]]) -> list[float] | None:
    by_stage: dict[int, list[float]] = {}
    for stage, idle in stated:
        if stage is not None:
            by_stage.setdefault(stage, []).append(idle)
    return [statistics.fmean(by_stage[stage]) for stage in sorted(by_stage)] or None


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
