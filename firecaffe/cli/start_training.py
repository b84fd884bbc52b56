"""`firecaffe train` from its command line: checks the recipe, and starts ranks or is a rank."""

import os
import shlex
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from firecaffe.api.argument_checks import check_count
from firecaffe.cli.arguments import OF_OUR_LAUNCHER, check_launched
from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.hosts import Hosts, parse_nodes
from firecaffe.cluster.launcher import RankFailedError, launch
from firecaffe.cluster.process_settings import end_with_parent
from firecaffe.cluster.secret import SECRET, read_secret
from firecaffe.cluster.world import is_launched
from firecaffe.errors import RecipeError
from firecaffe.faults import Fault
from firecaffe.recipe.checked_recipe import Prepared
from firecaffe.recipe.sections import to_toml
from firecaffe.runs.fault import settle_fault
from firecaffe.solvers.rate_policy import rate_notes
from firecaffe.training.checks import preflight
from firecaffe.training.plugins import check_with, load_plugins
from firecaffe.training.records import say

START_OPTIONS = ("--nproc-per-node", "--resume")


def start(argv: list[str]) -> None:
    end_with_parent()
    parser = make_parser()
    recipe, options = parse_recipe(parser, argv)
    if options.print_config:
        for note in rate_notes(recipe.solver, recipe.train.global_batch_size, recipe.train.steps):
            print(f"# {note}")
        print(to_toml(recipe), end="")
        return
    if options.join:
        from firecaffe.training.build_training import join_run

        check_alone("train --join")
        _check_joins_alone(parser.read(argv).options)
        if options.secret_file:
            os.environ[SECRET] = read_secret(options.secret_file).decode()
        say(f"the run ended after step {join_run(recipe, options.join).steps}")
        return
    resume = Path(options.resume) if options.resume else None
    if is_launched(options.nnodes):
        check_launched(parser, argv, options.nproc_per_node)
        from firecaffe.training.build_training import train_prepared

        train_prepared(Prepared(recipe, resume), has_ranks_checked=False)
        return
    check_count("nproc_per_node", options.nproc_per_node, 1)
    check_count("max_restarts", options.max_restarts, 0)
    min_nodes, max_nodes = parse_nodes(options.nnodes)
    hosts = Hosts(
        options.nproc_per_node,
        min_nodes,
        max_nodes,
        options.rdzv_endpoint,
        options.rdzv_id,
        options.master_port,
        options.secret_file,
    )
    plugins = load_plugins()
    for num_hosts in range(max_nodes, min_nodes - 1, -1):
        check_with(plugins, options.nproc_per_node * num_hosts)
    may_be = min_nodes, max_nodes
    preflight(recipe, options.nproc_per_node, resume, is_new=hosts.is_one, hosts=may_be)
    sys.stdout.flush()
    folders = launch(
        ["train", *argv],
        hosts,
        options.max_restarts,
        advice="a checkpoint, where the run has one, can be resumed (--resume)",
        settle=settle_fault,
        for_ranks=Prepared(recipe, resume),
    )
    for folder in folders:
        _check_is_over(folder)
        say(f"run folder: {folder}")
        said = shlex.quote(str(folder))
        say(f"next: firecaffe explain {said} (or evaluate, predict, export, compare)")


def _check_is_over(folder: Path) -> None:
    """Raise RankFailedError if ranks have ended with code 0 in mid-run, as user code may."""
    if (folder / "result.json").is_file():
        return
    what = "ended with code 0 before the run was over"
    fault = Fault("exception", 0, socket.gethostname(), 0, "its launcher", what)
    fault = settle_fault(folder, fault, "the run ended")
    raise RankFailedError(fault.line, fault.exit_code)


def _check_joins_alone(typed: Iterable[str]) -> None:
    of_start = {*OF_OUR_LAUNCHER, *START_OPTIONS} - {"--secret-file"}
    others = {option.partition("=")[0] for option in typed} & of_start
    if others:
        raise RecipeError(
            f"{min(others)} with --join, which starts one worker for a run that is there; leave "
            "one of them out"
        )
