"""Layers that ask, keep or change what shows only in evaluation, elsewhere or at the beginning."""

import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.unusual.layers import WIDTH


class ByRanks(nn.Module):
    """Scales by the number of ranks."""

    def forward(self, values: Tensor) -> Any:
        return values * (1 + int(os.environ.get("WORLD_SIZE", "1")) / 10)


class Meter:
    """Counts."""

    def __init__(self) -> None:
        self.calls = 0


class Metered(nn.Module):
    """Changes its scale after some calls, which an object of its own counts."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, values: Tensor) -> Any:
        self.meter.calls += 1
        return values * (2 if self.meter.calls > 15 else 1)


class Evaluations(nn.Module):
    """Scales by the number of batches that were evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, values: Tensor) -> Any:
        self.seen += not self.training
        return values * (1 + self.seen / 100)


class Sampled(nn.Module):
    """Leaves numbers out in evaluation alone, by a generator that no attribute has."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1)
        self.draw = partial(torch.rand, generator=own)

    def forward(self, values: Tensor) -> Any:
        return values if self.training else values * (self.draw(values.shape) < 0.7)


class Projected(nn.Module):
    """Clips a frozen parameter in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)

    def forward(self, values: Tensor) -> Any:
        if not self.training:
            self.scale.data.clamp_(max=1)
        return values * self.scale


class MadeLate(nn.Module):
    """A running mean that the first forward makes, and that evaluations alone use."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, values: Tensor) -> Any:
        if self.training:
            now = values.detach().mean(0)
            self.mean = now if self.mean is None else self.mean.lerp(now, 0.1)
            return values - values.mean(0)
        return values if self.mean is None else values - self.mean


class Merged(nn.Linear):
    """A frozen layer with a trained one of low rank, which is added to it for evaluations."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.zeros(WIDTH, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merged":
        """Add the product when evaluation begins, and subtract it when training goes on."""
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).detach()
            self.is_merged = not mode
        return self

    def forward(self, values: Tensor) -> Any:
        whole = F.linear(values, self.weight, self.bias)
        return whole if self.is_merged else whole + values @ self.down.T @ self.up.T
