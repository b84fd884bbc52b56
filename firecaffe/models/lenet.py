"""LeNet as Caffe trains it on MNIST (431,080 weights), and LeNet-300-100 (266,610 weights).

Source: LeCun et al. 1998; sizes and fillers of BVLC's examples/mnist/lenet_train_test.prototxt.
LeNet-300-100: the paper's 28x28-300-100-10 with ReLU and Caffe's fillers, which Han et al. 2015
(arXiv 1506.02626) prune.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers


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
