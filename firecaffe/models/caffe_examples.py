"""The networks of Caffe's examples: LeNet for MNIST, and three convolutions for CIFAR-10.

Source: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-Based Learning Applied to Document
Recognition". `lenet` has the sizes and fillers of BVLC Caffe,
examples/mnist/lenet_train_test.prototxt. `lenet_300_100` has no convolution. It is the network that
papers on pruning compare, for example Han et al. 2015 (arXiv 1506.02626).

Weights start from Caffe's Xavier, uniform within ±sqrt(3 / fan_in), and biases from 0. The image
must be 28x28.

Differences from the paper: `lenet_300_100` has ReLU and softmax, where the paper has a scaled tanh
and the squared error. `lenet` differs from LeNet-5 as Caffe's file does:

- Images are 28x28 without a border, not 32x32.
- Pools take the maximum, instead of trained subsampling. There is one ReLU, after ip1, instead of
  tanh.
- Every map of conv2 sees every map of conv1.
- It has 20, 50 and 500 units instead of 6, 16, 120 and 84, and softmax instead of radial basis
  functions.

Source: Krizhevsky's cuda-convnet, layers-80sec and layers-18pct, as BVLC Caffe has them in
examples/cifar10/cifar10_quick_train_test.prototxt and cifar10_full_train_test.prototxt.

- Pools round up, as in Caffe. An average is over the pixels within the image.
- `cifar10_full` normalizes within channels, twice. It divides by
  (1 + 5e-5 · mean square of the 3x3 pixels around) ^ 0.75.
- Weights start from a Gaussian: conv1 0.0001, conv2 and conv3 0.01, ip1 and ip2 0.1
  (`cifar10_full`: ip1 0.01). Biases start from 0.
- The image must be 32x32.

Difference from the authors' files: they subtract the mean image, the recipes the mean color.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers
from firecaffe.caffe.local_response_norm import LocalResponseNormWithinChannel


def lenet(*, num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Images (batch, in_channels, 28, 28) to logits (batch, num_classes)."""
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 20, 5),
            pool1=nn.MaxPool2d(2, 2),
            conv2=nn.Conv2d(20, 50, 5),
            pool2=nn.MaxPool2d(2, 2),
            flatten=nn.Flatten(),
            ip1=nn.Linear(50 * 4 * 4, 500),
            relu1=nn.ReLU(inplace=True),
            ip2=nn.Linear(500, num_classes),
        )
    )
    fillers.fill_all(network, fillers.xavier)
    return network


def lenet_300_100(*, num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Images (batch, in_channels, 28, 28) to logits (batch, num_classes)."""
    network = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            ip1=nn.Linear(in_channels * 28 * 28, 300),
            relu1=nn.ReLU(inplace=True),
            ip2=nn.Linear(300, 100),
            relu2=nn.ReLU(inplace=True),
            ip3=nn.Linear(100, num_classes),
        )
    )
    fillers.fill_all(network, fillers.xavier)
    return network


def _max_pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def _average_pool() -> nn.Module:
    return nn.AvgPool2d(3, 2, ceil_mode=True)


def _start(network: nn.Sequential, stds: dict[str, float]) -> nn.Sequential:
    for name, std in stds.items():
        fillers.fill(network.get_submodule(name), fillers.gaussian(std))
    return network


def cifar10_quick(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 32, 32) to logits (batch, num_classes)."""
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 32, 5, padding=2),
            pool1=_max_pool(),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(32, 32, 5, padding=2),
            relu2=nn.ReLU(inplace=True),
            pool2=_average_pool(),
            conv3=nn.Conv2d(32, 64, 5, padding=2),
            relu3=nn.ReLU(inplace=True),
            pool3=_average_pool(),
            flatten=nn.Flatten(),
            ip1=nn.Linear(64 * 4 * 4, 64),
            ip2=nn.Linear(64, num_classes),
        )
    )
    stds = {"conv1": 0.0001, "conv2": 0.01, "conv3": 0.01, "ip1": 0.1, "ip2": 0.1}
    return _start(network, stds)


def cifar10_full(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 32, 32) to logits (batch, num_classes)."""
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 32, 5, padding=2),
            pool1=_max_pool(),
            relu1=nn.ReLU(inplace=True),
            norm1=LocalResponseNormWithinChannel(3, 5e-5, 0.75),
            conv2=nn.Conv2d(32, 32, 5, padding=2),
            relu2=nn.ReLU(inplace=True),
            pool2=_average_pool(),
            norm2=LocalResponseNormWithinChannel(3, 5e-5, 0.75),
            conv3=nn.Conv2d(32, 64, 5, padding=2),
            relu3=nn.ReLU(inplace=True),
            pool3=_average_pool(),
            flatten=nn.Flatten(),
            ip1=nn.Linear(64 * 4 * 4, num_classes),
        )
    )
    return _start(network, {"conv1": 0.0001, "conv2": 0.01, "conv3": 0.01, "ip1": 0.01})
