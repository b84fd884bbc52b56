"""Numbers of a recipe that have to fit each other, or the data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from firecaffe.data import Data
from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import num_nodes
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.solvers.rate_policy import batch_scale, learning_rate
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    BACKUP,
    LOCAL,
    SynchronyConfig,
    learner_count_problem,
)
from firecaffe.value_checks import LARGEST, MAX_MICRO_BATCHES


@dataclass(frozen=True)
class Fit:
    """Numbers that have to fit, as the docstring of `problem` says; it returns the error, or ""."""

    words: tuple[str, ...]
    problem: Callable[..., str]


def check_fits(recipe: Recipe) -> None:
    raise_first(fit.problem(recipe) for fit in FITS)


def raise_first(problems: Iterable[str]) -> None:
    if line := next(filter(None, problems), ""):
        raise RecipeError(line)


def _whole_micro_batches(recipe: Recipe) -> str:
    """A step has whole micro-batches, up to a limited number."""
    train = recipe.train
    if train.global_batch_size % train.micro_batch_size:
        return (
            f"train.global_batch_size is {train.global_batch_size}, which is no multiple of "
            f"train.micro_batch_size, {train.micro_batch_size}"
        )
    if train.num_micro_batches > MAX_MICRO_BATCHES:
        return (
            f"train.global_batch_size {train.global_batch_size} in micro-batches of "
            f"train.micro_batch_size {train.micro_batch_size} is {train.num_micro_batches:,} a "
            f"step; there may be at most {MAX_MICRO_BATCHES:,}"
        )
    return ""


def _statistics(recipe: Recipe) -> str:
    """BatchNorm's statistics are computed over whole micro-batches."""
    samples, size = recipe.train.batch_norm_samples, recipe.train.micro_batch_size
    if not samples or samples >= size:
        return ""
    return (
        f"train.batch_norm_samples is {samples}; it must be 0, or at least "
        f"train.micro_batch_size, {size}: whole micro-batches are taken"
    )


def _partners(recipe: Recipe) -> str:
    """Samples are mixed with others of their micro-batch."""
    size = recipe.train.micro_batch_size
    for name in ("mixup", "cutmix"):
        if (alpha := getattr(recipe.data, name)) and size < 2:
            return (
                f"data.{name} is {alpha} with train.micro_batch_size {size}: partners are of the "
                "same micro-batch, so it takes 2 samples or more"
            )
    return ""


def _boxes(recipe: Recipe) -> str:
    """Boxes of an image are scaled to a crop, without padding."""
    data = recipe.data
    if data.augment != "inception" or (data.crop >= 1 and not data.pad):
        return ""
    return (
        f"data.augment is inception with data.crop {data.crop} and data.pad {data.pad}; expected "
        "a crop from 1, the side that boxes are scaled to, and no padding"
    )


def _falling_momentum(recipe: Recipe) -> str:
    """The momentum falls while the rate rises."""
    solver = recipe.solver
    if solver.lr_policy != "one_cycle" or solver.base_momentum <= solver.momentum:
        return ""
    return (
        f"solver.base_momentum is {solver.base_momentum}; it must be at most solver.momentum, "
        f"{solver.momentum}, from which it falls as the rate rises"
    )


def _reference_batch(recipe: Recipe) -> str:
    """A scaled rate needs the batch that it is meant for."""
    solver = recipe.solver
    if solver.scale == "none" or solver.reference_batch_size >= 1:
        return ""
    return (
        f"solver.scale is {solver.scale} with solver.reference_batch_size "
        f"{solver.reference_batch_size}; give the global batch that base_lr is for"
    )


def _level(recipe: Recipe) -> str:
    """Encoded nodes lie below the root of the tree."""
    level, leaves = recipe.exchange.level, recipe.leaves
    if not level or num_nodes(leaves.number, level - 1) > 1:
        return ""
    return (
        f"exchange.compressor_level is {level}, but the tree over {leaves} ends at level "
        f"{(leaves.number - 1).bit_length()}"
    )


def _whole_nodes(recipe: Recipe) -> str:
    """Measured shares consist of whole nodes of the encoded level."""
    level, leaves = recipe.exchange.level, recipe.train.num_micro_batches
    if not recipe.synchrony.measures_shares or not leaves % (1 << level):
        return ""
    return (
        f"exchange.compressor_level is {level} with synchrony.shares = measured: workers share out "
        f"sums of {1 << level} micro-batches, which must divide a step's {leaves}"
    )


def _stages(recipe: Recipe) -> str:
    """Each stage has one worker, or as many as hold its split layers."""
    parallel = recipe.parallel
    if not parallel.stages or parallel.is_split or parallel.model in (1, parallel.num_stages):
        return ""
    return (
        f"parallel.model is {parallel.model}, but parallel.stages names {parallel.num_stages} "
        "stages, a worker each; leave parallel.model out"
    )


def _parts(recipe: Recipe) -> str:
    """The workers of a model hold equal numbers of parts."""
    parallel = recipe.parallel
    if not parallel.is_split or not parallel.num_parts % parallel.model:
        return ""
    below = parallel.num_parts // parallel.model * parallel.model
    would = f"{below} or {below + parallel.model}" if below else str(parallel.model)
    return (
        f"parallel.parts is {parallel.parts}, which {parallel.model} workers cannot hold equally "
        f"(parallel.model); take {would}"
    )


def _gradients_of_a_step(recipe: Recipe) -> str:
    """A step has more micro-batches than are dropped, and enough for an update."""
    synchrony, leaves = recipe.synchrony, recipe.train.num_micro_batches
    if synchrony.mode == BACKUP and synchrony.backup_workers >= leaves:
        return (
            f"synchrony.backup_workers is {synchrony.backup_workers} of {leaves} micro-batches a "
            "step; it must be less"
        )
    if synchrony.mode == ASYNCHRONOUS and synchrony.gradients_per_update > leaves:
        return (
            f"synchrony.gradients_per_update is {synchrony.gradients_per_update} of {leaves} "
            "micro-batches a step; it must be at most as many"
        )
    return ""


def _warm_steps(recipe: Recipe) -> str:
    """A training continues after its warm steps."""
    synchrony, steps = recipe.synchrony, recipe.train.steps
    if not synchrony.is_served or not steps or synchrony.warm_steps < steps:
        return ""
    return f"synchrony.warm_steps is {synchrony.warm_steps} of train.steps {steps}; it must be less"


def _simulated_learners(recipe: Recipe) -> str:
    """There are more learners than are dropped, and enough for an update."""
    synchrony = recipe.synchrony
    if not synchrony.is_served or synchrony.clock != "simulated":
        return ""
    return learner_count_problem(
        synchrony, synchrony.learners, f"synchrony.learners, {synchrony.learners}"
    )


def _replicas(recipe: Recipe) -> str:
    """Replicas have equal numbers of micro-batches."""
    synchrony, leaves = recipe.synchrony, recipe.train.num_micro_batches
    if synchrony.mode != LOCAL or not leaves % synchrony.replicas:
        return ""
    return (
        f"synchrony.replicas is {synchrony.replicas} of {leaves} micro-batches a step "
        "(train.global_batch_size / train.micro_batch_size); it must divide them"
    )


def _rounds(recipe: Recipe) -> str:
    """A round has a step for each fragment, and an average arrives before the next."""
    synchrony, steps = recipe.synchrony, recipe.train.steps
    if synchrony.mode != LOCAL:
        return ""
    if synchrony.fragments > synchrony.local_steps:
        return (
            f"synchrony.fragments is {synchrony.fragments} with synchrony.local_steps "
            f"{synchrony.local_steps}; it must be at most that, so that each has its own step"
        )
    between = synchrony.local_steps // synchrony.fragments
    if synchrony.overlap_steps >= between:
        of_one = f" in {synchrony.fragments} fragments" * (synchrony.fragments > 1)
        return (
            f"synchrony.overlap_steps is {synchrony.overlap_steps} with synchrony.local_steps "
            f"{synchrony.local_steps}{of_one}; it must be less than {between}, so that an average "
            "has come before the next"
        )
    return too_short(synchrony, synchrony.warm_steps, steps) if steps else ""


def too_short(words: SynchronyConfig, synchronous: int, steps: int) -> str:
    """Return why a training has not even one round after `synchronous` steps, or an empty text."""
    if synchronous + words.local_steps <= steps:
        return ""
    before = f" after {synchronous} synchronous steps" if synchronous else ""
    left = steps - synchronous
    right = f"it must be at most {left}" if left > 0 else "fewer steps may be synchronous"
    return (
        f"synchrony.local_steps is {words.local_steps}{before}, but the training has {steps} "
        f"steps; {right}"
    )


SIZES = ("train.global_batch_size", "train.micro_batch_size")

# The first says whether there are micro-batches to count, so the order matters.
FITS = (
    Fit(SIZES, _whole_micro_batches),
    Fit(("train.batch_norm_samples", "train.micro_batch_size"), _statistics),
    Fit(("data.mixup", "data.cutmix", "train.micro_batch_size"), _partners),
    Fit(("data.augment", "data.crop", "data.pad"), _boxes),
    Fit(("solver.base_momentum", "solver.momentum"), _falling_momentum),
    Fit(("solver.scale", "solver.reference_batch_size"), _reference_batch),
    Fit(("exchange.compressor_level", "synchrony.replicas", *SIZES), _level),
    Fit(("exchange.compressor_level", "synchrony.shares", *SIZES), _whole_nodes),
    Fit(("parallel.model", "parallel.stages"), _stages),
    Fit(("parallel.parts", "parallel.model"), _parts),
    Fit(
        ("synchrony.backup_workers", "synchrony.gradients_per_update", *SIZES),
        _gradients_of_a_step,
    ),
    Fit(("synchrony.warm_steps", "train.steps"), _warm_steps),
    Fit(
        ("synchrony.backup_workers", "synchrony.gradients_per_update", "synchrony.learners"),
        _simulated_learners,
    ),
    Fit(("synchrony.replicas", *SIZES), _replicas),
    Fit(
        (
            *("synchrony.fragments", "synchrony.overlap_steps", "synchrony.local_steps"),
            *("synchrony.warm_steps", "train.steps"),
        ),
        _rounds,
    ),
)


def check_data_fit(recipe: Recipe, data: Data, steps: int) -> None:
    """Check numbers against the data and the steps that follow from it. Raises: RecipeError."""
    raise_first((_validation(recipe, data), _rates(recipe, steps)))


def _validation(recipe: Recipe, data: Data) -> str:
    every = recipe.train.eval_every
    if not every or data.validation is not None:
        return ""
    return (
        f"train.eval_every is {every}, but there are no validation samples, and the test samples "
        "are seen once, at the end; set data.hold_out, as to 0.1, or leave train.eval_every out"
    )


def _rates(recipe: Recipe, steps: int) -> str:
    # The first and the highest rate, a layer's share of it, and of the decay, must be float32.
    solver = recipe.solver
    scale = batch_scale(solver, recipe.train.global_batch_size)
    highest = max(0, min(round(solver.pct_start * steps), steps) - 1)  # of one_cycle
    rate = max(learning_rate(solver, step, steps, scale) for step in (0, highest, steps - 1))
    for what, value, mults in (
        (f"the learning rate of solver.base_lr {solver.base_lr:g}", rate, solver.lr_mult),
        (f"solver.weight_decay {solver.weight_decay:g}", solver.weight_decay, solver.decay_mult),
    ):
        most = value * max(mults.values(), default=1.0)
        if not most <= LARGEST:
            return (
                f"{what} comes to {most:g}; it must be at most {LARGEST:.2g}, the largest float32"
            )
    return ""


def check_batch(config: TrainConfig, num_samples: int) -> None:
    """Check the batch. Raises: RecipeError if a micro-batch of every step would be empty."""
    micro_batch = config.micro_batch_size
    most = -(-num_samples // micro_batch) * micro_batch
    if config.global_batch_size > most:
        raise RecipeError(
            f"train.global_batch_size is {config.global_batch_size}; there are {num_samples} "
            f"training samples, so it must be at most {most}"
        )
