"""The steps of a training of one worker, without a run around them."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.data.batches import TrainBatches
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.sections import TrainConfig
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.tasks import CLASSIFICATION, Loss, Task
from firecaffe.training.forward import Forward
from firecaffe.training.modes.every_step import empty_counts, steps_of_whole
from firecaffe.training.outcome import StepResult
from firecaffe.training.piece import Weights
from firecaffe.training.state import State
from firecaffe.transport.exchange import Exchange
from tests.kit.training import ALONE

CONFIG = TrainConfig(global_batch_size=10, micro_batch_size=2, seed=5)
"""Five micro-batches of 2: of 27 samples the third step has 2, 2, 2, 1 and 0."""


def uncounted(loss: Loss) -> Task:
    """A task that counts nothing."""
    return replace(CLASSIFICATION, loss=loss, counts=None)


class Worker:
    """A world of one: its network, optimizer, reducer and steps."""

    def __init__(
        self,
        net: nn.Module,
        data: TensorDataset,
        optimizer: optim.Optimizer,
        config: TrainConfig = CONFIG,
        task: Task = CLASSIFICATION,
        clip_gradients: float = 0.0,
    ) -> None:
        self.net, self.data, self.optimizer = net, data, optimizer
        sizes = config.global_batch_size, config.micro_batch_size
        self.order = SampleOrder(config.seed, len(data), *sizes)
        self.batches: TrainBatches = Batches(data, self.order, DataConfig())
        self.forward, self.named = Forward(net, task, config), dict(net.named_parameters())
        self.num_leaves = config.num_micro_batches
        self.reducer = GradientReducer(
            self.named,
            list(reversed(range(len(self.named)))),
            self.forward.empty_tail(),
            empty_counts(self.forward),
            self.num_leaves,
            Exchange(ALONE, find_route("tree", self.num_leaves, 1)),
            bucket_bytes=100,
        )
        parts = self.forward, self.batches, optimizer, self.reducer, range(self.num_leaves)
        self.stepper = steps_of_whole(*parts, clip_gradients)

    def step(self, step: int, rate: float) -> StepResult:
        return self.stepper.run(step, rate).read()

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those with samples, as the data set holds them."""
        for leaf in range(self.num_leaves):
            samples = self.order.micro_batch(step, leaf)
            if len(samples) > 0:
                yield self.data.inputs[samples], self.data.targets[samples]

    def tensors(self) -> dict[str, Tensor]:
        """Copies of weights, buffers and what the optimizer keeps."""
        kept = {**self.named, **dict(self.net.named_buffers())}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    kept[f"{name}/{key}"] = value
        return {name: each.detach().clone() for name, each in kept.items()}


def state_of(world: World, model: nn.Module, optimizer: optim.Optimizer) -> State:
    """The state of any training; other pieces and numbers are added to it."""
    return State(
        world,
        {
            "parameter": Weights(model.named_parameters),
            "buffer": Weights(model.named_buffers),
            "optimizer": OptimizerTensors(model, optimizer),
        },
        {"scalars": OptimizerNumbers(model, optimizer)},
    )
