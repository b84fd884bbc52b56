"""Data-parallel training of deep networks: faster on N workers, with the same bits as on one.

    import firecaffe

    recipe = firecaffe.Recipe(train=firecaffe.TrainConfig(global_batch_size=64, steps=100))
    result = firecaffe.train(recipe, model=MyNet, train_set=mine, test_set=mine_too)

Without a launcher, `train` uses one worker; under torchrun, each rank is a worker.
`firecaffe.launch(function, nproc_per_node=4)` runs a function on workers of this host. In a
training script of your own, `firecaffe.parallelize(model)` replaces DistributedDataParallel,
`firecaffe.local(model, optimizer, every=8)` averages replicas that train independently,
`firecaffe.split(model, {"classifier.*": "neurons"})` cuts layers over ranks, and
`firecaffe.attach(model, optimizer, folder)` records where the time goes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.compression.config import PruneConfig, ShareConfig
    from firecaffe.data import DataConfig, TensorDataset, from_torch
    from firecaffe.errors import FirecaffeError
    from firecaffe.gradients.config import ExchangeConfig
    from firecaffe.models.config import ModelConfig
    from firecaffe.parallel.config import ParallelConfig
    from firecaffe.recipe.config import CheckpointConfig, TrainConfig
    from firecaffe.recipe.sections import Recipe
    from firecaffe.runs.folder import RunConfig
    from firecaffe.script.attach import attach
    from firecaffe.script.hook import comm_hook
    from firecaffe.script.launch import launch
    from firecaffe.script.local import local
    from firecaffe.script.parallelize import parallelize
    from firecaffe.script.split import split
    from firecaffe.solvers.config import SolverConfig
    from firecaffe.synchrony.config import SynchronyConfig
    from firecaffe.tasks import Sums, Task, TaskConfig
    from firecaffe.training.build import train
    from firecaffe.training.load import load
    from firecaffe.training.result import Result

_PLACES = {
    "CheckpointConfig": "recipe.config",
    "DataConfig": "data",
    "ExchangeConfig": "gradients.config",
    "FirecaffeError": "errors",
    "ModelConfig": "models.config",
    "ParallelConfig": "parallel.config",
    "PruneConfig": "compression.config",
    "Recipe": "recipe.sections",
    "Result": "training.result",
    "RunConfig": "runs.folder",
    "ShareConfig": "compression.config",
    "SolverConfig": "solvers.config",
    "Sums": "tasks",
    "SynchronyConfig": "synchrony.config",
    "Task": "tasks",
    "TaskConfig": "tasks",
    "TensorDataset": "data",
    "TrainConfig": "recipe.config",
    "attach": "script.attach",
    "comm_hook": "script.hook",
    "from_torch": "data",
    "launch": "script.launch",
    "load": "training.load",
    "local": "script.local",
    "parallelize": "script.parallelize",
    "split": "script.split",
    "train": "training.build",
}
"""The module of each public name, imported on first use: a plan loads no training code."""

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ExchangeConfig",
    "FirecaffeError",
    "ModelConfig",
    "ParallelConfig",
    "PruneConfig",
    "Recipe",
    "Result",
    "RunConfig",
    "ShareConfig",
    "SolverConfig",
    "Sums",
    "SynchronyConfig",
    "Task",
    "TaskConfig",
    "TensorDataset",
    "TrainConfig",
    "attach",
    "comm_hook",
    "from_torch",
    "launch",
    "load",
    "local",
    "parallelize",
    "split",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'firecaffe' has no attribute {name!r}")
    return getattr(import_module(f"firecaffe.{_PLACES[name]}"), name)
