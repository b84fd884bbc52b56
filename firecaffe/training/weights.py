"""Weights and buffers as pieces of a training's state: every rank holds all of them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from firecaffe.errors import UnfitCheckpointError
from firecaffe.training.stored import Stored
from firecaffe.transport.collect import HeldPart


class Weights:
    """A network's parameters, or its buffers; see `training.piece.Piece`."""

    held_by_all = True

    def __init__(
        self, named: Callable[[], Iterable[tuple[str, Tensor]]], is_result: bool = True
    ) -> None:
        """named: `model.named_parameters` or `model.named_buffers`."""
        self._named, self.is_result = named, is_result

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor.detach()) for name, tensor in self._named()}

    def load(self, stored: Stored) -> None:
        load_parts(self.parts(), stored)


@torch.no_grad()
def load_parts(parts: dict[str, HeldPart], stored: Stored) -> None:
    """Loads into each part the rows that it holds, one tensor at a time, and reads no others.

    Raises: UnfitCheckpointError if names, shapes or types are not the same.
    """
    strangers = stored.keys() - parts.keys()
    if strangers:
        name = next(name for name in stored if name in strangers)
        raise UnfitCheckpointError(
            f"checkpoint holds {stored.full_name(name)}, which the model does not have"
        )
    for name, part in parts.items():
        if name not in stored:
            raise UnfitCheckpointError(f"checkpoint lacks {name}, which the model has")
        shape, dtype = stored.shape(name), stored.dtype(name)
        if shape != part.shape or dtype != part.tensor.dtype:
            raise UnfitCheckpointError(
                f"{name} is {dtype} {shape} in the checkpoint, "
                f"{part.tensor.dtype} {part.shape} in the model"
            )
        take_rows(part, stored, name)


@torch.no_grad()
def take_rows(part: HeldPart, stored: Stored, name: str) -> None:
    """Takes what this rank holds of a stored tensor of the same shape, and reads no more."""
    for rows, tensor in part.runs:
        tensor.copy_(stored[name] if rows is None else stored.rows(name, rows, part.dim))
