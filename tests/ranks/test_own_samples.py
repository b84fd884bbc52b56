"""One weird trick: ranks with samples of their own come to the bits of ranks that share them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.cluster.world import join
from firecaffe.parallel.layer_split import choose_layers, replace_layers
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.parts import PartGroup
from tests.world import Ranks

WORDS = {"classifier.*": "neurons", "classifier.3": "inputs"}
PARTS = 4
SAMPLES = 6, 6, 4, 5
"""Of each micro-batch."""

Bits = dict[str, Tensor]
"""Tensors by name; of a layer that is split the parts that a rank has, by their numbers."""


class Small(nn.Module):
    """A convolution, and two fully connected layers with dropout, as AlexNet's last."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 10, 5, stride=2), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(
            *(nn.Linear(250, 37), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(37, 22), nn.ReLU(inplace=True), nn.Linear(22, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(F.dropout(self.features(x), 0.1, self.training).flatten(1))
        return y


def split_by(group: PartGroup) -> nn.Module:
    torch.manual_seed(3)
    model = Small()
    return replace_layers(model, choose_layers(model, WORDS), group).module


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    torch.manual_seed(100 + leaf)
    x = torch.randn(SAMPLES[leaf], 3, 13, 13)
    return F.cross_entropy(model(x), torch.arange(len(x)) % 5)


def by_itself() -> list[Bits]:
    """The loss and gradients of each micro-batch, of one rank that holds all parts."""
    with join("cpu") as world:
        found = []
        model = split_by(PartGroup(world, PARTS))
        for leaf in range(len(SAMPLES)):
            model.zero_grad()
            loss = loss_of(model, leaf)
            torch.autograd.backward(loss)
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), **grads})
        return found


def together() -> dict[int, Bits]:
    """By micro-batch: the loss and gradients of this rank's, and its parts of those of all."""
    with join("cpu") as world:
        row = OwnSamples(world, PARTS)
        model = split_by(row)
        names = {parameter: name for name, parameter in model.named_parameters()}
        found: dict[int, Bits] = {leaf: {} for leaf in range(len(SAMPLES))}
        for first in range(0, len(SAMPLES), world.world_size):
            leaves = range(first, first + world.world_size)
            model.zero_grad()
            with row.apart([SAMPLES[leaf] for leaf in leaves]) as of_leaves:
                loss = loss_of(model, leaves[world.rank])
                torch.autograd.backward(loss)
            own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found[leaves[world.rank]] |= {"loss": loss.detach(), **own}
            for leaf, gradients in zip(leaves, of_leaves, strict=True):
                found[leaf] |= {names[each]: grad for each, grad in gradients.items()}
        return found


def test_each_micro_batch_has_the_bits_that_it_has_by_itself(ranks: Ranks) -> None:
    [expected] = ranks.shared(1, by_itself)
    for size in (1, 2, 4):
        found: list[Bits] = [{} for _ in SAMPLES]
        for of_rank in ranks.shared(size, together):
            for leaf, bits in of_rank.items():
                assert not found[leaf].keys() & bits.keys()
                found[leaf] |= bits
        for leaf, bits in enumerate(expected):
            assert found[leaf].keys() == bits.keys(), (size, leaf)
            for name, each in bits.items():
                assert torch.equal(found[leaf][name], each), (size, leaf, name)
