"""Data-parallel training of deep networks: faster on N workers, with the same bits as on one.

    import firecaffe

    recipe = firecaffe.Recipe(train=firecaffe.TrainConfig(global_batch_size=64, steps=100))
    result = firecaffe.train(recipe, model=MyNet, train_set=mine, test_set=mine_too)

`train(…, workers=4)` trains on four processes of this host; without it, under torchrun, each rank
is a worker. `firecaffe.launch(function, nproc_per_node=4)` runs a function of your own on workers.
In a training script of your own, `firecaffe.parallelize(model)` replaces DistributedDataParallel,
and `firecaffe.adapt` has further parts for such a script.
"""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from firecaffe import adapt as adapt
    from firecaffe.api.cluster_check import check as check
    from firecaffe.api.comparison import compare as compare
    from firecaffe.api.compressed_network import compress as compress
    from firecaffe.api.evaluate_and_predict import evaluate as evaluate
    from firecaffe.api.evaluate_and_predict import predict as predict
    from firecaffe.api.exchange_bench import bench_exchange as bench_exchange
    from firecaffe.api.exchange_rounds import schedule as schedule
    from firecaffe.api.explanation import explain as explain
    from firecaffe.api.import_and_pack import import_caffe as import_caffe
    from firecaffe.api.import_and_pack import pack as pack
    from firecaffe.api.input_rates import bench_data as bench_data
    from firecaffe.api.network_profile import profile as profile
    from firecaffe.api.plan_answer import plan as plan
    from firecaffe.api.rate_search import tune as tune
    from firecaffe.api.step_rates import bench_step as bench_step
    from firecaffe.api.train import train as train
    from firecaffe.api.verify_and_replay import replay as replay
    from firecaffe.api.verify_and_replay import verify as verify
    from firecaffe.api.weight_files import export as export
    from firecaffe.api.weight_files import unpack as unpack
    from firecaffe.compression import PruneConfig as PruneConfig
    from firecaffe.compression import ShareConfig as ShareConfig
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
    from firecaffe.models import ModelConfig as ModelConfig
    from firecaffe.parallel.config import ParallelConfig as ParallelConfig
    from firecaffe.recipe.sections import CheckpointConfig as CheckpointConfig
    from firecaffe.recipe.sections import Recipe as Recipe
    from firecaffe.recipe.sections import TrainConfig as TrainConfig
    from firecaffe.runs.run_folder import RunConfig as RunConfig
    from firecaffe.script.ddp import parallelize as parallelize
    from firecaffe.script.launch import launch as launch
    from firecaffe.solvers.config import SolverConfig as SolverConfig
    from firecaffe.synchrony.config import SynchronyConfig as SynchronyConfig
    from firecaffe.tasks import Sums as Sums
    from firecaffe.tasks import Task as Task
    from firecaffe.tasks import TaskConfig as TaskConfig
    from firecaffe.training.load import load as load
    from firecaffe.training.plugins import Plugin as Plugin
    from firecaffe.training.result import Result as Result

_PLACES = {
    "CheckpointConfig": "recipe.sections",
    "CheckpointError": "errors",
    "DataConfig": "data",
    "DataError": "errors",
    "ExchangeConfig": "gradients.config",
    "FirecaffeError": "errors",
    "ModelConfig": "models",
    "NotFiniteError": "errors",
    "ParallelConfig": "parallel.config",
    "PeerLostError": "errors",
    "Plugin": "training.plugins",
    "PruneConfig": "compression",
    "Recipe": "recipe.sections",
    "RecipeError": "errors",
    "Result": "training.result",
    "RunConfig": "runs.run_folder",
    "ShareConfig": "compression",
    "SolverConfig": "solvers.config",
    "Sums": "tasks",
    "SynchronyConfig": "synchrony.config",
    "Task": "tasks",
    "TaskConfig": "tasks",
    "TensorDataset": "data",
    "TrainConfig": "recipe.sections",
    "adapt": "adapt",
    "bench_data": "api.input_rates",
    "bench_exchange": "api.exchange_bench",
    "bench_step": "api.step_rates",
    "check": "api.cluster_check",
    "compare": "api.comparison",
    "compress": "api.compressed_network",
    "evaluate": "api.evaluate_and_predict",
    "explain": "api.explanation",
    "export": "api.weight_files",
    "from_torch": "data",
    "import_caffe": "api.import_and_pack",
    "launch": "script.launch",
    "load": "training.load",
    "pack": "api.import_and_pack",
    "parallelize": "script.ddp",
    "plan": "api.plan_answer",
    "predict": "api.evaluate_and_predict",
    "profile": "api.network_profile",
    "replay": "api.verify_and_replay",
    "schedule": "api.exchange_rounds",
    "train": "api.train",
    "tune": "api.rate_search",
    "unpack": "api.weight_files",
    "verify": "api.verify_and_replay",
}
"""The module of each public name, imported on first use: a plan loads no training code."""

_RENAMED = {
    "attach": "attach",
    "comm_hook": "ddp_hook",
    "local": "average_locally",
    "split": "split_layers",
}
"""Names that moved to `adapt`, with their names there. The next release removes them."""

__all__ = sorted(_PLACES)


def why_not(system: str = sys.platform) -> str:
    """Return in one line why firecaffe cannot run on a system; empty if it can."""
    if system == "win32":
        return "Windows - the file locks and signals that firecaffe needs are Unix's - use WSL 2"
    return ""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(
            f"firecaffe.{name} is firecaffe.adapt.{_RENAMED[name]} now; this name will go",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(__getattr__("adapt"), _RENAMED[name])
    if name == "__version__":
        from importlib.metadata import version

        return version("firecaffe")
    if name not in _PLACES:
        raise AttributeError(f"module 'firecaffe' has no attribute {name!r}")
    if problem := why_not():
        raise ImportError(problem)
    module = import_module(f"firecaffe.{_PLACES[name]}")
    return module if name == "adapt" else getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names, for tab completion and `help`, though none is imported yet."""
    return __all__
