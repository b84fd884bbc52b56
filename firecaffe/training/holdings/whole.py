"""A rank that holds the whole model, and computes samples of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import take_from_first
from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.training.evaluation import EvalBatch, autocast
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward, laid_out
from firecaffe.training.holdings.ready import Ready
from firecaffe.training.parallel.cut_pieces import Names
from firecaffe.training.piece import Numbers, Piece, Weights
from firecaffe.training.times import FetchBatch, Spent
from firecaffe.training.updates.part_sums import PartSums
from firecaffe.training.updates.spread import Alone, Among, Part, Spread
from firecaffe.training.whole_tensors import AllHere, Wholes


class Whole:
    has_inputs = True
    knows_loss = True
    has_whole_gradients = True

    def __init__(self, forward: Forward, network: nn.Module, evaluators: Group) -> None:
        self.forward, self.network, self.evaluators = forward, network, evaluators
        self.named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self.everywhere = self.named

    @property
    def tellers(self) -> Group:
        return self.evaluators

    def begin_step(self, first_leaf: int = 0) -> None:
        self.forward.begin_step(first_leaf)

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        for leaf in leaves:
            yield Ready(leaf, *self.forward(*fetch(leaf), step, leaf))

    def counts(self) -> Tensor:
        return self.forward.counts

    def set_buffers(self, changes: Sequence[Tensor], weight: float) -> None:
        self.forward.buffers.finish_step(changes, weight)

    def share_out(self, shares: Shares, order: Callable[[range], list[int]]) -> None: ...

    def spent(self) -> Spent:
        return Spent()

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        for batch in batches:
            yield batch, self.forward.model(laid_out(batch[1], self.forward.config))

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        forward = self.forward
        for number in numbers:
            taken = inputs(number)
            with autocast(forward.config, forward.device):
                forward.model(taken)
            yield number

    def try_outputs(self, inputs: Any) -> Any:
        return self.forward.model(inputs)

    def first_backward(self, first: Batch) -> Tensor | None:
        self.forward.begin_step()
        loss, _ = self.forward(*first, step=0, leaf=0)
        assert loss is not None  # the first micro-batch of an epoch is never empty
        torch.autograd.backward(loss)
        return loss

    def look_around(self, look: FirstLook, batches: Batches) -> Inventory | None:
        return look.around(batches)

    def reference(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        return self.named

    @property
    def part_sums(self) -> Sequence[PartSums]:
        return ()

    def spread(self) -> Spread:
        return Alone(self.named)

    def spread_over(self, groups: Sequence[Group], updated: Mapping[str, nn.Parameter]) -> Spread:
        network = {name: parameter.dtype for name, parameter in self.named.items()}
        return Among(groups, network, {name: Part(name) for name in self.named}, updated)

    def wholes(self) -> Wholes:
        return AllHere()

    @property
    def names(self) -> Names:
        return Names({}, {name: place for place, name in enumerate(self.outline)}, frozenset())

    def take_first_weights(self) -> list[int]:
        pieces = self.pieces().items()
        named = {
            f"{kind}/{n}": p.tensor for kind, piece in pieces for n, p in piece.parts().items()
        }
        return take_from_first(self.evaluators, named)

    def pieces(self) -> dict[str, Piece]:
        network = self.network
        return {
            "parameter": Weights(network.named_parameters),
            "buffer": Weights(network.named_buffers),
        }

    def piece(self, piece: Piece) -> Piece:
        return piece

    def piece_of_replicas(self, piece: Piece) -> Piece:
        return piece

    def memory(self, memory: CodecMemory) -> Piece:
        return memory

    @property
    def outline(self) -> Mapping[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def numbers(self, numbers: Numbers) -> Numbers:
        return numbers

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        return numbers

    def whole_name(self, name: str) -> str:
        return name

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: parameter.numel() for name, parameter in self.named.items()}

    @property
    def all_names(self) -> Sequence[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters(remove_duplicate=False))

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        return None

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        return None
