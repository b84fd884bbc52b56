"""The layouts that a recipe's [parallel] says, one for each unit of a chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.find_paths import PATHS
from firecaffe.parallel.slide import ROWS
from firecaffe.plan.chain import Unit
from firecaffe.plan.layouts import Layout
from firecaffe.recipe.parallel import layout_of


def layouts_of_words(
    chain: Sequence[Unit], words: ParallelConfig, chosen: Mapping[str, str], workers: int
) -> list[Layout]:
    """chain: cut where rows are gathered. chosen: the layers that are split, each with its word.

    Raises: RecipeError if a layer is split in a way that the planner does not price, or so many
    workers cannot have the layout.
    """
    model, parts = words.model, words.num_parts
    batch = workers // model
    rows = layout_of(words, workers)
    whole = Layout(rows.sharers, copies=rows.ranks_of_a_sharer)
    priced = {unit.name for unit in chain if unit.words[0] or _is_of_images(unit)}
    for name, word in chosen.items():
        if name not in priced:
            raise RecipeError(
                f"parallel.split has {name} by {word}, which the planner cannot price"
            )
    layouts = [whole]
    for unit in chain:
        shared = ""
        if unit.name in chosen:
            shared = _shared(unit, chosen[unit.name])
        elif unit.halo and layouts[-1].in_parts.rows > 1:
            shared = ROWS
        elif unit.halo and _is_by_channels(layouts[-1]):
            shared = "groups"  # goes on with the parts of the layer before it
        layouts.append(_layout(shared, batch, model, parts) if shared else whole)
    return layouts[1:]


SHARED: dict[str, Callable[[int, int], Layout]] = {
    "outputs": lambda batch, size: Layout(batch, outputs=size),
    "inputs": lambda batch, size: Layout(batch, inputs=size),
    "groups": lambda batch, size: Layout(batch, groups=size),
    ROWS: lambda batch, size: Layout(batch, rows=size),
    PATHS: lambda batch, size: Layout(batch, paths=size),
}
"""What of a layer workers share."""


def _shared(unit: Unit, word: str) -> str:
    """A row of `SHARED`, for a word of a split. Raises: RecipeError."""
    if (word == ROWS and _is_of_images(unit)) or (word == PATHS and unit.paths is not None):
        return word
    if unit.group_elements > 1 and word != ROWS:
        return "groups"
    if word not in unit.words:
        raise RecipeError(
            f"parallel.split has {unit.name} by {word}, which the planner cannot price"
        )
    return "outputs" if word == unit.words[0] else "inputs"


def _layout(shared: str, batch: int, model: int, parts: int) -> Layout:
    make = SHARED[shared]
    computed = None if parts == model else make(batch, parts)
    return replace(make(batch, model), computed=computed)


def _is_by_channels(layout: Layout) -> bool:
    """Whether a layer's output is left in parts, which may all be one worker's."""
    shared = layout.in_parts
    return shared.outputs * shared.groups > 1


def _is_of_images(unit: Unit) -> bool:
    """Whether it is a layer that can be split by rows."""
    return any(each is not None and each.is_layer for each in unit.images)
