"""Models in parts where what a rank has, or has not, could decide: the bits of one worker.

Compositions with other words are in the matrix (`test_matrix.py`).
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe import (
    ExchangeConfig,
    ParallelConfig,
    Recipe,
    ShareConfig,
    SolverConfig,
    TrainConfig,
)
from tests.kit.worlds import Trained, Training, changed, end

BY_ROWS, BY_NEURONS = {"0": "rows"}, {"3": "neurons", "5": "inputs"}

CASES: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    # A pool of an image's edge has fewer numbers in its mean: of parts that is another rounding.
    "a stage begins at a pool of rows": (ParallelConfig(0, 2, BY_ROWS, 2, stages=["1"]), {}),
    "values are not trained, and some ranks have none": (
        ParallelConfig(0, 2, BY_NEURONS, 2),
        {
            "share": ShareConfig({"3": 2}, train=False),
            "exchange": ExchangeConfig(update_at="shards", bucket_bytes=1500),
        },
    ),
}


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
        *(nn.Flatten(), nn.Linear(180, 21), nn.GELU(), nn.Linear(21, 4)),
    )


class Noise(nn.Module):
    """Noise in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * torch.rand_like(x))


def noisy() -> nn.Module:
    layers = list(net().children())
    return nn.Sequential(*layers[:3], Noise(), *layers[3:], Noise())


def test_stages_that_draw_in_evaluation_end_as_one_worker(trained: Trained) -> None:
    recipe = Recipe(train=TrainConfig(32, 4, steps=2, seed=5, eval_batch_size=7, device="cpu"))
    training = Training(noisy, 70)
    staged = trained(3, changed(recipe, parallel=ParallelConfig(stages=["2", "5"])), training)
    alone = trained(1, recipe, training)
    assert end(staged) == end(alone)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_worker(trained: Trained, name: str) -> None:
    layout, words = CASES[name]
    recipe = Recipe(
        train=TrainConfig(32, 4, steps=4, seed=5, device="cpu"),
        solver=SolverConfig(base_lr=0.02, momentum=0.9),
        parallel=layout,
        **words,
    )
    training = Training(net, 70)
    alone = trained(1, changed(recipe, parallel=layout.over(1, 1)), training)
    assert end(trained(4, recipe, training)) == end(alone)
