"""One training of ours, step by step: the same parts as `training.build_training` puts together."""

from dataclasses import replace

import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batches
from firecaffe.exchange.leaves import leaf_share
from firecaffe.exchange.route import Route, find_route
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.gradients.probe import run_probe
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.sections import TrainConfig
from firecaffe.tasks import CLASSIFICATION, Loss
from firecaffe.training.forward import Forward
from firecaffe.training.modes.every_step import empty_counts, steps_of_whole
from firecaffe.training.outcome import StepResult
from firecaffe.transport.exchange import Exchange


class OurStep:
    """Steps on this rank, with an exchange that `close` closes."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        config: TrainConfig,
        optimizer: optim.Optimizer,
        words: ExchangeConfig,
        exchange: Exchange,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        world, leaves = exchange.world, config.num_micro_batches
        share = leaf_share(leaves, world.world_size, world.rank, words.level)
        own = exchange.route.order(leaves, share)
        forward = Forward(model, replace(CLASSIFICATION, loss=loss), config)

        def first_backward() -> Tensor:
            forward.begin_step()
            value, _ = forward(*batches.train_batch(0, 0), step=0, leaf=0)
            assert value is not None
            torch.autograd.backward(value)
            return value

        named = dict(model.named_parameters())
        self.reducer = GradientReducer(
            named,
            run_probe(forward.buffers, named, first_backward, world).ready_order,
            forward.empty_tail(),
            empty_counts(forward),
            leaves,
            exchange,
            words.bucket_bytes,
        )
        self.stepper = steps_of_whole(forward, batches, optimizer, self.reducer, own)

    def __call__(self, step: int, rate: float | None = None) -> StepResult:
        """rate: of learning; None: the one that the optimizer has."""
        now: float = self.optimizer.param_groups[0]["lr"] if rate is None else rate
        return self.stepper.run(step, now).read()

    def close(self) -> None:
        self.reducer.close()


def route_of(
    world: World, words: ExchangeConfig, num_leaves: int, *, shared_memory: bool = False
) -> Route:
    """The route of such a training."""
    return find_route(
        words.algorithm,
        num_leaves,
        world.world_size,
        world.local_world_size,
        shared_memory=shared_memory,
        codec=words.codec,
        level=words.level,
    )
