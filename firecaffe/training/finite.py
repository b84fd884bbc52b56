"""The end of a run that diverges: nothing more is saved, and all ranks give the same reason."""

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
    """Add the learning rate and the last good checkpoint to a NotFiniteError or DivergedError.

    The block raises it on all ranks. The checkpoint, in `folder`, is named once it is on the disk.
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
