"""The moving average against torch's own, and how it takes the weights' place."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from firecaffe.training.evaluation_weights import Ema


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))


def test_it_is_torch_s() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    ours = Ema(dict(model.named_parameters()), 0.9)
    for step in range(5):
        moved(model)
        theirs.update_parameters(model)
        ours.update(step)
        for name, average in theirs.module.named_parameters():
            assert torch.equal(ours.average[name], average)


def test_a_warm_up_forgets_the_first_weights_sooner() -> None:
    weight = nn.Parameter(torch.zeros(1))
    ema = Ema({"w": weight}, 0.5, warmup=True)
    expected = 0.0
    for step in range(12):
        weight.data.fill_(step + 1)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = step + 1 if step == 0 else decay * expected + (1 - decay) * (step + 1)
        assert ema.average["w"].item() == pytest.approx(expected)


def test_in_the_weights_place_and_back() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(dict(model.named_parameters()), 0.5)
    ema.update(0)
    average = copy.deepcopy(model)
    moved(model)
    trained, inputs = copy.deepcopy(model), torch.rand(3, 2)
    memory = [each.data_ptr() for each in model.parameters()]
    with ema.in_place():
        assert torch.equal(model(inputs), average(inputs))
    assert torch.equal(model(inputs), trained(inputs))
    assert torch.equal(ema.average["weight"], average.weight)
    assert memory == [each.data_ptr() for each in model.parameters()]
    assert all(each.requires_grad for each in model.parameters())
