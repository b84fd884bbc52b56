"""What a mode with a server, of [synchrony], asks of the other sections."""

from firecaffe.errors import RecipeError
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, SynchronyConfig, check_learners


def check_served(
    words: SynchronyConfig, train: TrainConfig, solver: SolverConfig, exchange: ExchangeConfig
) -> None:
    """Raises: RecipeError if the words contradict each other."""
    if not words.is_served:
        return
    mode = f"synchrony.mode {words.mode}"
    leaves = train.num_micro_batches
    if exchange.compressor != NO_COMPRESSOR:
        raise RecipeError(
            f"exchange.compressor {exchange.compressor} with {mode}: codecs need all "
            "workers of a step together; leave it out, or train with every_step"
        )
    if train.autocast == "float16":
        raise RecipeError(
            f"train.autocast float16 with {mode}: the loss scale changes while gradients are under "
            "way; use bfloat16"
        )
    if words.mode == BACKUP and words.backup_workers >= leaves:
        raise RecipeError(
            f"synchrony.backup_workers is {words.backup_workers} of {leaves} micro-batches a step; "
            "it must be less"
        )
    if words.mode == ASYNCHRONOUS and words.gradients_per_update > leaves:
        raise RecipeError(
            f"synchrony.gradients_per_update is {words.gradients_per_update} of {leaves} "
            "micro-batches a step; it must be at most as many"
        )
    if train.steps and words.warm_steps >= train.steps:
        raise RecipeError(
            f"synchrony.warm_steps is {words.warm_steps} of train.steps {train.steps}; it "
            "must be less"
        )
    if words.mode != BACKUP and words.server_momentum == "delayed_nesterov":
        is_plain = solver.type in ("sgd", "nesterov") and solver.momentum_form == "torch"
        if not is_plain or solver.decay_form != "l2" or not solver.momentum:
            raise RecipeError(
                f"synchrony.server_momentum delayed_nesterov with solver.type {solver.type}, "
                f"momentum {solver.momentum:g}; it takes sgd or nesterov, with a momentum, in "
                "momentum_form torch and decay_form l2"
            )


def check_served_workers(words: SynchronyConfig, world_size: int) -> None:
    """Raises: RecipeError if there are several workers of a simulated clock, or too few of a real
    one.
    """
    if not words.is_served:
        return
    if words.clock == "real":
        count = words.num_learners(world_size)
        of = "1 worker" if world_size == 1 else f"{world_size} workers"
        each = f" with synchrony.in_flight {words.in_flight}" if words.in_flight > 1 else ""
        check_learners(words, count, f"{count}, the learners of {of}{each}")
    elif world_size > 1:
        raise RecipeError(
            f"synchrony.clock simulated on {world_size} workers; it is one process, whose learners "
            "are synchrony.learners: use --nproc-per-node 1, or clock = real"
        )
