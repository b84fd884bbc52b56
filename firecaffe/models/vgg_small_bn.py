"""A small VGG with batch normalization, for images of 32x32.

VGG's configuration A, eight convolutions and five pools, with a quarter of its channels and one
fully connected layer, so that two cores train it on CIFAR-10 in minutes. It is nobody's published
network.

Source of the layout: Simonyan and Zisserman 2014 (arXiv 1409.1556), table 1, configuration A.
Batch normalization between convolution and ReLU: Ioffe and Szegedy 2015 (arXiv 1502.03167). Names
and fillers as torchvision's vgg11_bn.
"""

from torch import nn

from firecaffe.models import fillers

STAGES = ((16,), (32,), (64, 64), (128, 128), (128, 128))
"""The channels of the convolutions before each pool."""


def vgg_small_bn(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 32, 32) to logits (batch, num_classes)."""
    features: list[nn.Module] = []
    i = in_channels
    for stage in STAGES:
        for o in stage:
            # BatchNorm takes the place of the bias.
            features += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)]
            features.append(nn.ReLU(inplace=True))
            i = o
        features.append(nn.MaxPool2d(2, 2))
    network = nn.Sequential()
    network.add_module("features", nn.Sequential(*features))
    network.add_module("flatten", nn.Flatten())
    network.add_module("classifier", nn.Linear(i, num_classes))
    fillers.fill_all(network.features, fillers.msra_fan_out)
    fillers.fill_all(network.classifier, fillers.gaussian(0.01))
    return network
