"""`firecaffe tune RECIPE.toml --global-batch-size N`: find the rate that keeps the accuracy."""

from firecaffe.cli.arguments import Parser
from firecaffe.errors import NotEnoughError, NotKeptError, RecipeError

USAGE = (
    "RECIPE.toml --global-batch-size N [--against RUN…] [--budget TRAININGS] [--seeds N] "
    "[--solvers sgd,lars] [--band POINTS] [--nproc-per-node N] [--side-by-side N] [--out FOLDER] "
    "[--write FILE [--overwrite]] [--json] [--section.word value …]"
)


def make_parser() -> Parser:
    parser = Parser(
        "tune",
        USAGE,
        "Find the learning rate with which another batch size keeps the recipe's accuracy: the "
        "rules' rates, the best with several seeds, a verdict, a recipe. "
        "Exit code 0 only if the accuracy is kept, 16 if it is lost, 17 if more seeds are needed.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the search is",
            "run.tuned": "the search says it of what it finds",
        },
    )
    add = parser.add
    add("--global-batch-size", type=int, default=0, metavar="N", help="that is tuned for")
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks of each training")
    add("--budget", type=float, default=8.0, metavar="TRAININGS", help="that the search may cost")
    add("--seeds", type=int, default=3, metavar="N", help="of the best, and of the recipe as it is")
    add(
        "--band",
        type=float,
        default=None,
        metavar="POINTS",
        help="of the task's metric that may be lost; 0.3 of shares, else a hundredth of it",
    )
    add(
        "--against",
        nargs="+",
        type=str,
        default=[],
        metavar="RUN",
        help="finished runs of the recipe as it is",
    )
    add(
        "--solvers",
        type=str,
        default="",
        metavar="A,B",
        help="to try, as sgd,lars; else the recipe's own",
    )
    add(
        "--side-by-side",
        type=int,
        default=0,
        metavar="N",
        help="trainings at once; 0: what the cores allow",
    )
    add("--out", type=str, default="", metavar="FOLDER", help="of the search; else runs/tune-…")
    add(
        "--write",
        type=str,
        default="",
        metavar="FILE",
        help="the recipe that is written; else in the search's folder",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.tune import tune
    from firecaffe.cli.show import show
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.tuning.accuracy_verdict import LOST, UNDECIDED

    recipe, options = parse_recipe(make_parser(), argv)
    if not options.global_batch_size:
        raise RecipeError("--global-batch-size is missing: the batch size to tune for")
    tuned = tune(
        recipe,
        global_batch_size=options.global_batch_size,
        nproc_per_node=options.nproc_per_node,
        budget=options.budget,
        seeds=options.seeds,
        band=options.band,
        against=options.against,
        solvers=options.solvers,
        side_by_side=options.side_by_side,
        out=options.out,
        write=options.write,
        overwrite=options.overwrite,
        name=options.recipe.stem,
    )
    show(tuned, options.json)
    verdict, path = tuned.result.verdict, tuned.path
    if verdict.verdict == LOST:
        raise NotKeptError(f"{verdict.words}; the best recipe all the same is {path}")
    if verdict.verdict == UNDECIDED:
        more = f"; --seeds {options.seeds + verdict.more} goes on with it" if verdict.more else ""
        raise NotEnoughError(f"{verdict.words}; the best recipe so far is {path}{more}")
    return 0
