"""A small network and data for training on real ranks: all that could break invariance."""

import torch
from torch import Tensor, nn

from firecaffe.data import TensorDataset


class Everything(nn.Module):
    """Convolution, BatchNorm, dropout; a shared, an unused, a frozen and a sometimes used
    parameter; a buffer that forward replaces."""

    mean_of_inputs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.again = nn.Conv2d(6, 6, 1)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 4)
        self.rare = nn.Parameter(torch.zeros(4))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("mean_of_inputs", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean_of_inputs = 0.9 * self.mean_of_inputs + 0.1 * images.mean()
        x = torch.relu(self.norm(self.conv(images)))
        x = torch.relu(self.again(torch.relu(self.again(x))))
        x = self.dropout(x).mean((2, 3))
        logits: Tensor = self.head(x) * self.frozen
        # Used by some micro-batches only.
        if images.mean() > 0:
            logits = logits + self.rare
        return logits


def small_data(num_samples: int, seed: int = 0) -> TensorDataset:
    """Images of 4 classes whose brightness tells the class, float32."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (num_samples,), generator=generator)
    # Integers, for torch.randn depends on the processor.
    noise = torch.randint(-128, 129, (num_samples, 1, 6, 6), generator=generator)
    images = noise / 64 + (labels[:, None, None, None] - 1.5) / 4
    return TensorDataset(images, labels, 4)
