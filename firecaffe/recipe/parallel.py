"""What [parallel] asks of the other sections and of the workers."""

from dataclasses import dataclass

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.reference import is_reference
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import EVERY_STEP, MEASURED, SynchronyConfig


@dataclass(frozen=True)
class Layout:
    """Workers in rows and columns: rank d · model + k holds part k of model d, or its stage k."""

    data: int
    model: int
    shares_samples: bool
    """Whether the workers of a row compute the same samples."""

    @property
    def rows(self) -> list[range]:
        """The ranks that hold one model together."""
        return [range(d * self.model, (d + 1) * self.model) for d in range(self.data)]

    @property
    def columns(self) -> list[range]:
        """The ranks that hold the same parts, or the same stage."""
        return [range(k, self.data * self.model, self.model) for k in range(self.model)]

    @property
    def sharers(self) -> int:
        """How many share out the micro-batches of a step."""
        return self.data if self.shares_samples else self.data * self.model


def layout_of(words: ParallelConfig, world_size: int) -> Layout:
    """The layout of so many workers. Raises: RecipeError if there is none."""
    size = words.row_size
    data = words.data or world_size // size
    if data * size != world_size:
        said = f"parallel.data {words.data} and " if words.data else ""
        said += f"{size} stages" if words.stages else f"parallel.model {size}"
        needed = f"{words.data * size}" if words.data else f"a multiple of {size}"
        raise RecipeError(f"{world_size} workers with {said}: there must be {needed}")
    return Layout(data, size, words.shares_samples)


def check_layout(layout: Layout, train: TrainConfig, level: int = 0) -> None:
    """Raises: RecipeError if the workers cannot share out the micro-batches. level: of the nodes
    that are shared out whole.
    """
    leaves = train.num_micro_batches
    is_apart = not layout.shares_samples and layout.sharers > 1
    if is_apart and level and leaves % (layout.sharers << level):
        raise RecipeError(
            f"parallel.scheme one_weird_trick with {leaves} micro-batches a step on "
            f"{layout.sharers} workers, of which {1 << level} are encoded together "
            f"(exchange.compressor_level {level}): each worker must have equally many of these"
        )
    if not layout.shares_samples and leaves % layout.sharers:
        raise RecipeError(
            f"parallel.scheme one_weird_trick with {leaves} micro-batches a step on "
            f"{layout.sharers} workers: they exchange one each at a time, so they must divide them"
        )


def check_beside(
    words: ParallelConfig,
    train: TrainConfig,
    solver: SolverConfig,
    synchrony: SynchronyConfig,
) -> None:
    """Raises: RecipeError if another section's word cannot be had with layers that are split, or
    with stages.
    """
    if not words.is_split and not words.stages:
        return
    word = "parallel.stages" if words.stages else "parallel.split"
    wrong = {
        f"synchrony.mode {synchrony.mode}": synchrony.mode != EVERY_STEP,
        "synchrony.shares measured": synchrony.shares == MEASURED,
        "train.compile, whose code of a part need not round as that of the whole": train.compile,
        f"solver.type {solver.type}": is_reference(solver.type),
    }
    found = next((each for each, is_wrong in wrong.items() if is_wrong), "")
    if found:
        would = f"leave it out, or {word}"
        if found.startswith("solver.type"):
            would = "an optimizer of your own may need what other workers have; take one by name"
        raise RecipeError(f"{word} with {found}: not possible; {would}")
