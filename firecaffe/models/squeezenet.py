"""SqueezeNet: the accuracy of AlexNet with a fiftieth of its weights, by Fire blocks.

Source: Iandola et al. 2016, "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and
<0.5MB model size" (arXiv 1602.07360), table 1. Fillers are those of forresti/SqueezeNet,
SqueezeNet_v1.0 and SqueezeNet_v1.1, train_val.prototxt: Caffe's Xavier, a Gaussian of 0.01 for the
last convolution, biases from 0. Names and layers are torchvision's, whose public weights load.

A Fire block squeezes its channels by a 1x1 convolution, then expands them by 1x1 and 3x3 ones,
concatenated. Crops of 224 and of 227 fit.

Differences from the paper:

- The authors' files crop to 227. The counts here are for torchvision's 224.
- The last convolution of the authors' v1.0 file has a padding of 1. Here it has none, as in
  torchvision.
"""

import torch
from torch import Tensor, nn

from firecaffe.caffe import fillers


class Fire(nn.Module):
    """A 1x1 convolution that squeezes the channels, then 1x1 and 3x3 ones, concatenated."""

    def __init__(self, in_channels: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(in_channels, squeeze, 1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.squeeze_activation(self.squeeze(x_BCHW))
        one = self.expand1x1_activation(self.expand1x1(x_BCHW))
        three = self.expand3x3_activation(self.expand3x3(x_BCHW))
        return torch.cat([one, three], dim=1)


class SqueezeNet(nn.Module):
    """Images (batch, in_channels, 224 or 227, the same) to logits. `features` give 512 channels."""

    def __init__(self, num_classes: int, features: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Conv2d(512, num_classes, 1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        fillers.fill_all(self.features, fillers.xavier)
        fillers.fill_all(self.classifier, fillers.gaussian(0.01))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images_BCHW)).flatten(1)
        return logits


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def squeezenet1_0(*, num_classes: int = 1000, in_channels: int = 3) -> SqueezeNet:
    features = nn.Sequential(
        nn.Conv2d(in_channels, 96, 7, stride=2),
        nn.ReLU(inplace=True),
        _pool(),
        Fire(96, 16, 64),
        Fire(128, 16, 64),
        Fire(128, 32, 128),
        _pool(),
        Fire(256, 32, 128),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        _pool(),
        Fire(512, 64, 256),
    )
    return SqueezeNet(num_classes, features)


def squeezenet1_1(*, num_classes: int = 1000, in_channels: int = 3) -> SqueezeNet:
    """The authors' later version: a smaller first layer and earlier pools."""
    features = nn.Sequential(
        nn.Conv2d(in_channels, 64, 3, stride=2),
        nn.ReLU(inplace=True),
        _pool(),
        Fire(64, 16, 64),
        Fire(128, 16, 64),
        _pool(),
        Fire(128, 32, 128),
        Fire(256, 32, 128),
        _pool(),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        Fire(512, 64, 256),
    )
    return SqueezeNet(num_classes, features)
