"""`firecaffe evaluate RUN`: a run's network on its test data, or on other data."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from firecaffe.cli.arguments import Parser
from firecaffe.cluster.handover import handed
from firecaffe.errors import RecipeError
from firecaffe.files import finite

if TYPE_CHECKING:
    from firecaffe.cli.typed_run import OfRun
    from firecaffe.training.evaluate_run import Evaluated


def make_parser() -> Parser:
    parser = Parser(
        "evaluate",
        "RUN [--best] [--nproc-per-node N] [--data.name NAME] [--data.path FOLDER] [--json]",
        "The loss and metrics of a run's network on its test data, or on other data.",
        takes_recipe=True,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start on this host")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    import torch

    from firecaffe.cli.launched import check_launched
    from firecaffe.cli.typed_run import OfRun, parse_run
    from firecaffe.cluster.hosts import Hosts
    from firecaffe.cluster.launcher import launch
    from firecaffe.cluster.world import is_launched
    from firecaffe.data import open_test
    from firecaffe.training.evaluate_run import NEEDED, task_of_run
    from firecaffe.training.load import load_run
    from firecaffe.training.named import check_named
    from firecaffe.training.prediction import labels_of_run

    if isinstance(typed := handed(), OfRun):
        return _evaluate(typed)
    parser = make_parser()
    typed = parse_run(parser, argv)
    ranks = typed.options.nproc_per_node
    if ranks < 1:
        raise RecipeError(f"--nproc-per-node is {ranks}; it must be at least 1")
    if is_launched():
        check_launched(parser, argv, ranks)
    elif ranks > 1:
        # Once before any rank is started, so that a mistake is told once.
        check_named(typed.where, typed.recipe, NEEDED)
        trained = load_run(typed.where, best=typed.options.best, recipe=typed.recipe)
        data = open_test(typed.recipe.data)
        data.test.batch(torch.tensor([0]))
        task_of_run(trained.about, typed.recipe, data)
        labels_of_run(trained.about, data, typed.recipe.data)
        sys.stdout.flush()
        launch(["evaluate", *argv], Hosts(ranks), for_ranks=typed)
        return 0
    return _evaluate(typed)


def _evaluate(typed: OfRun) -> int:
    from firecaffe.cluster.world import join
    from firecaffe.training.evaluate_run import evaluate_run

    exchange = typed.recipe.exchange
    with join(typed.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world:
        found = evaluate_run(typed.where, typed.recipe, world, best=typed.options.best)
        if world.is_first:
            _show(typed, found)
    return 0


def _show(typed: OfRun, evaluated: Evaluated) -> None:
    from firecaffe.training.checkpoint import best_step
    from firecaffe.training.records import in_words, say

    trained, evaluation = evaluated.trained, evaluated.evaluation
    for note in trained.notes:
        print(f"warning: {note}", file=sys.stderr)
    if typed.options.json:
        row = {
            "run": str(typed.where),
            "step": trained.step,
            "evaluated": trained.evaluated,
            "best": typed.options.best,
            "best_step": best_step(typed.where),
            "data": evaluated.data.description,
            **evaluation.row,
            "metrics": list(evaluation.metrics),
        }
        print(json.dumps(finite(row), indent=2, allow_nan=False))
        return
    which = " (moving average)" if trained.evaluated == "ema" else ""
    at = "" if trained.step is None else f" at step {trained.step}"
    say(evaluated.data.description)
    say(
        f"{typed.where}  test{at}{which}: "
        f"{in_words(evaluation.metrics, evaluation.shares)}loss {evaluation.loss:.4f} "
        f"({evaluation.samples:,} samples)"
    )
    if others := _others(trained.step, best_step(typed.where), typed.options.best):
        say(others)


def _others(step: int | None, best: int | None, is_best: bool) -> str:
    """Which weights these are, if the run keeps others, too. best: the step of the best kept."""
    if best is None or step is None:
        return ""
    if is_best:
        return (
            "these weights were the best on the validation samples; without --best it takes the "
            "newest"
        )
    if best == step:
        return ""
    return (
        "these weights are the newest; --best takes those that were the best on the validation "
        f"samples, of step {best}"
    )
