"""`firecaffe compress RUN`: make a trained network small, in one file, and report the loss."""

from pathlib import Path
from typing import Any

from firecaffe.cli.arguments import Parser
from firecaffe.errors import NotKeptError
from firecaffe.recipe.sections import Recipe

USAGE = (
    "RUN|RECIPE.toml [--scheme best|deep_compression|FILE.toml] [--target 40x|27KB|0.1points] "
    "[--best] [--nproc-per-node N] [--out NET.fcz [--overwrite]] [--plot FILE.png|.html] [--json]"
)


def make_parser() -> Parser:
    parser = Parser(
        "compress",
        USAGE,
        "Make a trained network small: prune, retrain, share values, retrain, code; one file, "
        "whose accuracy is that of the network decoded from it. Of a finished run, or of a recipe "
        "whose model.weights are trained. Exit code 16 if no size that was tried reaches the "
        "target.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the file is, and the rounds lie beside it",
            "run.tuned": "rounds have rates of their own",
        },
    )
    add = parser.add
    add("--scheme", type=str, default="best", metavar="NAME", help="how; a name, or FILE.toml")
    add(
        "--target",
        type=str,
        default="",
        metavar="WHAT",
        help="40x, 27KB or 0.1points: search what each layer keeps, by held-out samples",
    )
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks of each training")
    add(
        "--out",
        type=str,
        default="",
        metavar="FILE",
        help="the file; else model.fcz in the run's folder, or RECIPE.fcz here",
    )
    add(
        "--plot",
        type=str,
        default="",
        metavar="FILE",
        help="draw size against error of all sizes that were tried: FILE.png or FILE.html",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.compress import SUFFIX, compress
    from firecaffe.cli.show import show
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone
    from firecaffe.shrink.start_network import check_weights

    check_alone("compress")
    parser = make_parser()
    positionals = parser.read(argv).positionals
    run: Recipe | Path
    of_run: dict[str, Any] = {}
    if len(positionals) == 1 and positionals[0].endswith(".toml"):
        run, options = parse_recipe(parser, argv)
        check_weights(run, options.recipe)
        out = options.out or options.recipe.with_suffix(SUFFIX).name
    else:
        typed = parse_run(parser, argv)
        run, options, of_run = typed.where, typed.options, {"replace": typed.replaced}
        out = options.out
    answer = compress(
        run,
        scheme=options.scheme,
        target=options.target,
        best=options.best,
        trust_code=options.trust_code,
        nproc_per_node=options.nproc_per_node,
        out=out,
        plot=options.plot,
        overwrite=options.overwrite,
        **of_run,
    )
    show(answer, options.json)
    if not answer.is_reached:
        raise NotKeptError(answer.why_not)
    return 0
