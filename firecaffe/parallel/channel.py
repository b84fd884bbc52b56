"""One way between two stages: values go from one rank to another, in order.

Threads send and receive, so a stage computes meanwhile, and no two stages wait for each other to
send. A value's outline is told if it is another than that of the value before; its memory follows.

Where a stage's part of autograd's graph begins and ends.

It begins at tensors that have arrived, of which the gradient goes back to the stage before. It ends
at tensors that were passed on, of which the gradient has come from the stage after; they have one
root in common, so that whoever differentiates a loss differentiates that.
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
    """Sends values to a rank of the group."""

    def __init__(self, group: Group, other: int) -> None:
        self._group, self._line = group, Line(group.exchange_group, other)
        self._worker = Worker(f"to stage {other}")
        self._told = ""

    def send(self, value: Any) -> Future[None]:
        """Begins to send a value, whose tensors must stay as they are until they are there, which
        is when the result is done.

        Raises: RecipeError if it has something in it that cannot be sent; what the thread has met.
        """
        raise_failure([self._worker])
        packed = pack(value)
        runs = [run.cpu() for run in packed.runs]
        self._group.traffic.add(sum(run.nbytes for run in runs))
        return self._worker.submit(lambda: self._send(Packed(packed.outline, runs)))

    def wait(self, sent: Future[None]) -> None:
        """Waits until a value is there. Raises: PeerLostError; what the thread has met."""
        with waiting(self._group):
            wait_for(self._group, [sent], [self._worker])

    def close(self, wait: bool) -> None:
        """Ends the thread. wait: for what is on its way; to a lost rank it may be so for long."""
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
    """Receives values from a rank of the group, each after it was asked for."""

    def __init__(self, group: Group, other: int) -> None:
        self._group, self._line = group, Line(group.exchange_group, other)
        self._worker = Worker(f"from stage {other}")
        self._asked: deque[Future[Packed]] = deque()
        self._told = ""

    def ask(self) -> None:
        """Lets the next value come in while this rank computes."""
        self._asked.append(self._worker.submit(self._receive))

    def take(self) -> tuple[Any, list[Tensor]]:
        """Waits for the value that was asked for first. Returns it, and those of its tensors whose
        gradients are wanted back.

        Raises: PeerLostError; what the thread has met.
        """
        future = self._asked.popleft()
        with waiting(self._group):
            wait_for(self._group, [future], [self._worker])
        packed = future.result()
        return unpack(packed.outline, packed.runs, self._group.device)

    def close(self, wait: bool) -> None:
        """Ends the thread, as `Sender.close`."""
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
    """Tensors that have arrived, and their gradients after backward."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: of which the gradient is wanted. They become results of autograd's, in place, so
        that the stage may change them as it could if they were made here.
        """
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        """Of each tensor; None if nothing depends on it."""
        handle = torch.empty(0, requires_grad=True)
        for place, tensor in enumerate(tensors):
            _Arrive.apply(self.gradients, place, handle, tensor)  # type: ignore[no-untyped-call]


def root_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """A scalar whose backward gives each tensor its gradient; None if none has one. It is to be
    differentiated as it is.
    """
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
