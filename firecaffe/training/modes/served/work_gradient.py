"""Computes the gradient of a work, at the weights that its learner had pulled.

A simulated clock and a replay compute a gradient when its event happens (`LazyContributions`), at
the weights and buffers of the version that the learner had pulled. A dropped gradient is not
computed.

Under the real clock, learners compute on benches. Rank 0, which decides, has all weights, or other
holders have them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batch
from firecaffe.data.batches import TrainBatches
from firecaffe.recipe.run import Run
from firecaffe.synchrony.events import Event
from firecaffe.synchrony.server_policies import Leaf, Work
from firecaffe.training.forward import Forward
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.server import Server, UpdateSettings
from firecaffe.training.modes.served.server_memory import Gradient, ServerMemory
from firecaffe.training.state import State


@dataclass(frozen=True)
class Contribution:
    gradient: Gradient
    counts: Tensor
    data_s: float
    """Seconds for which the learner waited for the leaf's samples."""
    compute_s: float
    rank: int = 0
    is_finite: Tensor | None = None
    """See `coder.are_finite`; None unless the gradients went to their owners."""
    moved: tuple[int, int] = (0, 0)
    """Bytes that the learner has pulled from owners and pushed to them so far."""


LOSS_SCALE = "loss scale"
"""The key of a version's loss scale. The other keys are names of parameters and buffers."""


def loss_scale(forward: Forward) -> dict[str, Tensor]:
    """Return the present loss scale, shape (), as a tensor of a version; empty without one."""
    if not forward.scaler.is_enabled():
        return {}
    return {LOSS_SCALE: forward.scaler.scale(torch.ones((), device=forward.device))}


def set_loss_scale(forward: Forward, version: Mapping[str, Tensor]) -> None:
    """Set the loss scale to that of a version, if it has one."""
    if LOSS_SCALE in version and loss_scale(forward):  # the call initializes torch's scaler
        forward.scaler.update(float(version[LOSS_SCALE]))


class Contributions(Protocol):
    def of(self, work: Work) -> Contribution:
        """Return the contribution of a work that has just arrived and is not dropped."""


def compute(
    forward: Forward, named: Mapping[str, nn.Parameter], leaf: Leaf, batch: Batch
) -> tuple[Gradient, Tensor]:
    """Return a leaf's gradient, not finite if it has overflowed, and the task's counts."""
    forward.begin_step()
    loss, tail = forward(*batch, *leaf)
    assert loss is not None  # leaves without samples are not handed out
    for parameter in named.values():
        parameter.grad = None
    torch.autograd.backward(loss)
    tensors = {name: p.grad for name, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    for factor in loss_scale(forward).values():
        torch._foreach_div_(list(tensors.values()), factor)
    if forward.device.type == "cuda":
        torch.cuda.synchronize(forward.device)  # other threads use it, and it is timed
    return Gradient(tensors, tail), forward.counts


class Bench(Protocol):
    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Compute a work. `weights` are the tensors of its version that the server has sent."""

    def end(self) -> None: ...


class Workbench:
    """A separate network on which a rank's learners compute, one at a time."""

    def __init__(
        self,
        forward: Forward,
        named: Mapping[str, nn.Parameter],
        batches: TrainBatches,
        turn: AbstractContextManager[object],
    ) -> None:
        """Hold `turn` while computing: dropout and data sets may draw from shared generators."""
        self.forward, self.named, self._batches, self._turn = forward, named, batches, turn

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        device = self.forward.device
        torch.set_num_threads(self.forward.config.threads)  # each thread has its own number
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with self._turn:
            start = time.perf_counter()
            batch = self._batches.train_batch(*work.leaf)
            fetched = time.perf_counter()
            self.load(weights)
            gradient, counts = compute(self.forward, self.named, work.leaf, batch)
            return Contribution(gradient, counts, fetched - start, time.perf_counter() - fetched)

    def end(self) -> None: ...

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a version into the network. It may lack parameters that are there already."""
        self.forward.buffers.begin_micro_batch()  # a module may have replaced buffers
        for name in self.named.keys() & weights.keys():
            self.named[name].copy_(weights[name])
        for name, buffer in self.forward.model.named_buffers():
            buffer.copy_(weights[name])
        set_loss_scale(self.forward, weights)


@dataclass(frozen=True)
class LazyContributions:
    server: Server
    forward: Forward
    batches: TrainBatches
    coder: Coder

    def of(self, work: Work) -> Contribution:
        start = time.perf_counter()
        batch = self.batches.train_batch(*work.leaf)
        fetched = time.perf_counter()
        with self._at(work.version):
            gradient, counts = compute(self.forward, self.server.named, work.leaf, batch)
        sent = Gradient(self.coder.as_received(work.learner, gradient.tensors), gradient.tail)
        return Contribution(sent, counts, fetched - start, time.perf_counter() - fetched)

    @contextmanager
    def _at(self, number: int) -> Iterator[None]:
        version, named = self.server.memory.versions[number], self.server.named
        model = self.forward.model
        mine, scale = {n: p.detach() for n, p in named.items()}, loss_scale(self.forward)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        for name, parameter in named.items():
            parameter.data = version[name]
        _copy(model, version)
        set_loss_scale(self.forward, version)
        try:
            yield
        finally:
            for name, parameter in named.items():
                parameter.data = mine[name]
            self.forward.buffers.begin_micro_batch()  # a module may have replaced buffers
            _copy(model, buffers)
            set_loss_scale(self.forward, scale)


def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


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
    settings: UpdateSettings
    overflows: bool = False
    """Whether the event brings a gradient that has overflowed under its loss scale."""


class Holders:
    """No other holders: rank 0's server has all weights, and sends them. Others extend it."""

    hold_weights = False
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
