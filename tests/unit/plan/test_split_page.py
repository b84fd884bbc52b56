"""The tables of docs/parallel.md are those that `firecaffe plan --ways` prints."""

import re
import tomllib
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from firecaffe.cli.plan_layouts import Parallel
from firecaffe.models.config import ModelConfig
from firecaffe.models.network import with_outline
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig, check_parallel
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.forecast import forecasts
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.split_plans import WAYS
from firecaffe.training.parallel.split_network import chosen_layers

PAGE = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()


@pytest.mark.parametrize(("model", "name"), [("alexnet", "AlexNet"), ("vgg16", "VGG-16")])
def test_the_page_shows_what_the_command_does(model: str, name: str) -> None:
    config, cluster = ModelConfig(model), load_cluster("ethernet-10g")
    work = workload_of_model(config, None, 256, 8)
    found = Parallel(config, work, cluster, forecasts(work, cluster, [4]), [*WAYS])
    console = Console(width=250)
    with console.capture() as capture:
        found.show(console)
    lines = [re.split(r"\s{2,}", line.strip()) for line in capture.get().splitlines()]
    ways = [f"| {name} | {' | '.join(cells[1:])} |" for cells in lines if cells[0] == "4"]
    assert len(ways) == len(WAYS)
    assert [line for line in PAGE.splitlines() if line.startswith(f"| {name} | ")] == ways
    if model == "alexnet":
        units = {unit.name for unit in found.chain}
        layers = [f"| `{c[0]}` | {' | '.join(c[1:])} |" for c in lines if c[0] in units]
        after = PAGE.partition("## Planning a split")[2].splitlines()
        assert [line for line in after if line.startswith("| `") and " x " in line] != []
        assert [line for line in after if re.match(r"\| `(features|classifier)", line)] == layers


def test_a_recipe_takes_what_the_command_says_of_it() -> None:
    config, cluster = ModelConfig("alexnet"), load_cluster("ethernet-10g")
    work = workload_of_model(config, None, 256, 8)
    rows = forecasts(work, cluster, [4], ["ring"])
    found = Parallel(config, work, cluster, rows, ["same_samples", "one_weird_trick"])
    lines = [line for line in found.lines() if "parallel.model" in line]
    for plan, line in zip(found.plans, lines, strict=True):
        words = line.partition(": ")[2].replace(", parallel.", "\nparallel.")
        recipe = ParallelConfig(**tomllib.loads(words)["parallel"])
        check_parallel(recipe)
        assert recipe.model == plan.model
        assert (recipe.scheme == ONE_WEIRD_TRICK) == (plan.name == ONE_WEIRD_TRICK)
        assert (
            with_outline(config, None, None, partial(chosen_layers, words=recipe)) == recipe.split
        )
