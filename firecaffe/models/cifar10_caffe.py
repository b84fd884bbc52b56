"""The two networks of Caffe's CIFAR-10 example: three convolutions of 5x5, then pools of 3x3.

Source: cuda-convnet's layers-80sec and layers-18pct (Krizhevsky), as BVLC Caffe has them in
examples/cifar10/cifar10_quick_train_test.prototxt and cifar10_full_train_test.prototxt.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers
from firecaffe.caffe.local_response_norm import LocalResponseNormWithinChannel


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
