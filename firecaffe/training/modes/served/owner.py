"""An owner: has a run of the parameters' elements, and executes the log's events on it.

A rule that treats each element by itself gives the same bits wherever parameters are cut, so the
number of ranks changes no bit. If a rule needs whole parameters (their norms, or what a codec keeps
back of them), the cuts are between parameters.

Rank 0 sends an owner the events, in their order. Learners send it their gradients of these elements
and request versions of them, in any order: an event waits for its gradient, a learner for its
version.

The pieces of the whole training (`training.state`) and of an owner have the same names; an owner's
tensors are runs of the whole ones. So the training is cut by loading runs into each owner's pieces,
and put together by loading all owners' runs into the whole pieces.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.errors import PeerLostError
from firecaffe.solvers.optimizer_state import OptimizerNumbers
from firecaffe.solvers.update_rules import set_delay
from firecaffe.synchrony.events import Push
from firecaffe.synchrony.server_policies import Work
from firecaffe.training.modes.served.server import Server
from firecaffe.training.modes.served.server_memory import (
    ALIGNMENT,
    Gradient,
    Parcel,
    ServerMemory,
    bytes_in_file,
)
from firecaffe.training.modes.served.work_gradient import UpdateOrder
from firecaffe.training.piece import Piece, Weights
from firecaffe.training.tensor_file import InMemory
from firecaffe.training.updates.every_rank import Applier, OwnParameters
from firecaffe.transport.lane import Line


@dataclass(frozen=True)
class Shard:
    """A run of a parcel's bytes, on its owner's host or within the whole parcel."""

    start: int
    stop: int
    pieces: Mapping[str, range]
    """The shard's elements of each tensor, laid out row by row, in the order of the parcel."""

    def has_whole(self, name: str, tensor: Tensor) -> bool:
        return len(self.pieces[name]) == tensor.numel()

    def run_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the shard's part of a tensor, of one dimension, or all of it unchanged."""
        if self.has_whole(name, tensor):
            return tensor
        elements = self.pieces[name]
        return tensor.reshape(-1)[elements.start : elements.stop]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, parcel: Parcel) -> Tensor:
        return parcel.data[self.start : self.stop]

    def views(self, data: Tensor, parcel: Parcel) -> dict[str, Tensor]:
        """Return the pieces in `data`, shaped as by `run_of`. `parcel` has the whole layout."""
        views = {}
        for name, elements in self.pieces.items():
            whole = parcel.views[name]
            dtype = whole.dtype
            begin = parcel.places[name] + elements.start * dtype.itemsize - self.start
            views[name] = data[begin : begin + len(elements) * dtype.itemsize].view(dtype)
            if self.has_whole(name, whole):
                views[name] = views[name].view(whole.shape)
        return views


def cut(parcel: Parcel, count: int, whole: bool = False) -> list[Shard]:
    """Cut a parcel into shards of equal size, to within `ALIGNMENT` bytes. Some may be empty.

    If `whole`, the cuts are between tensors, as near to equal sizes as possible.
    """
    total = parcel.data.nbytes
    ends = [total * number // count // ALIGNMENT * ALIGNMENT for number in range(count)] + [total]
    if whole:
        between = [*parcel.places.values(), total]
        ends = [_nearest(between, end) for end in ends]
    return [Shard(start, stop, _pieces(parcel, start, stop)) for start, stop in pairwise(ends)]


def _nearest(places: Sequence[int], wanted: int) -> int:
    return min(places, key=lambda place: abs(place - wanted))


def _pieces(parcel: Parcel, start: int, stop: int) -> dict[str, range]:
    pieces = {}
    is_last = start < stop == parcel.data.nbytes
    for name, view in parcel.views.items():
        place, size = parcel.places[name], view.dtype.itemsize
        first = max(start - place, 0) // size
        last = min((stop - place) // size, view.numel())
        is_empty = not view.numel() and (start <= place < stop or (place == stop and is_last))
        if first < last or is_empty:
            pieces[name] = range(first, last) if first < last else range(0)
    return pieces


class Runs(OwnParameters):
    def __init__(self, whole: Mapping[str, nn.Parameter], shard: Shard) -> None:
        runs = {name: shard.run_of(name, whole[name].detach()).clone() for name in shard.pieces}
        super().__init__({name: nn.Parameter(run) for name, run in runs.items()})


class ShardMemory(ServerMemory):
    """A server's memory of runs. Versions are kept as the bytes that are sent."""

    def __init__(self, runs: Runs, squares: bool, shard: Shard, layout: Parcel) -> None:
        super().__init__(runs, runs.named, squares)
        self._runs, self._shard, self._layout = runs, shard, layout
        self.sent: dict[int, Tensor] = {}
        self.nothing = torch.zeros(shard.nbytes, dtype=torch.uint8)
        """Zeros, as many bytes as a version has."""
        self.newest = -1

    def keep(self, version: int) -> None:
        self.newest = version
        if version in self.sent:  # `versions` has those of a checkpoint, too
            return
        size = self.nothing.nbytes
        data = bytes_in_file(size) if self.is_full(size) else torch.zeros_like(self.nothing)
        views = self._shard.views(data, self._layout)
        for name, run in self._runs.named.items():
            views[name].copy_(run.detach())
        self.sent[version], self.versions[version] = data, views

    def release(self, needed: set[int]) -> None:
        super().release(needed)
        for version in self.sent.keys() - needed:
            del self.sent[version]


class ShardState:
    def __init__(self, runs: Runs, applier: Applier, memory: ShardMemory) -> None:
        self.memory = memory
        self._pieces: dict[str, Piece] = {
            "parameter": Weights(runs.named_parameters),
            "server": memory,
            **applier.pieces(runs),
        }
        self._numbers = OptimizerNumbers(runs, applier.optimizer)

    def take(self, whole: Mapping[str, Piece], numbers: Mapping[str, Any], shard: Shard) -> None:
        """Load this shard's runs of the whole pieces, and the optimizer's numbers."""
        for kind, piece in self._pieces.items():
            runs = {}
            for path, part in whole[kind].parts().items():
                name = parameter_of(kind, path)
                if name in shard.pieces and not path.startswith("tail/"):
                    is_count = path.endswith("/step")  # an optimizer's, equal at all owners
                    value = part.tensor
                    runs[path] = value.clone() if is_count else shard.run_of(name, value)
            piece.load(InMemory(runs))
        server = whole["server"]
        assert isinstance(server, ServerMemory)
        for leaf in server.gradients:  # also if a gradient has no elements here
            self.memory.gradients.setdefault(leaf, Gradient({}, []))
        local_numbers = {path: v for path, v in numbers.items() if _first(path) in shard.pieces}
        self._numbers.load_state_dict(local_numbers)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the owner's tensors, by KIND/PATH, and the optimizer's numbers."""
        tensors = {
            f"{kind}/{path}": part.tensor
            for kind, piece in self._pieces.items()
            for path, part in piece.parts().items()
        }
        return tensors, self._numbers.state_dict()


def put_together(
    named: Mapping[str, Tensor], shards: Sequence[Shard], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Return the whole tensors by kind and path, from the parts of all owners in order."""
    wholes = defaultdict[str, dict[str, Tensor]](dict)
    for shard, tensors in zip(shards, parts, strict=True):
        for full, value in tensors.items():
            kind, _, path = full.partition("/")
            name = parameter_of(kind, path)
            if value.ndim == 0:  # an optimizer's count of steps, equal at all owners
                wholes[kind][path] = value.clone()
                continue
            if path not in wholes[kind]:
                wholes[kind][path] = torch.empty(named[name].shape, dtype=value.dtype)
            elements = shard.pieces[name]
            flat = wholes[kind][path].view(-1)
            flat[elements.start : elements.stop] = value.cpu().reshape(-1)
    return wholes


def parameter_of(kind: str, path: str) -> str:
    """Return the parameter's NAME in a piece's path: NAME, NAME/KEY, or WHAT/WHERE/NAME."""
    return _first(path) if kind == "optimizer" else path.rpartition("/")[2]


def _first(path: str) -> str:
    return path.rpartition("/")[0]


@dataclass(frozen=True)
class OwnerParts:
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    mean_step: Mapping[str, float]
    """The mean of updates, equal on all owners."""
    moved: tuple[int, int]
    """Bytes sent to learners of other ranks, and received from them."""


class Owner:
    """The owner on one rank. One thread calls `take` and `give`; any thread calls the rest."""

    def __init__(self, server: Server, held: ShardState) -> None:
        self._server, self.held = server, held
        self._changed = threading.Condition()
        self._gradients: dict[Work, Gradient] = {}
        self._unwanted: set[Work] = set()
        """Works that do not count, and whose gradient is still to come."""
        self._is_cut = False
        self._threads = torch.get_num_threads()
        self.lines: list[Line] = []

    def bring(self, work: Work, gradient: Gradient) -> None:
        with self._changed:
            if work in self._unwanted:
                self._unwanted.remove(work)
            else:
                self._gradients[work] = gradient
            self._changed.notify_all()

    def version(self, number: int) -> Tensor:
        """Wait for a version; return its bytes, which do not change. Raises: PeerLostError."""
        memory = self.held.memory
        with self._changed:
            self._wait(lambda: number <= memory.newest)
            # It was kept for the work that the learner was given, and is gone if that was given up.
            return memory.sent.get(number, memory.nothing)

    @torch.no_grad()
    def take(self, order: UpdateOrder) -> None:
        """Execute the next event, once its gradient is here. Raises: PeerLostError if cut."""
        event = order.event
        torch.set_num_threads(self._threads)  # each thread has its own number
        if isinstance(event, Push):
            self._keep_gradient(event, order.overflows)
            if event.update is not None:
                set_delay(self._server.applier.optimizer, order.settings.delay)
                _, norm = self._server.prepare(event.update)
                if not norm.isfinite():
                    self._set_to_nan()
                self._server.apply(event.update, order.settings)
        with self._changed:
            self._server.take(event)
            self._changed.notify_all()

    def give(self) -> OwnerParts:
        """Return the parts, as they are after all earlier events."""
        sent = sum(line.sent_bytes for line in self.lines)
        received = sum(line.received_bytes for line in self.lines)
        mean_step = self._server.late_rule.mean_step.state_dict()
        return OwnerParts(*self.held.parts(), mean_step, (sent, received))

    def end(self) -> None: ...

    def _set_to_nan(self) -> None:
        """Set all gradients to NaN: clipping by an infinite norm would make an update of zeros."""
        # All owners do this, and a learner that computes with these weights reports it.
        for parameter in self._server.named.values():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)

    def cut(self) -> None:
        """End all waiting, from any thread."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def _keep_gradient(self, event: Push, overflows: bool) -> None:
        with self._changed:
            if event.counts:
                self._wait(lambda: event.work in self._gradients)
                self._server.keep(event.work, self._gradients.pop(event.work), overflows)
            elif self._gradients.pop(event.work, None) is None:
                self._unwanted.add(event.work)

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_cut or until())
        if self._is_cut:
            raise PeerLostError("another rank went away")
