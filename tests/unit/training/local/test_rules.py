"""Each rule of local training against a loop that is written out.

The gradient is bent: with a quadratic loss the replicas' mean would go the way of one network.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, SynchronyConfig, TrainConfig
from firecaffe.data import SampleOrder, TensorDataset
from tests.unit.training.served.made import CURVATURE, Quadratic

REPLICAS, H, STEPS, RATE, BETA = 4, 3, 8, 0.4, 0.6
TRAIN = TrainConfig(global_batch_size=16, micro_batch_size=2, steps=STEPS, seed=2)
SAMPLES = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def bent_loss(differences: Tensor, _: Tensor) -> Tensor:
    return (CURVATURE * differences.cosh().log()).sum(1).mean()


def trained(folder: Path, solver: dict[str, Any], words: dict[str, Any]) -> Tensor:
    """The weights that a training on one worker ends with."""
    recipe = Recipe(
        train=TRAIN,
        solver=SolverConfig(base_lr=RATE, **solver),
        run=RunConfig(folder=str(folder), tensorboard=False),
        synchrony=SynchronyConfig("local", **{"replicas": REPLICAS, "local_steps": H, **words}),
    )
    data = TensorDataset(SAMPLES, torch.zeros(len(SAMPLES)))
    result = firecaffe.train(recipe, Quadratic, data, data, bent_loss)
    found: Tensor = result.model.w.detach()  # type: ignore[operator]
    return found


def gradient(weights: Tensor, step: int, replica: int) -> Tensor:
    order = SampleOrder(TRAIN.seed, len(SAMPLES), TRAIN.global_batch_size, TRAIN.micro_batch_size)
    own = range(2 * replica, 2 * replica + 2)
    samples = SAMPLES[torch.cat([order.micro_batch(step, leaf) for leaf in own])]
    return CURVATURE * (weights - samples).tanh().mean(0)


def written_out(
    outer: str = "average",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    inner: float = 0.0,
    at_average: str = "keep",
    overlap_steps: int = 0,
) -> Tensor:
    """The same in a loop: SGD with momentum `inner`, averaged after steps 3, 6 and 8."""
    x = Quadratic().w.detach().clone()
    slow = torch.zeros(3)
    replicas = [x.clone() for _ in range(REPLICAS)]
    momenta = [torch.zeros(3) for _ in range(REPLICAS)]
    coming: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for step in range(STEPS):
        for r in range(REPLICAS):
            momenta[r] = inner * momenta[r] + gradient(replicas[r], step, r)
            replicas[r] = replicas[r] - RATE * momenta[r]
        done = step + 1
        if done in coming:
            x, slow = outer_step(outer, x, slow, coming[done][0], outer_lr, outer_momentum)
            replicas = [x + y - y0 for y, y0 in zip(replicas, coming[done][1], strict=True)]
        if done % H and done < STEPS:
            continue
        if overlap_steps and done < STEPS:
            difference = x - torch.stack(replicas).mean(0)
            coming[min(done + overlap_steps, STEPS)] = difference, list(replicas)
            continue
        difference = x - torch.stack(replicas).mean(0)
        x, slow = outer_step(outer, x, slow, difference, outer_lr, outer_momentum)
        replicas = [x.clone() for _ in range(REPLICAS)]
        if at_average == "zero":
            momenta = [torch.zeros(3) for _ in range(REPLICAS)]
        elif at_average == "average":
            momenta = [torch.stack(momenta).mean(0)] * REPLICAS
    return x


def outer_step(
    outer: str, x: Tensor, slow: Tensor, difference: Tensor, rate: float, momentum: float
) -> tuple[Tensor, Tensor]:
    if outer == "slowmo":
        slow = momentum * slow + difference / RATE
        return x - rate * RATE * slow, slow
    if outer == "nesterov":
        slow = momentum * slow + difference
        return x - rate * (difference + momentum * slow), slow
    return x - difference, slow


SLOWMO = {"outer": "slowmo", "outer_lr": 0.9, "outer_momentum": 0.4}
NESTEROV = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.3}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({}, {}),
        (SLOWMO, SLOWMO),
        (NESTEROV, NESTEROV),
        ({"outer": "slowmo"}, {"outer": "slowmo", "outer_momentum": 0.5}),
        ({"outer": "nesterov"}, {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}),
        ({"overlap_steps": 1}, {"overlap_steps": 1}),
        ({**NESTEROV, "overlap_steps": 2}, {**NESTEROV, "overlap_steps": 2}),
    ],
    ids=["average", "slowmo", "nesterov", "usual slowmo", "usual nesterov", "overlap", "both"],
)
@pytest.mark.parametrize("inner", [0.0, BETA])
def test_an_average(
    words: dict[str, Any], told: dict[str, Any], inner: float, tmp_path: Path
) -> None:
    found = trained(tmp_path / "run", {"momentum": inner}, words)
    torch.testing.assert_close(found, written_out(**told, inner=inner), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_average", ["keep", "zero", "average"])
def test_what_becomes_of_momentum(at_average: str, tmp_path: Path) -> None:
    found = trained(tmp_path / "run", {"momentum": BETA}, {"inner_momentum": at_average})
    expected = {
        each: written_out(inner=BETA, at_average=each) for each in ("keep", "zero", "average")
    }
    torch.testing.assert_close(found, expected.pop(at_average), rtol=1e-5, atol=1e-6)
    assert not any(torch.allclose(found, other, rtol=1e-3) for other in expected.values())


@pytest.mark.parametrize("outer", ["slowmo", "nesterov"])
def test_without_momentum_and_with_rate_1_the_outer_optimizer_is_the_average(
    outer: str, tmp_path: Path
) -> None:
    words = {"outer": outer, "outer_lr": 1.0, "outer_momentum": 0.0}
    found = trained(tmp_path / "run", {"momentum": BETA}, words)
    torch.testing.assert_close(found, written_out(inner=BETA), rtol=1e-5, atol=1e-6)


def test_replicas_do_part(tmp_path: Path) -> None:
    """The control: what comes out is not what rounds of one step come to."""
    (x,) = Quadratic().parameters()
    together = x.detach().clone()
    for step in range(STEPS):
        each = [gradient(together, step, r) for r in range(REPLICAS)]
        together = together - RATE * torch.stack(each).mean(0)
    one = trained(tmp_path / "one", {"momentum": 0.0}, {"local_steps": 1})
    torch.testing.assert_close(one, together, rtol=1e-5, atol=1e-6)
    found = trained(tmp_path / "run", {"momentum": 0.0}, {})
    assert not torch.allclose(found, together, rtol=1e-4)
