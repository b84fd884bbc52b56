"""Made-up pictures of discs and squares, with the class of each pixel. No files are needed."""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 24


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """A disc (class 1) and a square (class 2) on noise (class 0), elsewhere in every epoch."""

    classes = ("nothing", "disc", "square")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image, float32 (1, SIDE, SIDE), and its targets, int64 (SIDE, SIDE)."""
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        targets = torch.zeros(SIDE, SIDE, dtype=torch.int64)
        row, column = random.randrange(6, SIDE - 6), random.randrange(6, SIDE - 6)
        targets[(rows - row) ** 2 + (columns - column) ** 2 <= 36] = 1
        row, column = random.randrange(SIDE - 9), random.randrange(SIDE - 9)
        targets[row : row + 10, column : column + 10] = 2
        brightness = torch.tensor([0.0, 0.5, 1.0])[targets]
        return (brightness + 0.2 * torch.randn(SIDE, SIDE)).unsqueeze(0), targets


def load(count: int) -> dict[str, Shapes]:
    """What `[data] name` names: the data sets of a training."""
    return {"train": Shapes(count), "test": Shapes(64)}
