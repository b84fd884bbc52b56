"""A small Inception network with batch normalization, for images of 28x28 and 32x32.

Three of GoogLeNet's blocks, so that a test or a demonstration meets concatenation, batch
normalization and dropout in seconds. It is nobody's published network.

Source of the parts: firecaffe/models/inception.py.
"""

from collections import OrderedDict

from torch import nn

from firecaffe.caffe import fillers
from firecaffe.models.inception import Inception, conv_block


def googlenet_small_bn(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 28 or 32, the same) to logits (batch, num_classes)."""
    conv1 = conv_block(in_channels, 24, 3, padding=1, batch_norm=True)
    inception3a = Inception(24, (24, 16, 24, 8, 16, 16), batch_norm=True)
    inception3b = Inception(inception3a.out_channels, (32, 24, 48, 8, 16, 16), batch_norm=True)
    inception4a = Inception(inception3b.out_channels, (48, 32, 64, 8, 24, 24), batch_norm=True)
    network = nn.Sequential(
        OrderedDict(
            conv1=conv1,
            maxpool1=nn.MaxPool2d(3, 2, ceil_mode=True),
            inception3a=inception3a,
            inception3b=inception3b,
            maxpool2=nn.MaxPool2d(3, 2, ceil_mode=True),
            inception4a=inception4a,
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.4),
            fc=nn.Linear(inception4a.out_channels, num_classes),
        )
    )
    fillers.fill_all(network, fillers.xavier)
    return network
