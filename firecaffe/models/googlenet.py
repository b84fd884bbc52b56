"""GoogLeNet: 22 layers in nine Inception blocks, and two auxiliary heads.

Source: Szegedy et al. 2014, "Going Deeper with Convolutions" (arXiv 1409.4842), table 1. Batch
normalization between convolution and ReLU: Ioffe and Szegedy 2015 (arXiv 1502.03167). `googlenet`
has the layers and fillers of BVLC Caffe, models/bvlc_googlenet/train_val.prototxt. `googlenet_bn`
is torchvision's googlenet, whose public weights load. `googlenet_small_bn` is ours: three blocks,
which a laptop trains. It takes 28x28 and 32x32, gray or color.

Counts are with both heads. Without them, `googlenet` has 6,998,552 parameters and `googlenet_bn`
6,624,904. In training the network returns `HeadedLogits`, and each head's loss counts 0.3 times. In
evaluation it returns the logits.

Differences from the paper:

- The paper does not say how weights start. `googlenet` has Caffe's Xavier, and biases of 0.2, but 0
  in the three classifiers. `googlenet_bn` starts from a Gaussian of 0.01, which torchvision cuts
  off. `googlenet_small_bn` has Xavier.
- `googlenet` normalizes across channels with k = 1, as BVLC does.
- `googlenet_bn` normalizes by batch after every convolution (eps 0.001), instead of across
  channels. It has 3x3 convolutions for the paper's 5x5, a 2x2 pool before inception5a, and dropout
  0.2 for 0.4. All of this is torchvision's.
- The heads of `googlenet_bn` pool as the paper does. torchvision pools adaptively to 4x4, whose
  backward is not deterministic on CUDA. The shapes are the same.
"""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe import fillers
from firecaffe.caffe.local_response_norm import LocalResponseNorm

AUX_WEIGHT = 0.3
"""Source: section 5 of the paper, and `loss_weight: 0.3` in the file of BVLC Caffe."""


class HeadedLogits(NamedTuple):
    """Outputs with auxiliary heads in training, each (batch, num_classes); torchvision's order."""

    logits: Tensor
    aux2: Tensor
    aux1: Tensor  # of the head nearest to the input


def classification_loss(outputs: Tensor | HeadedLogits, labels_B: Tensor) -> Tensor:
    """Return the mean cross entropy of the batch; auxiliary heads add AUX_WEIGHT times theirs."""
    if not isinstance(outputs, HeadedLogits):
        return F.cross_entropy(outputs, labels_B)
    loss = F.cross_entropy(outputs.logits, labels_B)
    for head in (outputs.aux2, outputs.aux1):
        loss = loss + AUX_WEIGHT * F.cross_entropy(head, labels_B)
    return loss


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
        block = partial(conv_block, batch_norm=batch_norm)
        size = large_kernel_size
        self.branch1 = block(in_channels, one, 1)
        self.branch2 = nn.Sequential(
            block(in_channels, reduce_three, 1), block(reduce_three, three, 3, padding=1)
        )
        self.branch3 = nn.Sequential(
            block(in_channels, reduce_large, 1),
            block(reduce_large, large, size, padding=size // 2),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), block(in_channels, projection, 1)
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


class GoogLeNet(nn.Module):
    """Images (batch, in_channels, 224, 224) to logits, or HeadedLogits in training with heads.

    `batch_norm` selects torchvision's variant, else BVLC's.
    """

    def __init__(
        self, num_classes: int, in_channels: int, *, batch_norm: bool, aux_logits: bool
    ) -> None:
        super().__init__()

        def conv(i: int, o: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
            padding = kernel_size // 2
            return conv_block(
                i, o, kernel_size, stride=stride, padding=padding, batch_norm=batch_norm
            )

        def inception(i: int, *widths: int) -> Inception:
            a, b, c, d, e, f = widths
            # torchvision's weights have 3x3 in the branch that has 5x5 in the paper.
            size = 3 if batch_norm else 5
            return Inception(i, (a, b, c, d, e, f), batch_norm=batch_norm, large_kernel_size=size)

        def norm() -> nn.Module:
            return nn.Identity() if batch_norm else LocalResponseNorm()

        self.conv1 = conv(in_channels, 64, 7, stride=2)
        self.maxpool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.norm1 = norm()
        self.conv2 = conv(64, 64, 1)
        self.conv3 = conv(64, 192, 3)
        self.norm2 = norm()
        self.maxpool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.inception3a = inception(192, 64, 96, 128, 16, 32, 32)
        self.inception3b = inception(256, 128, 128, 192, 32, 96, 64)
        self.maxpool3 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.inception4a = inception(480, 192, 96, 208, 16, 48, 64)
        self.inception4b = inception(512, 160, 112, 224, 24, 64, 64)
        self.inception4c = inception(512, 128, 128, 256, 24, 64, 64)
        self.inception4d = inception(512, 112, 144, 288, 32, 64, 64)
        self.inception4e = inception(528, 256, 160, 320, 32, 128, 128)
        self.maxpool4 = nn.MaxPool2d(2 if batch_norm else 3, 2, ceil_mode=True)
        self.inception5a = inception(832, 256, 160, 320, 32, 128, 128)
        self.inception5b = inception(832, 384, 192, 384, 48, 128, 128)
        self.aux1: AuxiliaryHead | None = None
        self.aux2: AuxiliaryHead | None = None
        if aux_logits:
            self.aux1 = AuxiliaryHead(512, num_classes, batch_norm=batch_norm)
            self.aux2 = AuxiliaryHead(528, num_classes, batch_norm=batch_norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2 if batch_norm else 0.4)
        self.fc = nn.Linear(1024, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor | HeadedLogits:
        x = self.norm1(self.maxpool1(self.conv1(images_BCHW)))
        x = self.maxpool2(self.norm2(self.conv3(self.conv2(x))))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x_4a = self.inception4a(x)
        x_4d = self.inception4d(self.inception4c(self.inception4b(x_4a)))
        x = self.maxpool4(self.inception4e(x_4d))
        x = self.inception5b(self.inception5a(x))
        logits: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        if self.training and self.aux1 is not None and self.aux2 is not None:
            return HeadedLogits(logits, self.aux2(x_4d), self.aux1(x_4a))
        return logits


def googlenet(
    *, num_classes: int = 1000, in_channels: int = 3, aux_logits: bool = True
) -> GoogLeNet:
    network = GoogLeNet(num_classes, in_channels, batch_norm=False, aux_logits=aux_logits)
    fillers.fill_all(network, fillers.xavier, bias=0.2)
    heads = [head.fc2 for head in (network.aux1, network.aux2) if head is not None]
    for classifier in (network.fc, *heads):
        nn.init.zeros_(classifier.bias)
    return network


def googlenet_bn(
    *, num_classes: int = 1000, in_channels: int = 3, aux_logits: bool = True
) -> GoogLeNet:
    network = GoogLeNet(num_classes, in_channels, batch_norm=True, aux_logits=aux_logits)
    fillers.fill_all(network, fillers.gaussian(0.01))
    return network


def googlenet_small_bn(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 28 or 32, the same) to logits (batch, num_classes)."""
    conv1 = conv_block(in_channels, 24, 3, padding=1, batch_norm=True)
    inception3a = Inception(24, (24, 16, 24, 8, 16, 16), batch_norm=True)
    inception3b = Inception(inception3a.out_channels, (32, 24, 48, 8, 16, 16), batch_norm=True)
    inception4a = Inception(inception3b.out_channels, (48, 32, 64, 8, 24, 24), batch_norm=True)
    network = nn.Sequential(
        OrderedDict(
            conv1=conv1,
            maxpool1=nn.MaxPool2d(3, 2, ceil_mode=True),
            inception3a=inception3a,
            inception3b=inception3b,
            maxpool2=nn.MaxPool2d(3, 2, ceil_mode=True),
            inception4a=inception4a,
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.4),
            fc=nn.Linear(inception4a.out_channels, num_classes),
        )
    )
    fillers.fill_all(network, fillers.xavier)
    return network
