"""`firecaffe.plan`: a forecast of a training's time, memory and cost on a cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from firecaffe.api.answer import UNCUT_WIDTH, Answer, check_picture, write_cluster
from firecaffe.api.argument_checks import (
    DEFAULT_CLUSTER,
    check_cluster_file,
    check_target,
    paths_of,
)
from firecaffe.api.plan_inputs import (
    NetworkAlone,
    PlannedTraining,
    check_exclusive,
    clusters_of,
    compressors_of,
    exchanges_of,
    learn_from,
    powers_of_two,
    training_of,
    trainings_of,
    workers_of,
)
from firecaffe.api.plan_layouts import Parallel, ways_of
from firecaffe.api.plan_links import LinkChoice
from firecaffe.api.plan_page import write_page
from firecaffe.api.plan_tables import (
    Modes,
    assumptions,
    does_not_fit,
    epochs_sentences,
    parse_epochs,
    plan_table,
    slower_codecs,
    totals,
)
from firecaffe.api.plan_tables import plot as draw_plot
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cluster.from_script import from_script
from firecaffe.compression.transfer import LINKS, SLOWEST, FileTransfer, transfer_of
from firecaffe.errors import RecipeError
from firecaffe.planner.advice import paragraph
from firecaffe.planner.cluster import Cluster, check_precision
from firecaffe.planner.forecast import Forecast, fastest, forecasts
from firecaffe.planner.update_price import UPDATES
from firecaffe.planner.workload import Workload, in_precision, precision_text
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.synchrony.config import EVERY_STEP


@dataclass(frozen=True)
class Plan:
    name: str
    work: Workload
    cluster: Cluster
    rows: Sequence[Forecast]
    modes: Modes | None
    parallel: Parallel | None

    @property
    def notes(self) -> list[str]:
        notes = assumptions(self.work, self.cluster, self.rows, self.modes)
        if self.parallel is not None and self.parallel.has_own:
            notes.append(
                "the table and its hours are of training by data; the recipe's [parallel] has "
                "another table"
            )
        return notes

    def as_dict(self, transfer: FileTransfer | None) -> dict[str, Any]:
        work = self.work
        return {
            "workload": self.name,
            "model": work.model,
            "cluster": self.cluster.name,
            "global_batch_size": work.global_batch_size,
            "micro_batch_size": work.micro_batch_size,
            "precision": work.precision,
            "channels_last": work.channels_last,
            "parameter_bytes": work.parameter_bytes,
            "assumption": "; ".join(self.notes),
            "rows": [row.as_dict() for row in self.rows],
            "advice": paragraph(work, self.cluster, self.rows),
            "modes": self.modes and self.modes.as_dicts(),
            "parallel": self.parallel and self.parallel.as_dict(),
            "transfer": transfer and transfer.as_dict(_links([self.cluster])),
        }

    def parts(self, is_long: bool, is_drawn: bool) -> Iterator[RenderableType]:
        work, cluster, rows = self.work, self.cluster, self.rows
        yield (
            f"{self.name}: {work.model}, batch {work.global_batch_size} in micro-batches of "
            f"{work.micro_batch_size} {precision_text(work)}, "
            f"{work.parameter_bytes / 1e6:,.1f} MB of gradients"
            f"{UPDATES[work.update_at].said}, on {cluster.name} ({cluster.about})"
        )
        yield Text()
        yield paragraph(work, cluster, rows)
        best = fastest(rows)[-1]
        if best.hours is not None or best.hours_to_accuracy is not None:
            yield totals(best, cluster)
        yield from epochs_sentences(work, rows)
        for line in [*self.notes, *slower_codecs(work, cluster, rows, is_long)]:
            yield f"note: {line}"
        yield plan_table(work, cluster, rows, is_long)
        yield Text()
        if self.modes is not None:
            yield from self.modes.parts()
        if self.parallel is not None:
            if self.parallel.has_own:
                yield "By [parallel] of the recipe:"
            if is_drawn:
                yield self.parallel.picture()
                yield Text()
            yield from self.parallel.parts()


@dataclass(frozen=True, repr=False)
class Planned(Answer):
    """Forecasts for each number of workers and each exchange."""

    plans: list[Plan]
    """The plans: each training on each cluster."""
    learned: list[str]
    """Lines on how finished runs or rates have corrected the cluster."""
    transfer: FileTransfer | None
    """How long the weights take over the clusters' links, if a file was given."""
    is_long: bool
    """Whether every exchange is shown."""
    is_drawn: bool
    """Whether to draw which rank holds what."""
    choices: list[LinkChoice]
    """Which of several links each training needs, if a device was given."""

    least_width = UNCUT_WIDTH  # a narrower terminal breaks the lines, and cuts no figure

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dict for each training on each cluster, with all forecasts in `rows`.

        If a device was given, there is one dict for each training, with its links' dicts in
        `plans`. For `runs` alone there is one dict, with the lines in `learned`.
        """
        if not self.plans:
            return [{"learned": list(self.learned)}]
        plans = [plan.as_dict(self.transfer) for plan in self.plans]
        if not self.choices:
            return plans
        return [
            choice.as_dict() | {"plans": [own for own in plans if own["workload"] == choice.name]}
            for choice in self.choices
        ]

    def _parts(self) -> Iterator[RenderableType]:
        yield from self.learned
        for choice in self.choices:
            yield from choice.parts()
        for plan in () if self.choices else self.plans:
            yield from plan.parts(self.is_long, self.is_drawn)
        if self.transfer is not None:
            yield from self.transfer.words(_links([plan.cluster for plan in self.plans]))


@from_script
def plan(
    recipe: Recipe | str | Path | None = None,
    *,
    cluster: str | Path | Sequence[str | Path] = DEFAULT_CLUSTER,
    device: str = "",
    links: str | float | Sequence[float] = "",
    per_node: int = 1,
    workers: int | str | Sequence[int] | None = None,
    exchanges: str | Sequence[str] = "all",
    compressors: str | Sequence[str] | None = None,
    modes: bool = False,
    ways: str | Sequence[str] | None = None,
    draw: bool = False,
    fcz: str | Path = "",
    precision: str = "",
    channels_last: bool = False,
    epochs: str | Mapping[int, float] = "",
    noise_scale: float | None = None,
    all: bool = False,
    measure: bool = False,
    runs: Sequence[str | Path] = (),
    trust_code: bool = False,
    write: str | Path = "",
    plot: str | Path = "",
    html: str | Path = "",
    overwrite: bool = False,
    model: str = "",
    args: Mapping[str, Any] | None = None,
    input: str = "",
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    compare: Sequence[Recipe | str | Path] = (),
    name: str = "",
) -> Planned:
    """Forecast a training on a cluster; start no process.

    Args:
        recipe: The training, or the path of its file. Without it: `model` or `compare`.
        cluster: A shipped cluster's name or a cluster file, or several.
        device: Instead of a cluster, a device by its data sheet, as "a100", to find its link.
        links: Ethernets of nodes of `device`, in Gbit/s; without them 1, 10, 25 and 100.
        per_node: Devices of a node of `device`.
        workers: The numbers of workers, as [1, 2, 4]; without them powers of two.
        exchanges: "all", or the names of exchanges.
        compressors: "all", or names, none for float32; without them the recipe's.
        modes: Plan other modes of synchrony, too.
        ways: Plan other ways than by data to share the network, too: "all", or names.
        draw: Draw which rank holds what, for a recipe with [parallel] or the best of `ways`.
        fcz: A file of `compress`, whose transfer over the cluster's links is planned.
        precision: The arithmetic: fp32, tf32, fp16 or bf16; without it the recipe's, or fp32.
        channels_last: Plan images with the channels innermost in memory.
        epochs: Batch sizes and the epochs to your target accuracy with each, as {128: 30, 1024: 36}
            (one, if `noise_scale` is given); else published ones, if the network has any.
        noise_scale: The gradient noise scale that `explain` reports for a run, in samples.
        all: Show every exchange, not the three fastest, the advised and the recipe's.
        measure: Measure the recipe's step on this host, and plan with it and this host's cores.
        runs: Finished runs by which the cluster is corrected; or one file of rates, FILE.toml,
            which names its cluster (planner/learn_rates.py).
        trust_code: Run code that the folders of `runs` name.
        write: With `runs`: the file for the corrected cluster, FILE.toml.
        plot: A file for a picture of speedup and step time, FILE.png.
        html: A file for a page with sliders and pictures, FILE.html.
        overwrite: Replace files that exist.
        model: A network without a recipe, by name.
        args: The arguments of `model`.
        input: The shape of its images, as 3x224x224; without it the network's own.
        global_batch_size: The batch of `model`; without it one that all workers can share.
        micro_batch_size: The micro-batch of `model`; without it the largest power of two up to 256
            that fits the device, up to 8 for a CPU.
        compare: Two recipes, side by side.
        name: The recipe's name in the answer; without it its path.

    Raises: RecipeError for a wrong argument, or a training that fits no device of the cluster.
    """
    check_picture(option("plot"), str(plot), overwrite, (".png",))
    check_target(option("html"), str(html), overwrite, (".html",))
    check_cluster_file(write, overwrite)
    check_exclusive(locals())
    clusters, learned = clusters_of(cluster, device, links, per_node), list[str]()
    if runs or write:
        clusters[0], learned = learn_from(clusters, paths_of("runs", runs), trust_code)
    check_precision(precision, clusters)
    law = parse_epochs(epochs, noise_scale)

    def chosen(work: Workload) -> Workload:
        return replace(in_precision(work, precision, channels_last), epochs_law=law)

    numbers, trainings = workers_of(workers), dict[str, PlannedTraining]()
    checked = None if recipe is None else recipe_of(recipe)
    if checked is not None:
        path = "recipe" if isinstance(recipe, Recipe) else str(recipe)
        trainings = {name or path: training_of(checked, chosen)}
    elif model or compare or not runs:  # runs alone correct the cluster
        sizes = global_batch_size, micro_batch_size
        least = min((on.device for on in clusters), key=lambda on: on.memory_bytes)
        alone = NetworkAlone(model, args or {}, input, sizes, numbers, least)
        trainings = trainings_of(alone, compare, chosen)
    names, codecs = exchanges_of(exchanges), compressors_of(compressors, checked)
    request = PlanRequest(numbers, names, codecs, modes, ways_of(ways), draw)
    if measure:
        from firecaffe.api.step_rates import measured_here  # it loads all that a training needs

        clusters, learned = measured_here(checked, clusters)
    transfer = transfer_of(Path(fcz)) if fcz else None
    plans = [request.plan(key, of, on) for key, of in trainings.items() for on in clusters]
    choices = [
        LinkChoice.of(key, of.work, [(p.cluster, p.rows) for p in plans if p.name == key], names)
        for key, of in trainings.items()
    ]
    if write:
        write_cluster(write, clusters[0])
    if plot:
        draw_plot(Path(plot), [(f"{p.name} on {p.cluster.name}", p.rows) for p in plans])
    if html:
        write_page(Path(html), choices[0], bool(device))
    learned += [f"wrote {path}" for path in (write, plot, html) if path]
    return Planned(plans, learned, transfer, all, draw, choices if device else [])


@dataclass(frozen=True)
class PlanRequest:
    workers: Sequence[int]
    """Empty for powers of two."""
    exchanges: Sequence[str] | None
    """None for all."""
    compressors: Sequence[str]
    modes: bool
    ways: Sequence[str]
    draw: bool

    def plan(self, name: str, training: PlannedTraining, cluster: Cluster) -> Plan:
        work, synchrony, own = training.work, training.synchrony, training.layout
        workers = self.workers or powers_of_two(work, cluster)
        try:
            rows = forecasts(work, cluster, workers, self.exchanges, self.compressors)
        except ValueError as error:
            if type(error) is not ValueError:  # numpy raises subclasses, an exchange a plain one
                raise
            raise RecipeError(f"{option('workers')}: {error}") from error
        is_shared = bool(self.ways) or own is not None
        if self.draw and not is_shared:
            raise RecipeError(
                f"{option('draw')} shows which rank holds what of a network that is shared: by a "
                f"recipe with [parallel], or {option('ways')}; found neither"
            )
        if not (is_shared or any(row.fits for row in rows)):
            raise RecipeError(does_not_fit(work, cluster, rows))
        has_modes = self.modes or synchrony.mode != EVERY_STEP
        modes = Modes(work, cluster, rows, synchrony) if has_modes else None
        shared = (training.network, work, cluster, rows, self.ways, own)
        return Plan(name, work, cluster, rows, modes, Parallel(*shared) if is_shared else None)


def _links(clusters: Sequence[Cluster]) -> dict[str, float]:
    """Return bits/s of the links between hosts, and of a slow one, for the transfer of a file."""
    ours = {f"{own.links[-1].name} ({own.name})": own.links[-1] for own in clusters}
    bits = {name: 8 * link.bandwidth_bytes_per_s for name, link in ours.items()}
    return {**bits, SLOWEST: LINKS[SLOWEST]}
