"""LeNet and LeNet-300-100: small networks for MNIST, as Caffe trains them.

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
