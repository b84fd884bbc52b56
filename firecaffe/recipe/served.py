"""What a mode with a server, of [synchrony], asks of the other sections."""

from firecaffe.errors import RecipeError
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.reference import is_reference
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    BACKUP,
    FIRST,
    SHARDED,
    SynchronyConfig,
    check_learners,
)

NOT_BY_ELEMENT = ("lars", "lamb")
"""Solvers whose update of a weight depends on others of its layer."""


def check_served(
    words: SynchronyConfig, train: TrainConfig, solver: SolverConfig, exchange: ExchangeConfig
) -> None:
    """Raises: RecipeError if the words contradict each other."""
    if not words.is_served:
        return
    mode = f"synchrony.mode {words.mode}"
    leaves = train.num_micro_batches
    if words.is_lockless:
        _check_lockless(words, train, solver, exchange)
    _check_coded(words, exchange)
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
    if words.server == SHARDED:
        _check_sharded(words, solver)
    if words.mode != BACKUP and words.server_momentum == "delayed_nesterov":
        is_plain = solver.type in ("sgd", "nesterov") and solver.momentum_form == "torch"
        if not is_plain or solver.decay_form != "l2" or not solver.momentum:
            raise RecipeError(
                f"synchrony.server_momentum delayed_nesterov with solver.type {solver.type}, "
                f"momentum {solver.momentum:g}; it takes sgd or nesterov, with a momentum, in "
                "momentum_form torch and decay_form l2"
            )


def _check_coded(words: SynchronyConfig, exchange: ExchangeConfig) -> None:
    """Raises: RecipeError if a worker cannot encode a micro-batch's gradient by itself."""
    # Codecs load torch, which the meaning of a recipe's words does not need.
    from firecaffe.gradients.compressors import MEMORYLESS, ONE_BY_ONE

    compressor = exchange.compressor
    if compressor not in (NO_COMPRESSOR, *ONE_BY_ONE):
        raise RecipeError(
            f"exchange.compressor {compressor} with synchrony.mode {words.mode}: a server takes "
            f"gradients one by one, each in as many bytes; use one of {', '.join(ONE_BY_ONE)}"
        )
    if words.server == SHARDED and compressor not in (NO_COMPRESSOR, *MEMORYLESS):
        raise RecipeError(
            f"exchange.compressor {compressor} with synchrony.server sharded: it keeps what of a "
            f"whole parameter it has not sent; use {' or '.join(MEMORYLESS)}, or server = first"
        )
    if exchange.level:
        raise RecipeError(
            f"exchange.compressor_level {exchange.level} with synchrony.mode {words.mode}: each "
            "micro-batch's gradient is encoded by itself; leave it out"
        )


def _check_sharded(words: SynchronyConfig, solver: SolverConfig) -> None:
    """Raises: RecipeError if a rule asks for more than the elements that one owner has."""
    found = {
        f"solver.type {solver.type}": solver.type in NOT_BY_ELEMENT or is_reference(solver.type),
        f"solver.clip_gradients {solver.clip_gradients:g}": bool(solver.clip_gradients),
        "synchrony.compensate gap": words.compensate == "gap",
    }
    for word, needs_all in found.items():
        if needs_all:
            raise RecipeError(
                f"{word} with synchrony.server sharded: it takes all weights together, and each "
                "rank has a part of them; leave it out, or take server = first"
            )


def _check_lockless(
    words: SynchronyConfig, train: TrainConfig, solver: SolverConfig, exchange: ExchangeConfig
) -> None:
    """Raises: RecipeError if a word asks for what nobody has if there is no server, or for more
    than SGD.
    """
    is_sgd = solver.type in ("sgd", "nesterov") and solver.momentum_form == "torch"
    no_server = "no server has the updates in its hands"
    sgd = "it takes solver.type sgd or nesterov, in momentum_form torch, without clip_gradients"
    found = {
        ("synchrony.clock simulated", "its learners are one process"): words.clock == "simulated",
        (f"synchrony.server {words.server}", no_server): words.server != FIRST,
        (f"synchrony.in_flight {words.in_flight}", "nothing travels"): words.in_flight > 1,
        (f"exchange.compressor {exchange.compressor}", "no gradient travels"): (
            exchange.compressor != NO_COMPRESSOR
        ),
        (f"synchrony.gradients_per_update {words.gradients_per_update}", no_server): (
            words.gradients_per_update > 1
        ),
        (f"synchrony.staleness_rate {words.staleness_rate}", no_server): (
            words.staleness_rate != "none"
        ),
        (f"synchrony.compensate {words.compensate}", no_server): words.compensate != "none",
        (f"synchrony.server_momentum {words.server_momentum}", no_server): (
            words.server_momentum != "each"
        ),
        (f"train.ema_decay {train.ema_decay:g}", no_server): bool(train.ema_decay),
        (f"train.device {train.device}", "weights are shared in the host's memory; use cpu"): (
            train.device.startswith("cuda")
        ),
        (f"solver.type {solver.type}, momentum_form {solver.momentum_form}", sgd): not is_sgd,
        (f"solver.clip_gradients {solver.clip_gradients:g}", sgd): bool(solver.clip_gradients),
    }
    for (word, why), is_there in found.items():
        if is_there:
            raise RecipeError(f"{word} with synchrony.lock none: {why}")


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
