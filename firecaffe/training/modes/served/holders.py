"""The holders of the weights under the real clock, other than rank 0, which decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn, optim

from firecaffe.cluster.world import World
from firecaffe.recipe.run import Run
from firecaffe.synchrony.events import Event
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.server import Server
from firecaffe.training.modes.served.server_memory import ServerMemory
from firecaffe.training.modes.served.work_gradient import Bench, Workbench
from firecaffe.training.state import State


@dataclass(frozen=True)
class KeptTraining:
    """A training after its warm steps, whose weights go to their holders."""

    run: Run
    world: World
    named: Mapping[str, nn.Parameter]
    optimizer: optim.Optimizer
    state: State
    memory: ServerMemory
    """The memory that a checkpoint was loaded into, and the next one is saved from."""
    server: Server
    """Rank 0's server. If others hold the weights, it has the buffers only."""
    coder: Coder


@dataclass(frozen=True)
class UpdateOrder:
    """An event, and the settings of the update that it may cause."""

    event: Event
    step: int
    """The training's step, counted from 0."""
    rate: float
    momentum: float | None
    delay: int
    """The updates over which momentum is delayed; 0 if it is not."""


class Holders:
    """No other holders: rank 0's server has all weights, and sends them. Others extend it."""

    are_others = False
    """Whether others have the weights, and receive gradients; then no worker can join later."""

    def bench(self, bench: Workbench, place: int) -> Bench:
        return bench

    def tell(self, order: UpdateOrder) -> None: ...

    def gather(self, look: Callable[[], None]) -> None:
        """Update the training's state, on rank 0. `look` is called while waiting, and may raise."""

    @property
    def moved(self) -> dict[int, tuple[int, int]]:
        """Bytes (sent, received) of each rank as a server, at `gather`; empty if only rank 0 is."""
        return {}

    def end(self) -> None:
        """End the holders, on rank 0, once all learners have ended."""

    def join(self, timeout_s: float) -> bool:
        """Wait for this rank's threads to end. Return whether they have."""
        return True

    def check(self) -> None: ...

    def cut(self) -> None:
        """End all waiting of this rank's threads."""
