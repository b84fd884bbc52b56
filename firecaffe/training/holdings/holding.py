"""The holding: which part of a model a rank has, and how it computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import copy_from_first
from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.bucket_sums import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.parallel.own_samples import Gradients
from firecaffe.training.evaluation import EvalBatch, autocast
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward, match_format
from firecaffe.training.outcome import FetchBatch, Spent
from firecaffe.training.parallel.cut_pieces import Names
from firecaffe.training.piece import LocalWholes, Numbers, Piece, Weights, Wholes
from firecaffe.training.updates.part_sums import PartSums
from firecaffe.training.updates.spread import Alone, Among, Spread, TensorPart

EMPTY: Sequence[tuple[int, Gradients]] = ()


@dataclass(frozen=True)
class Ready:
    leaf: int
    root: Tensor | None
    """The tensor to differentiate; None without samples, or if nothing here has a gradient."""
    tail: Sequence[Tensor]
    """The plain loss, and the changes to buffers."""
    parts: Sequence[tuple[int, Gradients]] = field(default=EMPTY)
    """The row's micro-batches: number, and gradients of this rank's parts, filled by backward."""


class Holding:
    """The holding of a rank with the whole model and its own samples. Others extend it."""

    has_inputs = True
    """Whether this rank needs the samples of its micro-batches."""
    knows_loss = True
    """Whether this rank has the loss of its micro-batches."""
    has_whole_gradients = True
    """Whether this rank computes its micro-batches alone, and so has all of their gradients."""
    changed_in_backward: Sequence[str] = ()
    """The buffers that the first backward changed, apart from those of normalization layers."""
    everywhere: dict[str, nn.Parameter]
    """`named`, and other ranks' parameters on the meta device, so that name patterns match all."""
    outline: Mapping[str, nn.Parameter]
    """The whole network's parameters, in its order; those of other ranks on the meta device."""
    names: Names
    """The places of this rank's tensors in those of the whole network."""

    def __init__(self, forward: Forward, network: nn.Module, evaluators: Group) -> None:
        """Hold a network. `evaluators` are the ranks that divide the samples of an evaluation."""
        self.forward, self.network, self.evaluators = forward, network, evaluators
        self.named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self.everywhere, self.outline = self.named, dict(network.named_parameters())
        order = {name: place for place, name in enumerate(self.outline)}
        self.names = Names({}, order, frozenset())

    @property
    def result_group(self) -> Group:
        """The ranks that exchange their results of an evaluation."""
        return self.evaluators

    def begin_step(self, first_leaf: int = 0) -> None:
        """Begin a step, or one replica's. All its micro-batches start from the same buffers."""
        self.forward.begin_step(first_leaf)

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        """Yield each micro-batch of a step when its backward can run. Raises: PeerLostError.

        The caller must run that backward before it asks for the next micro-batch. All ranks of a
        row must iterate to the end, over equally many micro-batches.
        """
        for leaf in leaves:
            yield Ready(leaf, *self.forward(*fetch(leaf), step, leaf))

    def counts(self) -> Tensor:
        return self.forward.counts

    def set_buffers(self, changes: Sequence[Tensor], weight: float) -> None:
        """Update the buffers with the summed changes of a step of `weight` full micro-batches."""
        self.forward.buffers.finish_step(changes, weight)

    def set_shares(self, shares: Shares, order: Callable[[range], list[int]]) -> None:
        """Use other shares of micro-batches from the next step on, each computed in `order`."""

    def spent(self) -> Spent:
        return Spent()

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        """Yield this rank's evaluation batches (`numbers`), with outputs if this rank has them."""
        for batch in batches:
            yield batch, self.forward.model(match_format(batch[1], self.forward.config))

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        """Run forward as in training, on the inputs of each number. Yield once per forward."""
        forward = self.forward
        for number in numbers:
            taken = inputs(number)
            with autocast(forward.config, forward.device):
                forward.model(taken)
            yield number

    def try_outputs(self, inputs: Any) -> Any:
        """Return the network's outputs in its present mode; None if another rank has them."""
        return self.forward.model(inputs)

    def first_backward(self, first: Batch) -> Tensor | None:
        """Run backward for the training's first micro-batch. Return its loss, if known here."""
        self.forward.begin_step()
        loss, tail = self.forward(*first, step=0, leaf=0)
        assert loss is not None  # the first micro-batch of an epoch is never empty
        torch.autograd.backward(loss)
        self.changed_in_backward = self.forward.changed_since(tail, first)
        return loss

    def examine(self, look: FirstLook, batches: Batches) -> Inventory | None:
        """Examine the network. Return the findings; None if no rank has the whole network.

        All ranks call it. Raises: RecipeError, on all ranks, if another number of workers could get
        other bits.
        """
        return look.around(batches)

    def reference(self) -> Mapping[str, Tensor]:
        """Return results that all ranks compute alike, if they may have no others to compare."""
        return {}

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        """The trained parameters whose gradients come from this rank's own micro-batches."""
        return self.named

    @property
    def part_sums(self) -> Sequence[PartSums]:
        """The sums of the gradients of the other trained parameters."""
        return ()

    def spread(self) -> Spread:
        """Return the `Spread` by which the ranks of one model agree. All of them call it."""
        return Alone(self.named)

    def spread_over(self, groups: Sequence[Group], updated: Mapping[str, nn.Parameter]) -> Spread:
        """Return the `Spread` of `groups` whose ranks know only the sums of what they update."""
        network = {name: parameter.dtype for name, parameter in self._trained_outline.items()}
        parts = {}
        # In the order in which the gradients are summed.
        for name in (*self.summed, *(name for name in self.named if name not in self.summed)):
            source, _ = self.names.source(name)
            parts[name] = TensorPart(source.whole, source.part, source.num_parts)
        return Among(groups, network, parts, updated, self.knows_loss)

    def wholes(self) -> Wholes:
        return LocalWholes()

    def take_first_weights(self) -> list[int]:
        """Give all ranks the same first weights. Return the ranks whose own ones differed."""
        pieces = self.pieces().items()
        named = {
            f"{kind}/{n}": p.tensor for kind, piece in pieces for n, p in piece.parts().items()
        }
        return copy_from_first(self.evaluators, named)

    def pieces(self) -> dict[str, Piece]:
        network = self.network
        return {
            "parameter": Weights(network.named_parameters),
            "buffer": Weights(network.named_buffers),
        }

    def piece(self, piece: Piece) -> Piece:
        """Convert a piece from this rank's tensor names to those in a state."""
        return piece

    def piece_of_replicas(self, piece: Piece) -> Piece:
        """Convert a piece whose names begin with a replica's number."""
        return piece

    def memory(self, memory: CodecMemory) -> Piece:
        return memory

    def numbers(self, numbers: Numbers) -> Numbers:
        return numbers

    def gathered_numbers(self, numbers: Numbers) -> Numbers:
        """Return the numbers, by name, of all ranks that hold one model."""
        return numbers

    def whole_name(self, name: str) -> str:
        return self.names.source(name)[0].whole

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of elements of each trained parameter of the whole network, in its order."""
        return {name: parameter.numel() for name, parameter in self._trained_outline.items()}

    @property
    def _trained_outline(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.outline.items() if p.requires_grad}

    @property
    def all_names(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The network's parameters by all their names; those of other ranks on the meta device."""
        return list(self.network.named_parameters(remove_duplicate=False))

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        """How each split layer is split, by name; None if ranks hold no parts of layers."""
        return None

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        return None
