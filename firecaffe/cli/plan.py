"""`firecaffe plan RECIPE.toml --cluster NAME`: a forecast of a training's time and cost."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.cluster_file import check_cluster_file, write_cluster
from firecaffe.cli.console import make_console, time_words
from firecaffe.cli.network import network_of
from firecaffe.cli.options.plan import USAGE, make_parser
from firecaffe.cli.parse import parse_recipe, read_recipe
from firecaffe.cli.picture import SUFFIXES, check_picture
from firecaffe.cli.plan_modes import Modes
from firecaffe.cli.plan_parallel import Parallel, own_layout, ways
from firecaffe.cli.plan_plot import plot
from firecaffe.compression.transfer import LINKS, SLOWEST, Transfer, transfer_of
from firecaffe.errors import RecipeError
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.models.config import ModelConfig
from firecaffe.plan.advice import paragraph
from firecaffe.plan.cluster import Cluster, load_cluster
from firecaffe.plan.codec_cost import PRICED
from firecaffe.plan.forecast import Forecast, by_workers, fastest, forecasts, is_own
from firecaffe.plan.of_parallel import OwnLayout
from firecaffe.plan.of_recipe import workload_of, workload_of_model
from firecaffe.plan.update_price import UPDATES
from firecaffe.plan.workload import Workload
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig

MOST_WORKERS = 1_000_000
MICRO_BATCH_SIZE = 8
LEAST_BATCH_SIZE = 256
"""Least global batch size of a network alone, if none is given."""


def main(argv: list[str]) -> int:
    if make_parser().read(argv).positionals:
        recipe, options = parse_recipe(make_parser(has_recipe=True), argv)
        works = {str(options.recipe): _work(recipe)}
        compressors = _compressors(options.compressors, recipe.exchange.compressor)
    else:
        options = make_parser().parse_args(argv)
        works = _works(options)
        compressors = _compressors(options.compressors)
    if options.all and options.json:
        raise RecipeError("--all shows every exchange in a table; --json has all of them without")
    check_picture("--plot", options.plot, options.overwrite, SUFFIXES)
    check_cluster_file(options)
    clusters = [load_cluster(name) for name in options.cluster.split(",")]
    learned: list[str] = []
    if options.runs or options.write:
        clusters[0], learned = _learn(clusters, options)
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = re.split(r",(?![^(]*\))", options.exchanges)
    exchanges = None if names == ["all"] else names
    shared = ways(options.ways) if options.ways else []
    transfer = transfer_of(Path(options.fcz)) if options.fcz else None
    plans = []
    for name, (work, words, network, own) in works.items():
        for cluster in clusters:
            workers = _workers(options.workers, work, cluster)
            try:
                rows = forecasts(work, cluster, workers, exchanges, compressors)
            except ValueError as error:
                raise RecipeError(f"--exchanges: {error}") from error
            is_shared = bool(shared) or own is not None
            if options.draw and not is_shared:
                raise RecipeError(
                    "--draw shows which rank holds what of a network that is shared: by a recipe "
                    "with [parallel], or --ways; found neither"
                )
            if not is_shared and not any(row.fits for row in rows):
                raise RecipeError(_does_not_fit(work, cluster, rows))
            has_modes = options.modes or words.mode != EVERY_STEP
            modes = Modes(work, cluster, rows, words) if has_modes else None
            parallel = None
            if is_shared:
                parallel = Parallel(network, work, cluster, rows, shared, own)
            plans.append((name, work, cluster, rows, modes, parallel))
    if options.plot:
        plot(Path(options.plot), [(f"{n} on {c.name}", rows) for n, _, c, rows, *_ in plans])
    if options.json:
        print(json.dumps([_as_dict(*plan, transfer) for plan in plans], indent=2))
        return 0
    console = make_console()
    for line in learned:
        console.print(line, markup=False, soft_wrap=True)
    for plan in plans:
        _show(console, *plan, is_long=options.all, is_drawn=options.draw)
    if transfer is not None:
        for line in transfer.words(_links(clusters)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _links(clusters: Sequence[Cluster]) -> dict[str, float]:
    """Return bits/s of the links between hosts, and of a slow one, for the transfer of a file."""
    ours = {f"{cluster.links[-1].name} ({cluster.name})": cluster.links[-1] for cluster in clusters}
    bits = {name: 8 * link.bandwidth_bytes_per_s for name, link in ours.items()}
    return {**bits, SLOWEST: LINKS[SLOWEST]}


Work = tuple[Workload, SynchronyConfig, ModelConfig, OwnLayout | None]
"""A workload, with [synchrony], the network and the recipe's layout, if it has one."""


def _work(recipe: CheckedRecipe) -> Work:
    work = workload_of(recipe)
    return work, recipe.synchrony, recipe.model, own_layout(recipe, work)


def _works(options: Namespace) -> dict[str, Work]:
    model, compared = options.model, options.compare
    if bool(model) == bool(compared):
        raise RecipeError(f"give a recipe, --model or --compare; usage: firecaffe plan {USAGE}")
    if compared:
        for word in ("global_batch_size", "micro_batch_size"):
            if getattr(options, word) is not None:
                raise RecipeError(
                    f"--{word.replace('_', '-')} goes with --model; the recipes of --compare say "
                    f"theirs (train.{word})"
                )
        recipes = {path: read_recipe(Path(path)) for path in compared}
        return {path: _work(each) for path, each in recipes.items()}
    global_batch_size, micro_batch_size = options.global_batch_size, options.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = MICRO_BATCH_SIZE
    said = ""
    if global_batch_size is None:
        least = LEAST_BATCH_SIZE // max(1, micro_batch_size)
        most = max([*_numbers(options.workers), least, 1])
        global_batch_size = most * micro_batch_size
        said = (
            f"no --global-batch-size is given: {global_batch_size} is taken, {most} micro-batches "
            f"of {micro_batch_size} for at most as many workers"
        )
    network, shape = network_of(options)
    work = workload_of_model(network, shape, global_batch_size, micro_batch_size)
    return {model: (replace(work, assumption=said), SynchronyConfig(), network, None)}


def _learn(clusters: Sequence[Cluster], options: Namespace) -> tuple[Cluster, list[str]]:
    folders, written = options.runs, options.write
    if len(clusters) > 1 or not folders:
        what = f"{len(clusters)} clusters" if folders else "--write without --runs"
        raise RecipeError(f"--runs corrects one cluster and --write keeps it; found {what}")
    from firecaffe.plan.calibrate import learn

    cluster, said = learn(clusters[0], [*map(Path, folders)], trust_code=options.trust_code)
    said = [f"learned from {len(folders)} run{'s' * (len(folders) > 1)}:", *said]
    if written:
        write_cluster(Path(written), replace(cluster, name=Path(written).stem))
        said.append(f"wrote {written}")
    return cluster, said


def _compressors(words: str | None, of_recipe: str = NO_COMPRESSOR) -> list[str]:
    if words is None:
        if of_recipe not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(
                f"exchange.compressor is {of_recipe!r}, which has no forecast: what it sends is "
                f"known in training alone. Plan with --compressors, some of {_known()}"
            )
        return list(dict.fromkeys([NO_COMPRESSOR, of_recipe]))
    names = [NO_COMPRESSOR, *PRICED] if words == "all" else words.split(",")
    for name in names:
        if name not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(f"--compressors: no {name!r} to plan with; there are {_known()}")
    return names


def _known() -> str:
    return ", ".join((NO_COMPRESSOR, *PRICED))


def _workers(words: str, work: Workload, cluster: Cluster) -> list[int]:
    if not words:
        most = min(work.num_micro_batches, cluster.most_devices or MOST_WORKERS)
        return [1 << k for k in range(most.bit_length())]
    return _numbers(words)


def _numbers(words: str) -> list[int]:
    try:
        workers = sorted({int(word) for word in words.split(",") if words})
    except ValueError:
        raise RecipeError(
            f"--workers is {words!r}; it must be numbers with commas between, as 1,2,4"
        ) from None
    if workers and workers[-1] > MOST_WORKERS:
        raise RecipeError(f"--workers is {workers[-1]}; it must be at most {MOST_WORKERS}")
    return workers


def _does_not_fit(work: Workload, cluster: Cluster, rows: Sequence[Forecast]) -> str:
    least = min(rows, key=lambda row: sum(row.memory_bytes.values())).memory_bytes
    largest = max(least, key=least.__getitem__)
    return (
        f"{work.model} in micro-batches of {work.micro_batch_size} needs "
        f"{sum(least.values()) / 1e9:.3g} GB a worker (the most for {largest}), and a device of "
        f"{cluster.name} has {cluster.device.memory_bytes / 1e9:.3g} GB; take smaller "
        "micro-batches, or another cluster"
    )


def _as_dict(
    name: str,
    work: Workload,
    cluster: Cluster,
    rows: Sequence[Forecast],
    modes: Modes | None,
    parallel: Parallel | None,
    transfer: Transfer | None,
) -> dict[str, Any]:
    return {
        "workload": name,
        "model": work.model,
        "cluster": cluster.name,
        "global_batch_size": work.global_batch_size,
        "micro_batch_size": work.micro_batch_size,
        "parameter_bytes": work.parameter_bytes,
        "assumption": "; ".join(_assumptions(work, cluster, rows, modes)),
        "rows": [row.as_dict() for row in rows],
        "advice": paragraph(work, cluster, rows),
        "modes": modes and modes.as_dicts(),
        "parallel": parallel and parallel.as_dict(),
        "transfer": transfer and transfer.as_dict(_links([cluster])),
    }


def _show(
    console: Console,
    name: str,
    work: Workload,
    cluster: Cluster,
    rows: Sequence[Forecast],
    modes: Modes | None,
    parallel: Parallel | None,
    is_long: bool,
    is_drawn: bool,
) -> None:
    console.print(
        f"{name}: {work.model}, batch {work.global_batch_size} in micro-batches of "
        f"{work.micro_batch_size}, {work.parameter_bytes / 1e6:,.1f} MB of gradients"
        f"{UPDATES[work.update_at].said}, on {cluster.name} ({cluster.about})",
        markup=False,
    )
    for assumption in _assumptions(work, cluster, rows, modes):
        console.print(f"note: {assumption}", markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("exchange", no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for _, own in by_workers(rows):
        alone = own[0].workers == 1
        first = own if is_long else own[: 1 if alone else 3]
        taken = [row for row in own if is_own(row, work, cluster)]
        for row in (row for row in own if row in first or row in taken):
            way = row.exchange if row.compressor == NO_COMPRESSOR else row.compressor
            way = "-" if alone else f"{way} (own)" if row in taken else way
            table.add_row(str(row.workers), way, *_cells(row, cluster.device.memory_bytes))
        table.add_section()
    console.print(table)
    console.print(paragraph(work, cluster, rows), markup=False, soft_wrap=True)
    best = fastest(rows)[-1]
    if best.hours is not None or best.hours_to_accuracy is not None:
        console.print(_totals(best), markup=False, soft_wrap=True)
    console.print()
    if modes is not None:
        modes.show(console)
    if parallel is not None:
        if parallel.has_own:
            console.print("By [parallel] of the recipe; above, by data:", markup=False)
        if is_drawn:
            console.print(parallel.picture(), markup=False, highlight=False, soft_wrap=True)
            console.print()
        parallel.show(console)


def _assumptions(
    work: Workload, cluster: Cluster, rows: Sequence[Forecast], modes: Modes | None
) -> list[str]:
    said = [work.assumption] if work.assumption else []
    measured = cluster.measured_devices
    if 0 < measured < max(row.workers for row in rows):
        said.append(
            f"{cluster.name} was measured on {measured} workers; more of them are forecast as if "
            "there were further hosts like these"
        )
    return said if modes is None else said + modes.notes


HEADERS = (
    "step",
    "low - high",
    "compute",
    "exposed",
    "data",
    "update",
    "samples/s",
    "speedup",
    "eff.",
    "memory",
)


def _cells(row: Forecast, device_bytes: float) -> list[str]:
    return [
        time_words(row.step_s),
        _band(row.step_low_s, row.step_high_s),
        time_words(row.compute_s),
        time_words(row.exposed_communication_s),
        time_words(row.data_s),
        time_words(row.update_s),
        f"{row.images_per_s:,.0f}",
        f"{row.speedup:.3g}",
        f"{row.efficiency:.0%}",
        _memory(row, device_bytes),
    ]


def _memory(row: Forecast, device_bytes: float) -> str:
    """Format the memory's band, with ! if it does not fit and ? if it may not."""
    low, high = row.memory_low_bytes, row.memory_high_bytes
    sign = "!" if not row.fits else "?" if high > device_bytes else ""
    return f"{low / 1e9:.2f} - {high / 1e9:.2f} GB{sign}"


def _totals(row: Forecast) -> str:
    said = []
    if row.hours is not None:
        said.append(f"the recipe's steps take {_hours_band(row, row.hours)}")
    if row.hours_to_accuracy is not None:
        said.append(
            f"to its published accuracy {row.epochs_to_accuracy:.3g} epochs, "
            f"{_hours_band(row, row.hours_to_accuracy)}"
        )
    if row.kwh is not None:
        said.append(f"{row.kwh:,.3g} kWh")
    if row.usd is not None:
        said.append(f"{row.usd:,.4g} USD")
    if row.goodput < 1:
        said.append(f"{row.goodput:.1%} of the time, after failures and checkpoints")
    who = f"{row.workers} workers" if row.workers > 1 else "one worker"
    return f"With {who}: {'; '.join(said)}."


def _hours_band(row: Forecast, hours: float) -> str:
    """Format hours with the relative band of a step: the number of steps is exact."""
    low, high = (hours * each / row.step_s for each in (row.step_low_s, row.step_high_s))
    return f"{_hours(hours)} ({_hours(low)} to {_hours(high)})"


def _hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    if hours >= 1:
        return f"{hours:.3g} hours"
    return f"{hours * 60:.3g} minutes" if hours >= 1 / 60 else f"{hours * 3600:.3g} seconds"


def _band(low_s: float, high_s: float) -> str:
    scale, unit = (1.0, "s") if high_s >= 1 else (1e3, "ms")
    return f"{low_s * scale:.3g} - {high_s * scale:.3g} {unit}"
