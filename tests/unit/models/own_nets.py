"""Networks of a user, for tests: found by name, as `tests.unit.models.own_nets:Net`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

PLACE = "tests.unit.models.own_nets"


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a head."""

    def __init__(self, num_classes: int, in_channels: int = 1, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        logits: Tensor = self.head(self.drop(x.mean((2, 3))))
        return logits


class Reads(Net):
    """Reads numbers while it is made and while it runs, which the meta device does not have."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.rates = [each.item() for each in torch.linspace(0, 1, 3)]

    def forward(self, images: Tensor) -> Tensor:
        if images.sum() > 1e9:
            raise ValueError("too bright")
        return super().forward(images)


class Broken(Net):
    """Takes images of one pixel alone."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Pair(nn.Module):
    """Takes a dict with two vectors, `left` and `right`, of four numbers each."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.head(torch.cat((inputs["left"], inputs["right"]), dim=1))
        return logits


class Tied(nn.Module):
    """One weight with two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, num_classes)


def number() -> int:
    return 3


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def fails(**words: Any) -> nn.Module:
    raise KeyError("no such layer")


class Packed(nn.Module):
    """A recurrent network over sequences of unequal length, of which none is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        lengths = inputs["lengths"].cpu()
        packed = pack_padded_sequence(inputs["values"], lengths, True, enforce_sorted=False)
        last: Tensor = self.layer(packed)[1][-1]
        return last


def sequences() -> tuple[Any, Any]:
    """Return data for it, to train and to test."""
    inputs = {"values": torch.randn(32, 5, 3), "lengths": torch.arange(32) % 5 + 1}
    data = inputs, torch.arange(32) % 4
    return data, data
