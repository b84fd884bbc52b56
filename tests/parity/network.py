"""The network of the bare loops, what they share, and the training that they are compared with."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster.agree import digest
from firecaffe.cluster.world import World
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.tensor_file import TensorFile
from tests.kit.training_steps import state_of

SEED, STEPS, RATE, MOMENTUM, DECAY = 11, 6, 0.05, 0.9, 0.001
MICRO_BATCH = 3
KEPT_BACK = "kept back/"
"""Before the names of what a compressor keeps."""


class Net(nn.Module):
    """No dropout, whose noise is keyed by micro-batch, and no statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.conv1(images))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def recipe_for(folder: Path, batch: int, micro_batch: int = MICRO_BATCH, **sections: Any) -> Recipe:
    words: dict[str, Any] = {
        "train": TrainConfig(batch, micro_batch, steps=STEPS, seed=SEED),
        "solver": SolverConfig(base_lr=RATE, momentum=MOMENTUM, weight_decay=DECAY),
        "run": RunConfig(folder=str(folder / "run"), tensorboard=False),
    }
    return Recipe(**(words | sections))


def ours(
    net: nn.Module, train_set: TensorDataset, recipe: Recipe, resume: Path | None = None
) -> dict[str, Tensor]:
    """All tensors of the last checkpoint of `firecaffe.train`, and what a compressor keeps back."""
    result = firecaffe.train(
        recipe, lambda: copy.deepcopy(net), train_set, train_set, resume=resume
    )
    checkpoint = load_newest(Path(recipe.run.folder))[0]
    tensors = dict(checkpoint.tensors)
    names = [f"parameter/{name}" for name, _ in net.named_parameters()]
    assert result.weights_sha256 == digest((name, tensors[name]) for name in names)
    for path in checkpoint.piece_files.values():
        tensors |= {f"{KEPT_BACK}{key}": value for key, value in TensorFile(path).items()}
    return tensors


def state_tensors(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors of a training, by their names in a checkpoint."""
    return state_of(World(0, 1, torch.device("cpu")), net, optimizer).tensors_held_by_all()


def gradients_of(
    net: Net, train_set: TensorDataset, order: SampleOrder, step: int, leaf: int
) -> Sequence[Tensor | None]:
    """One micro-batch's, None for a parameter that it does not use."""
    samples = order.micro_batch(step, leaf)
    parameters = list(net.parameters())
    if len(samples) == 0:
        return [None] * len(parameters)
    loss = F.cross_entropy(net(train_set.inputs[samples]), train_set.targets[samples])
    if len(samples) < MICRO_BATCH:
        loss = loss * (len(samples) / MICRO_BATCH)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def dense(gradients: Iterable[Tensor | None], parameter: Tensor) -> list[Tensor]:
    return [torch.zeros_like(parameter) if each is None else each for each in gradients]


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """The left subtree is the largest whole one; each pair is added once, left to right."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return tree_sum(values[:half]) + tree_sum(values[half:])


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.view(torch.int32), expected[name].view(torch.int32)), name
