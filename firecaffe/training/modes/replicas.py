"""This rank's replicas, each with weights, buffers, an optimizer and a loss scale.

There is one network. Between steps it holds the average x of all replicas. To train, a replica
lends its tensors to the network. A checkpoint has each whole replica under its number, so that any
number of ranks can resume. A rank that holds parts has names such as `classifier.1.parts.2.weight`;
a checkpoint has these as rows of `classifier.1.weight`, the name on a single rank.

    R/parameter/NAME, R/buffer/NAME   if replicas differ; else all equal the average
    R/optimizer/NAME/KEY              the optimizer's tensors
    R/numbers                         the optimizer's other state: JSON, as bytes
    R/scale                           its loss scale, with float16: JSON, as bytes

The recipe may average moments with the weights: the momentum of sgd, both moments of adam. They
have the weights' shapes. They are in the tail of an average, and no codec encodes them. Each
replica keeps its own counts of updates.
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
from firecaffe.training.parallel.cut_pieces import Names, PieceSource
from firecaffe.training.piece import Numbers, load_parts
from firecaffe.training.tensor_file import Stored, Under
from firecaffe.transport.collect import HeldPart

NUMBERS, SCALE = "numbers", "scale"


@dataclass(frozen=True)
class Fragment:
    """The tensors of a network that are averaged together."""

    named: Mapping[str, nn.Parameter]
    has_buffers: bool
    """Whether all buffers are averaged with these tensors."""


@dataclass
class Replica:
    number: int
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: optim.Optimizer
    scale: dict[str, Any]
    compared: dict[str, Tensor] = field(default_factory=dict)
    """A fragment's weights when the average that is under way was begun."""


class Replicas:
    """This rank's replicas; implements `Piece`."""

    held_by_all = False
    is_result = True

    def __init__(
        self,
        holding: Holding,
        numbers: Sequence[int],
        make: Callable[[], optim.Optimizer],
    ) -> None:
        self._holding, self.model, self.named = holding, holding.network, holding.named
        self._scaler = holding.forward.scaler
        self.is_apart = False
        """Whether the replicas' weights differ from the average, at least in some fragment."""
        self.own = [
            Replica(
                number,
                {name: parameter.detach().clone() for name, parameter in self.named.items()},
                {name: buffer.clone() for name, buffer in self.model.named_buffers()},
                make(),
                self._scaler.state_dict(),
            )
            for number in numbers
        ]

    def join(self) -> None:
        self.take(Fragment(self.named, has_buffers=True))
        self.is_apart = False

    @torch.no_grad()
    def take(self, fragment: Fragment) -> None:
        """Give all replicas a fragment of the average that the network holds."""
        for replica in self.own:
            copy((replica.weights[name] for name in fragment.named), fragment.named.values())
            if fragment.has_buffers:
                copy(replica.buffers.values(), self.model.buffers())

    def remember(self, fragment: Fragment) -> None:
        """Remember a fragment's weights, for replicas that continue during its average."""
        for replica in self.own:
            replica.compared = {name: replica.weights[name].clone() for name in fragment.named}

    @torch.no_grad()
    def follow(self, fragment: Fragment) -> None:
        """Set a fragment to the average, plus each replica's change since `remember`."""
        # Not the buffers, because a variance might become negative.
        for replica in self.own:
            weights = [replica.weights[name] for name in fragment.named]
            if weights:  # torch refuses an empty list, as in a stage without weights
                torch._foreach_sub_(weights, list(replica.compared.values()))
                torch._foreach_add_(weights, list(fragment.named.values()))
            replica.compared = {}

    def inherit(self, optimizer: optim.Optimizer) -> None:
        """Move an optimizer's state to all replicas."""
        for replica in self.own:
            replica.scale = self._scaler.state_dict()
            for group, of_other in zip(
                replica.optimizer.param_groups, optimizer.param_groups, strict=True
            ):
                group |= {key: value for key, value in of_other.items() if key != "params"}
            for parameter, kept in optimizer.state.items():
                replica.optimizer.state[parameter] = deepcopy(kept)
        optimizer.state.clear()

    def forget(self, fragment: Fragment) -> None:
        for replica in self.own:
            for parameter in fragment.named.values():
                replica.optimizer.state.pop(parameter, None)

    @contextmanager
    def average_restored(self) -> Iterator[None]:
        """Restore the network's average after a `with` block in which replicas train in it."""
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
        """Put a replica into the network: share the memory of its weights, copy its buffers."""
        for name, parameter in self.named.items():
            parameter.data = replica.weights[name]
        copy(self.model.buffers(), replica.buffers.values())
        self._scaler.load_state_dict(replica.scale)

    def take_back(self, replica: Replica) -> None:
        copy(replica.buffers.values(), self.model.buffers())
        replica.scale = self._scaler.state_dict()

    def parts(self) -> dict[str, HeldPart]:
        parts: dict[str, HeldPart] = {}
        for replica in self.own:
            tensors = dict[str, Tensor]()
            if self.is_apart:
                tensors |= {f"parameter/{name}": weight for name, weight in replica.weights.items()}
                tensors |= {f"buffer/{name}": buffer for name, buffer in replica.buffers.items()}
            kept = OptimizerTensors(self.model, replica.optimizer).parts()
            tensors |= {f"optimizer/{name}": part.tensor for name, part in kept.items()}
            numbers = self._numbers(replica).state_dict()
            for name, values in ((NUMBERS, numbers), (SCALE, replica.scale)):
                if values:
                    text = bytearray(json.dumps(values).encode())
                    tensors[name] = torch.frombuffer(text, dtype=torch.uint8)
            parts |= {
                f"{replica.number}/{name}": HeldPart(tensor, order=replica.number)
                for name, tensor in tensors.items()
            }
        return parts

    def load(self, stored: Stored) -> None:
        self.join()
        for replica in self.own:
            of_replica = Under(stored, str(replica.number))
            for kind, tensors in (("parameter", replica.weights), ("buffer", replica.buffers)):
                of_kind = Under(of_replica, kind)
                if len(of_kind):
                    self.is_apart = True
                    load_parts({n: HeldPart(t) for n, t in tensors.items()}, of_kind)
            OptimizerTensors(self.model, replica.optimizer).load(Under(of_replica, "optimizer"))
            if NUMBERS in of_replica:
                numbers = json.loads(of_replica[NUMBERS].numpy().tobytes())
                self._numbers(replica).load_state_dict(numbers)
            if SCALE in of_replica:
                replica.scale = json.loads(of_replica[SCALE].numpy().tobytes())

    def _numbers(self, replica: Replica) -> Numbers:
        return self._holding.gathered_numbers(OptimizerNumbers(self.model, replica.optimizer))


@torch.no_grad()
def copy(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    places = list(into)
    if places:  # torch refuses an empty list
        torch._foreach_copy_(places, list(values))


STEP = "step"
"""torch's key for a count of updates, whose shape may be that of a weight of one element."""


@dataclass(frozen=True)
class Moments:
    """An optimizer's averaged tensors. `keys` are (parameter's name, key of its state)."""

    named: Mapping[str, nn.Parameter]
    keys: Sequence[tuple[str, str]] = ()

    def none(self) -> list[Tensor]:
        return [torch.zeros_like(self.named[name]) for name, _ in self.keys]

    def of(self, replica: Replica) -> list[Tensor]:
        """Return a replica's moments; zeros for what its optimizer has not made."""
        return [
            zeros if kept is None else kept
            for zeros, kept in zip(self.none(), self._kept(replica), strict=True)
        ]

    def give(self, replica: Replica, means: Sequence[Tensor]) -> None:
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
    """Find the tensors that an optimizer keeps, by an update of copies of the parameters."""
    if not named:
        return Moments(named)
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(copies)
    optimizer.step()
    keys = [
        (name, key)
        for name, parameter in copies.items()
        for key, kept in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(kept, Tensor) and kept.shape == parameter.shape and key != STEP
    ]
    return Moments(named, keys)


KINDS = ("parameter", "buffer", "optimizer", NUMBERS, SCALE)


@dataclass(frozen=True)
class NamesOfReplicas:
    """Implements `Naming`: tensors in the order of replicas, then kinds, then the network."""

    names: Names

    def source(self, path: str) -> tuple[PieceSource, str]:
        of_replica, local_path = _cut(path)
        if not local_path:
            return PieceSource(path), path
        source, whole = self.names.source(local_path)
        return source, of_replica + whole

    def own(self, path: str) -> list[str]:
        of_replica, whole = _cut(path)
        return [of_replica + name for name in self.names.own(whole)] if whole else [path]

    def place(self, path: str) -> int:
        number, kind, *_ = path.split("/")
        _, whole = _cut(path)
        first = (int(number) * len(KINDS) + KINDS.index(kind)) * len(self.names.places)
        return first + (self.names.place(whole) if whole else 0)


def _cut(path: str) -> tuple[str, str]:
    number, kind, *rest = path.split("/", 2)
    return f"{number}/{kind}/", "".join(rest)
