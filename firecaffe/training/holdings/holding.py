"""The protocol of a holding: which part of a model is here, and how it computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.training.evaluate import EvalBatch
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.ready import Ready
from firecaffe.training.parallel.pieces import Names
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.times import FetchBatch, Spent
from firecaffe.training.updates.part_sums import PartSums
from firecaffe.training.updates.spread import Spread
from firecaffe.training.wholes import Wholes


class Holding(Protocol):
    """What of a model a rank holds."""

    forward: Forward
    network: nn.Module
    """In which this rank's tensors have their names."""
    named: dict[str, nn.Parameter]
    """The parameters that are trained here."""
    everywhere: dict[str, nn.Parameter]
    """These, and those of other ranks, on the meta device: patterns of names are those of the whole
    network."""

    knows_loss: bool
    """Whether this rank has the loss of its micro-batches."""

    @property
    def has_inputs(self) -> bool:
        """Whether this rank asks for batches."""

    @property
    def evaluators(self) -> Group:
        """The ranks that share out the samples of an evaluation."""

    @property
    def tellers(self) -> Group:
        """The ranks that then tell each other what they have found."""

    def begin_step(self, first_leaf: int = 0) -> None:
        """Begins a step: all its micro-batches, from the first one on, start from the same buffers.
        With replicas it is called for each.
        """

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        """Yields each micro-batch of a step when its backward can be run; whoever asks for the next
        one has run it. All ranks of a row ask for equally many, to the end. Raises: PeerLostError.
        """

    def counts(self) -> Tensor:
        """What the task counts of this rank's micro-batches of the step."""

    def set_buffers(self, changes: Sequence[Tensor], weight: float) -> None:
        """Moves the buffers by the sums of the step's changes, over so many full micro-batches."""

    def share_out(self, shares: Shares, order: Callable[[range], list[int]]) -> None:
        """Hears which ranks compute which micro-batches from the next step on. order: that in which
        a rank computes its share.
        """

    def spent(self) -> Spent:
        """What forward and backward have spent for others so far."""

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        """Yields this rank's batches of an evaluation with the network's outputs, where those are
        known. numbers: theirs among all, of a data set of so many samples.
        """

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        """Runs the network's forward as in training, for inputs by number: it is done when its
        outputs, or something in their place, are yielded.
        """

    def try_outputs(self, inputs: Any) -> Any:
        """What the network returns, in the mode in which it is; None where another rank has it."""

    def first_backward(self, first: Batch) -> Tensor | None:
        """Runs backward for the training's first micro-batch. Returns its loss, if it is known."""

    def look_around(self, look: FirstLook, batches: Batches) -> Inventory | None:
        """What a look at the network finds; None if no rank has all of it. All ranks call it.

        Raises: RecipeError, on all ranks, if the promise cannot be kept.
        """

    def reference(self) -> Mapping[str, Tensor]:
        """What all ranks compute beside the first micro-batch, if they may have nothing else that
        can be compared.
        """

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        """The trained parameters whose gradients are of this rank's own micro-batches."""

    @property
    def part_sums(self) -> Sequence[PartSums]:
        """What sums the gradients of the others."""

    def spread(self) -> Spread:
        """What ranks that hold one model find out together. All of them call it."""

    def spread_over(self, groups: Sequence[Group], updated: Mapping[str, nn.Parameter]) -> Spread:
        """The same if each rank of these groups knows sums of what it updates alone: those
        parameters, by its names.
        """

    def wholes(self) -> Wholes:
        """How weights come together of which this rank has parts."""

    @property
    def names(self) -> Names:
        """The names of the whole network's tensors, by this rank's."""

    def take_first_weights(self) -> list[int]:
        """Gives all ranks the same first weights. Returns the ranks that had made others."""

    def pieces(self) -> dict[str, Piece]:
        """The weights and buffers, as pieces of a training's state."""

    def piece(self, piece: Piece) -> Piece:
        """A piece of tensors by the network's names, as a state has it."""

    def piece_of_replicas(self, piece: Piece) -> Piece:
        """The same of one whose names begin with a replica's number."""

    def memory(self, memory: CodecMemory) -> Piece:
        """What codecs keep back. memory: that of `summed`."""

    @property
    def outline(self) -> Mapping[str, nn.Parameter]:
        """The whole network's parameters, in its order; those of others on the meta device."""

    def numbers(self, numbers: Numbers) -> Numbers:
        """Numbers by the network's names, as a state has them."""

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        """Numbers by names, of all that the ranks that hold one model have."""

    def whole_name(self, name: str) -> str:
        """The name in the whole network, by this rank's."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The elements of each trained parameter of the whole network, in its order."""

    @property
    def all_names(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The whole network's parameters by all their names; those of others on the meta device."""

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        """The layers that are split, each with its word; None if ranks do not hold parts."""

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        """What result.json says of it, of a training of so many micro-batches a step."""
