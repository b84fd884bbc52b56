"""LeNet-300-100: two hidden layers, fully connected, 266,610 weights.

Source: LeCun et al. 1998, the 28x28-300-100-10 network; that with ReLU and Caffe's fillers is what
Han et al. 2015 (arXiv 1506.02626) prune.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers


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
