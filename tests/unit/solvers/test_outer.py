"""Outer optimizers; their rules are held in tests/unit/training/local."""

import torch
from torch import nn

from firecaffe.solvers.outer_optimizer import Outer


def test_slowmo_at_a_rate_of_zero_is_an_average() -> None:
    """Its momentum is in units of the rate, and has no value there."""
    weights = [nn.Parameter(torch.tensor([3.0, 5.0])), nn.Parameter(torch.tensor([7.0]))]
    outer = Outer(weights, "slowmo")
    weights[0].grad = torch.tensor([1.0, 2.0])  # the other one was not used
    outer.step(0.0)
    assert [each.tolist() for each in weights] == [[2.0, 3.0], [7.0]]
    assert not outer.optimizer.state
