"""`firecaffe demo RECIPE.toml`: train on one worker, then on several, and compare the runs."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.cli import data as data_command
from firecaffe.cli.arguments import Parser
from firecaffe.data.published import PUBLISHED
from firecaffe.errors import DataError, NotIdenticalError

if TYPE_CHECKING:
    from firecaffe.recipe.checked_recipe import CheckedRecipe


def make_parser() -> Parser:
    from firecaffe.cli.verify import OF_TWINS

    return Parser(
        "demo",
        "RECIPE.toml [--section.word value …]",
        "Train a recipe on one worker and on one per core (2 to 4), and compare. "
        "Exit code 0 only if both end with the same weights.",
        takes_recipe=True,
        instead=OF_TWINS,
    )


MOST_WORKERS = 4


def main(argv: list[str]) -> int:
    import torch

    from firecaffe.api.compare import Compared
    from firecaffe.api.same_bits import by_workers, check_twins, train_twin
    from firecaffe.cli.arguments import show
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.runs.environment import cpu_name
    from firecaffe.runs.run_table import read_run

    recipe, _ = parse_recipe(make_parser(), argv)
    recipe = _with_data(recipe)
    counts = (1, max(2, min(MOST_WORKERS, _cores())))
    twins = by_workers(recipe, counts)
    check_twins(twins)
    with tempfile.TemporaryDirectory(prefix="firecaffe-demo-") as parent:
        runs = []
        for twin in twins:
            print(
                f"\ntraining on {twin.name} worker{'s' if twin.workers > 1 else ''} …", flush=True
            )
            runs.append(read_run(train_twin(twin, Path(parent))))
        show(Compared(runs))
        print(f"data: {runs[0].result['data']}")
        print(
            f"the digest is that of {cpu_name()} ({torch.backends.cpu.get_cpu_capability()}) with "
            f"torch {torch.__version__}; another kind of processor may come to another one, again "
            "the same on any number of workers"
        )
        if len({run.result["weights_sha256"] for run in runs}) > 1:
            raise NotIdenticalError("the runs ended with different weights; `verify` says where")
    return 0


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _with_data(recipe: CheckedRecipe) -> CheckedRecipe:
    if recipe.data.name not in PUBLISHED or recipe.data.path:
        return recipe
    try:
        data_command.get(recipe.data.name)
    except DataError as error:
        print(f"{error}\ntraining on a generated data set instead")
        return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, name="generated"))
    return recipe
