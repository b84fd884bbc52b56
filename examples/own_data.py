"""Your own network, your own torch Dataset with random transforms: same bits on 1 and 2 workers.

python examples/own_data.py
"""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import firecaffe


class Bars(Dataset[tuple[Tensor, int]]):
    """Images of a bar, upright (class 0) or lying (class 1), shifted and noisy at random.

    Python's, numpy's and torch's random numbers are seeded around each item by (seed, epoch,
    sample), so transforms of torchvision or of your own need no change.
    """

    classes = ("upright", "lying")

    def __init__(self, count: int, random_transforms: bool) -> None:
        self.count, self.random_transforms = count, random_transforms

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.zeros(1, 16, 16)
        image[0, 2:14, 7:9] = 1.0
        label = index % 2
        if label == 1:
            image = image.transpose(1, 2)
        if self.random_transforms:
            image = image.roll(random.randrange(-4, 5), dims=random.choice((1, 2)))
        return image + 0.5 * torch.randn(image.shape), label


class Network(nn.Sequential):
    """Any nn.Module that takes a batch of the inputs and gives logits (B, classes)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(8 * 4 * 4, 2),
        )


def train() -> firecaffe.Result:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(global_batch_size=32, micro_batch_size=8, steps=30),
        solver=firecaffe.SolverConfig(type="adam", base_lr=0.003),
    )
    # With firecaffe.from_torch(Bars(…), workers=2) processes make the batches ahead.
    train_set, test_set = Bars(500, random_transforms=True), Bars(100, random_transforms=False)
    return firecaffe.train(recipe, Network, train_set, test_set)


if __name__ == "__main__":
    for workers in (1, 2):
        result = firecaffe.launch(train, nproc_per_node=workers)
        print(f"workers {workers}: top-1 {result.top1:.1%}, weights {result.weights_sha256[:16]}")
