"""Tensors by name that are stored elsewhere: each, or some of its rows, is read on demand."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class Stored(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor, without reading it."""

    def rows(self, name: str, rows: range, dim: int = 0) -> Tensor:
        """Some consecutive rows of a tensor, of one of its dimensions."""
        return self[name].narrow(dim, rows.start, len(rows))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def full_name(self, name: str) -> str:
        """The tensor's name in the checkpoint."""
        return name


class InMemory(Stored):
    """Tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Under(Stored):
    """The tensors whose names begin with PREFIX/, by the rest of their names."""

    def __init__(self, stored: Stored, prefix: str) -> None:
        self._stored, self._prefix = stored, f"{prefix}/"

    def full_name(self, name: str) -> str:
        return self._stored.full_name(self._prefix + name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self._prefix + name)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._prefix + name)

    def rows(self, name: str, rows: range, dim: int = 0) -> Tensor:
        return self._stored.rows(self._prefix + name, rows, dim)

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._stored

    def __iter__(self) -> Iterator[str]:
        names = (name for name in self._stored if name.startswith(self._prefix))
        return (name.removeprefix(self._prefix) for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)
