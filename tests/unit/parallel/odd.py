"""A network with what a cut has to get right."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gain(nn.Module):
    """Needs a buffer in backward as this forward has left it."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain.lerp_(1 + x.detach().float().mean(), 0.5)
        return x * self.gain


class Odd(nn.Module):
    """Changes in place behind a cut, a value that several stages need, a head in the middle, a size
    as a number, a layout of memory; a parameter, a buffer and a tensor beside modules.
    """

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(6 * 64, 4))
        self.act = nn.ReLU(inplace=True)
        conv = nn.Conv2d(6, 6, 3, padding=1)
        self.middle = nn.Sequential(nn.Dropout(0.3), conv, nn.Tanh(), Gain())
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.4, inplace=True), nn.Linear(8, 4))

    def forward(self, x: dict[str, Tensor]) -> Any:
        image = x["image"]
        self.calls.add_(1)
        y = self.first(image)
        side = self.head(y) if self.training else None
        y = self.act(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        z = self.middle(y) * torch.ones(6).view(6, 1, 1)
        z = z * self.scale.view(6, 1, 1) + y
        z = self.last(torch.cat([z, y], 1).reshape(image.shape[0], -1))
        return {"out": z + x["image"].mean(), "side": side}


def odd_loss(outputs: Any) -> Tensor:
    labels = torch.arange(len(outputs["out"])) % 4
    loss = F.cross_entropy(outputs["out"], labels)
    if outputs["side"] is not None:
        loss = loss + 0.3 * F.cross_entropy(outputs["side"], labels)
    return loss


def odd() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    x = {"image": torch.randn(3, 3, 8, 8)}
    network = Odd()
    network(x)  # makes the lazy layer
    return network, x
