"""Networks that change something in backward, or their inputs in forward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.training.unusual.layers import WIDTH, around
from benchmarks.training.unusual.teachers import Teacher


def updating() -> nn.Module:
    """An optimizer that steps in backward, which keeps no gradients at once."""
    network = around(nn.ReLU())
    weight = next(network.parameters())
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def update(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return network


class Following(Teacher):
    """A frozen teacher that follows the student after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(self._follow)

    def forward(self, values: Tensor) -> Any:
        with torch.no_grad():
            aim = self.teacher(values)
        return self.student(values) + 0.1 * aim

    @torch.no_grad()
    def _follow(self, *_: object) -> None:
        for follows, leads in zip(
            self.teacher.parameters(), self.student.parameters(), strict=True
        ):
            follows.lerp_(leads, 0.1)


def scaling() -> nn.Module:
    """A hook that divides gradients by the mean of the norms that it has seen."""
    layer, seen = nn.Linear(WIDTH, WIDTH), [1.0]

    def scale(gradient: Tensor) -> Tensor:
        seen[0] = 0.9 * seen[0] + 0.1 * float(gradient.norm())
        return gradient / seen[0]

    layer.weight.register_hook(scale)  # type: ignore[no-untyped-call]
    return around(layer)


class Overwriting(nn.Module):
    """A network that writes to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = around(nn.ReLU())

    def forward(self, values: Tensor) -> Any:
        return self.inner(values.mul_(1.5) if self.training else values * 1.5)


class Twice(nn.Module):
    """One layer in a part that backward goes through by itself, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Any:
        return self.layer(checkpoint(self._part, values, use_reentrant=True))

    def _part(self, values: Tensor) -> Tensor:
        return torch.tanh(self.layer(values))


class Adversary(nn.Module):
    """Moves what it takes by a gradient, whose parts by its weights it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Any:
        if self.training:
            at = values.detach().requires_grad_()
            with torch.enable_grad():
                self.layer(at).square().mean().backward()
            self.zero_grad()
            assert at.grad is not None
            values = values + at.grad.sign() * 0.1
        return self.layer(values)


class NormsInBuffer(nn.Module):
    """Divides its gradient by a mean of norms, in a buffer that a hook changes."""

    norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("norm", torch.ones(()))
        self.layer.weight.register_hook(self._scaled)  # type: ignore[no-untyped-call]

    def forward(self, values: Tensor) -> Any:
        return self.layer(values)

    def _scaled(self, gradient: Tensor) -> Tensor:
        self.norm.lerp_(gradient.norm(), 0.1)
        return gradient / self.norm
