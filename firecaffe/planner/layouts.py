"""Layouts: how workers share a layer's samples, outputs and inputs.

A rank is read as a mixed-radix number. Its first digit is the batch, so neighboring ranks hold one
model; outputs and inputs follow in either order. A layout assigns digits to dimensions, and a
`Form` describes the box of a tensor (samples by channels) that each worker then has.

Source: configurations of Jia et al. 2019 (FlexFlow) and Elango 2021 (PaSE), without spatial splits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.cut import ROWS
from firecaffe.parallel.find_paths import PATHS
from firecaffe.planner.chain import Unit
from firecaffe.recipe.worker_numbers import layout_of

Digit = tuple[int, int]
"""(stride, size): worker r has the digit r // stride % size."""


@dataclass(frozen=True)
class Form:
    """Each worker's box of a batch's tensor, by the digits that cut its samples and its channels.

    The first digit cuts the largest pieces. Workers that differ only in other digits share a box.
    """

    samples: tuple[Digit, ...] = ()
    channels: tuple[Digit, ...] = ()

    def finer(self, digit: Digit, of_samples: bool) -> "Form":
        if of_samples:
            return Form(_digits(*self.samples, digit), self.channels)
        return Form(self.samples, _digits(*self.channels, digit))


@dataclass(frozen=True)
class LayerLayout:
    """Numbers of workers that share each dimension of a layer; the product is all workers."""

    batch: int = 1
    outputs: int = 1
    """Workers that share the outputs (neurons, filters) of a layer for the same samples."""
    inputs: int = 1
    """Workers that each use some of the inputs (channels); their sums are added up."""
    groups: int = 1
    """Workers that share the groups of a layer, with both their inputs and their outputs."""
    copies: int = 1
    rows: int = 1
    """Workers that share the rows of images, each with the whole weights."""
    paths: int = 1
    inputs_inside: bool = False
    """Whether neighboring ranks share the inputs, and not the outputs."""
    computed: "LayerLayout | None" = None
    """The layout of the parts that are computed one by one, if a worker has several parts."""

    @property
    def workers(self) -> int:
        return self.model * self.batch

    @cached_property
    def model(self) -> int:
        """Workers that hold one model together."""
        return self.parts * self.copies * self.rows

    @property
    def parts(self) -> int:
        """Workers that share the layer's weights."""
        return self.outputs * self.inputs * self.groups * self.paths

    @property
    def products(self) -> int:
        """Parts that a worker computes one by one; all paths of a worker count as one."""
        if self.computed is None or self.computed.paths > 1:
            return 1
        return self.computed.parts * self.computed.rows // (self.parts * self.rows)

    @property
    def held(self) -> int:
        return 1 if self.computed is None else self.computed.parts // self.parts

    @property
    def in_parts(self) -> "LayerLayout":
        """The layout with one worker for each part."""
        return self.computed or self

    @cached_property
    def output_digit(self) -> Digit:
        return (self.inputs if self.inputs_inside else 1, self.outputs * self.paths)

    @cached_property
    def input_digit(self) -> Digit:
        return (1 if self.inputs_inside else self.outputs, self.inputs)

    @cached_property
    def takes(self) -> Form:
        """The input that each worker needs. Rows are treated as channels: see `through`."""
        return Form(self._samples, _digits(self.input_digit, (1, self.groups * self.rows)))

    @cached_property
    def makes(self) -> Form:
        """The output that each worker makes: one of `inputs` addends."""
        return Form(self._samples, _digits(self.output_digit, (1, self.groups * self.rows)))

    @cached_property
    def _samples(self) -> tuple[Digit, ...]:
        return _digits((self.model, self.batch))


def _digits(*digits: Digit) -> tuple[Digit, ...]:
    merged: list[Digit] = []
    for stride, size in digits:
        if size > 1 and merged and merged[-1][0] == stride * size:
            merged[-1] = stride, size * merged[-1][1]
        elif size > 1:
            merged.append((stride, size))
    return tuple(merged)


def through(before: LayerLayout, after: LayerLayout) -> list[LayerLayout]:
    """List a tensor's layouts between two layers; changes of rows, paths or cuts make it whole."""
    is_alike = before.rows == after.rows > 1
    is_cut_anew = before.rows * before.paths > 1 and after.inputs * after.groups > 1
    if is_cut_anew or (after.rows > 1 and not is_alike):
        return [before, LayerLayout(before.batch, copies=before.model), after]
    return [before, after]


def layouts_of(workers: int, micro_batches: int) -> list[LayerLayout]:
    """List all layouts of this many workers; at most `micro_batches` of them share the batch."""
    layouts = []
    for batch in _divisors(workers):
        model = workers // batch
        if batch > micro_batches:
            continue
        for outputs in _divisors(model):
            inputs = model // outputs
            layouts.append(LayerLayout(batch, outputs, inputs))
            if outputs > 1 and inputs > 1:
                layouts.append(LayerLayout(batch, outputs, inputs, inputs_inside=True))
        if model > 1:
            layouts += [LayerLayout(batch, groups=model), LayerLayout(batch, copies=model)]
    return layouts


def allows(unit: Unit, layout: LayerLayout) -> bool:
    return (
        layout.outputs <= unit.output_elements
        and layout.inputs <= unit.input_elements
        and layout.groups <= unit.group_elements
    )


def words_of(unit: Unit, layout: LayerLayout) -> str:
    by_outputs, by_inputs = unit.words
    shares = (
        ("batch", layout.batch),
        (by_outputs or "outputs", layout.outputs * layout.groups),
        (by_inputs or "inputs", layout.inputs),
        ("rows", layout.rows),
        ("paths", layout.paths),
        ("copies", layout.copies),
    )
    return " x ".join(f"{word} {size}" for word, size in shares if size > 1) or "one worker"


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def layouts_of_recipe(
    chain: Sequence[Unit], words: ParallelConfig, chosen: Mapping[str, str], workers: int
) -> list[LayerLayout]:
    """Return the layout of each unit, by a recipe's [parallel].

    chain: from `cut_where_gathered`. chosen: the split layers, each with its word. Raises:
    RecipeError if a split cannot be priced, or this many workers cannot have the layout.
    """
    model, parts = words.model, words.num_parts
    batch = workers // model
    rows = layout_of(words, workers)
    whole = LayerLayout(rows.sharers, copies=rows.ranks_of_a_sharer)
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
            shared = "groups"  # the norm works on the parts of the layer before it
        layouts.append(_layout(shared, batch, model, parts) if shared else whole)
    return layouts[1:]


def _shared(unit: Unit, word: str) -> str:
    """Return which dimension of a `LayerLayout` a recipe's word shares out."""
    if (word == ROWS and _is_of_images(unit)) or (word == PATHS and unit.paths is not None):
        return word
    if unit.group_elements > 1 and word != ROWS:
        return "groups"
    if word not in unit.words:
        raise RecipeError(
            f"parallel.split has {unit.name} by {word}, which the planner cannot price"
        )
    return "outputs" if word == unit.words[0] else "inputs"


def _layout(shared: str, batch: int, model: int, parts: int) -> LayerLayout:
    def among(size: int) -> LayerLayout:
        sizes: dict[str, Any] = {shared: size}
        return LayerLayout(batch, **sizes)

    return replace(among(model), computed=None if parts == model else among(parts))


def _is_by_channels(layout: LayerLayout) -> bool:
    shared = layout.in_parts
    return shared.outputs * shared.groups > 1


def _is_of_images(unit: Unit) -> bool:
    return any(image is not None and image.is_layer for image in unit.images)
