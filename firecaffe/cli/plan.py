"""`firecaffe plan RECIPE.toml --cluster NAME`: what a training would take, before it is started."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.cluster_file import check_path, write_cluster
from firecaffe.cli.console import make_console
from firecaffe.cli.parse import Parser, parse_recipe, recipe_parser
from firecaffe.errors import RecipeError
from firecaffe.plan.advice import paragraph
from firecaffe.plan.cluster import Cluster, load_cluster, shipped
from firecaffe.plan.codec import PRICED
from firecaffe.plan.forecast import NO_COMPRESSOR, Forecast, fastest, forecasts, spread
from firecaffe.plan.workload import Workload
from firecaffe.planning import workload_of, workload_of_model

USAGE = "RECIPE.toml | --model NAME | --compare A.toml B.toml [--cluster NAME|FILE.toml] [options]"
MOST_WORKERS = 1_000_000
DEFAULT_CLUSTER = "cpu-host"


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        parser = recipe_parser("plan", USAGE, ABOUT)
        _add_options(parser)
        recipe, options = parse_recipe(parser, argv)
        works = {argv[0]: workload_of(recipe)}
        if options.compressors == NO_COMPRESSOR:
            options.compressors = ",".join({NO_COMPRESSOR: 0, recipe.exchange.compressor: 0})
    else:
        parser = Parser("plan", USAGE, ABOUT)
        _add_options(parser)
        add = parser.add_argument
        add("--model", type=str, default="", help="a network, instead of a recipe")
        add("--global-batch-size", type=int, default=256, help="with --model")
        add("--micro-batch-size", type=int, default=8, help="with --model")
        add("--compare", nargs=2, default=[], help="two recipes, side by side")
        options = parser.parse_args(argv)
        works = _works(options.model, options.compare, options)
    clusters = [load_cluster(name) for name in options.cluster.split(",")]
    learned: list[str] = []
    if options.runs or options.write:
        clusters[0], learned = _learn(clusters, options.runs, options.write)
    compressors = _compressors(options.compressors)
    # Not at the comma of hierarchical(INNER,OUTER).
    names = re.split(r",(?![^(]*\))", options.exchanges)
    exchanges = None if names == ["all"] else names
    plans = []
    for name, work in works.items():
        for cluster in clusters:
            workers = _workers(options.workers, work, cluster)
            try:
                rows = forecasts(work, cluster, workers, exchanges, compressors)
            except ValueError as error:
                raise RecipeError(f"--exchanges: {error}") from error
            if not any(row.fits for row in rows):
                raise RecipeError(_does_not_fit(work, cluster, rows))
            plans.append((name, work, cluster, rows))
    if options.plot:
        from firecaffe.cli.plan_plot import plot

        plot(Path(options.plot), [(f"{n} on {c.name}", rows) for n, _, c, rows in plans])
    if options.json:
        print(json.dumps([_as_dict(*plan) for plan in plans], indent=2))
        return 0
    console = make_console()
    for line in learned:
        console.print(line, markup=False, soft_wrap=True)
    for plan in plans:
        _show(console, *plan, is_long=options.all)
    return 0


ABOUT = (
    "For each number of workers and each exchange: the time of a step and where it goes, speedup, "
    "memory, hours and cost; and what to change first. Starts no process."
)


def _add_options(parser: Parser) -> None:
    add = parser.add_argument
    known = ", ".join(shipped())
    add("--cluster", type=str, default=DEFAULT_CLUSTER, help=f"a file, or one of {known}")
    add("--runs", nargs="+", default=[], help="finished runs by which the cluster is corrected")
    add("--write", type=str, default="", help="with --runs: the corrected cluster, FILE.toml")
    add("--workers", type=str, default="", help="as 1,2,4,8; default: powers of two")
    add("--exchanges", type=str, default="all", help="all, or names with commas between")
    add("--compressors", type=str, default=NO_COMPRESSOR, help="all, or names; none is float32")
    add("--all", action="store_true", help="show every exchange, not the three fastest alone")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=str, default="", help="draw speedup and step time: FILE.png or FILE.html")


def _works(model: str, compared: Sequence[str], words: Any) -> dict[str, Workload]:
    if bool(model) == bool(compared):
        raise RecipeError(f"give a recipe, --model or --compare; usage: firecaffe plan {USAGE}")
    if model:
        work = workload_of_model(model, words.global_batch_size, words.micro_batch_size)
        return {model: work}
    parser = recipe_parser("plan", USAGE, ABOUT)
    return {path: workload_of(parse_recipe(parser, [path])[0]) for path in compared}


def _learn(
    clusters: Sequence[Cluster], folders: Sequence[str], written: str
) -> tuple[Cluster, list[str]]:
    if len(clusters) > 1 or not folders:
        what = f"{len(clusters)} clusters" if folders else "--write without --runs"
        raise RecipeError(f"--runs corrects one cluster and --write keeps it; found {what}")
    if written:
        check_path(Path(written))
    from firecaffe.cli.learned import learn

    cluster, said = learn(clusters[0], [Path(folder) for folder in folders])
    said = [f"learned from {len(folders)} run{'s' * (len(folders) > 1)}:", *said]
    if written:
        write_cluster(Path(written), replace(cluster, name=Path(written).stem))
        said.append(f"wrote {written}")
    return cluster, said


def _compressors(words: str) -> list[str]:
    names = [NO_COMPRESSOR, *PRICED] if words == "all" else words.split(",")
    for name in names:
        if name not in (NO_COMPRESSOR, *PRICED):
            known = ", ".join((NO_COMPRESSOR, *PRICED))
            raise RecipeError(f"--compressors: no {name!r} to plan with; there are {known}")
    return names


def _workers(words: str, work: Workload, cluster: Cluster) -> list[int]:
    if not words:
        most = min(work.num_micro_batches, cluster.most_devices or MOST_WORKERS)
        return [1 << k for k in range(most.bit_length())]
    try:
        workers = sorted({int(word) for word in words.split(",")})
    except ValueError:
        raise RecipeError(
            f"--workers is {words!r}; it must be numbers with commas between, as 1,2,4"
        ) from None
    if workers[-1] > MOST_WORKERS:
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
    name: str, work: Workload, cluster: Cluster, rows: Sequence[Forecast]
) -> dict[str, Any]:
    return {
        "workload": name,
        "model": work.model,
        "cluster": cluster.name,
        "global_batch_size": work.global_batch_size,
        "micro_batch_size": work.micro_batch_size,
        "parameter_bytes": work.parameter_bytes,
        "assumption": work.assumption,
        "rows": [row.as_dict() for row in rows],
        "advice": paragraph(work, cluster, rows),
    }


def _show(
    console: Console,
    name: str,
    work: Workload,
    cluster: Cluster,
    rows: Sequence[Forecast],
    is_long: bool,
) -> None:
    console.print(
        f"{name}: {work.model}, batch {work.global_batch_size} in micro-batches of "
        f"{work.micro_batch_size}, {work.parameter_bytes / 1e6:,.1f} MB of gradients, on "
        f"{cluster.name} ({cluster.about})",
        markup=False,
    )
    if work.assumption:
        console.print(f"note: {work.assumption}", markup=False)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("exchange", no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for _, own in spread(rows):
        shown = own if is_long else own[:3] if own[0].workers > 1 else own[:1]
        for row in shown:
            way = row.exchange if row.compressor == NO_COMPRESSOR else row.compressor
            way = way if row.workers > 1 else "-"
            table.add_row(str(row.workers), way, *_cells(row, cluster.device.memory_bytes))
        table.add_section()
    console.print(table)
    console.print(paragraph(work, cluster, rows), markup=False, soft_wrap=True)
    best = fastest(rows)[-1]
    if best.hours is not None or best.hours_to_accuracy is not None:
        console.print(_totals(best), markup=False, soft_wrap=True)
    console.print()


HEADERS = (
    "step",
    "low - high",
    "compute",
    "exposed",
    "data",
    "update",
    "images/s",
    "speedup",
    "eff.",
    "memory",
)


def _cells(row: Forecast, device_bytes: float) -> list[str]:
    return [
        _time(row.step_s),
        _band(row.step_low_s, row.step_high_s),
        _time(row.compute_s),
        _time(row.exposed_communication_s),
        _time(row.data_s),
        _time(row.update_s),
        f"{row.images_per_s:,.0f}",
        f"{row.speedup:.3g}",
        f"{row.efficiency:.0%}",
        _memory(row, device_bytes),
    ]


def _memory(row: Forecast, device_bytes: float) -> str:
    """Its band; ! where it does not fit, ? where it may not."""
    low, high = row.memory_low_bytes, row.memory_high_bytes
    sign = "!" if not row.fits else "?" if high > device_bytes else ""
    return f"{low / 1e9:.2f} - {high / 1e9:.2f} GB{sign}"


def _totals(row: Forecast) -> str:
    """Hours, energy and money of a whole training."""
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
    """As wide as the step's: steps are counted, not forecast."""
    low, high = (hours * each / row.step_s for each in (row.step_low_s, row.step_high_s))
    return f"{_hours(hours)} ({_hours(low)} to {_hours(high)})"


def _hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    return f"{hours:.3g} hours" if hours >= 1 else f"{hours * 60:.3g} minutes"


def _band(low_s: float, high_s: float) -> str:
    scale, unit = (1.0, "s") if high_s >= 1 else (1e3, "ms")
    return f"{low_s * scale:.3g} - {high_s * scale:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"
