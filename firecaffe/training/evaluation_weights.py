"""The weights of evaluations: a moving average, and BatchNorm statistics that are estimated anew.

    average = weights                                       after the first update
    average = average + (1 - decay) (weights - average)     after each later one

Replicas have common weights only when they are averaged. If that is after k steps, these count as k
updates: with a share of 1 - decay^k. Buffers are not averaged: the training's statistics are means
over steps already. Source: Polyak and Juditsky 1992; as in torch.optim.swa_utils
(`get_ema_multi_avg_fn`, buffers kept in sync).

The training's BatchNorm statistics are means over past weights. Late gradients and replicas make
them less accurate, and averaged weights have none. So evaluations may use others, estimated with
the present weights from the first whole micro-batches of the first epoch, augmented as in training:
the means of their means and variances, in order. The training's own do not change. Source: Izmailov
et al. 2018, "Averaging weights leads to wider optima and better generalization", section 3.2; as in
torch.optim.swa_utils.update_bn (a cumulative mean). The number of workers changes neither.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from firecaffe.cluster.agree import gather_bytes
from firecaffe.cluster.group import Group
from firecaffe.data import Batches
from firecaffe.errors import RecipeError
from firecaffe.parallel.layers_in_parts import NormOverRows
from firecaffe.recipe.sections import TrainConfig
from firecaffe.synchrony.server_policies import Leaf
from firecaffe.training.forward import match_format, seed_random
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.piece import Piece, Weights

# With a warm-up, the decay of update t, counted from 0, is at most (1 + t) / (WARMUP + t), so that
# the first weights are soon forgotten. Source: TensorFlow's ExponentialMovingAverage (num_updates).
WARMUP = 10


class Ema:
    def __init__(
        self, named: Mapping[str, nn.Parameter], decay: float, warmup: bool = False
    ) -> None:
        self._weights: dict[str, Tensor] = dict(named)
        self._decay, self._warmup = decay, warmup
        self.average = {name: parameter.detach().clone() for name, parameter in named.items()}

    @property
    def piece(self) -> Weights:
        return Weights(self.average.items)

    def update(self, step: int) -> None:
        self.update_after(range(step, step + 1), self._weights)

    @torch.no_grad()
    def update_after(self, steps: range, names: Iterable[str]) -> None:
        """Add the named weights after `steps`, of which only the last ended in common weights."""
        average = [self.average[name] for name in names]
        if not average:  # a stage without weights
            return
        weights = [self._weights[name] for name in names]
        if steps.start == 0:
            torch._foreach_copy_(average, weights)
            return
        torch._foreach_lerp_(average, weights, 1 - prod(map(self._decay_of, steps)))

    def _decay_of(self, step: int) -> float:
        return min(self._decay, (1 + step) / (WARMUP + step)) if self._warmup else self._decay

    def exchange(self) -> None:
        """Swap the average and the weights, without a copy."""
        for weight, average in zip(self._weights.values(), self.average.values(), strict=True):
            weight.data, average.data = average.detach(), weight.detach()


def average_of(config: TrainConfig, weights: Mapping[str, nn.Parameter]) -> Ema | None:
    return Ema(weights, config.ema_decay, config.ema_warmup) if config.ema_decay else None


NORMS = "batch_norm"
"""The piece of the state with the statistics that belong to a checkpoint's weights."""

BUFFERS = ("running_mean", "running_var")


def layers_of(network: nn.Module) -> dict[str, Any]:
    """Return this rank's trained BatchNorm layers, or parts of split ones, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm | NormOverRows)
        and module.training
        and module.running_mean is not None
    }


def check_layers(network: nn.Module, samples: int) -> None:
    """Raise RecipeError if a whole network has no layer whose statistics are estimated."""
    if not layers_of(network):
        raise RecipeError(
            f"train.batch_norm_samples is {samples}, but the network has no BatchNorm that is "
            "trained; leave it out"
        )


class TrainedNorms:
    """Leaves the training's own BatchNorm statistics in place for evaluations."""

    def pieces(self) -> dict[str, Piece]:
        return {}

    def is_for_step(self, step: int) -> bool:
        return True

    def estimate(self, ranks: Group, step: int) -> None: ...

    def in_place(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self) -> None: ...


class Norms:
    """Estimates the BatchNorm statistics of evaluations."""

    def __init__(self, holding: Holding, batches: Batches, samples: int) -> None:
        """Use `samples` samples, in whole micro-batches. Raises: RecipeError if there are fewer."""
        self._holding, self._forward, self._batches = holding, holding.forward, batches
        self._layers = layers_of(holding.network)
        order = batches.order
        if samples > order.num_samples:
            raise RecipeError(
                f"train.batch_norm_samples is {samples}; there are {order.num_samples} training "
                "samples, so it must be at most as many"
            )
        places = range(samples // order.micro_batch_size)
        self._leaves = [Leaf(*divmod(place, order.num_micro_batches)) for place in places]
        self._statistics = {name: buffer.clone() for name, buffer in self._running().items()}
        self._step = -1

    def pieces(self) -> dict[str, Piece]:
        """Return the statistics as state; not as results, because they follow from the weights."""
        statistics = Weights(self._statistics.items, is_result=False)
        return {NORMS: self._holding.piece(statistics)}

    def is_for_step(self, step: int) -> bool:
        return self._step == step

    @torch.no_grad()
    def estimate(self, ranks: Group, step: int) -> None:
        """Estimate the statistics after `step`, with the weights of evaluations. All ranks call it.

        `ranks` share out the micro-batches, and have the same layers.
        """
        places = range(ranks.rank, len(self._leaves), ranks.world_size)
        local_statistics = {
            f"{place}/{name}": buffer
            for place, statistics in zip(places, self._of_leaves(places), strict=True)
            for name, buffer in statistics.items()
        }
        gathered: dict[str, Tensor] = {}
        for data in gather_bytes(ranks, save(local_statistics) if local_statistics else b""):
            gathered |= load(data) if data else {}
        for name, buffer in self._statistics.items():
            of_leaves = [gathered[f"{place}/{name}"] for place in range(len(self._leaves))]
            buffer.copy_(torch.stack(of_leaves).double().mean(0))
        self._step = step

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these statistics instead of the training's own, for a `with` block."""
        kept = {name: buffer.clone() for name, buffer in self._running().items()}
        self.put()
        try:
            yield
        finally:
            for name, buffer in self._running().items():
                buffer.copy_(kept[name])

    def put(self) -> None:
        for name, buffer in self._running().items():
            buffer.copy_(self._statistics[name])

    def _running(self) -> dict[str, Tensor]:
        return {f"{n}.{b}": getattr(layer, b) for n, layer in self._layers.items() for b in BUFFERS}

    def _of_leaves(self, places: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        forward = self._forward
        momenta = {name: layer.momentum for name, layer in self._layers.items()}
        forward.buffers.begin_step()
        for layer in self._layers.values():
            layer.momentum = 1.0  # so that earlier values count for nothing
        try:
            for _ in self._holding.training_outputs(places, self._inputs):
                yield {name: buffer.cpu().clone() for name, buffer in self._running().items()}
                forward.buffers.begin_micro_batch()  # restores all buffers
        finally:
            for name, layer in self._layers.items():
                layer.momentum = momenta[name]
            forward.buffers.begin_micro_batch()

    def _inputs(self, place: int) -> Any:
        config, leaf = self._forward.config, self._leaves[place]
        inputs, _ = self._batches.train_batch(*leaf)
        seed_random(config.seed, "dropout", *leaf)
        return match_format(inputs, config)
