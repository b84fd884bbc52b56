"""The options of `firecaffe compress`."""

from firecaffe.cli.parser import Parser

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
