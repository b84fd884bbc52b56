"""The way between two stages: sends values from one rank to another, in order.

Threads send and receive while the stage computes, and no two stages wait for each other to send. A
value's outline is sent if it differs from the last one, then its memory. A stage's autograd graph
begins at arrived tensors, whose gradient goes back to the stage before. It ends at passed tensors,
whose gradient comes from the stage after. These have one root, to be differentiated as a loss.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.parallel.passed import Packed, pack, room_for, unpack
from firecaffe.transport.lane import Line
from firecaffe.transport.worker import Worker, raise_failure, wait_for


class Sender:
    def __init__(self, group: Group, other: int) -> None:
        self._group, self._line = group, Line(group.exchange_group, other)
        self._worker = Worker(f"to stage {other}")
        self._told = ""

    def send(self, value: Any) -> Future[None]:
        """Begin to send; tensors must not change until the result is done. Raises: RecipeError."""
        raise_failure([self._worker])
        packed = pack(value)
        runs = [run.cpu() for run in packed.runs]
        self._group.traffic.add(sum(run.nbytes for run in runs))
        return self._worker.submit(lambda: self._send(Packed(packed.outline, runs)))

    def wait(self, sent: Future[None]) -> None:
        """Wait until a value has arrived. Raises: PeerLostError, or what the thread has raised."""
        with waiting(self._group):
            wait_for(self._group, [sent], [self._worker])

    def close(self, wait: bool) -> None:
        self._worker.close(wait)

    def _send(self, packed: Packed) -> None:
        outline = b"" if packed.outline == self._told else packed.outline.encode()
        self._told = packed.outline
        parts = [torch.tensor([len(outline)]), torch.tensor(list(outline), dtype=torch.uint8)]
        with peers_may_be_lost(self._group):
            for finish in [
                self._line.begin_send(_as_bytes(part))
                for part in (*parts, *packed.runs)
                if part.numel()
            ]:
                finish()


class Receiver:
    def __init__(self, group: Group, other: int) -> None:
        self._group, self._line = group, Line(group.exchange_group, other)
        self._worker = Worker(f"from stage {other}")
        self._asked: deque[Future[Packed]] = deque()
        self._told = ""

    def ask(self) -> None:
        self._asked.append(self._worker.submit(self._receive))

    def take(self) -> tuple[Any, list[Tensor]]:
        """Return the oldest value, and its tensors that need gradients. Raises: PeerLostError."""
        future = self._asked.popleft()
        with waiting(self._group):
            wait_for(self._group, [future], [self._worker])
        packed = future.result()
        return unpack(packed.outline, packed.runs, self._group.device)

    def close(self, wait: bool) -> None:
        self._worker.close(wait)

    def _receive(self) -> Packed:
        length = torch.zeros(1, dtype=torch.int64)
        with peers_may_be_lost(self._group):
            self._line.receive(_as_bytes(length))
            if length.item():
                told = torch.empty(int(length), dtype=torch.uint8)
                self._line.receive(told)
                self._told = bytes(told.tolist()).decode()
            runs = room_for(self._told)
            for finish in [self._line.begin_receive(_as_bytes(run)) for run in runs if run.numel()]:
                finish()
        return Packed(self._told, runs)


def _as_bytes(run: Tensor) -> Tensor:
    return run.view(torch.uint8)


class Arrivals:
    """Arrived tensors, and their gradients after backward (None if nothing depends on one)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Make the tensors results of autograd, in place, so that the stage may change them."""
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        handle = torch.empty(0, requires_grad=True)
        for place, tensor in enumerate(tensors):
            _Arrive.apply(self.gradients, place, handle, tensor)  # type: ignore[no-untyped-call]


def root_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return a scalar whose unscaled backward gives the tensors their gradients, or None."""
    if all(gradient is None for gradient in gradients):
        return None
    root: Tensor = _Root.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return root


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, into: list[Tensor | None], place: int, handle: Tensor, tensor: Tensor
    ) -> Tensor:
        ctx.into, ctx.place = into, place
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.into[ctx.place] = gradient
        return None, None, None, None


class _Root(Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
