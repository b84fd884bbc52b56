"""A bare DDP script of one step, as anyone writes it: the control of `benchmarks.training.starts`.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.training.starts_ddp [--check] OUT.json

It loads nothing of firecaffe. Its network is nin_small, and its images are random.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.training.as_typed_ddp import Batch, train

CHANNELS = ((5, (32, 24, 16)), (5, (64, 64, 64)), (3, (96, 96, 10)))
"""Each block's first kernel, and the channels of its three layers."""

AFTER: tuple[tuple[nn.Module, ...], ...] = (
    (nn.MaxPool2d(3, 2, ceil_mode=True),),
    (nn.AvgPool2d(3, 2, ceil_mode=True), nn.Dropout(0.5)),
    (nn.AdaptiveAvgPool2d(1), nn.Flatten()),
)


def network() -> nn.Sequential:
    layers, inputs = list[nn.Module](), 1
    for (kernel, channels), after in zip(CHANNELS, AFTER, strict=True):
        for size, outputs in zip((kernel, 1, 1), channels, strict=True):
            layer = nn.Conv2d(inputs, outputs, size, padding=size // 2)
            nn.init.normal_(layer.weight, 0.0, math.sqrt(2 / (inputs * size * size)))
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.ReLU(inplace=True)]
            inputs = outputs
        layers += after
    del layers[-3]  # the logits have no ReLU
    return nn.Sequential(*layers)


def batch(size: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(size, 1, 28, 28, generator=generator)
    return images, torch.randint(10, (size,), generator=generator)


if __name__ == "__main__":
    *options, out = sys.argv[1:]
    torch.manual_seed(1)
    sys.exit(train(network(), [batch()], options == ["--check"], Path(out)))
