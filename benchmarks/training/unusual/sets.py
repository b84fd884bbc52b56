"""Data sets that draw, and that give what others do not."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.training.unusual.layers import CLASSES

SAMPLES = 70
"""Not a multiple of a batch: an epoch ends inside a step."""


def samples(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and the class of each."""
    images = torch.randn(SAMPLES, 1, 8, 8, generator=draw)
    return images, images.flatten(1)[:, :CLASSES].argmax(1)


class Items(Dataset[tuple[Any, int]]):
    """Items with noise from the generators of the process, or from one of their own."""

    def __init__(self, own: bool = False) -> None:
        self.images, self.labels = samples(torch.Generator().manual_seed(0))
        self.own = torch.Generator() if own else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        noise = torch.randn(1, 8, 8, generator=self.own)
        if self.own is None:
            noise = noise * random.random() + float(np.random.rand())
        return self.images[index] + 0.1 * noise, int(self.labels[index])


class Trees(Items):
    """Items whose inputs are a dict."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return {"image": self.images[index], "place": torch.tensor(index)}, int(self.labels[index])


class Seeding:
    """Batches for which it seeds and draws from the generators of the process."""

    def __init__(self) -> None:
        self.images, self.labels = samples(torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        first = int(indices_B[0])
        random.seed(first)
        np.random.seed(first)
        torch.manual_seed(first)
        noise = torch.randn(len(indices_B), 1, 8, 8) * random.random() * np.random.rand()
        return self.images[indices_B] + noise.float(), self.labels[indices_B]


class Fetched(Seeding):
    """The same, and it asks for a thread."""

    fetchers = 1
