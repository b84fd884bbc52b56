"""`firecaffe verify`, `replay` and `demo`: repeat trainings, and compare them bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from firecaffe.cli.arguments import Parser, show
from firecaffe.cli.import_and_pack import get_data
from firecaffe.data.published import PUBLISHED
from firecaffe.errors import DataError, NotIdenticalError
from firecaffe.recipe.sections import Recipe

VERIFY_USAGE = (
    "RECIPE.toml | RUN [--nproc-per-node 1,2 | --layouts L,L] [--steps 20] [--section.word value …]"
)
VERIFY_NOTES = (
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
IGNORED_SETTINGS = {"run.folder": FOLDER, "run.tensorboard": FOLDER, "run.digests": FOLDER}
"""Fields without effect on trainings that are only compared, each with the reason."""


def make_parser_verify() -> Parser:
    parser = Parser(
        "verify",
        VERIFY_USAGE,
        "Train the same recipe on several numbers of workers, and compare every bit. Of a run: "
        "train its first steps again on one worker, from its log of events if it has one, and "
        "compare with what it has recorded.",
        takes_recipe=True,
        instead={"train.steps": STEPS, "train.epochs": STEPS, **IGNORED_SETTINGS},
        notes=VERIFY_NOTES,
    )
    add = parser.add
    add("--nproc-per-node", "N,N", "numbers of workers", default="1,2")
    add(
        "--layouts",
        "L,L",
        "layouts instead of numbers of workers: 1, data=D, model=DxK, trick=DxK, stages=DxK, "
        "shards=D",
    )
    add("--steps", "N", "steps of each training; of a run, its first steps", default=20)
    parser.add_trust()
    return parser


def main_verify(argv: list[str]) -> None:
    from firecaffe.api.verify_and_replay import verify
    from firecaffe.cli.typed_recipe import parse_recipe, parse_run
    from firecaffe.cluster.groups import check_alone

    parser = make_parser_verify()
    line = parser.read(argv)
    recipe: Recipe | Path
    of_run: dict[str, Any] = {}
    if any(Path(path).is_dir() for path in line.positionals):
        check_alone("verify RUN")
        typed = parse_run(parser, argv)
        recipe, options, of_run = typed.where, typed.options, {"replace": typed.replaced}
    else:
        recipe, options = parse_recipe(parser, argv)
    # A run is verified on one worker; the option's default is for recipes.
    if not any(word.startswith("--nproc-per-node") for word in line.options):
        options.nproc_per_node = None
    show(verify(recipe, **parser.arguments(options), **of_run))


REPLAY_NOTES = (
    "It prints `same`, or ends with exit code 7. A damaged line of the log gives exit code 8 and "
    "the line's number.",
    "A run that did not finish is computed up to its newest checkpoint.",
    "What the run was given in Python must be named, as for `evaluate`.",
)


def make_parser_replay() -> Parser:
    parser = Parser(
        "replay",
        "RUN [--to FOLDER]",
        "Compute a run with a server again, on one worker, from its recipe and its log of events "
        "alone, and compare the digests of weights, buffers, optimizer state and losses.",
        takes_recipe=True,
        notes=REPLAY_NOTES,
    )
    parser.add("--to", "FOLDER", "save the result as a checkpoint")
    parser.add_trust()
    return parser


def main_replay(argv: list[str]) -> None:
    from firecaffe.api.verify_and_replay import replay
    from firecaffe.cli.typed_recipe import parse_run
    from firecaffe.cluster.groups import check_alone

    check_alone("replay")
    parser = make_parser_replay()
    typed = parse_run(parser, argv)
    show(replay(typed.where, **parser.arguments(typed.options), replace=typed.replaced))


if TYPE_CHECKING:
    from firecaffe.recipe.checked_recipe import CheckedRecipe


def make_parser_demo() -> Parser:
    return Parser(
        "demo",
        "RECIPE.toml [--section.word value …]",
        "Train a recipe on one worker and on one per core (2 to 4), and compare. "
        "Exit code 0 only if both end with the same weights.",
        takes_recipe=True,
        instead=IGNORED_SETTINGS,
    )


MAX_WORKERS = 4


def main_demo(argv: list[str]) -> None:
    import torch

    from firecaffe.api.comparison import Compared
    from firecaffe.api.twins import by_workers, check_twins, folder_of_twins, train_twin
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.data.decode import cores
    from firecaffe.runs.environment import cpu_name
    from firecaffe.runs.run_table import read_run

    recipe, _ = parse_recipe(make_parser_demo(), argv)
    recipe = _with_data(recipe)
    counts = (1, max(2, min(MAX_WORKERS, cores())))
    twins = by_workers(recipe, counts)
    check_twins(twins)
    with folder_of_twins("demo") as parent:
        runs = []
        for twin in twins:
            print(
                f"\ntraining on {twin.name} worker{'s' if twin.workers > 1 else ''} …", flush=True
            )
            runs.append(read_run(train_twin(twin, parent)))
        show(Compared(runs))
        print(f"data: {runs[0].result['data']}")
        print(
            f"the digest is that of {cpu_name()} ({torch.backends.cpu.get_cpu_capability()}) with "
            f"torch {torch.__version__}; another kind of processor may come to another one, again "
            "the same on any number of workers"
        )
        if len({run.result["weights_sha256"] for run in runs}) > 1:
            raise NotIdenticalError("the runs ended with different weights; `verify` says where")


def _with_data(recipe: CheckedRecipe) -> CheckedRecipe:
    if recipe.data.name not in PUBLISHED or recipe.data.path:
        return recipe
    try:
        get_data(recipe.data.name)
    except DataError as error:
        print(f"{error}\ntraining on a generated data set instead")
        return recipe.replace("data.name", "generated")
    return recipe
