"""parallel.head_updates against torch: fully connected layers that are updated more often."""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import firecaffe
from firecaffe import DataConfig, ParallelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import SampleOrder
from tests.ranks.networks import small_data
from tests.world import Ranks

SAMPLES, STEPS, UPDATES = 50, 5, 2
RECIPE = Recipe(
    data=DataConfig(augment="none"),
    train=TrainConfig(32, 4, steps=STEPS, seed=3, device="cpu"),
    solver=SolverConfig(base_lr=0.05, momentum=0.9, weight_decay=1e-2),
    parallel=ParallelConfig(1, 1, {"head.0": "neurons", "head.2": "inputs"}, 1, "one_weird_trick"),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3)
        self.head = nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).relu().flatten(1))
        return y


def first() -> Net:
    torch.manual_seed(1)
    return Net()


def fit(folder: str) -> dict[str, Tensor]:
    parallel = dataclasses.replace(RECIPE.parallel, head_updates=UPDATES)
    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(RECIPE, parallel=parallel, run=run)
    firecaffe.train(recipe, first, small_data(SAMPLES), small_data(8, 1))
    return dict(firecaffe.load(folder, model=first).named_parameters())


def by_torch() -> dict[str, Tensor]:
    """A step's head in two updates, by even and by odd micro-batches; its body once, by all."""
    model, data = first(), small_data(SAMPLES)
    head, body = (
        optim.SGD(each.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
        for each in (model.head, model.body)
    )
    order = SampleOrder(RECIPE.train.seed, SAMPLES, 32, 4)
    for step in range(STEPS):
        body.zero_grad()
        for update in range(UPDATES):
            head.zero_grad()
            chosen = [order.micro_batch(step, leaf) for leaf in range(update, 8, UPDATES)]
            count = sum(len(each) for each in chosen)
            for each in chosen:
                if len(each):
                    inputs, targets = data.batch(each)
                    loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                    torch.autograd.backward(loss)
            if count:
                for parameter in model.head.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= count
                head.step()
        assert model.body.weight.grad is not None
        for parameter in model.body.parameters():
            assert parameter.grad is not None
            parameter.grad /= order.samples_in_step(step)
        body.step()
    return dict(model.named_parameters())


def test_it_is_what_a_loop_of_torch_comes_to(ranks: Ranks, tmp_path: Path) -> None:
    """Steps 2 and 4 end an epoch, with a short micro-batch and empty ones."""
    [found] = ranks.shared(1, fit, str(tmp_path / "run"))
    for name, expected in by_torch().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
