"""`firecaffe tune RECIPE.toml --global-batch-size N`: find the rate that keeps the accuracy."""

from firecaffe.cli.arguments import Parser, show
from firecaffe.errors import NotEnoughError, NotKeptError, RecipeError

USAGE = (
    "RECIPE.toml --global-batch-size N [--against RUN…] [--budget TRAININGS] [--seeds N] "
    "[--solvers sgd,lars] [--band POINTS] [--nproc-per-node N] [--side-by-side N] [--out FOLDER] "
    "[--write FILE [--overwrite]] [--json] [--section.word value …]"
)

NOTES = (
    "Candidates are judged on a tenth of the training samples, by the task's metric. The best "
    "three are trained again with another seed, the best of those on all training samples with "
    "--seeds new seeds, and compared with the recipe as it is or the runs of --against.",
    "The cost is printed before the first training.",
    "The recipe is written into the search's folder, or to --write; run.tuned names the search.",
    "The same command continues a search that was stopped. With more --seeds it trains only what "
    "is missing.",
    "At the recipe's own batch size, it finds the rate of the baseline.",
)


def make_parser() -> Parser:
    parser = Parser(
        "tune",
        USAGE,
        "Find the learning rate with which another batch size keeps the recipe's accuracy, and "
        "write the recipe. "
        "Exit code 0 only if the accuracy is kept, 16 if it is lost, 17 if more seeds are needed.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the search is",
            "run.tuned": "the search says it of what it finds",
        },
        notes=NOTES,
    )
    add, flag = parser.add, parser.flag
    add("--global-batch-size", "N", "the batch size to tune for", type=int)
    add("--nproc-per-node", "N", "ranks of each training", default=1)
    add("--budget", "TRAININGS", "cost of the search, in whole trainings", default=8.0)
    add("--seeds", "N", "seeds of the final comparison", default=3)
    add(
        "--band",
        "POINTS",
        "loss of the metric that is allowed; else 0.3 points of a share, 1 in 100 of others",
        type=float,
    )
    add(
        "--against",
        "RUN",
        "finished runs of the recipe, instead of training it",
        nargs="+",
        type=str,
        default=[],
    )
    add("--solvers", "A,B", "solvers to try, as sgd,lars; else the recipe's own")
    add("--side-by-side", "N", "trainings at the same time; 0: what the cores allow", default=0)
    add("--out", "FOLDER", "folder of the search; else runs/tune-…")
    add("--write", "FILE", "where the recipe is written; else in the search's folder")
    parser.add_overwrite()
    flag("--json", "print one JSON object instead")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.rate_search import tune
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.tuning.accuracy_verdict import LOST, UNDECIDED

    parser = make_parser()
    recipe, options = parse_recipe(parser, argv)
    if options.global_batch_size is None:
        raise RecipeError("--global-batch-size is missing: the batch size to tune for")
    tuned = tune(recipe, **parser.arguments(options), name=options.recipe.stem)
    show(tuned, options.json)
    verdict, path = tuned.result.verdict, tuned.path
    if verdict.verdict == LOST:
        raise NotKeptError(f"{verdict.words}; the best recipe all the same is {path}")
    if verdict.verdict == UNDECIDED:
        more = f"; --seeds {options.seeds + verdict.more} goes on with it" if verdict.more else ""
        raise NotEnoughError(f"{verdict.words}; the best recipe so far is {path}{more}")
