"""AlexNet and CaffeNet: five convolutions, three fully connected layers.

Source: Krizhevsky, Sutskever, Hinton 2012; layer sizes and fillers of BVLC's
models/bvlc_alexnet/train_val.prototxt and models/bvlc_reference_caffenet/train_val.prototxt.
Krizhevsky 2014 (arXiv 1404.5997) for `alexnet_owt`, with torchvision's names and torch's fillers.
"""

from torch import Tensor, nn

from firecaffe.caffe import fillers
from firecaffe.caffe.local_response_norm import LocalResponseNorm


class AlexNet(nn.Module):
    """Images (batch, in_channels, 224 or 227, the same) to logits (batch, num_classes).

    `groups` 2 separates halves of conv2, conv4 and conv5, as on the two GPUs of the paper.
    `norm_first` normalizes before pooling, unlike CaffeNet. `bias` starts the nonzero biases.
    """

    def __init__(
        self, num_classes: int, in_channels: int, *, groups: int, norm_first: bool, bias: float
    ) -> None:
        super().__init__()

        def norm_and_pool() -> list[nn.Module]:
            layers = [LocalResponseNorm(), nn.MaxPool2d(3, 2, ceil_mode=True)]
            return layers if norm_first else layers[::-1]

        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 96, 11, stride=4),
            nn.ReLU(inplace=True),
            *norm_and_pool(),
            nn.Conv2d(96, 256, 5, padding=2, groups=groups),
            nn.ReLU(inplace=True),
            *norm_and_pool(),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1, groups=groups),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1, groups=groups),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.classifier = nn.Sequential(
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        conv1, conv2, conv3, conv4, conv5 = (
            layer for layer in self.features if isinstance(layer, nn.Conv2d)
        )
        for conv in (conv1, conv3):
            fillers.fill(conv, fillers.gaussian(0.01))
        for conv in (conv2, conv4, conv5):
            fillers.fill(conv, fillers.gaussian(0.01), bias)
        fc6, fc7, fc8 = (layer for layer in self.classifier if isinstance(layer, nn.Linear))
        for fc, std, start in ((fc6, 0.005, bias), (fc7, 0.005, bias), (fc8, 0.01, 0.0)):
            fillers.fill(fc, fillers.gaussian(std), start)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images_BCHW).flatten(1))
        return logits


class AlexNetOwt(nn.Module):
    """Images (batch, in_channels, 224, 224) to logits; what torchvision calls alexnet.

    It has one tower with fewer filters, and no normalization. The average pool to 6x6 is left out,
    since at 224 it changes nothing.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images_BCHW).flatten(1))
        return logits


def alexnet(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNet:
    return AlexNet(num_classes, in_channels, groups=2, norm_first=True, bias=0.1)


def alexnet_ungrouped(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNet:
    """AlexNet without groups, as FireCaffe seems to count it: 249.5 MB of weights."""
    return AlexNet(num_classes, in_channels, groups=1, norm_first=True, bias=0.1)


def caffenet(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNet:
    """Caffe's reference network: AlexNet with pooling before normalization, and biases from 1."""
    return AlexNet(num_classes, in_channels, groups=2, norm_first=False, bias=1.0)


def alexnet_owt(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNetOwt:
    return AlexNetOwt(num_classes, in_channels)
