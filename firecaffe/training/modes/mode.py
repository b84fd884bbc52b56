"""The protocol of a mode: when ranks exchange what they have computed, and what counts.

What a mode has of its own before ranks are connected: state, and what it wants summed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from firecaffe.data.train_batches import BatchesAhead, TrainBatches
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.training.balance import MeasuredShares, measured_shares
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import Rise
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.every_step import EveryStep, empty_counts
from firecaffe.training.outcome import StepResult, Votes
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.stepper import Source
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.update import StepUpdate


class Queued(Protocol):
    """A step that is queued, or whose sums are on their way."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Waits for its end. All ranks read the same steps in the same order. look: called
        meanwhile; it may raise. Raises: NotFiniteError.
        """


class Mode(Protocol):
    """Runs steps on this rank."""

    @property
    def holding(self) -> Holding:
        """What of the model is here."""

    @property
    def update(self) -> StepUpdate:
        """Who updates it by sums of a step: of every step, or of the first ones."""

    @property
    def behind(self) -> int:
        """The number of steps, the last ones, whose outcome cannot be read yet."""

    @property
    def advice(self) -> str:
        """What may be done if the loss stays above its start, for people."""

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Queued:
        """Trains step `step`, counted from 0. vote: asked once, before sums leave that tell it.

        Raises: PeerLostError; NotFiniteError, on all ranks, before the update.
        """


@dataclass(frozen=True)
class Summed:
    """Parameters of which something is summed over ranks, and examples of what goes along."""

    named: Mapping[str, nn.Parameter]
    tail: Sequence[Tensor]
    counts: Tensor


@dataclass(frozen=True)
class Linked:
    """A training whose ranks are connected, as a mode takes it."""

    run: Run
    mesh: Mesh
    step: EveryStep
    """Of every step, or of those at the beginning."""
    reducers: Sequence[GradientReducer]
    """Of what the mode wants summed."""
    ahead: BatchesAhead
    """Where this rank's batches come from, in order."""
    batches: TrainBatches
    """The same in any order."""
    state: State
    probe: str
    """The digest of what this machine computes for the probe's micro-batch."""
    resources: ExitStack
    """Takes what has to be closed."""
    source: Source | None
    """Of a server's events, instead of its clock."""


@dataclass(frozen=True)
class Steps:
    """What runs a training's steps."""

    stepper: Mode
    ahead: BatchesAhead
    """Where its batches come from."""
    real: RealRanks | None = None
    """The ranks under the real clock; None if there is none."""
    shares: MeasuredShares | None = None
    """Those that change between steps; None if they stay."""


class ModeParts(Protocol):
    """What a mode has of its own."""

    @property
    def rise(self) -> Rise | None:
        """What sees a loss that stays above its start; None if all workers make each step together,
        which cannot come to that by itself."""

    def pieces(self) -> dict[str, Piece]:
        """What of a training's state are tensors."""

    def numbers(self) -> dict[str, Numbers]:
        """What of it are none, by its words in meta.json."""

    def first_run(self, run: Run, first_step: int) -> Run:
        """The run as it goes on from a step."""

    def last_ahead(self, run: Run) -> int:
        """The step, one after the last, for which batches are asked in order."""

    def summed(self) -> Sequence[Summed]:
        """What is summed over ranks, a reducer each."""

    def steps(self, linked: Linked) -> Steps:
        """What runs the steps. All ranks call it."""

    def row(self, steps: int) -> Mapping[str, Any] | None:
        """What the record of a training of so many steps says of it."""

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Opens what is written in the run's folder, on rank 0. Returns lines for people."""

    def last_words(self) -> list[str]:
        """Lines for people at the run's end."""

    def close(self) -> None:
        """Closes what was opened."""


class EveryStepParts:
    """See `ModeParts`."""

    def __init__(self, update: EveryRank, rise: Rise | None = None) -> None:
        self.update, self.holding, self.rise = update, update.holding, rise

    def pieces(self) -> dict[str, Piece]:
        return {}

    def numbers(self) -> dict[str, Numbers]:
        return {} if self.rise is None else {"rise": self.rise}

    def first_run(self, run: Run, first_step: int) -> Run:
        return run

    def last_ahead(self, run: Run) -> int:
        return run.steps

    def summed(self) -> Sequence[Summed]:
        forward = self.holding.forward
        return [Summed(self.holding.summed, forward.empty_tail(), empty_counts(forward))]

    def steps(self, linked: Linked) -> Steps:
        shares = measured_shares(linked.run, linked.mesh, linked.step, linked.ahead)
        return Steps(linked.step, linked.ahead, shares=shares)

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return None

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return []

    def last_words(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing was opened."""
