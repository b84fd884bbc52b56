"""The protocol of a mode, and its parts, which exist before ranks are connected."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from firecaffe.data.train_batches import BatchesAhead, TrainBatches
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.synchrony.log import LogReader
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import Rise
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.every_step import EveryStep, empty_counts
from firecaffe.training.outcome import StepResult, Votes
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.rebalance import MeasuredShares, measured_shares
from firecaffe.training.served.real import RealRanks
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank


class Queued(Protocol):
    """A step that is queued, or whose sums are still being exchanged."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Wait for the step's end. All ranks read the same steps in the same order.

        `look` is called while waiting, and may raise. Raises: NotFiniteError.
        """


class Mode(Protocol):
    @property
    def holding(self) -> Holding: ...

    @property
    def update(self) -> EveryRank: ...

    @property
    def behind(self) -> int:
        """The number of steps, the last ones, whose outcome cannot be read yet."""

    @property
    def advice(self) -> str:
        """Advice to people if the loss stays above its start."""

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Queued:
        """Train step `step`, counted from 0. `vote` is called once, before the sums that carry it.

        Raises: PeerLostError; NotFiniteError, on all ranks, before the update.
        """


@dataclass(frozen=True)
class Summed:
    """Parameters of which something is summed over ranks, and examples of what is sent along."""

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
    ahead: BatchesAhead
    batches: TrainBatches
    state: State
    probe: str
    """The digest of what this machine computes for the probe's micro-batch."""
    resources: ExitStack
    source: LogReader | None
    """The log of a server's events, which come from its clock without one."""


@dataclass(frozen=True)
class Steps:
    stepper: Mode
    ahead: BatchesAhead
    real: RealRanks | None = None
    shares: MeasuredShares | None = None
    """The shares of micro-batches, if they change between steps."""


class ModeParts:
    """A mode's parts: here, of steps that all ranks make together. Other modes extend it."""

    updates_by_batch = True
    """Whether each step makes one update, by the mean gradient of its whole batch."""

    def __init__(self, update: EveryRank, rise: Rise | None = None) -> None:
        """Let `rise` detect a loss that stays above its start; not if all make steps together."""
        self.update, self.holding, self.rise = update, update.holding, rise

    def pieces(self) -> dict[str, Piece]:
        return {}

    def numbers(self) -> dict[str, Numbers]:
        """Return the mode's state that is not tensors, by its names in meta.json."""
        return {} if self.rise is None else {"rise": self.rise}

    def first_run(self, run: Run, first_step: int) -> Run:
        """Return the run as it continues from a step."""
        return run

    def last_ahead(self, run: Run) -> int:
        """Return the step after the last one whose batches are fetched in order."""
        return run.steps

    def summed(self) -> Sequence[Summed]:
        forward = self.holding.forward
        return [Summed(self.holding.summed, forward.empty_tail(), empty_counts(forward))]

    def exchange_words(self, run: Run, by_ranks: str) -> str:
        """Say how gradients travel. by_ranks: the exchange, where ranks sum them together."""
        return by_ranks

    def steps(self, linked: Linked) -> Steps:
        """Make what runs the steps. All ranks call it."""
        shares = measured_shares(linked.run, linked.mesh, linked.step, linked.ahead)
        return Steps(linked.step, linked.ahead, shares=shares)

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return None

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open the mode's files in the run's folder, on rank 0. Return lines for people."""
        return []

    def last_words(self) -> list[str]:
        return []

    def close(self) -> None: ...
