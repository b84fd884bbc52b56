"""What [parallel] asks of the other sections and of the workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import num_nodes
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.parallel.config import AUTO, ParallelConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.reference import is_reference
from firecaffe.solvers.config import BY_ELEMENT, SolverConfig
from firecaffe.synchrony.config import EVERY_STEP, LOCAL, MEASURED, SynchronyConfig
from firecaffe.words import count_of

T = TypeVar("T")


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


def rows_of(of_ranks: Sequence[T], row_size: int) -> list[Sequence[T]]:
    """What belongs to ranks, by rows of so many."""
    return [of_ranks[start : start + row_size] for start in range(0, len(of_ranks), row_size)]


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


def possible_layouts(
    words: ParallelConfig,
    num_micro_batches: int,
    world_size: int,
    is_dense: bool = True,
    level: int = 0,
) -> list[ParallelConfig]:
    """What `auto` may be on so many workers. is_dense: whether fully connected layers alone are
    split, so that one weird trick is possible. level: of the nodes that a codec encodes, which are
    shared out whole.

    Raises: RecipeError if there is nothing.
    """
    found = []
    for model in (each for each in range(1, world_size + 1) if world_size % each == 0):
        if words.parts % model:
            continue
        data = world_size // model
        same = replace(words, data=data, model=model, scheme="none")
        own = replace(same, scheme="one_weird_trick")
        if data <= num_nodes(num_micro_batches, level):
            found.append(same)
        if model > 1 and is_dense and num_micro_batches % (world_size << level) == 0:
            found.append(own)
    if not found:
        raise RecipeError(
            f"parallel.scheme auto: {world_size} workers cannot share {num_micro_batches} "
            f"micro-batches of a step and {words.parts} parts (parallel.parts) in any layout; take "
            f"at most {num_micro_batches} workers, or a number that divides the parts"
        )
    return found


def check_layout(layout: Layout, words: ParallelConfig, train: TrainConfig, level: int = 0) -> None:
    """level: of the nodes that are shared out whole.

    Raises: RecipeError if the workers cannot share out the micro-batches.
    """
    leaves = train.num_micro_batches
    said = count_of(leaves, "micro-batch", "micro-batches")
    is_apart = not layout.shares_samples and layout.sharers > 1
    if is_apart and level and leaves % (layout.sharers << level):
        raise RecipeError(
            f"parallel.scheme one_weird_trick with {said} a step on "
            f"{layout.sharers} workers, of which {1 << level} are encoded together "
            f"(exchange.compressor_level {level}): each worker must have equally many of these"
        )
    if not layout.shares_samples and leaves % layout.sharers:
        raise RecipeError(
            f"parallel.scheme one_weird_trick with {said} a step on "
            f"{layout.sharers} workers: they exchange one each at a time, so they must divide them"
        )
    each, updates = leaves // layout.sharers, words.head_updates
    if updates > 1 and each % updates:
        raise RecipeError(
            f"parallel.head_updates is {updates} with {said} a step on "
            f"{layout.sharers} workers, {each} each; each worker must have a multiple of {updates}"
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
    word = words.word
    is_local = synchrony.mode == LOCAL
    wrong = {
        f"synchrony.mode {synchrony.mode}": synchrony.mode not in (EVERY_STEP, LOCAL),
        "synchrony.mode local and scheme auto, which may be one_weird_trick": is_local
        and words.scheme == AUTO,
        "synchrony.mode local and scheme one_weird_trick, whose workers of a row have samples of "
        "their own, while a replica is a whole row's": is_local and not words.shares_samples,
        "synchrony.mode local and solver.clip_gradients, a norm over all parts": is_local
        and bool(solver.clip_gradients)
        and words.is_split,
        f"synchrony.mode local and solver.type {solver.type}": is_local
        and words.is_split
        and solver.type not in BY_ELEMENT,
        "train.compile, whose code of a part need not round as that of the whole": train.compile,
        f"solver.type {solver.type}": is_reference(solver.type),
    }
    found = next((each for each, is_wrong in wrong.items() if is_wrong), "")
    if found:
        would = f"leave it out, or {word}"
        if found.startswith("solver.type"):
            would = "an optimizer of your own may need what other workers have; take one by name"
        raise RecipeError(f"{word} with {found}: not possible; {would}")


def check_head_updates(
    words: ParallelConfig,
    train: TrainConfig,
    solver: SolverConfig,
    exchange: ExchangeConfig,
    synchrony: SynchronyConfig,
) -> None:
    """Raises: RecipeError if another section's word cannot be had with several updates of the split
    layers in a step.
    """
    if words.head_updates == 1:
        return
    wrong = {
        f"synchrony.mode {synchrony.mode}, in which a step is no sum": synchrony.mode != EVERY_STEP,
        "synchrony.shares measured, by which workers have parts of an update of any size": (
            synchrony.shares == MEASURED
        ),
        f"exchange.compressor {exchange.compressor}, which knows one gradient a step": bool(
            exchange.codec
        ),
        "train.autocast float16, whose loss scale is that of a whole step": train.autocast
        == "float16",
        "solver.clip_gradients, a norm over updates of different layers": bool(
            solver.clip_gradients
        ),
    }
    for found, is_wrong in wrong.items():
        if is_wrong:
            raise RecipeError(
                f"parallel.head_updates {words.head_updates} with {found}: not possible; leave it "
                "out, or parallel.head_updates"
            )
