"""Networks with which a split or stages may go wrong, for images of 1 x 28 x 28."""

from typing import Any

import torch
from torch import Tensor, nn

PLACE = __file__


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv2d(1, 4, 5)
        self.body = nn.Sequential(nn.Linear(2304, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.conv(x).flatten(1)))


class Paths(nn.Module):
    """Two convolutions beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 2, 5), nn.Conv2d(1, 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], 1)


class WithPaths(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Paths()


class Branching(Net):
    """It cannot be traced."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x if len(x) > 1 and x[0].mean() < 9 else -x)


class Twice(Net):
    """It calls a layer twice."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body[2](self.body(self.conv(x).flatten(1))))


class Tied(Net):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.get_parameter("body.2.weight")

    def forward(self, x: Tensor) -> Any:
        return self.head(self.tied(self.body(self.conv(x).flatten(1))))


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda *_: None)
        self.body.register_forward_hook(lambda *_: None)


class Odd(Net):
    """With a layer of a kind that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.body(self.conv(x).flatten(1))
        return self.head(self.odd(y, y))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 10, 28), nn.Flatten())
