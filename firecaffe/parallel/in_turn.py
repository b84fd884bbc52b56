"""One weird trick, in turn: micro-batches are exchanged beside the computation of split layers.

At once, a rank waits for all that a row exchanges, and then computes. In turn, it computes with
each micro-batch as it comes, its own first, while the others are still on their way; and what it
has made for another rank is sent while it computes with the next. Backward goes through the
micro-batches the other way around: so it, too, begins with its own where it is given something, and
ends with it where it gives. What is computed, and the order of all sums, are the same.

As in Krizhevsky's scheme (b), micro-batches come one after the other and ranks compute meanwhile;
as in his scheme (c), all ranks send all the time. In (b) one rank at a time sends to all, so that
the other ranks' links are idle; in (c) each sends slices of its micro-batch, which would be matrix
products of other shapes, and other bits.

Source: Krizhevsky 2014 (arXiv 1404.5997); Wang et al. 2023 (ASPLOS), who begin with the part of a
gathered tensor that is there.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import waiting
from firecaffe.parallel.own_samples import Gradients, OwnSamples
from firecaffe.transport.execute import PeerMessage, UnderWay, one_by_one

TAG = 1 << 16
"""The tag of these messages, beyond those of schedules."""

INPUTS, OUTPUTS = "inputs", "outputs"


class SamplesInTurn(OwnSamples):
    """`OwnSamples` of ranks that send each other messages."""

    def __init__(self, group: Group, num_parts: int) -> None:
        super().__init__(group, num_parts)
        assert group.exchange_group is not None
        rank, size = group.rank, group.world_size
        self._start = one_by_one(group, group.exchange_group, range(size), TAG)
        # Each sends to the next rank first, so that not all send to one; so what comes first is of
        # the rank before.
        self._places = [(rank - distance) % size for distance in range(size)]
        self._coming: dict[int, UnderWay] = {}
        self._going: list[tuple[UnderWay, Tensor]] = []
        self._addends: dict[int, Tensor] = {}
        self._nodes_there: list[Tensor] = []
        self._nodes_coming: Sequence[UnderWay] = ()
        self._waited_s = 0.0

    @property
    def seconds(self) -> float:
        return super().seconds + self._waited_s

    def take_gradients(self) -> list[Gradients]:
        self._finish()
        return super().take_gradients()

    def copies(self, whole: Tensor) -> list[Tensor]:
        """They are not all there yet: `call` waits for its own."""
        if self._is_shared:
            return super().copies(whole)
        self._finish()
        own, others = whole.contiguous(), self._places[1:]
        every = [own.new_empty((samples, *own.shape[1:])) for samples in self._samples]
        every[self.group.rank] = own
        works = self._start([(False, other, every[other]) for other in others])
        self._coming = dict(zip(others, works, strict=True))
        for other in reversed(others):
            self._send(other, own)
        return [each.view_as(each) for each in every for _ in self.own]

    def sum(self, own: Sequence[Tensor]) -> Tensor:
        if self._is_shared:
            return super().sum(own)
        for number, addend in enumerate(own):
            if number not in self._addends:
                self._give(number, addend)
            assert self._addends[number].data_ptr() == addend.data_ptr()
        with self._waits():
            for work in self._nodes_coming:
                work.wait()
        self._addends.clear()
        return self._sum_of(self._nodes_there)

    def order(self, count: int, sums: str) -> Sequence[int]:
        if self._is_shared:
            return super().order(count, sums)
        # What is summed is wanted by others: this rank's own comes last, forward of sums of
        # outputs, and backward, which goes the other way, of those of inputs' gradients.
        places = reversed(self._places) if sums == OUTPUTS else self._places
        each = len(self.own)
        return [place * each + part for place in places for part in range(each)]

    def call(self, part: nn.Module, number: int, sums: str, *inputs: Any) -> Tensor:
        place = number // len(self.own)
        self._arrive(place)
        if self._is_shared or not torch.is_grad_enabled():
            return super().call(part, number, sums, *inputs)
        if sums == INPUTS:
            [taken] = inputs
            inputs = (_Give.apply(self, number, taken),)  # type: ignore[no-untyped-call]
        made = super().call(part, number, sums, *inputs)
        if sums == OUTPUTS:
            made = _Arrive.apply(self, place, made)  # type: ignore[no-untyped-call]
            self._give(number, made.detach())
        return made

    def _arrive(self, place: int) -> None:
        """Waits for a rank's tensor. Raises: PeerLostError."""
        work = self._coming.pop(place, None)
        if work is not None:
            with self._waits():
                work.wait()

    def _give(self, number: int, addend: Tensor) -> None:
        """Takes an addend; sends those of a rank's sum if these are all. number: among those of
        this rank's parts of all micro-batches.
        """
        if not self._addends:
            rank, sample = self.group.rank, addend.shape[1:]
            shapes = [(len(nodes), self._samples[rank], *sample) for nodes in self._nodes_of]
            self._nodes_there = [addend.new_empty(shape) for shape in shapes]
            others = self._places[1:]
            messages: list[PeerMessage] = [(False, o, self._nodes_there[o]) for o in others]
            self._nodes_coming = self._start(messages)
        self._addends[number] = addend
        count = len(self.own)
        place = number // count
        found = [self._addends.get(place * count + part) for part in range(count)]
        addends = [each for each in found if each is not None]
        if len(addends) < count:
            return
        nodes = torch.stack(self._nodes(addends))
        if place == self.group.rank:
            self._nodes_there[place] = nodes
        else:
            self._send(place, nodes)

    def _send(self, other: int, tensor: Tensor) -> None:
        self.group.traffic.add(tensor.nbytes)
        [work] = self._start([(True, other, tensor)])
        self._going.append((work, tensor))

    def _finish(self) -> None:
        """Waits until nothing is under way. Raises: PeerLostError."""
        for place in list(self._coming):
            self._arrive(place)
        with self._waits():
            for work, _ in self._going:
                work.wait()
        self._going = []

    @contextmanager
    def _waits(self) -> Iterator[None]:
        begun_s = time.perf_counter()
        with waiting(self.group):
            yield
        self._waited_s += time.perf_counter() - begun_s


class _Arrive(Function):
    """What a part has made. Its gradient is on its way when backward comes here."""

    @staticmethod
    def forward(ctx: Any, group: SamplesInTurn, place: int, made: Tensor) -> Tensor:
        ctx.group, ctx.place = group, place
        return made.view_as(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.group._arrive(ctx.place)
        return None, None, gradient


class _Give(Function):
    """What a part takes. Its gradient is an addend of the sum for the rank that it is of."""

    @staticmethod
    def forward(ctx: Any, group: SamplesInTurn, number: int, taken: Tensor) -> Tensor:
        ctx.group, ctx.number = group, number
        return taken.view_as(taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.group._give(ctx.number, gradient)
        return None, None, gradient
