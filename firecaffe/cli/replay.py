"""`firecaffe replay RUN`: compute the same bits again from the run's log of events alone."""

from pathlib import Path

from firecaffe.cli.arguments import Parser
from firecaffe.errors import NotIdenticalError

NOTES = (
    "It prints `same`, or ends with exit code 7. A damaged line of the log gives exit code 8 and "
    "the line's number.",
    "A run that did not finish is computed up to its newest checkpoint.",
    "What the run was given in Python must be named, as for `evaluate`.",
)


def make_parser() -> Parser:
    parser = Parser(
        "replay",
        "RUN [--to FOLDER]",
        "Compute a run with a server again, on one worker, from its recipe and its log of events "
        "alone, and compare the digests of weights, buffers, optimizer state and losses.",
        takes_recipe=True,
        notes=NOTES,
    )
    parser.add(
        "--to", type=str, default="", metavar="FOLDER", help="save the result as a checkpoint"
    )
    parser.add_trust()
    return parser


NEEDED = ("model", "data", "task")
"""Recipe sections that determine what is computed."""


def main(argv: list[str]) -> int:
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone
    from firecaffe.cluster.world import join
    from firecaffe.training.load import run_of
    from firecaffe.training.named import check_named
    from firecaffe.training.verification import replay

    check_alone("replay")
    typed = parse_run(make_parser(), argv)
    check_named(typed.where, typed.recipe, NEEDED)
    folder = run_of(typed.where)
    assert folder is not None  # parse_run has read its recipe
    to = Path(typed.options.to) if typed.options.to else None
    exchange = typed.recipe.exchange
    with join(typed.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world:
        replayed = replay(folder, typed.recipe, world, to)
    ours, theirs = replayed.computed, replayed.recorded
    if not replayed.is_same:
        what = "weights" if ours.weights != theirs.weights else "optimizer state or losses"
        raise NotIdenticalError(
            f"{folder} differs from its replay after step {ours.step}: {what}; weights "
            f"{theirs.weights[:12]} in the run, {ours.weights[:12]} in the replay. Other code, "
            "data or hardware than the run's may be why"
        )
    print(
        f"same: {replayed.updates:,} updates of {ours.step} steps; weights {ours.weights[:12]}, "
        f"state {ours.state[:12]}"
    )
    return 0
