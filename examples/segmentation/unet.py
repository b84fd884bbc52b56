"""A small U-Net: two levels down, two up, with the features of each level handed across.

Source: Ronneberger, Fischer, Brox, U-Net, 2015 (arXiv:1505.04597), narrower and with BatchNorm.
"""

import torch
from torch import Tensor, nn


def _block(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Images (B, in_channels, H, W) to logits (B, num_classes, H, W); H and W multiples of 4."""

    def __init__(self, width: int, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.down_1 = _block(in_channels, width)
        self.down_2 = _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.up_2 = _block(6 * width, 2 * width)
        self.up_1 = _block(3 * width, width)
        self.head = nn.Conv2d(width, num_classes, 1)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down_1(images)
        coarse = self.down_2(self.pool(fine))
        bottom = self.bottom(self.pool(coarse))
        coarse = self.up_2(torch.cat((self.grow(bottom), coarse), dim=1))
        fine = self.up_1(torch.cat((self.grow(coarse), fine), dim=1))
        logits: Tensor = self.head(fine)
        return logits
