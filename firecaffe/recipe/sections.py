"""A whole run as data: the Configs of all parts, composed."""

from dataclasses import dataclass, field

from firecaffe.compression.config import PruneConfig, ShareConfig, check_prune, check_share
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.leaves import num_nodes
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig, check_exchange
from firecaffe.models.config import ModelConfig
from firecaffe.parallel.config import ParallelConfig, check_parallel
from firecaffe.recipe.config import (
    CheckpointConfig,
    TrainConfig,
    check_checkpoint,
    check_mixing,
    check_train,
)
from firecaffe.recipe.constrained import check_constrained
from firecaffe.recipe.local import check_local
from firecaffe.recipe.parallel import check_beside, check_head_updates
from firecaffe.recipe.served import check_served
from firecaffe.recipe.update_at import check_update_at
from firecaffe.runs.folder import RunConfig
from firecaffe.runs.loggers import check_loggers
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.policy import check_policy
from firecaffe.synchrony.config import LOCAL, MEASURED, SynchronyConfig, check_synchrony
from firecaffe.tasks.config import TaskConfig
from firecaffe.words import check_kinds


@dataclass(frozen=True)
class Recipe:
    """One training, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The samples, and what is done to them."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which batches and in which arithmetic."""
    solver: SolverConfig = field(default_factory=SolverConfig)
    """The optimizer and its learning rate."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """How gradients are summed over the workers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    run: RunConfig = field(default_factory=RunConfig)
    """Where the run is recorded."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The loss, and what evaluations measure."""
    synchrony: SynchronyConfig = field(default_factory=SynchronyConfig)
    """When workers exchange, and who computes what."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Which workers hold one model together, and by what it is split."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """Which weights are zero, and stay zero."""
    share: ShareConfig = field(default_factory=ShareConfig)
    """Which layers' weights share few values."""


def check_recipe(recipe: Recipe) -> None:
    """Checks what can be known from the words alone.

    Raises: RecipeError with the dotted name of the word, what was found, and what would be right.
    """
    # Optimizers and losses load torch, which the meaning of a recipe's words does not need.
    from firecaffe.solvers.optimizer import check_solver
    from firecaffe.tasks.table import check_task

    check_kinds(recipe)
    check_task(recipe.task)
    check_train(recipe.train)
    check_mixing(recipe.data, recipe.train)
    check_solver(recipe.solver)
    check_policy(recipe.solver)
    check_exchange(recipe.exchange)
    check_synchrony(recipe.synchrony)
    check_shares(recipe.synchrony, recipe.exchange)
    check_served(recipe.synchrony, recipe.train, recipe.solver, recipe.exchange)
    check_local(recipe.synchrony, recipe.train, recipe.solver)
    check_parallel(recipe.parallel)
    check_head_updates(
        recipe.parallel, recipe.train, recipe.solver, recipe.exchange, recipe.synchrony
    )
    check_beside(recipe.parallel, recipe.train, recipe.solver, recipe.synchrony)
    check_update_at(recipe.exchange, recipe.train, recipe.solver, recipe.synchrony, recipe.parallel)
    check_prune(recipe.prune)
    check_share(recipe.share)
    check_constrained(
        recipe.prune, recipe.share, recipe.exchange, recipe.synchrony, recipe.parallel
    )
    if recipe.exchange.compressor != NO_COMPRESSOR and recipe.train.autocast == "float16":
        raise RecipeError(
            f"exchange.compressor {recipe.exchange.compressor} with train.autocast float16: the "
            "loss scale changes between steps, what a codec has kept back would not; use bfloat16"
        )
    level, leaves, what = recipe.exchange.level, recipe.train.num_micro_batches, "micro-batches"
    if recipe.synchrony.mode == LOCAL:
        leaves, what = recipe.synchrony.replicas, "replicas"
    if level and num_nodes(leaves, level - 1) == 1:
        raise RecipeError(
            f"exchange.compressor_level is {level}, but the tree over {leaves} {what} "
            f"ends at level {(leaves - 1).bit_length()}"
        )
    check_loggers(recipe.run.loggers)
    check_checkpoint(recipe.checkpoint)


def check_shares(synchrony: SynchronyConfig, exchange: ExchangeConfig) -> None:
    """Raises: RecipeError if the exchange cannot sum shares of any size to the same bits."""
    if synchrony.shares != MEASURED:
        return
    if exchange.compressor != NO_COMPRESSOR:
        raise RecipeError(
            f"synchrony.shares measured with exchange.compressor {exchange.compressor}: what a "
            "codec keeps back belongs to the worker that has its micro-batches, which shares would "
            "change; leave one of them out"
        )
    if exchange.algorithm != AUTO and not keeps_tree_order(exchange.algorithm):
        raise RecipeError(
            "synchrony.shares measured adds in the order of the micro-batch tree, which "
            f"exchange.algorithm {exchange.algorithm} does not keep; use tree"
        )
