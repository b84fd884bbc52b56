"""Runs the stage of a network that this rank has, one step after the other.

Micro-batches go forward through the ranks of a group and backward again, in an order of
`parallel.pipeline`. What each of them does to gradients, buffers and random numbers is what it does
in the whole network:

- Backward is for one micro-batch at a time, and whoever runs it has that one's gradients.
- Each micro-batch has buffers of its own, which begin as those at the start of the step.
- The state of torch's generators goes along from stage to stage.
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

from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.generators import TORCH, all_states, changed
from firecaffe.parallel.channel import Arrivals, Receiver, Sender, root_of
from firecaffe.parallel.passed import check_apart, tensors_in
from firecaffe.parallel.pipeline import ORDERS
from firecaffe.parallel.stages import Stage

AHEAD = 2
"""Batches that a stage has sent and the next one has not taken, in evaluation."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class MicroBatches(Protocol[T_co]):
    """The micro-batches of a step, as the trainer has them."""

    def inputs(self, leaf: int) -> Any:
        """What goes into the network; asked on the first stage. It leaves torch's generators as
        forward is to find them.
        """

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        """The scalar to differentiate, of what the network returns; asked on the last stage."""

    def end(self, leaf: int) -> T_co:
        """Called on each stage after its forward, when its buffers are as this micro-batch has left
        them.
        """


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A micro-batch of which this stage can run backward."""

    leaf: int
    root: Tensor | None
    """To be differentiated, as a loss; None if nothing here has a gradient."""
    kept: T
    """What `MicroBatches.end` returned."""


@dataclass(frozen=True)
class _Held:
    """A micro-batch between its forward and its backward."""

    arrivals: Arrivals
    ends: Sequence[Tensor]
    """The loss, or what was passed on and has a gradient."""
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
        """order: a row of ORDERS. arithmetic: around each forward, as torch.autocast."""
        if (stage.number, stage.num_stages) != (group.rank, group.world_size):
            raise ValueError(f"rank {group.rank} of {group.world_size} has stage {stage.number}")
        self.stage, self.device, self.arithmetic = stage, group.device, arithmetic
        self._order = ORDERS[order]
        self._has_looked = False
        self.waited_s = 0.0
        """Seconds of the last step in which this stage waited for others."""
        before, after = stage.number - 1, stage.number + 1
        self._from_before = None if stage.is_first else Receiver(group, before)
        self._to_before = None if stage.is_first else Sender(group, before)
        self._to_after = None if stage.is_last else Sender(group, after)
        self._from_after = None if stage.is_last else Receiver(group, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, wait: bool = True) -> None:
        """Ends the threads. wait: for what they still send."""
        for each in (self._to_before, self._to_after, self._from_before, self._from_after):
            if each is not None:
                each.close(wait)

    def run(self, leaves: Sequence[int], micro_batches: MicroBatches[T]) -> Iterator[Ready[T]]:
        """Yields each micro-batch of a step, in the order of `leaves`, when its forward is done and
        the gradients of what was passed on are there. Whoever asks for the next has run backward
        from its root. All ranks of the group take the same leaves, to the end.

        Raises: RecipeError if something goes from stage to stage that cannot; PeerLostError.
        """
        self.waited_s = 0.0
        held: dict[int, _Held] = {}
        actions = self._order(self.stage.num_stages, len(leaves), self.stage.number)
        # One comes in while another is computed.
        left = {True: len(leaves), False: len(leaves)}
        for receiver in (self._from_before, self._from_after):
            if receiver is not None and leaves:
                receiver.ask()
        for action in actions:
            left[action.is_forward] -= 1
            leaf, is_more = leaves[action.micro_batch], left[action.is_forward] > 0
            if action.is_forward:
                held[leaf] = self._forward(leaf, micro_batches, is_more)
                continue
            now = held.pop(leaf)
            yield Ready(leaf, self._root(now, is_more), now.kept)
            if self._to_before is not None:
                self._to_before.send(now.arrivals.gradients)

    @torch.no_grad()
    def outputs(
        self,
        stage: Stage,
        numbers: Sequence[int],
        inputs: Callable[[int], Any],
        draws: bool = False,
    ) -> Iterator[tuple[int, Any]]:
        """Yields each batch's number and, on the last stage, what the network returns for it; None
        on the others. All ranks of the group take the same numbers, to the end.

        stage: this rank's, of the network in evaluation. inputs: asked on the first stage. draws:
        whether the network draws random numbers, each stage where the one before has ended.

        Raises: as `run`.
        """
        on_way: deque[Future[None]] = deque()
        if self._from_before is not None and numbers:
            self._from_before.ask()
        for place, number in enumerate(numbers):
            if self._from_before is None:
                taken: tuple[Any, ...] = (inputs(number),)
            else:
                (taken, states), _ = self._take(self._from_before, place + 1 < len(numbers))
                if draws:
                    self._set_generators(states)
            with self.arithmetic():
                given = stage.module(*taken)
            if self._to_after is not None:
                check_apart(tensors_in(given))
                states = self._generators() if draws else []
                on_way.append(self._to_after.send((given, states)))
                if len(on_way) > AHEAD:  # a slower stage sets the pace
                    self._to_after.wait(on_way.popleft())
            yield number, given if self._to_after is None else None

    def _forward(self, leaf: int, micro_batches: MicroBatches[Any], is_more: bool) -> _Held:
        wanted: list[Tensor] = []
        if self._from_before is None:
            taken: tuple[Any, ...] = (micro_batches.inputs(leaf),)
        else:
            (taken, states), wanted = self._take(self._from_before, is_more)
            self._set_generators(states)
        arrivals = Arrivals(wanted)
        before = None if self._has_looked else all_states()
        with ExitStack() as stack:
            stack.enter_context(own_buffers(self.stage.module))
            with self.arithmetic():
                given = self.stage.module(*taken)
                if self._to_after is None:
                    given = micro_batches.loss(leaf, given)
            kept = micro_batches.end(leaf)
        if before is not None:
            self._check_drawn(changed(before))
        ends = tensors_in(given)
        if self._to_after is not None:
            check_apart(ends)
            self._to_after.send((given, self._generators()))
        return _Held(arrivals, [each for each in ends if each.requires_grad], kept)

    def _check_drawn(self, generators: Sequence[str]) -> None:
        """Raises: RecipeError if a stage after the first has drawn from one of python's or numpy's,
        whose states do not go along.
        """
        self._has_looked = True
        others = [each for each in generators if each != TORCH]
        if others and self._from_before is not None:
            raise RecipeError(
                f"stages: layers of stage {self.stage.number} draw from {' and '.join(others)}, "
                "whose state does not go from stage to stage; draw from torch's, or train without "
                "stages"
            )

    def _root(self, held: _Held, is_more: bool) -> Tensor | None:
        if self._from_after is None:
            return held.ends[0] if held.ends else None
        gradients, _ = self._take(self._from_after, is_more)
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
    """Gives a module copies of its buffers for a block. Backward may need what they are then, when
    the next micro-batch has begun from the step's start again.
    """
    places = [
        (each._buffers, name, buffer)
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    for buffers, name, buffer in places:
        buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer
