"""The bytes that the planner counts of rows and paths, against those that ranks send."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from firecaffe.models.config import ModelConfig
from firecaffe.models.inception import Inception
from firecaffe.models.local_response_norm import LocalResponseNorm
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.of_parallel import OwnCost, OwnLayout
from firecaffe.plan.of_recipe import workload_of_model
from tests.ranks.splitting import sent_by
from tests.world import Ranks

WIDTHS = (4, 3, 6, 2, 3, 5)


def in_rows() -> nn.Module:
    """Halos of pools in ceil mode, a pool that makes too few rows, and a dense layer in parts."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 11, 4), nn.ReLU(), LocalResponseNorm(3, 0.5), nn.Dropout(0.2)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 6, 5, padding=2, groups=2)),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 3, padding=1)),
        *(nn.MaxPool2d(3, 3), nn.Flatten(), nn.Linear(4 * 2 * 2, 8), nn.ReLU()),
    )


def in_paths() -> nn.Module:
    """Between filters and neurons; one takes what another has made."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(Inception(8, WIDTHS, batch_norm=True), nn.MaxPool2d(2)),
        *(Inception(18, WIDTHS, batch_norm=False), nn.Flatten(), nn.Linear(18 * 9, 8)),
    )


def in_two() -> nn.Module:
    """The paths take what is common, and rows what paths have made."""
    return nn.Sequential(Fire(3, 4, 6), nn.ReLU(), nn.Conv2d(12, 4, 3, padding=1), nn.ReLU())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], tuple[int, int, int]]] = {
    "in_rows": (
        in_rows,
        {"0": "rows", "5": "rows", "6": "rows", "9": "rows", "12": "inputs"},
        (3, 71, 55),
    ),
    "in_paths": (
        in_paths,
        {"0": "filters", "3": "paths", "5": "paths", "7": "neurons"},
        (3, 12, 12),
    ),
    "in_two": (in_two, {"0": "paths", "2": "rows"}, (3, 7, 5)),
}
"""Networks, each with what it is split by, and its images."""


def sent(name: str, parts: int) -> list[int]:
    make, words, shape = NETWORKS[name]
    return sent_by(make(), words, torch.ones(2, *shape), parts)


@pytest.mark.parametrize(
    ("name", "workers", "parts"),
    [
        *(("in_rows", 2, 2), ("in_rows", 2, 4), ("in_rows", 4, 4)),
        *(("in_paths", 2, 2), ("in_paths", 2, 4), ("in_paths", 4, 4), ("in_two", 2, 2)),
    ],
)
def test_what_is_planned_is_sent(ranks: Ranks, name: str, workers: int, parts: int) -> None:
    found = ranks.shared(workers, sent, name, parts)
    _, words, shape = NETWORKS[name]
    config = ModelConfig(f"tests.ranks.test_planned_split:{name}")
    work = workload_of_model(config, shape, 2, 2)
    layout = OwnLayout(ParallelConfig(1, workers, words, parts), words)
    cluster = load_cluster("ethernet-10g")
    (plan,) = OwnCost.of(config, work, layout).plans(cluster, workers, "tree")
    assert plan.step.activations_bytes == pytest.approx(sum(map(sum, found)) / workers)
    assert plan.step.gradients_bytes == 0
