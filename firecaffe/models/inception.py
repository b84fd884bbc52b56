"""The parts of the GoogLeNet family: convolution with ReLU, Inception block, auxiliary head.

Source: Szegedy et al. 2014 (arXiv 1409.4842), sections 4 and 5. Batch normalization between
convolution and ReLU: Ioffe and Szegedy 2015 (arXiv 1502.03167). Names as torchvision's.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn


def conv_block(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    batch_norm: bool,
    stride: int = 1,
    padding: int = 0,
) -> nn.Sequential:
    """Build `conv`, `bn` if requested (it replaces the bias), and `relu`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, bias=not batch_norm
    )
    if batch_norm:
        layers["bn"] = nn.BatchNorm2d(out_channels, eps=0.001)
    layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


class Inception(nn.Module):
    """Four branches over one input, concatenated by channel. Height and width stay the same.

    `widths`: 1x1; reduction, 3x3; reduction, large convolution; projection after the max pool.
    """

    def __init__(
        self,
        in_channels: int,
        widths: tuple[int, int, int, int, int, int],
        *,
        batch_norm: bool,
        large_kernel_size: int = 5,
    ) -> None:
        super().__init__()
        one, reduce_three, three, reduce_large, large, projection = widths
        self.branch1 = conv_block(in_channels, one, 1, batch_norm=batch_norm)
        self.branch2 = nn.Sequential(
            conv_block(in_channels, reduce_three, 1, batch_norm=batch_norm),
            conv_block(reduce_three, three, 3, padding=1, batch_norm=batch_norm),
        )
        self.branch3 = nn.Sequential(
            conv_block(in_channels, reduce_large, 1, batch_norm=batch_norm),
            conv_block(
                reduce_large,
                large,
                large_kernel_size,
                padding=large_kernel_size // 2,
                batch_norm=batch_norm,
            ),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            conv_block(in_channels, projection, 1, batch_norm=batch_norm),
        )
        self.out_channels = one + three + large + projection

    def forward(self, x_BCHW: Tensor) -> Tensor:
        branches = (self.branch1, self.branch2, self.branch3, self.branch4)
        return torch.cat([branch(x_BCHW) for branch in branches], dim=1)


class AuxiliaryHead(nn.Module):
    """(batch, in_channels, 14, 14) to logits (batch, num_classes); used only in training."""

    def __init__(self, in_channels: int, num_classes: int, *, batch_norm: bool) -> None:
        super().__init__()
        # 14 to 4, as in the paper. The backward of an adaptive pool to 4x4 would not be
        # deterministic on CUDA.
        self.avgpool = nn.AvgPool2d(5, stride=3, ceil_mode=True)
        self.conv = conv_block(in_channels, 128, 1, batch_norm=batch_norm)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.7)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BN = self.conv(self.avgpool(x_BCHW)).flatten(1)
        logits: Tensor = self.fc2(self.dropout(self.relu(self.fc1(x_BN))))
        return logits
