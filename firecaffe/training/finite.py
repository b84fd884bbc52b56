"""Numbers that are not finite end a run: nothing more is saved, and all ranks say alike why."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError, NotFiniteError
from firecaffe.training.checkpoint import newest_name
from firecaffe.training.saver import Saver


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first tensor that holds an infinity or a NaN; empty where none does."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                return name
    return ""


def check_finite(world: World, tensors: Mapping[str, Tensor]) -> None:
    """By rank 0's tensors, for it saves them. Raises: NotFiniteError on all ranks."""
    broken = first_not_finite(tensors) if world.is_first else ""
    broken = gather_text(world, broken)[0]
    if broken:
        raise NotFiniteError(f"after the update {broken} is not finite")


@contextmanager
def explained(
    world: World, saver: Saver, folder: Path, rate: Callable[[], float]
) -> Iterator[None]:
    """Adds the learning rate and the last good checkpoint, once that is on the disk, to what all
    ranks raise. folder: of the checkpoints. rate: of the step under way.

    Raises: NotFiniteError.
    """
    try:
        yield
    except NotFiniteError as error:
        newest = ""
        if world.is_first:
            with suppress(CheckpointError):
                saver.finish()
            newest = newest_name(folder)
        newest = gather_text(world, newest)[0]
        good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
        told = NotFiniteError(f"{error}; the learning rate is {rate():.4g}; {good}")
        told.goes_along = not world.is_first
        raise told from None
