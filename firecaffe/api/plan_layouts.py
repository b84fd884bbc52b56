"""The tables of `firecaffe plan --ways`: ways to share a network, with reasons per layer."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from firecaffe.api.answer import numbers_table, time_text
from firecaffe.api.argument_checks import commas, filled
from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.models.network import with_outline
from firecaffe.parallel.cut import ROWS
from firecaffe.parallel.find_paths import PATHS
from firecaffe.planner.chain import Unit, chain_of
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import Forecast
from firecaffe.planner.layouts import LayerLayout, words_of
from firecaffe.planner.recipe_layout import RECIPE, RecipeLayout, layout_cost
from firecaffe.planner.recipe_stages import works_of
from firecaffe.planner.split_plans import (
    WAYS,
    Reason,
    SplitPlan,
    exchange_for,
    reasons,
    split_plans,
)
from firecaffe.planner.split_step import SplitCost
from firecaffe.planner.step_cost import recipe_exchange
from firecaffe.planner.workload import LayerWork, Workload
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.value_checks import digits_of

MAX_WAYS_WORKERS = 512
"""Most workers: the search compares every pair of them."""


def ways_of(ways: str | Sequence[str] | None) -> list[str]:
    if ways is None:
        return []
    words = filled("ways", commas("ways", ways))
    names = [*WAYS] if words == "all" else words.split(",")
    for name in names:
        if name not in WAYS:
            raise RecipeError(f"{option('ways')}: no {name!r}; there are all, {', '.join(WAYS)}")
    return names


class Parallel:
    """The ways for each number of workers, and the reasons of the fastest on the largest number."""

    def __init__(
        self,
        config: ModelConfig,
        work: Workload,
        cluster: Cluster,
        rows: Sequence[Forecast],
        names: Sequence[str],
        own: RecipeLayout | None = None,
    ) -> None:
        """Plan the ways, and a recipe's layout `own`. Raises RecipeError if none is possible."""
        self.work, self.cluster = work, cluster
        workers = sorted({row.workers for row in rows if row.workers > 1})
        if not workers or workers[-1] > MAX_WAYS_WORKERS:
            most = max(row.workers for row in rows)
            raise RecipeError(
                f"{option('ways')} plans for 2 to {MAX_WAYS_WORKERS} workers; found {most}"
            )
        self.chain = chain_of(config, work)
        self.plans: list[SplitPlan] = []
        self.price = price = None if own is None else layout_cost(config, work, own)
        for size in workers:
            exchange = recipe_exchange(work, cluster, size) or exchange_for(rows, size)
            if own is not None and price is not None and own.fits(size):
                self.plans.append(price.plans(cluster, size, exchange)[0])
            exchange = exchange_for(rows, size)
            self.plans += split_plans(work, cluster, self.chain, size, exchange, names)
        if not self.plans:
            what = f"{option('ways')} {','.join(names)}: {work.model} cannot be shared so"
            if own is not None and not names:
                what = f"parallel has rows of {own.words.row_size} workers, which cannot be made"
            raise RecipeError(f"{what} by {', '.join(map(str, workers))} workers")
        last = [plan for plan in self.plans if plan.workers == workers[-1] and plan.layouts]
        self.best = min(last, key=lambda plan: (not plan.fits, plan.step.step_s), default=None)
        self.reasons: list[Reason] = []
        if self.best is not None:
            self.reasons = reasons(self.best, self._cost(self.best))

    def _chain(self, plan: SplitPlan) -> Sequence[Unit]:
        return self.price.chain if self.price and plan.name == RECIPE else self.chain

    def _cost(self, plan: SplitPlan) -> SplitCost:
        return SplitCost(self.work, self.cluster, self._chain(plan), plan.workers, plan.exchange)

    @property
    def has_own(self) -> bool:
        return any(plan.name == RECIPE for plan in self.plans)

    def as_dict(self) -> dict[str, Any]:
        return {
            "plans": [self._as_dict(plan) for plan in self.plans],
            "layers": [asdict(reason) for reason in self.reasons],
        }

    def _as_dict(self, plan: SplitPlan) -> dict[str, Any]:
        chain = self._chain(plan)
        units = [unit.name for unit in chain]
        layouts = {
            unit.name: words_of(unit, layout)
            for unit, layout in zip(chain, plan.layouts, strict=False)
            if unit.works
        }
        begins = [units[at] for at in plan.cuts[:-1]]
        return {name: value for name, value in asdict(plan).items() if name != "crossings"} | {
            "step_s": plan.step.step_s,
            "layouts": layouts,
            "cuts": begins,
        }

    def _recipe(self, plan: SplitPlan) -> str:
        pairs = zip(self.chain, plan.layouts, strict=True)
        split = {
            unit.name: unit.words[layout.inputs > 1] for unit, layout in pairs if layout.parts > 1
        }
        words = ", ".join(f'"{name}" = "{word}"' for name, word in split.items())
        return (
            f"{_way(plan)} on {plan.workers}: parallel.model = {plan.model}, "
            f'parallel.scheme = "{SCHEMES[plan.name]}", parallel.split = {{ {words} }}'
        )

    def picture(self) -> str:
        """Draw the recipe's layout, or the best way. Raises RecipeError for too many ranks."""
        own = [plan for plan in self.plans if plan.name == RECIPE]
        plan = own[-1] if own else self.best
        if plan is None:
            return (
                f"{option('draw')} shows layouts, and a recipe's stages; a "
                "pipeline alone has neither"
            )
        if plan.workers > MAX_RANKS:
            raise RecipeError(
                f"{option('draw')} shows at most {MAX_RANKS} workers; found {plan.workers}"
            )
        title = f"{_way(plan)} on {plan.workers} workers"
        if plan.crossings:
            return f"{title}\n{draw_stages(plan, self.work.layers)}"
        return f"{title}\n{draw(plan, self._cost(plan))}"

    def parts(self) -> Iterator[RenderableType]:
        table = numbers_table(
            *("workers", "way", "step", "samples/s", "speedup", "compute"),
            *("between", "exposed", "sends", "memory", "widest"),
            texts=("way",),
        )
        before = 0
        for plan in self.plans:
            if before not in (0, plan.workers):
                table.add_section()
            before = plan.workers
            table.add_row(str(plan.workers), _way(plan), *_way_cells(plan))
        yield table
        if self.best is not None:
            yield self._why(self.best)
        yield from self.lines()
        yield Text()

    def _why(self, best: SplitPlan) -> Table:
        title = f"{_way(best)} on {best.workers} workers, MB and ms"
        headers = ("layer", "layout", "|W|", "|D|", "by data", "ms", "so", "ms")
        table = numbers_table(*headers, texts=headers[:2], title=title)
        for reason in self.reasons:
            table.add_row(
                reason.name,
                reason.words,
                *(f"{size / 1e6:,.2f}" for size in (reason.weights_bytes, reason.data_bytes)),
                *(f"{reason.by_data_bytes / 1e6:,.2f}", f"{reason.by_data_s * 1e3:,.2f}"),
                *(f"{reason.sent_bytes / 1e6:,.2f}", f"{reason.sent_s * 1e3:,.2f}"),
            )
        return table

    def lines(self) -> list[str]:
        exchanges = {plan.workers: plan.exchange for plan in self.plans}
        ways = ", ".join(f"{name} on {workers}" for workers, name in exchanges.items())
        said = [
            f"Gradients by {ways}, as float32. Between: exchanges of activations, for which "
            "everybody waits. Exposed: what backward does not hide of the sums of gradients. "
            "Sends: MB of each worker in a step, gradients + activations. Widest: how many times "
            "as wide all layers may be within the memory of a device."
        ]
        if self.best is not None:
            said.append(
                "|W|: its weights. |D|: its input and output, of the whole batch. By data: what "
                "each worker would send of its gradients. So: what it sends in this layout, and "
                "between this layer and the one before. Each with what it takes by itself."
            )
        said += [self._recipe(plan) for plan in self.plans if plan.name in SCHEMES]
        if any(plan.cuts for plan in self.plans):
            said.append("A pipeline's compute has its idle turns; layers are cut as a sequence.")
        if any(plan.idle and plan.name == RECIPE for plan in self.plans):
            said.append(
                "Of the recipe's stages compute is that of the one that computes longest; between "
                "is what a step takes besides, until all are through. Not computing: the share of "
                "a step for which stages do not, on average."
            )
        return said


SCHEMES = {"same_samples": "none", "one_weird_trick": "one_weird_trick"}
"""`parallel.scheme` of the ways that a recipe can have."""


def recipe_layout(recipe: Recipe, work: Workload) -> RecipeLayout | None:
    """Return a split recipe's layout, else None. Raises RecipeError that names a wrong layer."""
    parallel = recipe.parallel
    if parallel.is_whole:
        return None
    if not parallel.is_split:
        return RecipeLayout.of(recipe, {})
    # These modules load training code, so they are imported late.
    from firecaffe.parallel.layer_split import check_parts
    from firecaffe.training.parallel.split_network import chosen_layers

    def choose(network: nn.Module) -> dict[str, str]:
        layers = chosen_layers(network, parallel)
        check_parts(network, layers, parallel.num_parts)
        return layers

    return RecipeLayout.of(
        recipe, with_outline(recipe.model, work.num_classes or None, work.layout.channels, choose)
    )


def _way(plan: SplitPlan) -> str:
    if plan.name == RECIPE and plan.idle:
        assert plan.words is not None
        stages = plan.words.num_stages
        workers = f" of {plan.model // stages}" if plan.model > stages else ""
        return f"{RECIPE}, {stages} stages{workers}, {plan.idle:.0%} not computing"
    if plan.words is not None:
        scheme = "by data" if plan.model == 1 else f"{plan.words.scheme}, {plan.model} a model"
        return f"{RECIPE}, {scheme}"
    if plan.idle:
        return f"pipeline, {plan.model} stages, {plan.idle:.0%} idle"
    return plan.name if plan.model == 1 else f"{plan.name}, {plan.model} a model"


def _way_cells(plan: SplitPlan) -> list[str]:
    step = plan.step
    times = (step.compute_s, step.activations_s, step.exposed_communication_s)
    sent = step.gradients_bytes / 1e6, step.activations_bytes / 1e6
    return [
        time_text(step.step_s),
        f"{plan.images_per_s:,.0f}",
        digits_of(plan.speedup),
        *(time_text(time_s) for time_s in times),
        f"{sent[0]:,.1f} + {sent[1]:,.1f}",
        f"{plan.memory_bytes / 1e9:.2f} GB{'' if plan.fits else '!'}",
        f"{plan.widest:.2f}",
    ]


MAX_RANKS = 16

OWN, OTHERS = "█", "·"

DrawnRow = tuple[str, str, list[str], str, str]
"""Layers, the word of their split, a cell for each rank, whose samples, who sums the gradients."""

INSIDE = {ROWS: "halos and sums of gradients", PATHS: "sums of gradients"}
"""Names of the data exchanged within a layer, by the word of its split."""


def draw(plan: SplitPlan, cost: SplitCost) -> str:
    """Draw a line for each run of layers in one layout, and for each exchange between them.

    A layer's line shows the parts that each rank holds. An exchange's line shows the MB of
    activations that each worker sends in a step.
    """
    rows: list[DrawnRow | str] = []
    names: list[str] = []
    pairs = [*zip(cost.chain, plan.layouts, strict=True)]
    between = (cost.between(at, *pair) for at, pair in enumerate(pairwise(plan.layouts)))
    sent = [0.0, *(passed.sent_bytes for passed in between)]
    most = max(layout.batch for layout in plan.layouts)
    for at, (unit, layout) in enumerate(pairs):
        if sent[at]:
            rows += [
                *_row(names, pairs[at - 1][1]),
                f"↕ activations, {sent[at] / 1e6:,.1f} MB",
            ]
            names = []
        elif names and (layout != pairs[at - 1][1] or layout.parts > 1):
            rows += _row(names, pairs[at - 1][1])
            names = []
        if unit.weights:
            names.append(_called(unit.name, unit.words, layout))
        inside = cost.inside(unit, layout, most).sent_bytes
        if inside:
            what = INSIDE.get(_called("", unit.words, layout).strip(), "halos and masks")
            rows += [*_row(names, layout), f"↕ {what}, {inside / 1e6:,.1f} MB"]
            names = []
    rows += _row(names, pairs[-1][1])
    return _lines(rows, plan.workers)


def _called(name: str, words: tuple[str, str], layout: LayerLayout) -> str:
    """Return the layer's name and the word of its split, separated by a tab."""
    shared = layout.in_parts
    if shared.rows > 1:
        return f"{name}\t{ROWS}"
    word = words[1] if shared.inputs > 1 else words[0] if shared.parts > 1 else "-"
    return f"{name}\t{word}"


def _row(names: Sequence[str], layout: LayerLayout) -> Iterator[DrawnRow]:
    for word, own in groupby(names, lambda name: name.partition("\t")[2]):
        first, *rest = (called.partition("\t")[0] for called in own)
        name = f"{first} … {rest[-1]}" if rest else first
        cells = [held(layout, rank) for rank in range(layout.workers)]
        together = layout.workers // layout.batch
        samples = "own" if together == 1 else f"of {together}"
        yield name, word, cells, samples, f"{layout.batch} workers" if layout.batch > 1 else "-"


def held(layout: LayerLayout, rank: int) -> str:
    """Draw the parts of a layer's weights, with those of this rank filled."""
    place = 0
    for stride, size in (layout.output_digit, layout.input_digit, (1, layout.groups)):
        place = place * size + rank // stride % size
    own = layout.held
    parts = layout.parts * own
    if parts == 1:
        return OWN
    return OTHERS * (place * own) + OWN * own + OTHERS * (parts - (place + 1) * own)


def _lines(rows: Sequence[DrawnRow | str], workers: int) -> str:
    widest = max(len(row[2][0]) for row in rows if not isinstance(row, str))
    shown = [row if isinstance(row, str) else _whole(row, widest) for row in rows]
    ranks = [f"rank {rank}" for rank in range(workers)]
    table = [("layers", "by", *ranks, "samples", "gradients")]
    table += [row for row in shown if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = (f"  {row}" if isinstance(row, str) else _line(row, widths) for row in shown)
    return "\n".join([_line(table[0], widths), *body])


def _whole(row: DrawnRow, widest: int) -> tuple[str, ...]:
    name, word, cells, *rest = row
    return (name, word, *(cell if len(cell) > 1 else cell * widest for cell in cells), *rest)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def draw_stages(plan: SplitPlan, layers: Sequence[LayerWork]) -> str:
    assert plan.words is not None
    names = plan.words.stages
    works = works_of(layers, names)
    batch, size = plan.workers // plan.model, plan.words.num_stages
    per_stage = plan.model // size
    rows: list[DrawnRow | str] = []
    for stage, calls in enumerate(works):
        own = [rank % plan.model // per_stage for rank in range(plan.workers)]
        cells = [OWN if number == stage else OTHERS for number in own]
        called = f"{calls[0].name} … {calls[-1].name}" if len(calls) > 1 else calls[0].name
        gradients = f"{batch} workers" if batch > 1 else "-"
        rows.append((called, f"stage {stage}", cells, f"of {size}" * (size > 1), gradients))
        if stage < size - 1:
            crossing = plan.crossings[stage]
            rows.append(
                f"↕ {crossing.forward:,.0f} numbers a sample, {crossing.backward:,.0f} back"
            )
    return _lines(rows, plan.workers)
