"""ResNet: blocks that add their input to what they compute from it.

Source: He, Zhang, Ren and Sun 2015, "Deep Residual Learning for Image Recognition" (arXiv
1512.03385), table 1. Names and layers are torchvision's, whose public weights load.

`resnet18` has basic blocks, the other two bottlenecks. Where a block changes the shape, a 1x1
convolution projects the shortcut (the paper's option B). Convolutions start from He with fan_out,
batch normalization from 1 and 0, the classifier from torch's default.

Differences from the paper:

- The stride of a bottleneck is on its 3x3 convolution, as in torchvision, not on its first 1x1.
- `resnet18` projects its shortcuts too. The paper first pads them with zeros (option A).
- The last normalization of a block starts from 1. Goyal et al. 2017 start it from 0 for large
  batches.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from firecaffe.caffe import fillers


def _conv(i: int, o: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, kernel_size, stride, padding=kernel_size // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        shortcut = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        out: Tensor = self.relu(y_BCHW + shortcut)
        return out


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        shortcut = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        y_BCHW = self.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        out: Tensor = self.relu(y_BCHW + shortcut)
        return out


class ResNet(nn.Module):
    """Images (batch, in_channels, 224, 224) to logits; `depths`: blocks of the four stages."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)

        def stage(i: int, width: int, depth: int, stride: int) -> nn.Sequential:
            o = width * block.expansion
            rest = (block(o, width, 1) for _ in range(depth - 1))
            return nn.Sequential(block(i, width, stride), *rest)

        self.layer1 = stage(64, 64, depths[0], 1)
        self.layer2 = stage(64 * block.expansion, 128, depths[1], 2)
        self.layer3 = stage(128 * block.expansion, 256, depths[2], 2)
        self.layer4 = stage(256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                fillers.fill(layer, fillers.msra_fan_out)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images_BCHW))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(*, num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    return ResNet(num_classes, in_channels, BasicBlock, (2, 2, 2, 2))


def resnet50(*, num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    return ResNet(num_classes, in_channels, Bottleneck, (3, 4, 6, 3))


def resnet152(*, num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    return ResNet(num_classes, in_channels, Bottleneck, (3, 8, 36, 3))
