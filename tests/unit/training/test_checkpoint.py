"""Checkpoints: every bit comes back, or an error says why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.errors import CheckpointError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer
from firecaffe.training.checkpoint import (
    META,
    STATE,
    SUMS,
    Checkpoint,
    check_identity,
    load_newest,
    restore,
    save_checkpoint,
    state_scalars,
    state_tensors,
)

FILES = (STATE, META, SUMS)


class Net(nn.Module):
    """A shared, a frozen, an unused and a scalar parameter; buffers of several types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)
        self.again = self.head
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.factors = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bytes", torch.tensor([0, 255], dtype=torch.uint8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).mean((2, 3))
        out: Tensor = self.again(torch.relu(self.head(x))) * self.scale
        return out * self.factors.sum().float()


def train_some(net: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(5, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()


def build(seed: int, solver: str, channels_last: bool) -> tuple[Net, optim.Optimizer]:
    net = Net(seed)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    config = SolverConfig(type=solver, momentum=0.9, weight_decay=0.01)
    return net, make_optimizer(named, config)


def taken(net: nn.Module, optimizer: optim.Optimizer, step: int = 3) -> Checkpoint:
    return Checkpoint(
        step=step,
        identity={"solver.type": "sgd", "solver.stepvalue": [1, 2], "solver.base_lr": 0.1},
        probe="p",
        history="h",
        tensors=state_tensors(net, optimizer),
        scalars=state_scalars(net, optimizer),
        scaler={"scale": 65536.0, "_growth_tracker": 3},
    )


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """What must come back: dtype, shape, layout and every byte."""
    return {
        name: (t.dtype, t.shape, t.stride(), t.contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_bit_comes_back(tmp_path: Path, solver: str, channels_last: bool) -> None:
    net, optimizer = build(1, solver, channels_last)
    train_some(net, optimizer, range(3))
    before = bits(state_tensors(net, optimizer))
    save_checkpoint(tmp_path, taken(net, optimizer))
    assert bits(state_tensors(net, optimizer)) == before

    loaded = load_newest(tmp_path)[0]
    other, other_optimizer = build(2, solver, channels_last)
    restore(loaded, other, other_optimizer)
    assert bits(state_tensors(other, other_optimizer)) == before
    assert state_scalars(other, other_optimizer) == state_scalars(net, optimizer)
    assert (loaded.step, loaded.probe, loaded.history) == (3, "p", "h")
    assert loaded.scaler == {"scale": 65536.0, "_growth_tracker": 3}

    # And the training goes on as if it had not been interrupted.
    train_some(net, optimizer, range(3, 6))
    train_some(other, other_optimizer, range(3, 6))
    assert bits(state_tensors(other, other_optimizer)) == bits(state_tensors(net, optimizer))


def test_what_the_state_holds() -> None:
    net, optimizer = build(1, "adam", False)
    train_some(net, optimizer, range(1))
    names = list(state_tensors(net, optimizer))
    parameters = [name for name in names if name.startswith("parameter/")]
    assert parameters == [f"parameter/{name}" for name, _ in net.named_parameters()]
    assert "parameter/head.weight" in names
    assert "parameter/again.weight" not in names  # shared: once
    assert "buffer/norm.num_batches_tracked" in names
    assert {n.rpartition("/")[2] for n in names if n.startswith("optimizer/head.bias/")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert not any(n.startswith(("optimizer/unused", "optimizer/frozen")) for n in names)
    # The live tensors, not copies.
    tensors = state_tensors(net, optimizer)
    assert tensors["parameter/scale"].data_ptr() == net.scale.data_ptr()


def test_scalars_come_back(tmp_path: Path) -> None:
    net, optimizer = build(1, "sgd", False)
    optimizer.state[net.scale] = {"count": 3, "rate": 0.1, "nothing": None}
    save_checkpoint(tmp_path, taken(net, optimizer))
    other, other_optimizer = build(2, "sgd", False)
    restore(load_newest(tmp_path)[0], other, other_optimizer)
    assert other_optimizer.state[other.scale] == {"count": 3, "rate": 0.1, "nothing": None}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("parameter/head.bias", None, "lacks head.bias, which the model has"),
        ("buffer/mask", None, "lacks mask, which the model has"),
        ("parameter/head.bias", torch.zeros(5), r"head.bias is torch.float32 \(5,\) in the chec"),
        ("parameter/head.bias", torch.zeros(4).double(), r"head.bias is torch.float64 \(4,\) in"),
        ("buffer/mask", torch.zeros(2), r"mask is torch.float32 \(2,\) in the checkpoint, torch"),
        ("parameter/more", torch.zeros(2), "holds parameter/more, which the model does not have"),
        ("buffer/more", torch.zeros(2), "holds buffer/more"),
        ("optimizer/more/step", torch.zeros(2), "holds optimizer/more/step"),
        ("stranger", torch.zeros(2), "holds stranger"),
    ],
)
def test_another_model(name: str, value: Tensor | None, words: str) -> None:
    net, optimizer = build(1, "sgd", False)
    checkpoint = taken(net, optimizer)
    if value is None:
        del checkpoint.tensors[name]
    else:
        checkpoint.tensors[name] = value
    with pytest.raises(CheckpointError, match=words):
        restore(checkpoint, *build(2, "sgd", False))


def test_scalars_of_another_model() -> None:
    checkpoint = taken(*build(1, "sgd", False))
    checkpoint.scalars["more/count"] = 3
    with pytest.raises(CheckpointError, match="holds more/count, which the model does not have"):
        restore(checkpoint, *build(2, "sgd", False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"solver.base_lr": 0.2}, "solver.base_lr is 0.2 in the recipe, 0.1 in the checkpoint"),
        ({"solver.stepvalue": [1, 3]}, r"solver.stepvalue is \[1, 3\] in the recipe, \[1, 2\] in"),
        ({"train.steps": 5}, "train.steps is 5 in the recipe, None in the checkpoint"),
        ({"solver.type": None}, "solver.type is None in the recipe, 'sgd' in the checkpoint"),
        # The first in the alphabet, however many there are.
        ({"solver.type": "adam", "data.name": "x"}, "data.name is 'x'"),
    ],
)
def test_identity_names_the_word(changes: dict[str, Any], words: str) -> None:
    checkpoint = taken(*build(1, "sgd", False))
    check_identity(checkpoint, dict(checkpoint.identity), checkpoint.step)
    asked = {k: v for k, v in {**checkpoint.identity, **changes}.items() if v is not None}
    with pytest.raises(CheckpointError, match=words):
        check_identity(checkpoint, asked, checkpoint.step)


def test_fewer_steps_than_the_checkpoint_s_are_the_cause_that_is_told() -> None:
    """Not the word train.steps, which may differ besides (cosine)."""
    checkpoint = taken(*build(1, "sgd", False))
    steps = checkpoint.step - 1
    with pytest.raises(
        CheckpointError, match=rf"at step {steps + 1}, the recipe ends at .* {steps};"
    ):
        check_identity(checkpoint, {**checkpoint.identity, "train.steps": steps}, steps)
