"""What large batches take: scaled rates, Caffe's momentum, layer-wise rates, multipliers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import groups_of, make_optimizer, set_rate
from firecaffe.solvers.rate_policy import batch_scale, learning_rate, rate_notes

# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "batch", "factor"),
    [("none", 4096, 1.0), ("linear", 4096, 32.0), ("sqrt", 2048, 4.0), ("linear", 64, 0.5)],
)
def test_the_scale_of_a_batch(scale: str, batch: int, factor: float) -> None:
    solver = SolverConfig(base_lr=0.1, scale=scale, reference_batch_size=128)
    assert batch_scale(solver, batch) == factor
    rate = learning_rate(solver, 3, 10, batch_scale(solver, batch))
    assert rate == pytest.approx(0.1 * factor)


def test_goyals_warm_up() -> None:
    """From the rate of batch 256 to that of 8192, a thirty-second each step of thirty-one."""
    solver = SolverConfig(base_lr=0.1, scale="linear", reference_batch_size=256, warmup_steps=31)
    scale = batch_scale(solver, 8192)
    rates = [learning_rate(solver, i, 100, scale) for i in range(33)]
    assert rates[:2] == pytest.approx([0.2, 0.3])
    assert rates[30:] == pytest.approx([3.2, 3.2, 3.2])


def test_what_a_scale_resolves_to_is_said() -> None:
    solver = SolverConfig(base_lr=0.01, scale="linear", reference_batch_size=128)
    (said,) = rate_notes(solver, 1024, 10)
    assert "0.08 = 0.01 x 8 (linear, batch 1024 over 128)" in said
    assert rate_notes(SolverConfig(), 1024, 10) == []
    # And a warm-up that is longer than the training.
    (said,) = rate_notes(SolverConfig(warmup_steps=100), 64, 24)
    assert "100 steps" in said
    assert rate_notes(SolverConfig(warmup_steps=100), 64, 100) == []


# --- momentum -------------------------------------------------------------------------------------


def trained(config: SolverConfig, steps: int, rates: list[float] | None = None) -> torch.Tensor:
    """A quadratic bowl, float64: the gradient is the weight times its place."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    slopes = torch.linspace(0.1, 3.0, 12, dtype=torch.float64).view(3, 4)
    optimizer = make_optimizer({"w": weight}, config)
    for i in range(steps):
        weight.grad = slopes * weight.detach()
        rate = learning_rate(config, i, steps) if rates is None else rates[i]
        set_rate(optimizer, rate)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("kind", ["sgd", "nesterov"])
def test_caffes_form_by_its_formula(kind: str) -> None:
    config = SolverConfig(
        type=kind, momentum=0.9, weight_decay=0.01, momentum_form="caffe", lr_policy="poly"
    )
    w, h = np.ones(12), np.zeros(12)
    slopes = np.linspace(0.1, 3.0, 12)
    for i in range(12):
        before = h.copy()
        h = 0.9 * h + 0.01 * (1 - i / 12) * (slopes * w + 0.01 * w)
        w = w - (1.9 * h - 0.9 * before if kind == "nesterov" else h)
    assert trained(config, 12).flatten().numpy() == pytest.approx(w, rel=1e-12)


def test_momentum_correction_makes_the_forms_the_same() -> None:
    """Goyal et al. 2017, equations 9 and 10: the rate outside is the rate inside, corrected."""
    rates = [0.1, 0.1, 0.02, 0.02, 0.3, 0.001, 0.2, 0.0, 0.1]
    corrected = SolverConfig(momentum_form="caffe", momentum_correction=True, weight_decay=0.01)
    plain = SolverConfig(weight_decay=0.01)
    until = rates.index(0.0)
    ours, theirs = trained(corrected, until, rates), trained(plain, until, rates)
    assert torch.allclose(ours, theirs, rtol=1e-10)
    bare = trained(replace(corrected, momentum_correction=False), until, rates)
    assert (bare - theirs).abs().max() > 0.1


# --- layer-wise rates -----------------------------------------------------------------------------


def stepped(config: SolverConfig, start: np.ndarray, given: Iterable[np.ndarray]) -> np.ndarray:
    weight = nn.Parameter(torch.tensor(start))
    optimizer = make_optimizer({"w": weight}, config)
    for gradient in given:
        weight.grad = torch.tensor(gradient)
        set_rate(optimizer, config.base_lr)
        optimizer.step()
    found: np.ndarray = weight.detach().numpy()
    return found


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5, 5)])
def test_lars_is_algorithm_1(shape: tuple[int, ...]) -> None:
    start, *given = np.random.default_rng(5).normal(size=(7, *shape))
    config = SolverConfig("lars", base_lr=4.0, momentum=0.9, weight_decay=0.0005, trust=0.01)
    w, v = start.copy(), np.zeros(shape)
    for g in given:
        norm = np.linalg.norm(w)
        rate = 0.01 * norm / (np.linalg.norm(g) + 0.0005 * norm)
        v = 0.9 * v + 4.0 * rate * (g + 0.0005 * w)
        w = w - v
    assert stepped(config, start, given) == pytest.approx(w, rel=1e-10)


def test_lamb_is_algorithm_2() -> None:
    start, *given = np.random.default_rng(5).normal(size=(7, 4, 3))
    config = SolverConfig("lamb", base_lr=0.02, momentum=0.9, momentum2=0.99, weight_decay=0.1)
    w, m, v = start.copy(), np.zeros((4, 3)), np.zeros((4, 3))
    for t, g in enumerate(given, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        r = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + 0.1 * w
        w = w - 0.02 * np.linalg.norm(w) / np.linalg.norm(r) * r
    assert stepped(config, start, given) == pytest.approx(w, rel=1e-10)


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_weights_or_gradients_of_0_take_the_plain_rate(kind: str) -> None:
    config = SolverConfig(kind, base_lr=0.1)
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    moved = stepped(config, zeros, [ones])
    assert np.isfinite(moved).all()
    assert moved == pytest.approx(-0.1 * ones)
    assert stepped(config, ones, [zeros]) == pytest.approx(ones)


# --- multipliers ----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 2)


def factors(config: SolverConfig) -> dict[str, tuple[float, float]]:
    named = dict(Net().named_parameters())
    names = {id(each): name for name, each in named.items()}
    return {
        names[id(each)]: (group["rate_factor"], group["weight_decay"])
        for group in groups_of(named, config)
        for each in group["params"]
    }


def test_caffes_bias_multipliers() -> None:
    words: dict[str, Any] = {"lr_mult": {"*.bias": 2.0}, "decay_mult": {"*.bias": 0.0}}
    found = factors(SolverConfig(weight_decay=0.5, **words))
    assert found["conv.weight"] == (1.0, 0.5)
    assert found["conv.bias"] == found["fc.bias"] == found["norm.bias"] == (2.0, 0.0)
    assert found["norm.weight"] == (1.0, 0.5)


def test_no_decay_on_vectors_and_the_last_match_counts() -> None:
    found = factors(SolverConfig(weight_decay=0.5, decay_mult={"@vector": 0.0, "fc.*": 3.0}))
    bare = [name for name, (_, decay) in found.items() if decay == 0.0]
    assert bare == ["conv.bias", "norm.weight", "norm.bias"]
    assert found["fc.bias"] == found["fc.weight"] == (1.0, 1.5)
    # One group where nothing is multiplied; and a pattern that matches nothing is named.
    assert len(groups_of(dict(Net().named_parameters()), SolverConfig())) == 1
    with pytest.raises(RecipeError, match=r"solver.lr_mult has 'conv1.\*', which no parameter"):
        factors(SolverConfig(lr_mult={"conv1.*": 2.0}))


@pytest.mark.parametrize("kind", ["sgd", "adam", "lars", "lamb"])
def test_a_multiplier_is_on_the_rate_of_every_update(kind: str) -> None:
    config = SolverConfig(kind, base_lr=0.1, momentum=0.5, lr_mult={"fast": 3.0})
    start, slow = torch.ones(2, dtype=torch.float64), SolverConfig(kind, base_lr=0.3, momentum=0.5)
    both = {"fast": nn.Parameter(start.clone()), "slow": nn.Parameter(start.clone())}
    alone = {"fast": nn.Parameter(start.clone())}
    for named, solver in ((both, config), (alone, slow)):
        optimizer = make_optimizer(named, solver)
        for i in range(4):
            for each in named.values():
                each.grad = torch.full((2,), 0.1 * (i + 1), dtype=torch.float64)
            set_rate(optimizer, solver.base_lr)
            optimizer.step()
    assert torch.allclose(both["fast"], alone["fast"], rtol=1e-12)
    assert not torch.allclose(both["slow"], alone["fast"])
