"""The gradient of a work: computed here, at the weights that its learner had pulled.

Gradients that are computed when their event comes: what a simulated clock and a replay need.

They are computed at the weights and buffers of the version that the learner had pulled. What is
dropped is never computed.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from firecaffe.data import Batch
from firecaffe.data.train_batches import TrainBatches
from firecaffe.synchrony.leaves import Leaf
from firecaffe.synchrony.policy import Work
from firecaffe.training.forward import Forward
from firecaffe.training.served.coder import Coder
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.server import Server


@dataclass(frozen=True)
class Contribution:
    """What a learner brings."""

    gradient: Gradient
    counts: Tensor
    """What the task counts of the leaf's samples."""
    data_s: float
    """Seconds for which the learner waited for the leaf's samples."""
    compute_s: float
    """Seconds for which it then computed."""
    is_own: bool = True
    """Whether it was this rank that computed."""
    rank: int = 0
    """The rank that computed."""
    is_finite: Tensor | None = None
    """If gradients went to their owners, and are not here; see `coder.are_finite`."""
    moved: tuple[int, int] = (0, 0)
    """Bytes that the learner has pulled from owners so far, and pushed to them."""


class Contributions(Protocol):
    """Where the gradients of works come from."""

    def of(self, work: Work) -> Contribution:
        """That of a work which was just brought, and counts."""


def compute(
    forward: Forward, named: Mapping[str, nn.Parameter], leaf: Leaf, batch: Batch
) -> tuple[Gradient, Tensor]:
    """The gradient of a leaf at the present weights and buffers, and what the task counts of it."""
    forward.begin_step()
    loss, tail = forward(*batch, *leaf)
    assert loss is not None  # leaves without samples are not handed out
    for parameter in named.values():
        parameter.grad = None
    torch.autograd.backward(loss)
    tensors = {name: p.grad for name, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    if forward.device.type == "cuda":
        torch.cuda.synchronize(forward.device)  # it is used by other threads, and timed
    return Gradient(tensors, tail), forward.counts


class Bench(Protocol):
    """Where a learner computes."""

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Computes a work. weights: what the server has sent of its version."""

    def end(self) -> None:
        """The learner has ended."""


class Workbench:
    """A network of its own on which a rank's learners compute, one at a time."""

    def __init__(
        self,
        forward: Forward,
        named: Mapping[str, nn.Parameter],
        batches: TrainBatches,
        turn: threading.Lock,
    ) -> None:
        """turn: held by whoever computes. Dropout, and a data set of the user's, draw from
        generators that all threads share.
        """
        self.forward, self.named, self._batches, self._turn = forward, named, batches, turn

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Computes a work at all weights and buffers of its version, on any device, in any
        thread.
        """
        device = self.forward.device
        torch.set_num_threads(self.forward.config.threads)  # each thread has a number of its own
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with self._turn:
            start = time.perf_counter()
            batch = self._batches.train_batch(*work.leaf)
            fetched = time.perf_counter()
            self.load(weights)
            gradient, counts = compute(self.forward, self.named, work.leaf, batch)
            return Contribution(gradient, counts, fetched - start, time.perf_counter() - fetched)

    def end(self) -> None:
        """Nothing has to end."""

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the weights and buffers of a version into the network; without weights, it has
        them already.
        """
        self.forward.buffers.begin_micro_batch()  # a module may have put others in places
        for name in self.named.keys() & weights.keys():
            self.named[name].copy_(weights[name])
        for name, buffer in self.forward.model.named_buffers():
            buffer.copy_(weights[name])


@dataclass(frozen=True)
class Computed:
    """Computes each gradient when it is asked for, in the server's process."""

    server: Server
    forward: Forward
    batches: TrainBatches
    """Asked for leaves in any order."""
    coder: Coder
    """Of what would have travelled."""

    def of(self, work: Work) -> Contribution:
        start = time.perf_counter()
        batch = self.batches.train_batch(*work.leaf)
        fetched = time.perf_counter()
        with self._at(work.version):
            found, counts = compute(self.forward, self.server.named, work.leaf, batch)
        sent = Gradient(self.coder.as_sent(work.learner, found.tensors), found.tail)
        return Contribution(sent, counts, fetched - start, time.perf_counter() - fetched)

    @contextmanager
    def _at(self, number: int) -> Iterator[None]:
        """The network at a version, for a `with` block: the memory of the parameters is exchanged,
        and the buffers, which are few, are copied.
        """
        version, named = self.server.memory.versions[number], self.server.named
        model = self.forward.model
        mine = {name: parameter.detach() for name, parameter in named.items()}
        buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
        for name, parameter in named.items():
            parameter.data = version[name]
        _copy(model, version)
        try:
            yield
        finally:
            for name, parameter in named.items():
                parameter.data = mine[name]
            self.forward.buffers.begin_micro_batch()  # a module may have put others in places
            _copy(model, buffers)


def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
