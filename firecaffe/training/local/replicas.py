"""The replicas of this rank: weights, buffers, an optimizer and a loss scale each; a piece of the
state.

There is one network. At rest it holds the average x of all replicas; a replica trains in it by
lending it its tensors. In a checkpoint a replica is whole and by its number, so that any number of
ranks goes on with it:

    R/parameter/NAME, R/buffer/NAME   if replicas are apart; else all are as the average
    R/optimizer/NAME/KEY              what its optimizer keeps
    R/numbers                         what of that are no tensors: JSON, as bytes
    R/scale                           its loss scale, with float16: JSON, as bytes

What replicas' optimizers keep for each weight, averaged with the weights if the recipe says so.

These are tensors in the form of the weights: the momentum of sgd, both moments of adam. Counts of
updates stay each replica's own. They go in the tail of an average, and no codec encodes them.

The names of what replicas have, of a network that a row of ranks holds.

By this rank's names a replica has `3/parameter/classifier.1.parts.2.weight`, or with what its
optimizer keeps of that `3/optimizer/classifier.1.parts.2.weight/momentum_buffer`. In a checkpoint
they are rows of `3/parameter/classifier.1.weight`, and so on, as one rank has it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.parallel.pieces import Names, Source
from firecaffe.training.piece import Numbers, load_parts
from firecaffe.training.tensor_file import Stored, Under
from firecaffe.transport.collect import HeldPart

NUMBERS, SCALE = "numbers", "scale"


@dataclass(frozen=True)
class Fragment:
    """What of a network is averaged together."""

    named: Mapping[str, nn.Parameter]
    """Those of its parameters that are trained."""
    has_buffers: bool
    """Whether all buffers go with these."""


@dataclass
class Replica:
    """One copy of the network."""

    number: int
    weights: dict[str, Tensor]
    """Those that are trained, by name."""
    buffers: dict[str, Tensor]
    optimizer: optim.Optimizer
    scale: dict[str, Any]
    """The state of its loss scale; empty without one."""
    compared: dict[str, Tensor] = field(default_factory=dict)
    """Its weights when the average that is under way was taken: those of a fragment."""


class Replicas:
    """This rank's replicas; see `training.piece.Piece`."""

    held_by_all = False
    is_result = True

    def __init__(
        self,
        holding: Holding,
        numbers: Sequence[int],
        make: Callable[[], optim.Optimizer],
    ) -> None:
        """make: an optimizer of what is trained."""
        self._holding, self.model, self.named = holding, holding.network, holding.named
        self._scaler = holding.forward.scaler
        self.is_apart = False
        """Whether they have other weights than the average, at least of some fragment."""
        self.own = [
            Replica(
                number,
                {name: each.detach().clone() for name, each in self.named.items()},
                {name: each.clone() for name, each in self.model.named_buffers()},
                make(),
                self._scaler.state_dict(),
            )
            for number in numbers
        ]

    def join(self) -> None:
        """Gives all replicas the average that the network holds."""
        self.take(Fragment(self.named, has_buffers=True))
        self.is_apart = False

    def end_step(self, are_together: bool) -> None:
        """are_together: whether all have the weights of the average now."""
        self.is_apart = not are_together

    @torch.no_grad()
    def take(self, fragment: Fragment) -> None:
        """Gives all replicas a fragment of the average that the network holds."""
        for replica in self.own:
            copy((replica.weights[name] for name in fragment.named), fragment.named.values())
            if fragment.has_buffers:
                copy(replica.buffers.values(), self.model.buffers())

    def remember(self, fragment: Fragment) -> None:
        """Remembers the weights that are compared, for replicas that go on meanwhile."""
        for replica in self.own:
            replica.compared = {name: replica.weights[name].clone() for name in fragment.named}

    @torch.no_grad()
    def follow(self, fragment: Fragment) -> None:
        """Gives each replica a fragment of the average that the network holds, and the way that it
        has gone since it was compared. Its buffers go on: a variance might become negative so.
        """
        for replica in self.own:
            weights = [replica.weights[name] for name in fragment.named]
            if weights:  # torch takes no empty list, as of a stage without any
                torch._foreach_sub_(weights, list(replica.compared.values()))
                torch._foreach_add_(weights, list(fragment.named.values()))
            replica.compared = {}

    def inherit(self, optimizer: optim.Optimizer) -> None:
        """Gives all replicas what an optimizer keeps, and lets it forget it."""
        for replica in self.own:
            replica.scale = self._scaler.state_dict()
            for group, of_other in zip(
                replica.optimizer.param_groups, optimizer.param_groups, strict=True
            ):
                group |= {key: each for key, each in of_other.items() if key != "params"}
            for parameter, kept in optimizer.state.items():
                replica.optimizer.state[parameter] = deepcopy(kept)
        optimizer.state.clear()

    def forget(self, fragment: Fragment) -> None:
        """Lets the replicas' optimizers begin anew with a fragment."""
        for replica in self.own:
            for parameter in fragment.named.values():
                replica.optimizer.state.pop(parameter, None)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Gives the network back the average after a `with` block in which replicas train in it."""
        average = [parameter.detach() for parameter in self.named.values()]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        scale = self._scaler.state_dict()
        try:
            yield
        finally:
            self._scaler.load_state_dict(scale)
            for parameter, tensor in zip(self.named.values(), average, strict=True):
                parameter.data = tensor
            copy(self.model.buffers(), buffers)

    def lend(self, replica: Replica) -> None:
        """Puts a replica into the network: of its weights the memory, of its buffers the values."""
        for name, parameter in self.named.items():
            parameter.data = replica.weights[name]
        copy(self.model.buffers(), replica.buffers.values())
        self._scaler.load_state_dict(replica.scale)

    def take_back(self, replica: Replica) -> None:
        """Gives a replica what it has come to in the network, beside its weights."""
        copy(replica.buffers.values(), self.model.buffers())
        replica.scale = self._scaler.state_dict()

    def parts(self) -> dict[str, HeldPart]:
        found: dict[str, HeldPart] = {}
        for replica in self.own:
            tensors = dict[str, Tensor]()
            if self.is_apart:
                tensors |= {f"parameter/{name}": each for name, each in replica.weights.items()}
                tensors |= {f"buffer/{name}": each for name, each in replica.buffers.items()}
            kept = OptimizerTensors(self.model, replica.optimizer).parts()
            tensors |= {f"optimizer/{name}": part.tensor for name, part in kept.items()}
            numbers = self._numbers(replica).state_dict()
            for name, values in ((NUMBERS, numbers), (SCALE, replica.scale)):
                if values:
                    text = bytearray(json.dumps(values).encode())
                    tensors[name] = torch.frombuffer(text, dtype=torch.uint8)
            found |= {
                f"{replica.number}/{name}": HeldPart(each, order=replica.number)
                for name, each in tensors.items()
            }
        return found

    def load(self, stored: Stored) -> None:
        """Raises: CheckpointError if a tensor is of another network."""
        self.join()
        for replica in self.own:
            own = Under(stored, str(replica.number))
            for kind, tensors in (("parameter", replica.weights), ("buffer", replica.buffers)):
                found = Under(own, kind)
                if len(found):
                    self.is_apart = True
                    load_parts({name: HeldPart(each) for name, each in tensors.items()}, found)
            OptimizerTensors(self.model, replica.optimizer).load(Under(own, "optimizer"))
            if NUMBERS in own:
                numbers = json.loads(own[NUMBERS].numpy().tobytes())
                self._numbers(replica).load_state_dict(numbers)
            if SCALE in own:
                replica.scale = json.loads(own[SCALE].numpy().tobytes())

    def _numbers(self, replica: Replica) -> Numbers:
        """Those of its optimizer, of all ranks that hold it."""
        return self._holding.numbers_of_row(OptimizerNumbers(self.model, replica.optimizer))


@torch.no_grad()
def copy(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copies each of some tensors into another."""
    places = list(into)
    if places:  # torch takes no empty list
        torch._foreach_copy_(places, list(values))


STEP = "step"
"""The name of torch's counts, which have the form of a weight that is one number."""


@dataclass(frozen=True)
class Moments:
    """Which there are: (a parameter's name, the key of its optimizer)."""

    named: Mapping[str, nn.Parameter]
    keys: Sequence[tuple[str, str]] = ()

    def none(self) -> list[Tensor]:
        """The sums over no replica."""
        return [torch.zeros_like(self.named[name]) for name, _ in self.keys]

    def of(self, replica: Replica) -> list[Tensor]:
        """A replica's; zeros for what its optimizer has not made."""
        return [
            zeros if kept is None else kept
            for zeros, kept in zip(self.none(), self._kept(replica), strict=True)
        ]

    def give(self, replica: Replica, means: Sequence[Tensor]) -> None:
        """Gives a replica the means, as far as its optimizer has made them."""
        for kept, mean in zip(self._kept(replica), means, strict=True):
            if kept is not None:
                kept.copy_(mean)

    def _kept(self, replica: Replica) -> list[Tensor | None]:
        state = replica.optimizer.state
        return [state.get(self.named[name], {}).get(key) for name, key in self.keys]


def find_moments(
    named: Mapping[str, nn.Parameter],
    make: Callable[[dict[str, nn.Parameter]], optim.Optimizer],
) -> Moments:
    """Finds out what an optimizer keeps, from an update of copies. make: the optimizer of some
    parameters.
    """
    if not named:
        return Moments(named)
    copies = {name: nn.Parameter(each.detach().clone()) for name, each in named.items()}
    for each in copies.values():
        each.grad = torch.zeros_like(each)
    optimizer = make(copies)
    optimizer.step()
    keys = [
        (name, key)
        for name, each in copies.items()
        for key, kept in sorted(optimizer.state.get(each, {}).items())
        if isinstance(kept, Tensor) and kept.shape == each.shape and key != STEP
    ]
    return Moments(named, keys)


KINDS = ("parameter", "buffer", "optimizer", NUMBERS, SCALE)
"""In the order in which a replica tells its tensors."""


@dataclass(frozen=True)
class NamesOfReplicas:
    """See `training.parallel.pieces.Naming`. Tensors are in order of replicas, then of kinds, then
    of the network.
    """

    names: Names

    def source(self, path: str) -> tuple[Source, str]:
        of_replica, own = _cut(path)
        if not own:
            return Source(path), path
        source, whole = self.names.source(own)
        return source, of_replica + whole

    def own(self, path: str) -> list[str]:
        of_replica, whole = _cut(path)
        return [of_replica + own for own in self.names.own(whole)] if whole else [path]

    def place(self, path: str) -> int:
        number, kind, *_ = path.split("/")
        _, whole = _cut(path)
        first = (int(number) * len(KINDS) + KINDS.index(kind)) * len(self.names.places)
        return first + (self.names.place(whole) if whole else 0)


def _cut(path: str) -> tuple[str, str]:
    """Which replica's what it is, as `3/optimizer/`, and the rest of the path: of numbers none."""
    number, kind, *rest = path.split("/", 2)
    return f"{number}/{kind}/", "".join(rest)
