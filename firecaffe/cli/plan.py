"""`firecaffe plan RECIPE.toml --cluster NAME`: a forecast of a training's time and cost."""

from firecaffe.api.argument_checks import DEFAULT_CLUSTER
from firecaffe.cli.arguments import Parser, show
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import PRECISIONS, shipped

USAGE = (
    "RECIPE.toml | --model NAME | --compare A.toml B.toml | --runs RATES.toml "
    "[--cluster NAME|FILE.toml | --device NAME [--links N,N]] [options]"
)
ABOUT = (
    "Forecast a training before it is started: for each number of workers and each exchange the "
    "time of a step and its parts, speedup, memory, hours and cost. Starts no process."
)
NOTES = (
    "The table shows the three fastest exchanges, the advised and the recipe's, then what limits, "
    "what to change first, and the largest useful number of workers: each further one brings at "
    "least half of what one does alone. An exchange that does not keep the bits of one worker is "
    "not recommended.",
    "Memory is a range: what is counted, to that plus what libraries have used in our runs. ! "
    "means that it does not fit, ? that it may not.",
    "--cluster takes several names with commas. Without a batch, --model takes 256 or one that all "
    "--workers can share.",
    "--runs corrects the cluster by finished runs, or by a file of rates, and prints what was "
    "learned; of a file also forecasts of its other rows. Alone it plans nothing else. --write "
    "saves the corrected cluster.",
    "--ways has data, same_samples, one_weird_trick, layers and pipeline. A recipe with "
    "[parallel] has its own row in any case.",
    "--device says which network to buy, without a cluster file: a faster link is advised if it is "
    "sure to bring 5 %.",
    "--plot needs matplotlib: pip install 'firecaffe[plot]'.",
)
INSTEAD = {"exchange.algorithm": "--exchanges says which are planned"}


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser("plan", USAGE, ABOUT, takes_recipe=True, instead=INSTEAD, notes=NOTES)
    add, flag = parser.add, parser.flag
    add("--cluster", "NAME", f"a file, or one of {', '.join(shipped())}", default=DEFAULT_CLUSTER)
    add("--device", "NAME", "which link nodes of this device need, as a100, by its data sheet")
    add("--links", "N,N", "Ethernets between nodes of --device, in Gbit/s; else 1,10,25,100")
    add("--per-node", "N", "devices of a node of --device", default=1)
    add("--workers", "N,N", "numbers of workers, as 1,2,4,8; else powers of two", type=str)
    add("--exchanges", "A,B", "all, or names with commas", default="all")
    add(
        "--compressors",
        "A,B",
        "all, or names with commas, none for float32; else the recipe's",
        type=str,
    )
    flag("--modes", "also forecast the other modes of [synchrony]")
    add(
        "--ways",
        "A,B",
        "also forecast other ways to share the network: all, or names with commas",
        type=str,
    )
    flag("--draw", "draw which rank holds what, for a recipe with [parallel] or the best of --ways")
    add(
        "--fcz",
        "FILE",
        "transfer times of the weights, in this file of firecaffe compress and as float32",
    )
    add("--precision", "WORD", f"arithmetic: {', '.join(PRECISIONS)}; else the recipe's, or fp32")
    flag("--channels-last", "images with the channels innermost in memory, as train.channels_last")
    add(
        "--epochs",
        "B=E,B=E",
        "batches and the epochs to your accuracy, as 128=30,1024=36; else published ones",
    )
    add(
        "--noise-scale",
        "N",
        "gradient noise scale, as firecaffe explain says it; one batch is enough then",
        type=float,
    )
    flag("--all", "show every exchange")
    flag("--measure", "measure the recipe's step on this host, about 2 s, and plan with it")
    add(
        "--runs",
        "RUN",
        "finished runs, or a file of rates, that correct the cluster",
        nargs="+",
        default=[],
    )
    parser.add_trust()
    add("--write", "FILE", "with --runs: the file for the corrected cluster, FILE.toml")
    add("--plot", "FILE", "draw speedup and step time: FILE.png")
    add("--html", "FILE", "write a page with sliders and pictures: FILE.html")
    parser.add_overwrite()
    flag("--json", "print JSON")
    if not has_recipe:
        add = parser.add_network("instead of a recipe")
        add("--global-batch-size", "N", "batch of --model", type=int)
        add(
            "--micro-batch-size",
            "N",
            "micro-batch of --model; else the largest power of two up to 256 (on a CPU: 8) "
            "that fits",
            type=int,
        )
        add("--compare", "RECIPE", "plan two recipes side by side", nargs=2, default=[])
    return parser


ALONE = {
    "--model": "",
    "--args": "--model.args",
    "--input": "",
    "--global-batch-size": "--train.global_batch_size",
    "--micro-batch-size": "--train.micro_batch_size",
    "--compare": "",
}
"""The options that replace a recipe, each with the recipe's setting for it, if there is one."""


def main(argv: list[str]) -> None:
    from firecaffe.api.plan_answer import plan
    from firecaffe.cli.typed_recipe import parse_optional_recipe

    line = make_parser().read(argv)
    name = "".join(line.positionals[:1])
    for typed in (option.partition("=")[0] for option in line.options):
        if line.positionals and typed in ALONE:
            own = f", or say {ALONE[typed]}" if ALONE[typed] else ""
            raise RecipeError(f"{typed} has no effect beside a recipe; leave one of them out{own}")
    recipe, parser, options = parse_optional_recipe(make_parser, argv)
    if recipe is None:
        given = bool(options.model) + bool(options.compare)
        if given == 2 or not (given or options.runs):
            raise RecipeError(f"give a recipe, --model or --compare; usage: firecaffe plan {USAGE}")
    if options.all and options.json:
        raise RecipeError("--all shows every exchange in a table; --json has all of them without")
    show(plan(recipe, name=name, **parser.arguments(options)), options.json)
