"""firecaffe: train deep networks on N workers, near N times as fast and to the same bits.

    import firecaffe

    recipe = firecaffe.Recipe(train=firecaffe.TrainConfig(global_batch_size=64, steps=100))
    result = firecaffe.train(recipe, model=MyNet, train_set=mine, test_set=mine_too)

Run alone it trains on one worker; under torchrun on as many as there are ranks. In a training
script of your own, `firecaffe.parallelize(model)` stands in for DistributedDataParallel.
"""

from firecaffe.assemble import train
from firecaffe.data import DataConfig, TensorDataset
from firecaffe.errors import FirecaffeError
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models.config import ModelConfig
from firecaffe.parallelize import comm_hook, parallelize
from firecaffe.recipe import Recipe
from firecaffe.runs.folder import RunConfig
from firecaffe.train.config import CheckpointConfig, TrainConfig
from firecaffe.train.loop import Result
from firecaffe.train.solver import SolverConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ExchangeConfig",
    "FirecaffeError",
    "ModelConfig",
    "Recipe",
    "Result",
    "RunConfig",
    "SolverConfig",
    "TensorDataset",
    "TrainConfig",
    "comm_hook",
    "parallelize",
    "train",
]
