"""`firecaffe verify RECIPE.toml | RUN`: compare the bits of trainings."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.cli.arguments import Parser
from firecaffe.errors import NotIdenticalError, RecipeError
from firecaffe.runs.recorded import first_difference
from firecaffe.runs.run_folder import read_run_file

if TYPE_CHECKING:
    from firecaffe.training.verification import Verified

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
    from firecaffe.cli.twins import by_workers, check_twins, layouts_of, train_twin
    from firecaffe.cli.typed_recipe import parse_recipe

    parser = make_parser()
    if any(Path(given).is_dir() for given in parser.read(argv).positionals):
        return _verify_run(argv)
    recipe, options = parse_recipe(parser, argv)
    if options.steps < 1:
        raise RecipeError(f"--steps is {options.steps}; it must be at least 1")
    recipe = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, steps=options.steps, epochs=0)
    )
    if options.layouts:
        twins = layouts_of(options.layouts, recipe)
    else:
        twins = by_workers(recipe, _numbers(options.nproc_per_node))
    check_twins(twins)
    with tempfile.TemporaryDirectory(prefix="firecaffe-verify-") as folder:
        runs = {twin.name: train_twin(twin, Path(folder), digests=True) for twin in twins}
        return _report(runs, options.steps, "layouts" if options.layouts else "workers")


def _report(runs: dict[str, Path], steps: int, what: str) -> int:
    first, *others = runs
    for number in others:
        difference = first_difference(runs[first], runs[number])
        if difference is not None:
            doubts = dict.fromkeys(
                doubt
                for run in (runs[first], runs[number])
                for doubt in read_run_file(run, "result.json")["identity_doubts"]
            )
            why = f"; {'; '.join(doubts)}" if doubts else ""
            raise NotIdenticalError(
                f"{first} and {number} {what} differ from step {difference.step} on, "
                f"first in {difference.tensor}{why}"
            )
    results = [read_run_file(run, "result.json") for run in runs.values()]
    result = results[0]
    for doubt in dict.fromkeys(doubt for run in results for doubt in run["identity_doubts"]):
        print(f"note: {doubt}")
    counts = ", ".join(runs)
    print(
        f"identical: {counts} {what}, every tensor after each of {steps} steps; "
        f"weights {result['weights_sha256'][:12]}, state {result['state_sha256'][:12]}"
    )
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(set(numbers)) < 2 or min(numbers) < 1:
        raise RecipeError(
            f"--nproc-per-node is {text!r}; verify needs two or more numbers, as in 1,2,4"
        )
    return list(dict.fromkeys(numbers))


NEEDED = ("model", "data", "task")
"""Recipe sections that determine what is computed."""

MOST_LISTED = 4


def _verify_run(argv: list[str]) -> int:
    from firecaffe.cli.launched import check_alone
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.world import join
    from firecaffe.training.load import run_of
    from firecaffe.training.named import check_named
    from firecaffe.training.verification import verify_run

    check_alone("verify RUN")
    typed = parse_run(make_parser(), argv)
    if any(option.startswith("--nproc-per-node") for option in make_parser().read(argv).options):
        raise RecipeError(
            "--nproc-per-node: verify RUN trains on one worker, and compares with what the run has "
            "recorded; leave it out"
        )
    check_named(typed.where, typed.recipe, NEEDED)
    folder = run_of(typed.where)
    assert folder is not None  # parse_run has read its recipe
    if typed.options.steps < 1:
        raise RecipeError(f"--steps is {typed.options.steps}; it must be at least 1")
    exchange = typed.recipe.exchange
    with join(typed.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world:
        verified = verify_run(folder, typed.recipe, world, typed.options.steps)
    print(line(verified))
    return 0


def line(verified: Verified) -> str:
    steps = "step" if verified.last == 1 else "steps"
    of = f"{verified.steps:,} of {verified.last:,} {steps} once more on one worker"
    if verified.updates:
        of += f", {verified.updates:,} updates from the log of events"
    compared = [f"{verified.losses:,} losses"]
    if verified.tensors:
        compared.append(f"every tensor after {_steps(verified.tensors)}")
    if verified.weights:
        compared.append(f"the weights after {_steps(verified.weights)}")
    if verified.result:
        compared.append("the result")
    return f"same: {of}; compared {', '.join(compared)}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > MOST_LISTED:
        return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
    return f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"
