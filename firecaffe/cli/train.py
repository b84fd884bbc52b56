"""`firecaffe train RECIPE.toml`: train, on N local ranks or in the world that torchrun made."""

import os
import sys
from pathlib import Path

from firecaffe.assemble import preflight, train
from firecaffe.cli.parse import parse_recipe, recipe_parser
from firecaffe.comm.launch import launch
from firecaffe.comm.world import is_launched
from firecaffe.errors import RecipeError
from firecaffe.recipe import to_toml

USAGE = "RECIPE.toml [--nproc-per-node N] [--resume RUN] [--section.word value …]"


def main(argv: list[str]) -> int:
    parser = recipe_parser("train", USAGE, "Train the network of a recipe.")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="local ranks to start")
    parser.add_argument("--master-port", type=int, default=0, help="where they meet; 0: any")
    parser.add_argument("--resume", type=str, default="", help="a run folder or a checkpoint")
    parser.add_argument("--print_config", action="store_true", help="print the recipe and stop")
    recipe, options = parse_recipe(parser, argv)
    if options.print_config:
        print(to_toml(recipe), end="")
        return 0
    resume = Path(options.resume) if options.resume else None
    if is_launched():
        if options.nproc_per_node not in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            raise RecipeError(
                f"--nproc-per-node is {options.nproc_per_node}, but RANK and WORLD_SIZE in the "
                "environment say that another launcher has started this rank; unset them or leave "
                "the option out"
            )
        train(recipe, resume=resume)
        return 0
    if options.nproc_per_node < 1:
        raise RecipeError(f"--nproc-per-node is {options.nproc_per_node}; it must be at least 1")
    preflight(recipe, options.nproc_per_node, resume)
    sys.stdout.flush()
    launch(
        ["train", *argv],
        options.nproc_per_node,
        options.master_port,
        advice="a checkpoint, where the run has one, can be resumed (--resume)",
    )
    return 0
