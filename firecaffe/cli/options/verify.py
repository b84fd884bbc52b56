"""The options of `firecaffe verify`."""

from firecaffe.cli.parser import Parser

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
