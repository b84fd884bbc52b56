"""The tables of `firecaffe plan --ways`: ways to share a network, with reasons per layer."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from firecaffe.cli.console import time_words
from firecaffe.cli.draw_layout import draw, draw_stages
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.network import with_outline
from firecaffe.plan.chain import Unit, chain_of
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.forecast import Forecast
from firecaffe.plan.layouts import words_of
from firecaffe.plan.of_parallel import RECIPE, OwnLayout, own_cost
from firecaffe.plan.split_plans import WAYS, Reason, SplitPlan, exchange_for, reasons, split_plans
from firecaffe.plan.split_step import SplitCost
from firecaffe.plan.step_cost import own_exchange
from firecaffe.plan.workload import Workload
from firecaffe.recipe.sections import Recipe

MOST_WORKERS = 512
"""Most workers: the search compares every pair of them."""

HEADERS = (
    "step",
    "samples/s",
    "speedup",
    "compute",
    "between",
    "exposed",
    "sends",
    "memory",
    "widest",
)


def ways(words: str) -> list[str]:
    """Parse the names of ways. Raises RecipeError for an unknown one."""
    names = [*WAYS] if words == "all" else words.split(",")
    for name in names:
        if name not in WAYS:
            raise RecipeError(f"--ways: no {name!r}; there are all, {', '.join(WAYS)}")
    return names


class Parallel:
    """The ways for each planned number of workers, and the reasons of the fastest on the most."""

    def __init__(
        self,
        config: ModelConfig,
        work: Workload,
        cluster: Cluster,
        rows: Sequence[Forecast],
        names: Sequence[str],
        own: OwnLayout | None = None,
    ) -> None:
        """Plan the ways, and a recipe's layout `own`. Raises RecipeError if none is possible."""
        self.work, self.cluster = work, cluster
        workers = sorted({row.workers for row in rows if row.workers > 1})
        if not workers or workers[-1] > MOST_WORKERS:
            found = max(row.workers for row in rows)
            raise RecipeError(f"--ways plans for 2 to {MOST_WORKERS} workers; found {found}")
        self.chain = chain_of(config, work)
        self.plans: list[SplitPlan] = []
        self.price = price = None if own is None else own_cost(config, work, own)
        for size in workers:
            exchange = own_exchange(work, cluster, size) or exchange_for(rows, size)
            if own is not None and price is not None and own.fits(size):
                self.plans.append(price.plans(cluster, size, exchange)[0])
            exchange = exchange_for(rows, size)
            self.plans += split_plans(work, cluster, self.chain, size, exchange, names)
        if not self.plans:
            what = f"--ways {','.join(names)}: {work.model} cannot be shared so"
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
            return "--draw shows layouts, and a recipe's stages; a pipeline alone has neither"
        title = f"{_way(plan)} on {plan.workers} workers"
        if plan.crossings:
            return f"{title}\n{draw_stages(plan, self.work.layers)}"
        return f"{title}\n{draw(plan, self._cost(plan))}"

    def show(self, console: Console) -> None:
        table = Table(box=SIMPLE_HEAD)
        table.add_column("workers", justify="right", no_wrap=True)
        table.add_column("way", no_wrap=True)
        for header in HEADERS:
            table.add_column(header, justify="right", no_wrap=True)
        before = 0
        for plan in self.plans:
            if before not in (0, plan.workers):
                table.add_section()
            before = plan.workers
            table.add_row(str(plan.workers), _way(plan), *_cells(plan))
        console.print(table)
        if self.best is not None:
            console.print(self._why(self.best))
        for line in self.lines():
            console.print(line, markup=False, soft_wrap=True)
        console.print()

    def _why(self, best: SplitPlan) -> Table:
        table = Table(box=SIMPLE_HEAD, title=f"{_way(best)} on {best.workers} workers, MB and ms")
        table.add_column("layer", no_wrap=True)
        table.add_column("layout", no_wrap=True)
        for header in ("|W|", "|D|", "by data", "ms", "so", "ms"):
            table.add_column(header, justify="right", no_wrap=True)
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


def own_layout(recipe: Recipe, work: Workload) -> OwnLayout | None:
    """Return a split recipe's layout, else None. Raises RecipeError that names a wrong layer."""
    words = recipe.parallel
    if words.is_whole:
        return None
    if not words.is_split:
        return OwnLayout.of(recipe, {})
    # These modules load training code, so they are imported late.
    from firecaffe.parallel.split import check_parts
    from firecaffe.training.parallel.split_network import chosen_layers

    def choose(network: nn.Module) -> dict[str, str]:
        found = chosen_layers(network, words)
        check_parts(network, found, words.num_parts)
        return found

    sizes = work.num_classes or None, work.layout.channels
    return OwnLayout.of(recipe, with_outline(recipe.model, *sizes, choose))


def _way(plan: SplitPlan) -> str:
    if plan.name == RECIPE and plan.idle:
        assert plan.words is not None
        stages = plan.words.num_stages
        each = f" of {plan.model // stages}" if plan.model > stages else ""
        return f"{RECIPE}, {stages} stages{each}, {plan.idle:.0%} not computing"
    if plan.words is not None:
        scheme = "by data" if plan.model == 1 else f"{plan.words.scheme}, {plan.model} a model"
        return f"{RECIPE}, {scheme}"
    if plan.idle:
        return f"pipeline, {plan.model} stages, {plan.idle:.0%} idle"
    return plan.name if plan.model == 1 else f"{plan.name}, {plan.model} a model"


def _cells(plan: SplitPlan) -> list[str]:
    step = plan.step
    times = (step.compute_s, step.activations_s, step.exposed_communication_s)
    sent = step.gradients_bytes / 1e6, step.activations_bytes / 1e6
    return [
        time_words(step.step_s),
        f"{plan.images_per_s:,.0f}",
        f"{plan.speedup:.3g}",
        *(time_words(time) for time in times),
        f"{sent[0]:,.1f} + {sent[1]:,.1f}",
        f"{plan.memory_bytes / 1e9:.2f} GB{'' if plan.fits else '!'}",
        f"{plan.widest:.2f}",
    ]
