"""Runs the stage of a network that this rank has, one step after the other.

Micro-batches go forward and backward through the ranks in an order of `parallel.pipeline`, as in
the whole network. Backward runs for one micro-batch at a time, so the caller has its gradients.
Each micro-batch has its own buffers, which start as they were at the step's start. The state of
torch's generators is sent from stage to stage.

Between two stages values go in order. Threads send and receive while the stage computes, and no two
stages wait for each other to send. A value's outline is sent if it differs from the last one, then
its memory. A stage's autograd graph begins at arrived tensors, whose gradient goes back to the
previous stage. It ends at passed tensors, whose gradient comes from the next stage. Passed tensors
have one root, to be differentiated as a loss.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.calls import Worker, raise_failure, wait_for
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.errors import RecipeError
from firecaffe.generators import TORCH, all_states, changed
from firecaffe.parallel.stage_values import (
    Packed,
    check_no_alias,
    pack,
    room_for,
    tensors_in,
    unpack,
)
from firecaffe.parallel.stages import ORDERS, Stage
from firecaffe.transport.lane import Line


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
            wait_for([sent], [self._worker], self._group.watch.check)

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
            wait_for([future], [self._worker], self._group.watch.check)
        packed = future.result()
        return unpack(packed.outline, packed.runs, self._group.device)

    def close(self, wait: bool) -> None:
        self._worker.close(wait)

    def _receive(self) -> Packed:
        length = torch.zeros(1, dtype=torch.int64)
        with peers_may_be_lost(self._group):
            self._line.receive(_as_bytes(length))
            if length.item():
                encoded = torch.empty(int(length), dtype=torch.uint8)
                self._line.receive(encoded)
                self._told = bytes(encoded.tolist()).decode()
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


AHEAD = 2
"""Batches that a stage may have sent before the next one receives them, in evaluation."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class MicroBatches(Protocol[T_co]):
    """The micro-batches of a step, as the training provides them."""

    def inputs(self, leaf: int) -> Any:
        """Return the first stage's input, and set torch's generators for its forward."""

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        """Return the scalar to differentiate, on the last stage."""

    def end(self, leaf: int) -> T_co:
        """Finish a forward on each stage; buffers are as this micro-batch has left them."""


@dataclass(frozen=True)
class ReadyPass(Generic[T]):
    leaf: int
    root: Tensor | None
    """The tensor to differentiate, as a loss; None if nothing here has a gradient."""
    kept: T


@dataclass(frozen=True)
class _Held:
    arrivals: Arrivals
    # The loss, or what was passed on and has a gradient.
    ends: Sequence[Tensor]
    kept: Any


class StageRunner:
    """This rank's stage; rank k of the group has stage k."""

    def __init__(
        self,
        stage: Stage,
        group: Group,
        order: str = "1f1b",
        arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Make a runner; `order` is a row of ORDERS, and `arithmetic` surrounds each forward."""
        if (stage.number, stage.num_stages) != (group.rank, group.world_size):
            raise ValueError(f"rank {group.rank} of {group.world_size} has stage {stage.number}")
        self.stage, self.device, self.arithmetic = stage, group.device, arithmetic
        self._order = ORDERS[order]
        self._has_looked = False
        self.waited_s = 0.0
        """Seconds of the last step in which this stage waited for others."""
        before, after = stage.number - 1, stage.number + 1
        self._from_previous = None if stage.is_first else Receiver(group, before)
        self._to_previous = None if stage.is_first else Sender(group, before)
        self._to_next = None if stage.is_last else Sender(group, after)
        self._from_next = None if stage.is_last else Receiver(group, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, wait: bool = True) -> None:
        for channel in (self._to_previous, self._to_next, self._from_previous, self._from_next):
            if channel is not None:
                channel.close(wait)

    def run(self, leaves: Sequence[int], micro_batches: MicroBatches[T]) -> Iterator[ReadyPass[T]]:
        """Yield each micro-batch of `leaves` when its backward can start at its root.

        The caller must run it before asking for the next. All ranks must pass the same leaves and
        finish. Raises: RecipeError if a value cannot be passed between stages; PeerLostError.
        """
        self.waited_s = 0.0
        held: dict[int, _Held] = {}
        actions = self._order(self.stage.num_stages, len(leaves), self.stage.number)
        # One value is received while another is computed.
        left = {True: len(leaves), False: len(leaves)}
        for receiver in (self._from_previous, self._from_next):
            if receiver is not None and leaves:
                receiver.ask()
        for action in actions:
            left[action.is_forward] -= 1
            leaf, is_more = leaves[action.micro_batch], left[action.is_forward] > 0
            if action.is_forward:
                held[leaf] = self._forward(leaf, micro_batches, is_more)
                continue
            now = held.pop(leaf)
            yield ReadyPass(leaf, self._root(now, is_more), now.kept)
            if self._to_previous is not None:
                self._to_previous.send(now.arrivals.gradients)

    @torch.no_grad()
    def outputs(
        self,
        stage: Stage,
        numbers: Sequence[int],
        inputs: Callable[[int], Any],
    ) -> Iterator[tuple[int, Any]]:
        """Yield each batch's number and the network's output, None except on the last stage.

        `inputs` is called on the first stage. Each stage continues with torch's generators from the
        previous stage's end. All ranks pass the same numbers and finish. Raises: as `run`.
        """
        on_way: deque[Future[None]] = deque()
        if self._from_previous is not None and numbers:
            self._from_previous.ask()
        for place, number in enumerate(numbers):
            if self._from_previous is None:
                taken: tuple[Any, ...] = (inputs(number),)
            else:
                (taken, states), _ = self._take(self._from_previous, place + 1 < len(numbers))
                self._set_generators(states)
            with self.arithmetic():
                given = stage.module(*taken)
            if self._to_next is not None:
                check_no_alias(tensors_in(given))
                on_way.append(self._to_next.send((given, self._generators())))
                if len(on_way) > AHEAD:  # a slower stage sets the pace
                    self._to_next.wait(on_way.popleft())
            yield number, given if self._to_next is None else None

    def _forward(self, leaf: int, micro_batches: MicroBatches[Any], is_more: bool) -> _Held:
        wanted: list[Tensor] = []
        if self._from_previous is None:
            taken: tuple[Any, ...] = (micro_batches.inputs(leaf),)
        else:
            (taken, states), wanted = self._take(self._from_previous, is_more)
            self._set_generators(states)
        arrivals = Arrivals(wanted)
        before = None if self._has_looked else all_states()
        with ExitStack() as stack:
            stack.enter_context(own_buffers(self.stage.module))
            with self.arithmetic():
                given = self.stage.module(*taken)
                if self._to_next is None:
                    given = micro_batches.loss(leaf, given)
            kept = micro_batches.end(leaf)
        if before is not None:
            self._check_drawn(changed(before))
        ends = tensors_in(given)
        if self._to_next is not None:
            check_no_alias(ends)
            self._to_next.send((given, self._generators()))
        return _Held(arrivals, [end for end in ends if end.requires_grad], kept)

    def _check_drawn(self, generators: Sequence[str]) -> None:
        # The states of python's and numpy's generators do not go from stage to stage.
        self._has_looked = True
        others = [generator for generator in generators if generator != TORCH]
        if others and self._from_previous is not None:
            raise RecipeError(
                f"stages: layers of stage {self.stage.number} draw from {' and '.join(others)}, "
                "whose state does not go from stage to stage; draw from torch's, or train without "
                "stages"
            )

    def _root(self, held: _Held, is_more: bool) -> Tensor | None:
        if self._from_next is None:
            return held.ends[0] if held.ends else None
        gradients, _ = self._take(self._from_next, is_more)
        return root_of(held.ends, gradients)

    def _take(self, receiver: Receiver, is_more: bool) -> tuple[Any, list[Tensor]]:
        start_s = time.perf_counter()
        taken = receiver.take()
        self.waited_s += time.perf_counter() - start_s
        if is_more:
            receiver.ask()
        return taken

    def _generators(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1].cpu(), self.device)


@contextmanager
def own_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Give a module copies of its buffers in a `with` block."""
    places = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    # Backward may need their values after the next micro-batch has begun from the step's start.
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    for buffers, name, buffer in places:
        buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer
