"""Layers that keep, change or draw what others do not; for images of 1 x 8 x 8 and 4 classes."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, PIXELS = 16, 4, 64


def around(*layers: nn.Module) -> nn.Sequential:
    """Layers between a first and a last Linear."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


class Words(nn.Module):
    """An Embedding of the pixels' brightness."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH, **words)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Any:
        numbers = images.flatten(1).mul(4).long().remainder(32)
        return self.head(self.table(numbers).mean(1))


class Wave(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, values: Tensor) -> Any:
        return (torch.fft.fft(values) @ self.weight).abs()


class PairsOfReals(nn.Module):
    """The same as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 2) / 4)

    def forward(self, values: Tensor) -> Any:
        return (torch.fft.fft(values) @ torch.view_as_complex(self.weight)).abs()


class Clamp(nn.Module):
    """Clips to the largest value of the first micro-batches: a number, in the extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.seen = 0.0, (0, "micro-batches")

    def get_extra_state(self) -> dict[str, Any]:
        return {"limit": self.limit, "seen": self.seen, "last": torch.tensor([self.limit])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.limit, self.seen = state["limit"], state["seen"]

    def forward(self, values: Tensor) -> Any:
        if self.training:
            self.limit = max(self.limit, values.abs().max().item())
            self.seen = (self.seen[0] + 1, self.seen[1])
        return values.clamp(-self.limit, self.limit)


class Peculiar(Clamp):
    """An extra state of a class of its own."""

    def get_extra_state(self) -> Any:
        return self


class Queue(nn.Module):
    """A memory of past features in a buffer, with a pointer."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(64, WIDTH), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, values: Tensor) -> Any:
        feature = F.normalize(values, dim=1)
        near = feature @ self.queue.clone().T @ self.queue.clone()
        if self.training:
            with torch.no_grad():
                rows = (int(self.place) + torch.arange(len(feature))) % len(self.queue)
                self.queue[rows] = feature
                self.place.copy_((self.place + len(feature)) % len(self.queue))
        return values + near


class Coupling(nn.Module):
    """An affine coupling of a flow, and its logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.of_half = nn.Sequential(nn.Linear(WIDTH // 2, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, values: Tensor) -> Any:
        first, second = values.chunk(2, 1)
        scale, shift = self.of_half(first).chunk(2, 1)
        return torch.cat([second * scale.tanh().exp() + shift, first], 1)


class Recurrent(nn.Module):
    """An LSTM over rows; with `carries`, the state of one batch begins the next."""

    def __init__(self, carries: bool = False) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.carries, self.hidden = carries, torch.zeros(1, 1, WIDTH)

    def forward(self, images: Tensor) -> Any:
        begin = self.hidden.expand(1, len(images), WIDTH).contiguous()
        found, (hidden, _) = self.cell(images[:, 0], (begin, torch.zeros_like(begin)))
        if self.carries and self.training:
            self.hidden = hidden.detach().mean(1, keepdim=True)
        return self.head(found[:, -1])


class Depth(nn.Module):
    """Stochastic depth by a generator of the process, or by one of its own."""

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), draw
        self.own = torch.Generator().manual_seed(1) if draw is None else None

    def forward(self, values: Tensor) -> Any:
        if not self.training:
            return values + self.layer(values)
        drawn = float(torch.rand((), generator=self.own)) if self.draw is None else self.draw()
        return values + self.layer(values) if drawn < 0.7 else values


def by_torch() -> float:
    return float(torch.rand(()))


def by_numpy() -> float:
    return float(np.random.rand())


by_python = random.random


class Penalty(nn.Module):
    """A derivative of the network inside it, whose graph is kept in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, values: Tensor) -> Any:
        with torch.enable_grad():
            at = values if values.requires_grad else values.detach().requires_grad_(True)
            energy = self.energy(at).sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=self.training)
        return slope


class Forces(nn.Module):
    """All of the output is such a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(PIXELS, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, images: Tensor) -> Any:
        with torch.enable_grad():
            at = images.flatten(1).detach().requires_grad_(True)
            energy = self.energy(at).square().sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=self.training)
        return slope[:, :CLASSES]


class Types(nn.Module):
    """Layers of other types."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).to(dtype)
        self.dtype = dtype

    def forward(self, values: Tensor) -> Any:
        return self.layer(values.to(self.dtype)).to(values.dtype)


class Counting(nn.Module):
    """Warms up by a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: Tensor) -> Any:
        if self.training:
            self.calls += 1
        return values * min(1.0, self.calls / 100)


class Caching(nn.Module):
    """Keeps what it saw last, and reads it not before it is new."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last: Any = None

    def forward(self, values: Tensor) -> Any:
        self.last = {"mean": values.mean(), "of": [values.detach()]}
        return self.layer(values) + self.last["mean"]


class Codebook(nn.Module):
    """A codebook that follows what is near its entries, in buffers."""

    entries: Tensor
    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.randn(8, WIDTH))
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, values: Tensor) -> Any:
        nearest = torch.cdist(values.detach(), self.entries.clone()).argmin(1)
        found = self.entries[nearest].clone()
        if self.training:
            chosen = F.one_hot(nearest, 8).to(values.dtype)
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                sums = chosen.T @ values
                self.entries.lerp_(sums / chosen.sum(0).clamp(min=1)[:, None], 0.1)
        return values + (found - values).detach()


class Sometimes(nn.Module):
    """Layers that a micro-batch uses by what it holds, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Any:
        return self.bright(values) if values.mean() > 0 else self.dark(values)


class Experts(nn.Module):
    """Each sample goes to one of four experts; what balances them is kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, values: Tensor) -> Any:
        shares = self.gate(values).softmax(1)
        best, of = shares.max(1)
        self.balance = shares.mean(0).square().sum()
        found = torch.zeros_like(values)
        for number, expert in enumerate(self.experts):
            rows = (of == number).nonzero()[:, 0]
            found = found.index_add(0, rows, expert(values[rows]) * best[rows, None])
        return found + 0.01 * self.balance


class Checkpointed(nn.Module):
    """Computes a part with dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.ReLU())

    def forward(self, values: Tensor) -> Any:
        found: Tensor = checkpoint(self.part, values, use_reentrant=False)
        return found


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up.weight = self.down.weight

    def forward(self, values: Tensor) -> Any:
        return self.up(self.down(values).relu())


class Odd(nn.Module):
    """Parameters of one number, of none, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).T)

    def forward(self, values: Tensor) -> Any:
        return self.scale * values @ self.turned + self.none.sum()


class Masked(nn.Module):
    """An attention mask of minus infinities in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.attention = nn.MultiheadAttention(WIDTH // 4, 1, batch_first=True)

    def forward(self, values: Tensor) -> Any:
        rows = values.reshape(len(values), 4, WIDTH // 4)
        found, _ = self.attention(rows, rows, rows, attn_mask=self.mask, need_weights=False)
        return values + found.flatten(1)


class Hooked(nn.Module):
    """Gradients that hooks change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight.register_hook(_clamped)  # type: ignore[no-untyped-call]

    def forward(self, values: Tensor) -> Any:
        return self.layer(values)


class OfTree(nn.Module):
    """Takes inputs that are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.network = around(nn.Dropout(0.3))

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.network(inputs["image"]) + 0.01 * inputs["place"][:, None]


class LossInside(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(CLASSES, CLASSES))

    def forward(self, outputs: Tensor, labels: Tensor) -> Any:
        return (outputs - self.centers[labels]).square().mean()


def contrast(outputs: Tensor, _: Tensor) -> Tensor:
    """Each sample against the others of its micro-batch."""
    near = F.normalize(outputs, dim=1)
    return F.cross_entropy(near @ near.T * 5, torch.arange(len(near)))


def _clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)
