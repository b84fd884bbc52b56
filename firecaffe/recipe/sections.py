"""A whole run as data: the Configs of all parts, in one recipe."""

from dataclasses import dataclass, field

from firecaffe.compression.config import PruneConfig, ShareConfig
from firecaffe.data import DataConfig
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models.config import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.config import (
    CheckpointConfig,
    TrainConfig,
)
from firecaffe.runs.folder import RunConfig
from firecaffe.solvers.config import SolverConfig, needs_norms
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.tasks.config import TaskConfig


@dataclass(frozen=True)
class Recipe:
    """One training, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The samples, and how they are prepared."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which batches and in which arithmetic to train."""
    solver: SolverConfig = field(default_factory=SolverConfig)
    """The optimizer and its learning rate."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """How gradients are summed over the workers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    run: RunConfig = field(default_factory=RunConfig)
    """The place where the run is recorded."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The loss, and what evaluations measure."""
    synchrony: SynchronyConfig = field(default_factory=SynchronyConfig)
    """When workers exchange, and who computes what."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Which workers hold one model together, and how it is split."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """Which weights are zero, and stay zero."""
    share: ShareConfig = field(default_factory=ShareConfig)
    """Which layers' weights share few values."""

    @property
    def updates_whole_layers(self) -> bool:
        """Whether an update needs whole parameters: their norm, pruning or shared values."""
        return needs_norms(self.solver) or self.prune.is_on or self.share.is_on
