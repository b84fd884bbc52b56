"""`firecaffe plan RECIPE.toml --cluster NAME`: a forecast of a training's time and cost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from firecaffe.cli.arguments import Parser
from firecaffe.cli.cluster_file import DEFAULT_CLUSTER, check_cluster_file, write_cluster
from firecaffe.cli.console import make_console
from firecaffe.cli.picture import SUFFIXES, check_picture
from firecaffe.cli.typed_network import NAME, network_of, network_words
from firecaffe.compression.transfer import transfer_of
from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.plan.cluster import Cluster, load_cluster, shipped
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig

if TYPE_CHECKING:
    from firecaffe.models.config import ModelConfig
    from firecaffe.plan.forecast import Forecast
    from firecaffe.plan.of_parallel import OwnLayout
    from firecaffe.plan.workload import Workload
    from firecaffe.recipe.checked_recipe import CheckedRecipe

    Work = tuple[Workload, SynchronyConfig, ModelConfig, OwnLayout | None]
    """A workload, with [synchrony], the network and the recipe's layout, if it has one."""

USAGE = "RECIPE.toml | --model NAME | --compare A.toml B.toml [--cluster NAME|FILE.toml] [options]"
ABOUT = (
    "For each number of workers and each exchange: the time of a step and where it goes, speedup, "
    "memory, hours and cost; and what to change first. Starts no process."
)
INSTEAD = {"exchange.algorithm": "--exchanges says which are planned"}


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser(
        "plan",
        USAGE,
        ABOUT,
        takes_recipe=True,
        instead=INSTEAD,
    )
    add = parser.add
    add(
        "--cluster",
        type=str,
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help=f"a file, or one of {', '.join(shipped())}",
    )
    add("--workers", type=str, default="", metavar="N,N", help="as 1,2,4,8; else powers of two")
    add("--exchanges", type=str, default="all", metavar="A,B", help="all, or names with commas")
    add(
        "--compressors",
        type=str,
        default=None,
        metavar="A,B",
        help="all, or names with commas, none for float32; else the recipe's",
    )
    add(
        "--modes",
        action="store_true",
        help="what other modes of [synchrony] would make of the rate, too",
    )
    add(
        "--ways",
        type=str,
        default="",
        metavar="A,B",
        help="other ways than by data to share the network, too: all, or names with commas",
    )
    add(
        "--draw",
        action="store_true",
        help="draw which rank holds what: of a recipe with [parallel], or of the best of --ways",
    )
    add(
        "--fcz",
        type=str,
        default="",
        metavar="FILE",
        help="how long the weights take over the cluster's links, in this file of firecaffe "
        "compress and as float32",
    )
    add("--all", action="store_true", help="every exchange, not the three fastest and the recipe's")
    add(
        "--runs",
        nargs="+",
        default=[],
        metavar="RUN",
        help="finished runs by which the cluster is corrected",
    )
    parser.add_trust()
    add(
        "--write",
        type=str,
        default="",
        metavar="FILE",
        help="with --runs: the corrected cluster, FILE.toml",
    )
    add(
        "--plot",
        type=str,
        default="",
        metavar="FILE",
        help="draw speedup and step time: FILE.png or FILE.html",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print JSON")
    if not has_recipe:
        add = parser.add_group("instead of a recipe")
        add("--model", type=str, default="", metavar="NAME", help=NAME)
        network_words(add)
        add(
            "--global-batch-size",
            type=int,
            default=None,
            metavar="N",
            help="of the network; else one that all workers can share",
        )
        add(
            "--micro-batch-size", type=int, default=None, metavar="N", help="of the network; else 8"
        )
        add("--compare", nargs=2, default=[], metavar="RECIPE", help="two recipes, side by side")
    return parser


MOST_WORKERS = 1_000_000
MICRO_BATCH_SIZE = 8
LEAST_BATCH_SIZE = 256
"""Least global batch size of a network alone, if none is given."""


def main(argv: list[str]) -> int:
    from firecaffe.cli.plan_layouts import Parallel, ways
    from firecaffe.cli.plan_tables import Modes, as_dict, links_of, plot, show
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.plan.forecast import forecasts

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
    exchanges = _exchanges(options.exchanges)
    shared = ways(options.ways) if options.ways else []
    transfer = transfer_of(Path(options.fcz)) if options.fcz else None
    plans = []
    for name, (work, synchrony, network, own) in works.items():
        for cluster in clusters:
            workers = _workers(options.workers, work, cluster)
            try:
                rows = forecasts(work, cluster, workers, exchanges, compressors)
            except ValueError as error:
                raise RecipeError(f"--workers: {error}") from error
            is_shared = bool(shared) or own is not None
            if options.draw and not is_shared:
                raise RecipeError(
                    "--draw shows which rank holds what of a network that is shared: by a recipe "
                    "with [parallel], or --ways; found neither"
                )
            if not is_shared and not any(row.fits for row in rows):
                raise RecipeError(_does_not_fit(work, cluster, rows))
            has_modes = options.modes or synchrony.mode != EVERY_STEP
            modes = Modes(work, cluster, rows, synchrony) if has_modes else None
            parallel = None
            if is_shared:
                parallel = Parallel(network, work, cluster, rows, shared, own)
            plans.append((name, work, cluster, rows, modes, parallel))
    if options.plot:
        plot(Path(options.plot), [(f"{n} on {c.name}", rows) for n, _, c, rows, *_ in plans])
    if options.json:
        print(json.dumps([as_dict(*plan, transfer) for plan in plans], indent=2))
        return 0
    console = make_console()
    for line in learned:
        console.print(line, markup=False, soft_wrap=True)
    for plan in plans:
        show(console, *plan, is_long=options.all, is_drawn=options.draw)
    if transfer is not None:
        for line in transfer.words(links_of(clusters)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _work(recipe: CheckedRecipe) -> Work:
    from firecaffe.cli.plan_layouts import own_layout
    from firecaffe.plan.of_recipe import workload_of

    work = workload_of(recipe)
    return work, recipe.synchrony, recipe.model, own_layout(recipe, work)


def _works(options: Namespace) -> dict[str, Work]:
    from firecaffe.cli.typed_recipe import read_recipe
    from firecaffe.plan.of_recipe import workload_of_model

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
        return {path: _work(recipe) for path, recipe in recipes.items()}
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


def _exchanges(text: str) -> list[str] | None:
    """Parse --exchanges; None for all. Raises RecipeError for an unknown one."""
    if text == "all":
        return None
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = re.split(r",(?![^(]*\))", text)
    for name in names:
        if name == NATIVE:
            continue
        try:
            find_schedule(name)
        except ValueError as error:
            raise RecipeError(f"--exchanges: {error}") from None
    return names


def _compressors(typed: str | None, of_recipe: str = NO_COMPRESSOR) -> list[str]:
    from firecaffe.plan.codec_cost import PRICED

    if typed is None:
        if of_recipe not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(
                f"exchange.compressor is {of_recipe!r}, which has no forecast: what it sends is "
                f"known in training alone. Plan with --compressors, some of {_known()}"
            )
        return list(dict.fromkeys([NO_COMPRESSOR, of_recipe]))
    names = [NO_COMPRESSOR, *PRICED] if typed == "all" else typed.split(",")
    for name in names:
        if name not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(f"--compressors: no {name!r} to plan with; there are {_known()}")
    return names


def _known() -> str:
    from firecaffe.plan.codec_cost import PRICED

    return ", ".join((NO_COMPRESSOR, *PRICED))


def _workers(typed: str, work: Workload, cluster: Cluster) -> list[int]:
    if not typed:
        most = min(work.num_micro_batches, cluster.most_devices or MOST_WORKERS)
        return [1 << k for k in range(most.bit_length())]
    return _numbers(typed)


def _numbers(typed: str) -> list[int]:
    try:
        workers = sorted({int(word) for word in typed.split(",") if typed})
    except ValueError:
        raise RecipeError(
            f"--workers is {typed!r}; it must be numbers with commas between, as 1,2,4"
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
