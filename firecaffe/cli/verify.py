"""`firecaffe verify RECIPE.toml | RUN`: compare the bits of trainings."""

from pathlib import Path
from typing import Any

from firecaffe.cli.arguments import Parser
from firecaffe.recipe.sections import Recipe

USAGE = (
    "RECIPE.toml | RUN [--nproc-per-node 1,2 | --layouts L,L] [--steps 20] [--section.word value …]"
)
NOTES = (
    "After every step it compares SHA-256 digests of all weights, buffers, optimizer state and "
    "losses. It prints `identical`, or the first step and the first tensor that differ, and the "
    "reason if it is known.",
    "--layouts 1,data=4,model=2x2,trick=2x2 compares a split network on one worker, on four with "
    "their own samples, and on two models of two workers each, without and with one weird trick. "
    "stages=2x2 is for parallel.stages, shards=4 for exchange.update_at = shards.",
    "A run is compared with what it has recorded of its first steps: each loss, the digests of the "
    "weights, those of all tensors if it has them (run.digests), and its checkpoints. A run with "
    "no more steps than --steps has its result compared too.",
    "It prints `same` and what was compared, or ends with exit code 7 at the first difference. A "
    "damaged checkpoint gives exit code 4, a damaged line of the log 8.",
    "What the run was given in Python must be named, as for `evaluate`.",
)
STEPS = "--steps says how long each training is"
FOLDER = "each training has its own folder, which is removed"
OF_TWINS = {"run.folder": FOLDER, "run.tensorboard": FOLDER, "run.digests": FOLDER}
"""Fields without effect on trainings that are only compared, each with the reason."""


def make_parser() -> Parser:
    parser = Parser(
        "verify",
        USAGE,
        "Train the same recipe on several numbers of workers, and compare every bit. Of a run: "
        "train its first steps again on one worker, from its log of events if it has one, and "
        "compare with what it has recorded.",
        takes_recipe=True,
        instead={"train.steps": STEPS, "train.epochs": STEPS, **OF_TWINS},
        notes=NOTES,
    )
    add = parser.add
    add("--nproc-per-node", default="1,2", metavar="N,N", help="numbers of workers")
    add(
        "--layouts",
        metavar="L,L",
        help="layouts instead of numbers of workers: 1, data=D, model=DxK, trick=DxK, stages=DxK, "
        "shards=D",
    )
    add(
        "--steps", default=20, metavar="N", help="steps of each training; of a run, its first steps"
    )
    parser.add_trust()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.same_bits import verify
    from firecaffe.cli.arguments import show
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone

    parser = make_parser()
    line = parser.read(argv)
    recipe: Recipe | Path
    of_run: dict[str, Any] = {}
    if any(Path(path).is_dir() for path in line.positionals):
        check_alone("verify RUN")
        typed = parse_run(parser, argv)
        recipe, options, of_run = typed.where, typed.options, {"replace": typed.replaced}
    else:
        recipe, options = parse_recipe(parser, argv)
    # A run is verified on one worker, whatever the default says of recipes.
    if not any(word.startswith("--nproc-per-node") for word in line.options):
        options.nproc_per_node = None
    show(verify(recipe, **parser.arguments(options), **of_run))
    return 0
