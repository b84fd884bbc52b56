"""Gradients that are computed when their event comes: what a simulated clock and a replay need.

They are computed at the weights and buffers of the version that the learner had pulled. What is
dropped is never computed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.data.train_batches import TrainBatches
from firecaffe.synchrony.policy import Work
from firecaffe.training.forward import Forward
from firecaffe.training.served.coder import Coder
from firecaffe.training.served.compute import Contribution, compute
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.server import Server


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
