"""Network in Network: two 1x1 convolutions follow each convolution; no layer is fully connected.

The logits are the channels of the last convolution, averaged over the image, so images may have any
size that is large enough for the pooling.

Source: Lin, Chen and Yan 2013, "Network In Network" (arXiv 1312.4400). `nin` is the file that
FireCaffe's first author trained (forresti/dnn_dsx, NiN_for_dissertation/trainval_gold.prototxt).
`nin_cifar` is Lin's CIFAR-10 model for Caffe (gist mavenlin/e56253735ef32c3c296d). `nin_small` is
ours: a narrow network that a CPU trains in a minute.

- `nin` takes crops of 224 and of 227. The other two take 28x28 and 32x32, gray or color.
- Weights start from a Gaussian: in `nin` 0.01 for conv1 to conv3 and cccp8 and 0.05 for the others,
  in `nin_cifar` 0.05. `nin_small` starts from He's filler, because layers this narrow do not train
  from a Gaussian of 0.05. Biases start from 0.

Differences from the paper:

- The paper has no ImageNet network. Lin's own file for one starts conv2 from 0.05.
- The last pool is global. The files say 6x6 or 8x8, which is the same for their crops.
- `nin_small` has one dropout, and no ReLU on its logits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from firecaffe.caffe import fillers


@dataclass(frozen=True)
class _Block:
    kernel_size: int
    stride: int
    padding: int
    channels: tuple[int, int, int]
    after: dict[str, nn.Module]  # layers after the block, by name


def _pool(name: str, *, average: bool = False) -> dict[str, nn.Module]:
    kind = nn.AvgPool2d if average else nn.MaxPool2d
    return {name: kind(3, 2, ceil_mode=True)}


def _network(in_channels: int, blocks: Sequence[_Block], *, relu_last: bool) -> nn.Sequential:
    # Names are those in the authors' files: conv1, cccp1, cccp2, …
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, block in enumerate(blocks, start=1):
        names = (f"conv{number}", f"cccp{2 * number - 1}", f"cccp{2 * number}")
        for name, channels in zip(names, block.channels, strict=True):
            if name == names[0]:
                size, stride, padding = block.kernel_size, block.stride, block.padding
                layers[name] = nn.Conv2d(in_channels, channels, size, stride, padding)
            else:
                layers[name] = nn.Conv2d(in_channels, channels, 1)
            layers[f"relu_{name}"] = nn.ReLU(inplace=True)
            in_channels = channels
        layers |= block.after
    if not relu_last:
        del layers[f"relu_cccp{2 * len(blocks)}"]
    layers["global_pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers)


def nin(*, num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 224 or 227, the same) to logits (batch, num_classes)."""
    network = _network(
        in_channels,
        [
            _Block(11, 4, 0, (96, 96, 96), _pool("pool1")),
            _Block(5, 1, 2, (256, 256, 256), _pool("pool2")),
            _Block(3, 1, 1, (384, 384, 384), _pool("pool3") | {"drop3": nn.Dropout(0.5)}),
            _Block(3, 1, 1, (1024, 1024, num_classes), {}),
        ],
        relu_last=True,
    )
    fillers.fill_all(network, fillers.gaussian(0.05))
    for name in ("conv1", "conv2", "conv3", "cccp8"):
        fillers.fill(network.get_submodule(name), fillers.gaussian(0.01))
    return network


def nin_cifar(*, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Images (batch, in_channels, 28 or 32, the same) to logits (batch, num_classes)."""
    network = _network(
        in_channels,
        [
            _Block(5, 1, 2, (192, 160, 96), _pool("pool1") | {"drop1": nn.Dropout(0.5)}),
            _Block(5, 1, 2, (192,) * 3, _pool("pool2", average=True) | {"drop2": nn.Dropout(0.5)}),
            _Block(3, 1, 1, (192, 192, num_classes), {}),
        ],
        relu_last=True,
    )
    fillers.fill_all(network, fillers.gaussian(0.05))
    return network


def nin_small(*, num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Images (batch, in_channels, 28 or 32, the same) to logits; narrow, for trials on a CPU."""
    network = _network(
        in_channels,
        [
            _Block(5, 1, 2, (32, 24, 16), _pool("pool1")),
            _Block(5, 1, 2, (64,) * 3, _pool("pool2", average=True) | {"drop2": nn.Dropout(0.5)}),
            _Block(3, 1, 1, (96, 96, num_classes), {}),
        ],
        relu_last=False,
    )
    fillers.fill_all(network, fillers.msra)
    return network
