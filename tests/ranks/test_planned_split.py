"""The bytes that the planner counts of a recipe's layouts, against those that ranks send."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import DataConfig, ExchangeConfig, Recipe, RunConfig, TrainConfig
from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.models.config import ModelConfig
from firecaffe.models.googlenet import Inception
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.of_parallel import OwnLayout, own_cost
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
    torch.manual_seed(0)  # ranks draw alike, whatever these have drawn before
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
    (plan,) = own_cost(config, work, layout).plans(cluster, workers, "tree")
    assert plan.step.activations_bytes == pytest.approx(sum(map(sum, found)) / workers)
    assert plan.step.gradients_bytes == 0


HEAD = {"ip1": "inputs", "ip2": "neurons"}
LENET = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(64, 4, steps=2, device="cpu", eval_batch_size=500),
    exchange=ExchangeConfig("tree", shared_memory=False, timeout_s=300),
    parallel=ParallelConfig(2, 2, HEAD, 4, "one_weird_trick"),
)


def fit(folder: str) -> list[float | None]:
    run = RunConfig(folder=folder, tensorboard=False)
    result = firecaffe.train(replace(LENET, run=run))
    return result.sent_bytes_per_step_by_rank


def test_what_one_weird_trick_sends(ranks: Ranks, tmp_path: Path) -> None:
    """The sums of 405,000 weights in their columns, of which a worker has two nodes, one of each
    worker of its row; and the activations.
    """
    folder = tmp_path / "run"
    sent = ranks.shared(4, fit, str(folder))[0]
    found = json.loads((folder / "forecast.json").read_text())
    mean = sum(each or 0 for each in sent) / len(sent)
    assert found["gradients_bytes"] + found["activations_bytes"] == pytest.approx(mean, rel=0.02)
    head = 3 / 2 * 4 * (405_000 + 510) / 2  # of each worker; a bias by inputs is whole
    assert found["gradients_bytes"] == pytest.approx(
        head + 2 * 3 / 4 * 4 * (431_080 - 405_510), rel=0.01
    )
