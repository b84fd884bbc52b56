"""The protocol of a holding: which part of a model a rank has, and how it computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.training.evaluation import EvalBatch
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.ready import Ready
from firecaffe.training.parallel.cut_pieces import Names
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.times import FetchBatch, Spent
from firecaffe.training.updates.part_sums import PartSums
from firecaffe.training.updates.spread import Spread
from firecaffe.training.whole_tensors import Wholes


class Holding(Protocol):
    forward: Forward
    network: nn.Module
    """The module in which this rank's tensors have their names."""
    named: dict[str, nn.Parameter]
    everywhere: dict[str, nn.Parameter]
    """`named`, and other ranks' parameters on the meta device, so that name patterns match all."""

    knows_loss: bool
    """Whether this rank has the loss of its micro-batches."""
    has_whole_gradients: bool
    """Whether this rank has all gradients of its micro-batches, which it alone computes."""

    @property
    def has_inputs(self) -> bool: ...

    @property
    def evaluators(self) -> Group:
        """The ranks that share out the samples of an evaluation."""

    @property
    def tellers(self) -> Group:
        """The ranks that then exchange their results of the evaluation."""

    def begin_step(self, first_leaf: int = 0) -> None:
        """Begin a step, or a replica's: all its micro-batches start from the same buffers."""

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        """Yield each micro-batch of a step when its backward can run. Raises: PeerLostError.

        The caller runs this backward before it asks for the next micro-batch. All ranks of a row
        ask for equally many, to the end.
        """

    def counts(self) -> Tensor: ...

    def set_buffers(self, changes: Sequence[Tensor], weight: float) -> None:
        """Update the buffers with the summed changes of a step of `weight` full micro-batches."""

    def share_out(self, shares: Shares, order: Callable[[range], list[int]]) -> None:
        """Use other shares of micro-batches from the next step on, each computed in `order`."""

    def spent(self) -> Spent: ...

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        """Yield this rank's evaluation batches, `numbers` of all, with outputs if it has them."""

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        """Run forward as in training, for inputs by number. Yield something when each is done."""

    def try_outputs(self, inputs: Any) -> Any:
        """Return the network's outputs in its present mode; None if another rank has them."""

    def first_backward(self, first: Batch) -> Tensor | None:
        """Run backward for the training's first micro-batch. Return its loss, if it is known."""

    def look_around(self, look: FirstLook, batches: Batches) -> Inventory | None:
        """Examine the network. Return what is found; None if no rank has all of it.

        All ranks call it. Raises: RecipeError, on all ranks, if other numbers of workers could get
        other bits.
        """

    def reference(self) -> Mapping[str, Tensor]:
        """Return results that all ranks compute equally, if they may have no others to compare."""

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        """The trained parameters whose gradients are of this rank's own micro-batches."""

    @property
    def part_sums(self) -> Sequence[PartSums]:
        """The sums of the gradients of the other trained parameters."""

    def spread(self) -> Spread:
        """Return how the ranks that hold one model agree on a step. All of them call it."""

    def spread_over(self, groups: Sequence[Group], updated: Mapping[str, nn.Parameter]) -> Spread:
        """Return how ranks of `groups` agree if each knows sums of what it updates only."""

    def wholes(self) -> Wholes: ...

    @property
    def names(self) -> Names: ...

    def take_first_weights(self) -> list[int]:
        """Give all ranks the same first weights. Return the ranks that had made others."""

    def pieces(self) -> dict[str, Piece]: ...

    def piece(self, piece: Piece) -> Piece:
        """Convert a piece from the network's tensor names here to those in a state."""

    def piece_of_replicas(self, piece: Piece) -> Piece:
        """Convert a piece whose names begin with a replica's number."""

    def memory(self, memory: CodecMemory) -> Piece: ...

    @property
    def outline(self) -> Mapping[str, nn.Parameter]:
        """The whole network's parameters, in its order; those of other ranks on the meta device."""

    def numbers(self, numbers: Numbers) -> Numbers: ...

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        """Return the numbers, by name, of all ranks that hold one model."""

    def whole_name(self, name: str) -> str: ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of elements of each trained parameter of the whole network, in its order."""

    @property
    def all_names(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The network's parameters by all their names; those of other ranks on the meta device."""

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        """The split layers, each with how it is split; None if ranks hold no parts of layers."""

    def row(self, num_leaves: int) -> dict[str, Any] | None: ...
