"""VGG: 3x3 convolutions throughout, three fully connected layers.

Source: Simonyan and Zisserman 2014, "Very Deep Convolutional Networks for Large-Scale Image
Recognition" (arXiv 1409.1556), table 1, configurations A, D and E. Names and fillers are
torchvision's, whose public weights load: He with fan_out for convolutions, a Gaussian of 0.01 for
fully connected layers, biases from 0. The crop must be 224.

`vgg_small_bn` is ours, for images of 32x32 that two cores train on in minutes. It has the
convolutions and pools of configuration A with 16 to 256 channels, batch normalization after each
convolution instead of its bias, and one fully connected layer. Its names follow torchvision's
vgg11_bn. As in large networks, its last two convolutions have three quarters of its weights and
under a third of its work, so there is something to prune.

Differences from the paper:

- The paper starts the deep configurations from a trained shallow one.
- torchvision has an adaptive pool before the classifier, which changes nothing at 224. Here there
  is none.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from firecaffe.caffe import fillers


class VGG(nn.Module):
    """Images (batch, in_channels, 224, 224) to logits; `depths`: convolutions before each pool."""

    def __init__(self, num_classes: int, in_channels: int, depths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for depth, channels in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = channels
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        fillers.fill_all(self.features, fillers.msra_fan_out)
        fillers.fill_all(self.classifier, fillers.gaussian(0.01))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images_BCHW).flatten(1))
        return logits


def vgg16(*, num_classes: int = 1000, in_channels: int = 3) -> VGG:
    return VGG(num_classes, in_channels, (2, 2, 3, 3, 3))


def vgg19(*, num_classes: int = 1000, in_channels: int = 3) -> VGG:
    return VGG(num_classes, in_channels, (2, 2, 4, 4, 4))


STAGES = ((16,), (32,), (64, 64), (128, 128), (256, 256))


def vgg_small_bn(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 32, 32) to logits; two cores train it on CIFAR-10 in minutes."""
    layers: list[nn.Module] = []
    i = in_channels
    for stage in STAGES:
        for o in stage:
            # BatchNorm replaces the bias (Ioffe and Szegedy 2015, arXiv 1502.03167).
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
