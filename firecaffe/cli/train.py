"""`firecaffe train RECIPE.toml`: train, on N local ranks or in the world that torchrun made."""

import os
import sys
from pathlib import Path

from firecaffe.assemble import train
from firecaffe.cli.parse import parse_recipe, recipe_parser
from firecaffe.comm.launch import Hosts, launch, parse_nodes
from firecaffe.comm.world import is_launched
from firecaffe.errors import RecipeError
from firecaffe.preflight import preflight
from firecaffe.recipe import to_toml
from firecaffe.runs.fault import settle_fault
from firecaffe.training.inject import check_injections, parse_injection
from firecaffe.training.learning_rate import rate_notes

USAGE = (
    "RECIPE.toml [--nproc-per-node N] [--resume RUN] [--max-restarts K] [--section.word value …]"
)


def main(argv: list[str]) -> int:
    parser = recipe_parser("train", USAGE, "Train the network of a recipe.")
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=1, help="ranks to start on this host")
    add("--master-port", type=int, default=0, help="where they meet; 0: any")
    add("--nnodes", type=str, default="1", help="hosts: N, or MIN:MAX, which may leave and come")
    add("--rdzv-endpoint", type=str, default="", help="HOST:PORT where several hosts meet")
    add("--rdzv-id", type=str, default="", help="the name of the run, the same on all hosts")
    add("--max-restarts", type=int, default=0, help="restarts from the newest checkpoint")
    add("--resume", type=str, default="", help="a run folder or a checkpoint")
    add("--inject", action="append", default=[], help="KIND:WORD=VALUE,…; see docs/faults.md")
    add("--print_config", action="store_true", help="print the recipe and stop")
    recipe, options = parse_recipe(parser, argv)
    if options.print_config:
        for note in rate_notes(recipe.solver, recipe.train.global_batch_size, recipe.train.steps):
            print(f"# {note}")
        print(to_toml(recipe), end="")
        return 0
    resume = Path(options.resume) if options.resume else None
    injections = [parse_injection(text) for text in options.inject]
    if is_launched():
        if options.nproc_per_node not in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            raise RecipeError(
                f"--nproc-per-node is {options.nproc_per_node}, but RANK and WORLD_SIZE in the "
                "environment say that another launcher has started this rank; unset them or leave "
                "the option out"
            )
        train(recipe, resume=resume, injections=injections)
        return 0
    for name in ("nproc_per_node", "max_restarts"):
        least = 0 if name == "max_restarts" else 1
        if getattr(options, name) < least:
            word = f"--{name.replace('_', '-')}"
            raise RecipeError(f"{word} is {getattr(options, name)}; it must be at least {least}")
    min_nodes, max_nodes = parse_nodes(options.nnodes)
    hosts = Hosts(
        options.nproc_per_node,
        min_nodes,
        max_nodes,
        options.rdzv_endpoint,
        options.rdzv_id,
        options.master_port,
    )
    check_injections(injections, options.nproc_per_node * max_nodes)
    preflight(recipe, options.nproc_per_node * max_nodes, resume, is_new=hosts.is_one)
    sys.stdout.flush()
    launch(
        ["train", *argv],
        hosts,
        options.max_restarts,
        advice="a checkpoint, where the run has one, can be resumed (--resume)",
        settle=settle_fault,
    )
    return 0
