"""`firecaffe bench step`: time and memory of a step on this device, by micro-batch size."""

from firecaffe.cli.arguments import Parser
from firecaffe.cli.shared_options import NAME, add_cluster_file, add_network_options
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe

USAGE = (
    "RECIPE.toml | --model NAME [--sizes 1,2,4,…] [--cluster NAME|FILE] "
    "[--write FILE.toml [--overwrite]]"
)
ABOUT = (
    "Time the steps of one worker at each micro-batch size: samples/s and their share of the best, "
    "the update, memory, and the time by type of layer."
)
DEFAULT_SIZES = "1,2,4,8,16,32"
INSTEAD = {"train.micro_batch_size": "--sizes says which are measured"}


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser(
        "bench step",
        USAGE,
        ABOUT,
        takes_recipe=True,
        instead=INSTEAD,
        notes=(
            "--write puts the measurements into a cluster file for `firecaffe plan`. From three "
            "sizes on, the device's efficiency and overhead are fitted to them.",
        ),
    )
    add = parser.add
    add("--sizes", default=DEFAULT_SIZES, metavar="N,N", help="micro-batch sizes to measure")
    add("--seconds", default=2.0, metavar="S", help="least time for each size")
    add_cluster_file(parser, "the cluster file to write")
    add("--json", action="store_true", help="print JSON")
    if not has_recipe:
        add = parser.add_group("instead of a recipe")
        add("--model", metavar="NAME", help=NAME)
        add_network_options(add)
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.step_rates import bench_step
    from firecaffe.cli.arguments import show
    from firecaffe.cli.typed_recipe import parse_recipe

    recipe: Recipe | None = None
    parser = make_parser()
    if parser.read(argv).positionals:
        parser = make_parser(has_recipe=True)
        recipe, options = parse_recipe(parser, argv)
    else:
        options = parser.parse_args(argv)
        if not options.model:
            raise RecipeError(f"give a recipe or --model; usage: firecaffe bench step {USAGE}")
    show(bench_step(recipe, **parser.arguments(options)), options.json)
    return 0
