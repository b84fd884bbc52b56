"""What mode local, of [synchrony], asks of the other sections and of the workers."""

from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import num_nodes
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import LOCAL, MEASURED, SynchronyConfig
from firecaffe.words import count_of

DROPPING = ("step", "multistep")
"""The policies whose rate drops."""


def check_local(words: SynchronyConfig, train: TrainConfig, solver: SolverConfig) -> None:
    """Raises: RecipeError if the words contradict each other."""
    if words.mode != LOCAL:
        return
    mode, leaves = "synchrony.mode local", train.num_micro_batches
    if leaves % words.replicas:
        raise RecipeError(
            f"synchrony.replicas is {words.replicas} of {leaves} micro-batches a step "
            "(train.global_batch_size / train.micro_batch_size); it must divide them"
        )
    if words.shares == MEASURED:
        raise RecipeError(
            f"synchrony.shares measured with {mode}: a replica has its own micro-batches; leave "
            "one of them out"
        )
    if train.autocast == "float16":
        raise RecipeError(
            f"train.autocast float16 with {mode}: the loss scale would be that of a worker; use "
            "bfloat16"
        )
    if train.ema_decay:
        raise RecipeError(
            f"train.ema_decay {train.ema_decay:g} with {mode}: between two averages there are no "
            "weights of all replicas to take into it; synchrony.outer slowmo or nesterov have a "
            "memory of their own"
        )
    if words.fragments > words.local_steps:
        raise RecipeError(
            f"synchrony.fragments is {words.fragments} with synchrony.local_steps "
            f"{words.local_steps}; it must be at most that, so that each has a step of its own"
        )
    between = words.local_steps // words.fragments
    if words.overlap_steps >= between:
        of_one = f" in {words.fragments} fragments" * (words.fragments > 1)
        raise RecipeError(
            f"synchrony.overlap_steps is {words.overlap_steps} with synchrony.local_steps "
            f"{words.local_steps}{of_one}; it must be less than {between}, so that an average has "
            "come before the next"
        )
    if words.overlap_steps and words.inner_momentum == "average":
        raise RecipeError(
            f"synchrony.inner_momentum average with overlap_steps {words.overlap_steps}: momentum "
            "has gone on when its average comes; use keep or zero"
        )
    if words.outer_lr <= 0 and words.outer_lr != -1:
        raise RecipeError(f"synchrony.outer_lr is {words.outer_lr:g}; it must be above 0, or -1")
    if not 0 <= words.outer_momentum < 1 and words.outer_momentum != -1:
        raise RecipeError(
            f"synchrony.outer_momentum is {words.outer_momentum:g}; it must be from 0 up to, not "
            "including, 1, or -1"
        )
    said = [
        f"{word} {getattr(words, word)}"
        for word in ("warm_steps", "warm_epochs", "warm_until_drop")
        if getattr(words, word)
    ]
    if len(said) > 1:
        raise RecipeError(
            f"synchrony.{' and '.join(said)}: one of them says when replicas part, leave the "
            "others out"
        )
    if words.warm_until_drop and solver.lr_policy not in DROPPING:
        raise RecipeError(
            f"synchrony.warm_until_drop with solver.lr_policy {solver.lr_policy}, whose rate does "
            f"not drop; it counts with {' and '.join(DROPPING)}"
        )
    if train.steps:
        check_length(words, words.warm_steps, train.steps)


def check_length(words: SynchronyConfig, synchronous: int, steps: int) -> None:
    """Raises: RecipeError if a training of so many steps has not even one round. synchronous: the
    number of steps before the first.
    """
    if synchronous + words.local_steps > steps:
        before = f" after {synchronous} synchronous steps" if synchronous else ""
        left = steps - synchronous
        right = f"it must be at most {left}" if left > 0 else "fewer steps may be synchronous"
        raise RecipeError(
            f"synchrony.local_steps is {words.local_steps}{before}, but the training has {steps} "
            f"steps; {right}"
        )


def check_local_workers(words: SynchronyConfig, world_size: int, level: int = 0) -> None:
    """Raises: RecipeError if workers cannot share out the replicas. level: of a compressor."""
    if words.mode != LOCAL:
        return
    if world_size > words.replicas:
        raise RecipeError(
            f"synchrony.replicas is {words.replicas} on {world_size} workers; each hosts one at "
            f"least, so there may be 1 to {words.replicas} workers"
        )
    nodes = num_nodes(words.replicas, level)
    if world_size > nodes:
        raise RecipeError(
            f"{world_size} ranks but only {count_of(nodes, 'sum', 'sums')} of {1 << level} "
            f"replicas to encode (exchange.compressor_level {level}); use at most "
            f"{count_of(nodes, 'rank', 'ranks')} or a lower level"
        )
