"""A small VGG with batch normalization, for images of 32x32.

The eight convolutions and five pools of VGG's configuration A, with 16 channels that double after
each pool, and one fully connected layer: two cores train it on CIFAR-10 in minutes. It is nobody's
published network.

Source of the layout: Simonyan and Zisserman 2014 (arXiv 1409.1556), table 1, configuration A.
Batch normalization between convolution and ReLU: Ioffe and Szegedy 2015 (arXiv 1502.03167). Names
as torchvision's vgg11_bn, and fillers.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers

STAGES = ((16,), (32,), (64, 64), (128, 128), (256, 256))
"""The channels of the convolutions before each pool."""


def vgg_small_bn(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 32, 32) to logits (batch, num_classes)."""
    layers: list[nn.Module] = []
    i = in_channels
    for stage in STAGES:
        for o in stage:
            # BatchNorm takes the place of the bias.
            layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)]
            layers.append(nn.ReLU(inplace=True))
            i = o
        layers.append(nn.MaxPool2d(2, 2))
    features, classifier = nn.Sequential(*layers), nn.Linear(i, num_classes)
    fillers.fill_all(features, fillers.msra_fan_out)
    fillers.fill(classifier, fillers.gaussian(0.01))
    return nn.Sequential(
        OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier)
    )
