"""Evaluation: every sample is counted exactly once, on any number of ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import gather_bytes, gather_json
from firecaffe.cluster.group import Group
from firecaffe.data import DataConfig, Dataset, eval_batches, num_samples
from firecaffe.errors import RecipeError
from firecaffe.gradients.buffers import BufferSnapshot
from firecaffe.recipe.sections import TrainConfig
from firecaffe.tasks import Task
from firecaffe.tasks.metric import Metric, Parts, State, add_batch, pack, unpack
from firecaffe.training.forward import AUTOCAST, match_format, seed_random
from firecaffe.user_code import failed, failing_as

EvalBatch = tuple[int, Any, Any]
"""The number of a batch, its inputs and its targets."""


class Outputs(Protocol):
    def __call__(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int]
    ) -> Iterator[tuple[EvalBatch, Any]]:
        """Yield batches with their outputs, on ranks that have them. numbers: of these batches."""


@dataclass(frozen=True)
class Evaluation:
    """The loss (mean over samples) and metrics of a network on a data set."""

    samples: int
    loss: float
    metrics: dict[str, float]
    shares: list[str]
    """The names of metrics that are shares of 1."""
    largest_class_share: float | None
    """The top-1 of always predicting the most frequent class; None without classes."""

    @property
    def row(self) -> dict[str, Any]:
        row = {"samples": self.samples, "loss": self.loss, **self.metrics}
        share = self.largest_class_share
        return row if share is None else {**row, "largest_class_share": share}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the modules into evaluation mode, for a `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        if modes[0][1]:
            model.train()  # a user's `train` method may undo what it did for evaluation
        for module, training in modes:
            module.training = training


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    dtype = AUTOCAST.get(config.autocast)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def evaluate(
    model: nn.Module,
    task: Task,
    dataset: Dataset,
    data: DataConfig,
    config: TrainConfig,
    world: Group,
    labels_L: Tensor | None = None,
    outputs_of: Outputs | None = None,
    result_group: Group | None = None,
) -> Evaluation:
    """Evaluate the model on all ranks together; every rank returns the same.

    Batches are the same for any number of ranks, and results are combined in batch order. `world`
    shares out the batches. labels_L: the network's label for each label of the data set, if they
    differ. outputs_of: returns the network's outputs; None calls it. result_group: the ranks that
    exchange results, each of its own batches; None means world.
    """
    outputs_of = outputs_of or partial(_outputs_of, model, config)
    rows: list[tuple[int, int, float]] = []  # of each batch: number, samples, sum of their losses
    parts: Parts = {}
    classes: Counter[int] = Counter()
    batches = eval_batches(
        dataset,
        config.eval_batch_size,
        world.rank,
        world.world_size,
        config=data,
        device=world.device,
    )
    numbers = range(world.rank, -(-len(dataset) // config.eval_batch_size), world.world_size)
    kept = BufferSnapshot(model)
    with evaluating(model), torch.no_grad(), autocast(config, world.device):
        for (number, inputs, targets), outputs in outputs_of(_seeded(batches, config), numbers):
            if labels_L is not None:
                targets = labels_L.to(targets.device)[targets]
            samples = num_samples(inputs, targets)
            with failing_as(f"the loss of batch {number} of an evaluation: it"):
                loss = float(task.loss(outputs, targets))
            rows.append((number, samples, loss * samples))
            add_batch(parts, task.measured, number, outputs, targets)
            if task.classes is not None:
                classes.update(task.classes(targets))
            kept.put_back()
        kept.put_back()
    stated = {"rows": rows, "classes": list(classes.items())}
    return _of_all(stated, parts, task, config.seed, result_group or world)


def _of_all(
    stated: dict[str, Any], parts: Parts, task: Task, seed: int, result_group: Group
) -> Evaluation:
    # All ranks call it.
    metrics = task.measured
    gathered = gather_json(result_group, stated)
    in_batch_order = sorted(tuple(row) for part in gathered for row in part["rows"])
    classes = sum((Counter(dict(part["classes"])) for part in gathered), Counter[int]())
    _, counts, losses = zip(*in_batch_order, strict=True)
    count = sum(counts)
    states = unpack(metrics, gather_bytes(result_group, pack(parts))) if metrics else {}
    seed_random(seed, "metrics")
    return Evaluation(
        samples=count,
        loss=sum(losses) / count,
        metrics={name: value_of(name, metrics[name], states[name], count) for name in metrics},
        shares=task.shares,
        largest_class_share=max(classes.values()) / count if classes else None,
    )


def _seeded(batches: Iterator[EvalBatch], config: TrainConfig) -> Iterator[EvalBatch]:
    # Random numbers in a network or metric depend on the batch, not on the rank that has it.
    for batch in batches:
        seed_random(config.seed, "evaluation", batch[0])
        yield batch


def _outputs_of(
    model: nn.Module, config: TrainConfig, batches: Iterator[EvalBatch], _: Sequence[int]
) -> Iterator[tuple[EvalBatch, Any]]:
    for batch in batches:
        with failing_as(f"the network does not take test batch {batch[0]}: it"):
            outputs = model(match_format(batch[1], config))
        yield batch, outputs


def value_of(name: str, metric: Metric, state: State, samples: int) -> float:
    try:
        return metric.value(state, samples)
    except RecipeError as error:
        raise RecipeError(f"metric {name!r}: {error}") from error
    except Exception as error:
        raise failed(f"metric {name!r}, of {samples} samples,", error) from error
