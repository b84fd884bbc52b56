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
    from firecaffe.compression.config import PruneConfig as PruneConfig
    from firecaffe.compression.config import ShareConfig as ShareConfig
    from firecaffe.data import DataConfig as DataConfig
    from firecaffe.data import TensorDataset as TensorDataset
    from firecaffe.data import from_torch as from_torch
    from firecaffe.errors import CheckpointError as CheckpointError
    from firecaffe.errors import DataError as DataError
    from firecaffe.errors import FirecaffeError as FirecaffeError
    from firecaffe.errors import NotFiniteError as NotFiniteError
    from firecaffe.errors import PeerLostError as PeerLostError
    from firecaffe.errors import RecipeError as RecipeError
    from firecaffe.gradients.config import ExchangeConfig as ExchangeConfig
    from firecaffe.models.config import ModelConfig as ModelConfig
    from firecaffe.parallel.config import ParallelConfig as ParallelConfig
    from firecaffe.recipe.config import CheckpointConfig as CheckpointConfig
    from firecaffe.recipe.config import TrainConfig as TrainConfig
    from firecaffe.recipe.sections import Recipe as Recipe
    from firecaffe.runs.run_folder import RunConfig as RunConfig
    from firecaffe.script.attach import attach as attach
    from firecaffe.script.hook import comm_hook as comm_hook
    from firecaffe.script.launch import launch as launch
    from firecaffe.script.local import local as local
    from firecaffe.script.parallelize import parallelize as parallelize
    from firecaffe.script.split import split as split
    from firecaffe.solvers.config import SolverConfig as SolverConfig
    from firecaffe.synchrony.config import SynchronyConfig as SynchronyConfig
    from firecaffe.tasks import Sums as Sums
    from firecaffe.tasks import Task as Task
    from firecaffe.tasks import TaskConfig as TaskConfig
    from firecaffe.training.build_training import train as train
    from firecaffe.training.load import load as load
    from firecaffe.training.result import Result as Result

_PLACES = {
    "CheckpointConfig": "recipe.config",
    "CheckpointError": "errors",
    "DataConfig": "data",
    "DataError": "errors",
    "ExchangeConfig": "gradients.config",
    "FirecaffeError": "errors",
    "ModelConfig": "models.config",
    "NotFiniteError": "errors",
    "ParallelConfig": "parallel.config",
    "PeerLostError": "errors",
    "PruneConfig": "compression.config",
    "Recipe": "recipe.sections",
    "RecipeError": "errors",
    "Result": "training.result",
    "RunConfig": "runs.run_folder",
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
    "train": "training.build_training",
}
"""The module of each public name, imported on first use: a plan loads no training code."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'firecaffe' has no attribute {name!r}")
    from firecaffe.platforms import why_not

    if problem := why_not():
        raise ImportError(problem)
    return getattr(import_module(f"firecaffe.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, for tab completion and `help`, though none is imported yet."""
    return __all__
