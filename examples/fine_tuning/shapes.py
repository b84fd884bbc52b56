"""A small network in two parts, `features` and `head`, and pictures that are made up."""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Network(nn.Module):
    """Images (B, 1, 16, 16) to logits (B, num_classes); the data say how many classes there are."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


SHAPES = {
    "upright": (slice(2, 14), slice(7, 9)),
    "lying": (slice(7, 9), slice(2, 14)),
    "square": (slice(5, 11), slice(5, 11)),
}


class Shapes(Dataset[tuple[Tensor, int]]):
    """A bright shape on noise, shifted at random; the target is the place of its name in `classes`.

    classes: names of SHAPES.
    """

    def __init__(self, count: int, classes: list[str]) -> None:
        self.count, self.classes = count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % len(self.classes)
        image = torch.zeros(1, 16, 16)
        image[0][SHAPES[self.classes[label]]] = 1.0
        image = image.roll((random.randint(-2, 2), random.randint(-2, 2)), dims=(1, 2))
        return image + 0.3 * torch.randn(image.shape), label


def load(count: int, classes: list[str]) -> dict[str, Shapes]:
    """What `[data] name` names: the data sets of a training."""
    return {"train": Shapes(count, classes), "test": Shapes(120, classes)}
