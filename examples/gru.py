"""A GRU over sequences of several lengths, padded by a collate function of one's own.

python examples/gru.py
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import firecaffe


class Waves(Dataset[tuple[Tensor, int]]):
    """10 to 30 samples of a noisy sine (class 0), square (1) or saw-tooth (2) of random phase."""

    classes = ("sine", "square", "saw-tooth")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label, length = index % 3, random.randint(10, 30)
        cycles = (torch.arange(length) / 8 + random.random()) % 1
        wave = (torch.sin(2 * torch.pi * cycles), (cycles < 0.5) * 2.0 - 1, 2 * cycles - 1)[label]
        return wave + 0.05 * torch.randn(length), label


def collate(items: Sequence[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Waves padded to the longest of the micro-batch, with their lengths; and the labels."""
    waves, labels = zip(*items, strict=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    inputs = {"waves": pad_sequence(list(waves), batch_first=True), "lengths": lengths}
    return inputs, torch.tensor(labels)


class Network(nn.Module):
    """A dict of waves (B, T) and lengths (B,) to logits (B, 3), from each wave's last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        waves, lengths = inputs["waves"], inputs["lengths"]
        states, _ = self.gru(waves.unsqueeze(2))
        last = states[torch.arange(len(lengths)), lengths - 1]
        logits: Tensor = self.head(last)
        return logits


def main() -> None:
    recipe = firecaffe.Recipe(
        train=firecaffe.TrainConfig(global_batch_size=32, micro_batch_size=16, steps=100),
        solver=firecaffe.SolverConfig(type="adam", base_lr=0.01, clip_gradients=1.0),
    )
    train_set = firecaffe.from_torch(Waves(2000), collate=collate)
    test_set = firecaffe.from_torch(Waves(300), collate=collate)
    result = firecaffe.train(recipe, Network, train_set, test_set)
    print(f"top-1 {result.top1:.1%}")


if __name__ == "__main__":
    main()
