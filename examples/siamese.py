"""A Siamese network: two images in, a contrastive loss and a metric as a task of one's own.

python examples/siamese.py
"""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import firecaffe

Pair = tuple[Tensor, Tensor]


class Pairs(Dataset[tuple[Pair, Tensor]]):
    """Two noisy, shifted images of patterns, and whether the pattern is the same (1) or not (0)."""

    patterns = torch.tensor([0x0FF0, 0xF00F, 0x1248, 0x8421, 0x6996, 0x7137, 0xC3A5, 0x2BD4])

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Pair, Tensor]:
        same = index % 2
        first, second = random.sample(range(len(self.patterns)), 2)
        pair = self._view(first), self._view(first if same else second)
        return pair, torch.tensor(float(same))

    def _view(self, number: int) -> Tensor:
        """The pattern's 4x4 bits as squares of 4x4 pixels, moved about in an image (1, 16, 16)."""
        bits = (self.patterns[number] >> torch.arange(16)) & 1
        image = bits.view(1, 4, 4).float().repeat_interleave(4, 1).repeat_interleave(4, 2)
        image = image.roll((random.randint(-2, 2), random.randint(-2, 2)), dims=(1, 2))
        return image + 0.1 * torch.randn(image.shape)


class Siamese(nn.Module):
    """A pair of images (B, 1, 16, 16), handed over as the data set gives it, to distances (B,)."""

    def __init__(self) -> None:
        super().__init__()
        hidden = (nn.Flatten(), nn.Linear(16 * 16, 128), nn.ReLU())
        self.embed = nn.Sequential(*hidden, nn.Linear(128, 16))

    def forward(self, pair: Pair) -> Tensor:
        first, second = pair
        distance: Tensor = (self.embed(first) - self.embed(second)).norm(dim=1)
        return distance


def contrastive(margin: float = 1.0) -> firecaffe.Task:
    """Pulls equal pairs together, others apart, up to a margin (Hadsell, Chopra, LeCun, 2006)."""

    def loss(distance: Tensor, same: Tensor) -> Tensor:
        apart = (margin - distance).clamp(min=0)
        return (same * distance.square() + (1 - same) * apart.square()).mean()

    def right(distance: Tensor, same: Tensor) -> Tensor:  # summed over the samples
        return ((distance < margin / 2) == (same == 1)).float().sum()

    return firecaffe.Task(loss, metrics={"right": right}, metric="right", higher_is_better=True)


def main() -> None:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(global_batch_size=32, micro_batch_size=16, steps=100),
        solver=firecaffe.SolverConfig(type="adam", base_lr=0.002),
    )
    result = firecaffe.train(recipe, Siamese, Pairs(2000), Pairs(200), task=contrastive())
    print(f"right about {result.metrics['right']:.1%} of the pairs")


if __name__ == "__main__":
    main()
