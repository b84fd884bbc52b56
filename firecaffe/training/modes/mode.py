"""The protocol of a mode, and its parts, which exist before ranks are connected."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from firecaffe.cluster.world import World
from firecaffe.data.batches import PrefetchedBatches, TrainBatches
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.synchrony.log import LogReader
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import LossRise, NoLossRise
from firecaffe.training.modes.every_step import (
    EveryStep,
    FixedShares,
    ShareBalancer,
    empty_counts,
    measured_shares,
)
from firecaffe.training.outcome import StepResult, Votes
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.result import Result
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank


class PendingStep(Protocol):
    """A step that is queued, or whose sums are still being exchanged."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Wait for the step; all read in one order. `look` may raise. Raises: NotFiniteError."""


class Mode(Protocol):
    @property
    def behind(self) -> int:
        """The number of the latest steps whose outcome cannot be read yet."""

    @property
    def advice(self) -> str:
        """Advice for the user if the loss stays above its start."""

    def run(
        self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes
    ) -> PendingStep:
        """Train step `step`, counted from 0. `vote` is called before sums that carry votes.

        Raises: PeerLostError; NotFiniteError, on all ranks, before the update.
        """


@dataclass(frozen=True)
class ReducerSpec:
    """Parameters for which ranks sum tensors, and examples of what they send along."""

    named: Mapping[str, nn.Parameter]
    tail: Sequence[Tensor]
    counts: Tensor


@dataclass(frozen=True)
class Linked:
    run: Run
    mesh: Mesh
    step: EveryStep
    """The steps of the training, or those at its beginning."""
    reducers: Sequence[GradientReducer]
    ahead: PrefetchedBatches
    batches: TrainBatches
    state: State
    probe: str
    """The digest of what this machine computes for the probe's micro-batch."""
    resources: ExitStack
    source: LogReader | None
    """The log that a server's events are read from; None if they come from its clock."""


class Loop(Protocol):
    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the training ends early."""

    def run(self, until: int | None = None) -> None:
        """Train up to a step, to the training's last one, or to an early end."""

    def part(self) -> None:
        """Stop exchanging the sums of steps: no rank waits for all others any more."""

    def continue_alone(self, world: World) -> None: ...

    def say(self, line: str) -> None: ...

    def end(self) -> Result:
        """Make the last checkpoint and evaluations, and return the result."""


class TrainingRanks:
    """The ranks from the first step to the result; here, all make all steps together."""

    have_weights = True
    """Whether the ranks that evaluate may load weights other than the last."""

    turn: AbstractContextManager[object] = nullcontext()
    """The lock that keeps this rank's learners from computing in a `with` block."""

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether another process, which has no vote, was asked to stop."""
        return False

    def run(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result:
        """Train to the end. All ranks call it, and return the same result."""
        loop.run()
        return loop.end()

    def gather(self) -> None:
        """Bring the state to the ranks that save, evaluate and compare it."""


@dataclass(frozen=True)
class Steps:
    stepper: Mode
    ahead: PrefetchedBatches
    ranks: TrainingRanks = field(default_factory=TrainingRanks)
    shares: FixedShares | ShareBalancer = field(default_factory=FixedShares)


class ModeParts:
    """The parts of a mode; here, all ranks make each step together. Other modes extend it."""

    updates_by_batch = True
    """Whether each step makes one update, by the mean gradient of its whole batch."""

    rise: LossRise | NoLossRise = NoLossRise()
    """Detects a loss that stays above its start; unused if all ranks make each step together."""

    def __init__(self, update: EveryRank) -> None:
        self.update, self.holding = update, update.holding

    def pieces(self) -> dict[str, Piece]:
        return {}

    def numbers(self) -> dict[str, Numbers]:
        """Return the mode's state that is not tensors, by its names in meta.json."""
        return {}

    def first_run(self, run: Run, first_step: int) -> Run:
        return run

    def prefetch_end(self, run: Run) -> int:
        """Return the first step whose batches are no longer fetched in order."""
        return run.steps

    def summed(self) -> Sequence[ReducerSpec]:
        forward = self.holding.forward
        return [ReducerSpec(self.holding.summed, forward.empty_tail(), empty_counts(forward))]

    def describe_exchange(self, run: Run, by_ranks: str) -> str:
        """Describe how gradients travel. `by_ranks` describes sums that all ranks make together."""
        return by_ranks

    def steps(self, linked: Linked) -> Steps:
        """Make the objects that run the steps. All ranks call it."""
        shares = measured_shares(linked.run, linked.mesh, linked.step, linked.ahead)
        return Steps(linked.step, linked.ahead, shares=shares)

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return None

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open the mode's files in the run's folder, on rank 0. Return lines for people."""
        return []

    def closing_lines(self) -> list[str]:
        return []

    def close(self) -> None: ...
