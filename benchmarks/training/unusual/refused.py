"""Layers that change or hold what no training keeps the same on any number of workers."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.unusual.layers import WIDTH


class Growing(nn.Module):
    """A buffer that grows."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def forward(self, values: Tensor) -> Any:
        self.seen = torch.cat([self.seen, values.detach()])
        return values


class Replacing(nn.Module):
    """Another parameter in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values: Tensor) -> Any:
        self.scale = nn.Parameter(self.scale.detach().clamp(0, 2))
        return values * self.scale


class Thawing(nn.Module):
    """A frozen layer whose gradients forward asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, values: Tensor) -> Any:
        self.layer.requires_grad_(self.training)
        return self.layer(values)


class Clipping(nn.Module):
    """Weights that forward clips, behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Any:
        self.layer.weight.data.clamp_(-0.05, 0.05)
        return self.layer(values)


class Overlapping(nn.Module):
    """Two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(WIDTH + 4)
        self.one, self.other = nn.Parameter(memory[:WIDTH]), nn.Parameter(memory[4:])

    def forward(self, values: Tensor) -> Any:
        return values * self.one + self.other


class OwnWay(nn.Module):
    """State that goes into the state_dict in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def forward(self, values: Tensor) -> Any:
        return values * self.scale
