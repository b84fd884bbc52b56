"""A run that diverges ends: nothing more is saved, and all ranks say alike why."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from firecaffe.cluster.agree import text_of_first
from firecaffe.cluster.world import World
from firecaffe.errors import DivergedError, NotFiniteError, RunError
from firecaffe.training.checkpoint import good_name
from firecaffe.training.saver import Saver


@contextmanager
def explained(
    world: World, saver: Saver, folder: Path, rate: Callable[[int], float]
) -> Iterator[None]:
    """Adds the learning rate and the last good checkpoint, once that is on the disk, to a
    NotFiniteError or DivergedError that the block raises on all ranks. folder: of the checkpoints.
    rate: the learning rate of a step, counted from 0.

    Raises: NotFiniteError, DivergedError.
    """
    try:
        yield
    except (NotFiniteError, DivergedError) as error:
        with suppress(RunError):
            saver.wait(world)
        name = text_of_first(world, good_name(folder) if world.is_first else "")
        good = f"the last good checkpoint is {name}" if name else "there is no checkpoint"
        step = error.step or world.place.step
        told = type(error)(f"{error}; the learning rate is {rate(step - 1):.4g}; {good}")
        told.goes_along, told.step = not world.is_first, step
        raise told from None
