"""AlexNet and CaffeNet: five convolutions, three fully connected layers.

Source: Krizhevsky, Sutskever and Hinton 2012, "ImageNet Classification with Deep Convolutional
Neural Networks". Sizes and fillers are those of BVLC Caffe, models/bvlc_alexnet/train_val.prototxt
and models/bvlc_reference_caffenet/train_val.prototxt. `alexnet_owt` is the network of Krizhevsky
2014, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997). It has
torchvision's names and torch's fillers; torchvision calls it alexnet, and those weights load.

- `alexnet` and `caffenet` split conv2, conv4 and conv5 into two groups, as on the two GPUs of the
  paper. `alexnet_ungrouped` has no groups. Compare FireCaffe's volumes for AlexNet with it: its
  weights (249.5 MB) and its work (6.95 TFLOP, forward and backward, for a batch of 1024) agree
  with the paper's table; those with groups do not.
- `caffenet` pools before it normalizes.
- Pools round up, as Caffe's do, so crops of 224 and of 227 both fit.

Differences from the paper:

- A crop of 227 gives the paper's 55x55 after conv1; its 224 would give 54x54.
- Normalization is Caffe's, with k = 1 and alpha / 5. The paper has k = 2 and alpha.
- Weights start from a Gaussian of 0.01, those of fc6 and fc7 from 0.005. The biases of conv2,
  conv4, conv5, fc6 and fc7 start from 0.1 (`caffenet`: 1), the others from 0. The paper has 0.01
  and 1.
"""

from torch import Tensor, nn

from firecaffe.caffe import fillers
from firecaffe.caffe.local_response_norm import LocalResponseNorm


class AlexNet(nn.Module):
    """Images (batch, in_channels, 224 or 227, the same) to logits (batch, num_classes).

    `groups` 2 separates halves of conv2, conv4 and conv5, as on the two GPUs of the paper.
    `norm_first` normalizes before pooling, unlike CaffeNet. `bias` initializes the nonzero biases.
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
    return AlexNet(num_classes, in_channels, groups=1, norm_first=True, bias=0.1)


def caffenet(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNet:
    return AlexNet(num_classes, in_channels, groups=2, norm_first=False, bias=1.0)


def alexnet_owt(*, num_classes: int = 1000, in_channels: int = 3) -> AlexNetOwt:
    return AlexNetOwt(num_classes, in_channels)
