"""Networks for the benchmark of .fcz: made ones with published shares, and a trained, pruned one.

Sources: Han, Mao and Dally 2016 (Deep Compression, arXiv 1510.00149), tables 4 and 5, for AlexNet
and VGG-16: kept shares, and bits of 8 for convolutions and 5 for the others; Iandola et al. 2016
(SqueezeNet, arXiv 1602.07360), table 2: 33 % kept, 6 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor, nn
from torch.nn import functional as F

from firecaffe import DataConfig, ModelConfig
from firecaffe.data import open_data
from firecaffe.models.network import make_network

Tensors = dict[str, NDArray[np.float32]]

ALEXNET = (0.84, 0.38, 0.35, 0.37, 0.37, 0.09, 0.09, 0.25)
VGG16_CONVOLUTIONS = (0.58, 0.22, 0.34, 0.36, 0.53, 0.24, 0.42, 0.32, 0.27, 0.34, 0.35, 0.29, 0.36)
VGG16 = (*VGG16_CONVOLUTIONS, 0.04, 0.04, 0.23)
SQUEEZENET = (0.33,) * 26


@dataclass(frozen=True)
class Published:
    """What a paper says of a network."""

    model: str
    shares: Sequence[float]
    """Kept, of each layer."""
    convolution_bits: int
    linear_bits: int
    megabytes: float


PUBLISHED = {
    "AlexNet": Published("alexnet", ALEXNET, 8, 5, 6.9),
    "VGG-16": Published("vgg16", VGG16, 8, 5, 11.3),
    "SqueezeNet": Published("squeezenet1_0", SQUEEZENET, 6, 6, 0.47),
}

SAMPLED = 200_000
"""Weights of which centroids are found."""


def make(published: Published) -> Tensors:
    """Weights at random places, from the tails of a normal distribution, shared by k-means that
    begins with equal steps; biases from a normal distribution.
    """
    with torch.device("meta"):
        network = make_network(ModelConfig(published.model), 1000, 3)
    drawn = np.random.default_rng(0)
    shares = iter(published.shares)
    made: Tensors = {}
    for name, parameter in network.named_parameters():
        size = parameter.numel()
        tensor = np.zeros(size, np.float32)
        if parameter.ndim > 1:
            share = next(shares)
            bits = published.convolution_bits if parameter.ndim == 4 else published.linear_bits
            kept = np.flatnonzero(drawn.random(size) < share)
            sizes = -ndtri(drawn.random(len(kept)) * share / 2)
            values = np.where(drawn.random(len(kept)) < 0.5, sizes, -sizes)
            tensor[kept] = shared(values, 1 << bits) * np.float32(0.01)
        else:
            tensor[:] = drawn.standard_normal(size) * 0.01
        made[name] = tensor.reshape(tuple(parameter.shape))
    assert next(shares, None) is None
    return made


def shared(values: NDArray[np.floating], count: int) -> NDArray[np.float32]:
    """The values, each the nearest of `count` centroids by k-means (Lloyd 1957, 20 rounds)."""
    sample = values[:SAMPLED]
    centroids = np.linspace(sample.min(), sample.max(), count)
    for _ in range(20):
        nearest = np.digitize(sample, (centroids[1:] + centroids[:-1]) / 2)
        members = np.bincount(nearest, minlength=count)
        sums = np.bincount(nearest, sample, count)
        centroids = np.where(members > 0, sums / np.maximum(members, 1), centroids)
    nearest = np.digitize(values, (centroids[1:] + centroids[:-1]) / 2)
    half: NDArray[np.float32] = centroids.astype(np.float16).astype(np.float32)[nearest]
    return half


ROUNDS = {
    "8, 9 and 26 % kept, 4 bits": (((0.3, 0.3, 0.5), (0.15, 0.15, 0.4), (0.08, 0.09, 0.26)), 4),
    "2, 4 and 25 % kept, 3 bits": (
        (
            (0.3, 0.3, 0.5),
            (0.1, 0.12, 0.4),
            (0.05, 0.07, 0.3),
            (0.03, 0.05, 0.3),
            (0.02, 0.04, 0.25),
        ),
        3,
    ),
}
"""How LeNet-300-100 is pruned: the shares of each round."""


def layers(tensors: Tensors | None = None) -> nn.Sequential:
    """LeNet-300-100, with some weights."""
    sizes = (784, 300, 100, 10)
    linear = [nn.Linear(i, o) for i, o in pairwise(sizes)]
    network = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])
    if tensors is not None:
        network.load_state_dict({name: torch.from_numpy(each) for name, each in tensors.items()})
    return network


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MNIST: training images and labels, test images and labels."""
    data = open_data(DataConfig("mnist", augment="none"))
    found: list[Tensor] = []
    for part in (data.train, data.test):
        images, labels = part.batch(torch.arange(len(part)))[:2]
        found += [images.float().reshape(len(part), -1) / 255, labels]
    return found[0], found[1], found[2], found[3]


def train(images: Tensor, labels: Tensor, name: str) -> Tensors:
    """LeNet-300-100, pruned by magnitude in rounds with an epoch after each and three in the end,
    its weights and biases shared by k-means. Nothing is tuned; it stands for any pruned network.
    """
    torch.manual_seed(0)
    network = layers()
    linear = [each for each in network if isinstance(each, nn.Linear)]
    masks = [torch.ones_like(each.weight) for each in linear]
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    rounds, bits = ROUNDS[name]

    def epoch() -> None:
        for part in torch.split(torch.randperm(len(images)), 128):
            optimizer.zero_grad()
            F.cross_entropy(network(images[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                for each, mask in zip(linear, masks, strict=True):
                    each.weight *= mask

    for shares in ((1.0, 1.0, 1.0), *rounds):
        for each, mask, share in zip(linear, masks, shares, strict=True):
            size = each.weight.detach().abs() * mask
            least = size.flatten().topk(int(share * mask.numel())).values[-1]
            mask.copy_((size >= least).float())
        for _ in range(3 if shares in (rounds[-1], (1.0, 1.0, 1.0)) else 1):
            epoch()
    found = {}
    for key, tensor in network.state_dict().items():
        weights = tensor.numpy().copy()
        there = np.flatnonzero(weights != 0) if weights.ndim > 1 else np.arange(weights.size)
        flat = np.zeros(weights.size, np.float32)
        count = 1 << bits if weights.ndim > 1 else min(16, weights.size)
        flat[there] = shared(weights.reshape(-1)[there].astype(np.float64), count)
        found[key] = flat.reshape(weights.shape)
    return found


def errors(tensors: Tensors, images: Tensor, labels: Tensor) -> float:
    """The share of wrong test images."""
    with torch.no_grad():
        return float((layers(tensors)(images).argmax(1) != labels).float().mean())


def all_made() -> Iterator[tuple[str, Published, Callable[[], Tensors]]]:
    for name, published in PUBLISHED.items():
        yield name, published, partial(make, published)
