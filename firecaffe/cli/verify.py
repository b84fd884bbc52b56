"""`firecaffe verify RECIPE.toml | RUN`: compare the bits of trainings."""

from pathlib import Path
from typing import Any

from firecaffe.cli.arguments import Parser
from firecaffe.recipe.sections import Recipe

USAGE = (
    "RECIPE.toml | RUN [--nproc-per-node 1,2 | --layouts L,L] [--steps 20] [--section.word value …]"
)
STEPS = "--steps says how long each training is"
FOLDER = "each training has a folder of its own, which is removed"
OF_TWINS = {"run.folder": FOLDER, "run.tensorboard": FOLDER, "run.digests": FOLDER}
"""Fields without effect on trainings that are only compared, each with the reason."""


def make_parser() -> Parser:
    parser = Parser(
        "verify",
        USAGE,
        "Train the same recipe on several numbers of workers and compare all weights, buffers, "
        "optimizer state and losses after every step. Of a run: train its first steps once more on "
        "one worker, from its log of events if it has one, and compare with what it has recorded.",
        takes_recipe=True,
        instead={"train.steps": STEPS, "train.epochs": STEPS, **OF_TWINS},
    )
    add = parser.add
    add("--nproc-per-node", type=str, default="1,2", metavar="N,N", help="numbers of workers")
    add(
        "--layouts",
        type=str,
        default="",
        metavar="L,L",
        help="instead of numbers of workers, layouts of a model that is split or in stages: 1, "
        "data=D, model=DxK, trick=DxK, stages=DxK, shards=D",
    )
    add(
        "--steps",
        type=int,
        default=20,
        metavar="N",
        help="steps of each training; of a run, its first ones",
    )
    parser.add_trust()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.verify import verify
    from firecaffe.cli.show import show
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
    is_typed = any(word.startswith("--nproc-per-node") for word in line.options)
    answer = verify(
        recipe,
        nproc_per_node=options.nproc_per_node if is_typed else None,
        layouts=options.layouts,
        steps=options.steps,
        trust_code=options.trust_code,
        **of_run,
    )
    show(answer)
    return 0
