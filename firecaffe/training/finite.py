"""Numbers that are not finite end a run: nothing more is saved, and all ranks say alike why."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from firecaffe.cluster.agree import text_of_first
from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError, NotFiniteError
from firecaffe.training.checkpoint import newest_name
from firecaffe.training.saver import Saver


@contextmanager
def explained(
    world: World, saver: Saver, folder: Path, rate: Callable[[int], float]
) -> Iterator[None]:
    """Adds the learning rate and the last good checkpoint, once that is on the disk, to a
    NotFiniteError that the block raises on all ranks. folder: of the checkpoints. rate: the
    learning rate of a step, counted from 0.

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
        newest = text_of_first(world, newest)
        good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
        step = error.step or world.place.step
        told = NotFiniteError(f"{error}; the learning rate is {rate(step - 1):.4g}; {good}")
        told.goes_along, told.step = not world.is_first, step
        raise told from None
