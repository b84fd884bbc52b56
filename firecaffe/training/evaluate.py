"""Evaluation: every sample counted exactly once, on any number of ranks."""

import json
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.data import DataConfig, Dataset, eval_batches
from firecaffe.recipe.config import TrainConfig
from firecaffe.training.step import AUTOCAST, Loss, count_correct


@dataclass(frozen=True)
class Evaluation:
    """Fractions of the data set's samples, and the mean loss."""

    samples: int
    loss: float
    top1: float
    top5: float
    largest_class_share: float
    """Top-1 of whoever always names the class that most samples are of."""


def evaluate(
    model: nn.Module,
    loss: Loss,
    dataset: Dataset,
    data: DataConfig,
    config: TrainConfig,
    world: World,
) -> Evaluation:
    """Evaluates the model on all ranks together; every rank returns the same.

    Batches are the same for every number of ranks, and their sums are added in batch order.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    dtype = AUTOCAST.get(config.autocast)
    rows: list[tuple[int, int, float, float, float]] = []
    of_class: Counter[int] = Counter()
    batches = eval_batches(
        dataset,
        config.eval_batch_size,
        world.rank,
        world.world_size,
        config=data,
        device=world.device,
    )
    with torch.no_grad(), torch.autocast(world.device.type, dtype, enabled=dtype is not None):
        for number, images, labels in batches:
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            outputs = model(images)
            mean_loss = loss(outputs, labels).item()
            top1, top5 = count_correct(outputs, labels).tolist()
            rows.append((number, len(labels), mean_loss * len(labels), top1, top5))
            of_class.update(labels.tolist())
    for module, training in modes:
        module.training = training
    stated = json.dumps({"rows": rows, "classes": list(of_class.items())})
    gathered = [json.loads(text) for text in gather_text(world, stated)]
    in_batch_order = sorted(tuple(row) for part in gathered for row in part["rows"])
    classes: Counter[int] = Counter()
    for part in gathered:
        classes.update(dict(part["classes"]))
    _, samples, losses, top1s, top5s = zip(*in_batch_order, strict=True)
    count = sum(samples)
    return Evaluation(
        samples=count,
        loss=sum(losses) / count,
        top1=sum(top1s) / count,
        top5=sum(top5s) / count,
        largest_class_share=max(classes.values()) / count,
    )
