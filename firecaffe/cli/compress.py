"""`firecaffe compress RUN`: make a trained network small, in one file, and report the loss."""

from pathlib import Path
from typing import Any

from firecaffe.cli.arguments import Parser, show
from firecaffe.errors import NotKeptError
from firecaffe.recipe.sections import Recipe

USAGE = (
    "RUN|RECIPE.toml [--scheme best|deep_compression|FILE.toml] [--target 40x|27KB|0.1points] "
    "[--best] [--nproc-per-node N] [--out NET.fcz [--overwrite]] [--plot FILE.png|.html] [--json]"
)

NOTES = (
    "RUN is a finished run's folder, or a checkpoint or a file of weights in it. The newest "
    "undamaged checkpoint is taken, or with --best the best one.",
    "--target searches how much each layer keeps, on validation samples: the run needs "
    "data.hold_out, or a data set with validation samples. If no size reaches the target, the exit "
    "code is 16 and the nearest size is named.",
    "It prints the bytes of each tensor, the metrics of the float network and of the network "
    "decoded from the file, and the ratio: 4 bytes per weight over the bytes of the file.",
    "The rounds of training are kept in NET-rounds, and the report in NET.json. The same command "
    "continues rounds that were stopped.",
    "--plot needs matplotlib: pip install 'firecaffe[plot]'.",
)

INSTEAD = "; firecaffe compress RUN/recipe.toml --model.weights RUN takes other words"


def make_parser() -> Parser:
    parser = Parser(
        "compress",
        USAGE,
        "Make a trained network small, in one file: prune, retrain, share values, retrain, code. "
        "The network is that of a finished run, or the trained model.weights of a recipe.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the file is; the rounds lie in the same folder",
            "run.tuned": "each round has its own rate",
        },
        notes=NOTES,
    )
    add, flag = parser.add, parser.flag
    add("--scheme", "NAME", "best, deep_compression, or FILE.toml", default="best")
    add("--target", "WHAT", "40x, 27KB or 0.1points: a ratio, a size, or a loss of accuracy")
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", "N", "ranks of each training", default=1)
    add("--out", "FILE", "the file; else model.fcz in the run's folder, or RECIPE.fcz here")
    add(
        "--plot",
        "FILE",
        "draw size against error for all sizes that were tried: FILE.png or FILE.html",
    )
    parser.add_overwrite()
    flag("--json", "print one JSON object instead")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.compressed_network import compress
    from firecaffe.cli.typed_recipe import parse_recipe, parse_run
    from firecaffe.cluster.groups import check_alone
    from firecaffe.models.weights import FCZ
    from firecaffe.shrink.attempt import check_weights

    check_alone("compress")
    parser = make_parser()
    positionals = parser.read(argv).positionals
    run: Recipe | Path
    of_run: dict[str, Any] = {}
    if len(positionals) == 1 and positionals[0].endswith(".toml"):
        run, options = parse_recipe(parser, argv)
        check_weights(run, options.recipe)
        options.out = options.out or options.recipe.with_suffix(FCZ).name
    else:
        typed = parse_run(parser, argv, instead=INSTEAD)
        run, options, of_run = typed.where, typed.options, {"replace": typed.replaced}
    answer = compress(run, **parser.arguments(options), **of_run)
    show(answer, options.json)
    if not answer.is_reached:
        raise NotKeptError(answer.why_not)
