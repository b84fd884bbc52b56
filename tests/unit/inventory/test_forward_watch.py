"""What one forward changes and draws."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.unusual import layers, refused
from benchmarks.unusual.teachers import Teacher
from firecaffe.errors import RecipeError
from firecaffe.generators import NUMPY, PYTHON, TORCH
from firecaffe.inventory.forward_watch import Changes, Watch

VALUES = torch.randn(8, layers.WIDTH, generator=torch.Generator().manual_seed(0))


def around(network: nn.Module) -> Changes:
    watch = Watch(network)
    network(VALUES)
    return watch.changes()


def test_a_plain_network_changes_nothing() -> None:
    assert around(nn.Sequential(nn.Linear(layers.WIDTH, 2), nn.BatchNorm1d(2))) == Changes(
        [], {}, {}, []
    )


def test_a_queue_is_written_in_places() -> None:
    changes = around(layers.Queue())
    assert changes.in_places == {"queue": "8 of its 64 rows"}
    assert changes.steps == {"place": 8}


def test_a_teacher_follows() -> None:
    assert around(Teacher()).frozen == ["teacher.weight", "teacher.bias"]


class Drawing(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * random.random() * np.random.rand()


@pytest.mark.parametrize(
    ("network", "draws"),
    [(nn.Dropout(), [TORCH]), (Drawing(), [PYTHON, NUMPY]), (nn.Linear(layers.WIDTH, 2), [])],
)
def test_generators_that_are_drawn_from(network: nn.Module, draws: list[str]) -> None:
    assert around(network).draws == draws


class Scaling(nn.Module):
    """Writes the same value as there was: the next may be another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 2)
        return values * self.scale


class Making(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("there", torch.zeros(2))

    def forward(self, values: Tensor) -> Tensor:
        match self.what:
            case "parameter":
                self.new = nn.Parameter(torch.zeros(2))
            case "buffer":
                self.register_buffer("new", torch.zeros(2))
            case "type":
                self.there = torch.zeros(2, dtype=torch.float64)
        return values


@pytest.mark.parametrize(
    ("network", "word"),
    [
        (Scaling(), "parameter scale"),
        (refused.Clipping(), r"parameter layer\.weight"),
        (nn.Sequential(nn.Embedding(8, 2, max_norm=0.1)), r"0\.weight.*max_norm"),
        (refused.Replacing(), "in the place of scale"),
        (refused.Growing(), "buffer seen"),
        (Making("parameter"), "parameter new"),
        (Making("buffer"), "buffer new"),
        (Making("type"), "float64"),
    ],
)
def test_what_cannot_be_kept_is_refused(network: nn.Module, word: str) -> None:
    watch = Watch(network)
    network(torch.arange(8) if isinstance(network, nn.Sequential) else VALUES)
    with pytest.raises(RecipeError, match=word):
        watch.changes()
