"""What [parallel] asks of the other sections and of the workers."""

from dataclasses import dataclass, replace

from firecaffe.errors import RecipeError
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import EVERY_STEP, MEASURED, SynchronyConfig

BY_ELEMENT = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop", "adam", "adamw")
"""Solvers that treat each weight by itself, so that a part is updated as the whole would be."""

BY_LAYER = (*BY_ELEMENT, "lars", "lamb")
"""Solvers that treat each parameter by itself, so that it does not matter who has the others."""


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


def possible_layouts(
    words: ParallelConfig, num_micro_batches: int, world_size: int, is_dense: bool = True
) -> list[ParallelConfig]:
    """What `auto` may be on so many workers. is_dense: whether fully connected layers alone are
    split, so that one weird trick is possible.

    Raises: RecipeError if there is nothing.
    """
    found = []
    for model in (each for each in range(1, world_size + 1) if world_size % each == 0):
        if words.parts % model:
            continue
        data = world_size // model
        same = replace(words, data=data, model=model, scheme="none")
        own = replace(same, scheme="one_weird_trick")
        if data <= num_micro_batches:
            found.append(same)
        if model > 1 and is_dense and num_micro_batches % world_size == 0:
            found.append(own)
    if not found:
        raise RecipeError(
            f"parallel.scheme auto: {world_size} workers cannot share {num_micro_batches} "
            f"micro-batches of a step and {words.parts} parts (parallel.parts) in any layout; take "
            f"at most {num_micro_batches} workers, or a number that divides the parts"
        )
    return found


def check_layout(layout: Layout, train: TrainConfig) -> None:
    """Raises: RecipeError if the workers cannot share out the micro-batches."""
    leaves = train.num_micro_batches
    if not layout.shares_samples and leaves % layout.sharers:
        raise RecipeError(
            f"parallel.scheme one_weird_trick with {leaves} micro-batches a step on "
            f"{layout.sharers} workers: they exchange one each at a time, so they must divide them"
        )


def check_beside(
    words: ParallelConfig,
    train: TrainConfig,
    solver: SolverConfig,
    exchange: ExchangeConfig,
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
        f"exchange.compressor {exchange.compressor}": bool(exchange.codec),
        "train.autocast float16, whose loss scale all would have to agree on": train.autocast
        == "float16",
        "train.compile": train.compile,
        "train.batch_norm_samples": bool(train.batch_norm_samples),
        "solver.clip_gradients, a norm over all parts": bool(solver.clip_gradients)
        and words.is_split,
        f"solver.type {solver.type}": solver.type not in (BY_LAYER if words.stages else BY_ELEMENT),
    }
    found = next((each for each, is_wrong in wrong.items() if is_wrong), "")
    if found:
        would = f"leave it out, or {word}"
        if found.startswith("solver.type"):
            would = f"{', '.join(BY_ELEMENT)} treat each weight by itself"
            if words.stages:
                would = f"{', '.join(BY_LAYER)} treat each layer by itself"
        raise RecipeError(f"{word} with {found}: not possible; {would}")
