"""`firecaffe verify RUN`: whether a run's first steps give the same bits on one worker."""

from collections.abc import Sequence

from firecaffe.cli.launched import check_alone
from firecaffe.cli.of_run import parse_run
from firecaffe.cli.options.verify import make_parser
from firecaffe.cluster.world import join
from firecaffe.errors import RecipeError
from firecaffe.training.load import run_of
from firecaffe.training.named import check_named
from firecaffe.training.verification import Verified, verify_run

NEEDED = ("model", "data", "task")
"""Recipe sections that determine what is computed."""

MOST_LISTED = 4


def main(argv: list[str]) -> int:
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
        found = verify_run(folder, typed.recipe, world, typed.options.steps)
    print(line(found))
    return 0


def line(found: Verified) -> str:
    steps = "step" if found.last == 1 else "steps"
    of = f"{found.steps:,} of {found.last:,} {steps} once more on one worker"
    if found.updates:
        of += f", {found.updates:,} updates from the log of events"
    compared = [f"{found.losses:,} losses"]
    if found.tensors:
        compared.append(f"every tensor after {_steps(found.tensors)}")
    if found.weights:
        compared.append(f"the weights after {_steps(found.weights)}")
    if found.result:
        compared.append("the result")
    return f"same: {of}; compared {', '.join(compared)}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > MOST_LISTED:
        return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
    return f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"
