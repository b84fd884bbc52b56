"""Tasks that are no classification: workers change no bit of weights, metrics and losses."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, TaskConfig, TrainConfig
from firecaffe.data import TensorDataset
from tests.world import Ranks

GENERATOR = torch.Generator().manual_seed(5)


def noise(*shape: int) -> Tensor:
    """Whole numbers over 64: torch.randn depends on the processor."""
    return torch.randint(-128, 129, shape, generator=GENERATOR) / 64


IMAGES = noise(61, 2, 6, 6)
MASKS = (IMAGES[:, 0] > 0.5).long() + (IMAGES[:, 1] > 0.7).long()
MASKS[IMAGES[:, 0] > 1.9] = 255
NUMBERS = torch.stack([IMAGES.mean((1, 2, 3)) * 5, IMAGES[:, 0].amax((1, 2))], 1)
LABELS = (NUMBERS.mean(0) < NUMBERS).float()


class Pixels(nn.Module):
    """Gives what torchvision's networks for segmentation give."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1)
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.net(images)}


def numbers() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
    )


def own() -> firecaffe.Task:
    """Sums of floating point, of torchmetrics and of a plain function."""
    import torchmetrics  # 3 s of a processor: each process of tests imports this file

    def far(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().amax(1).sum()

    metrics = {"far": far, "r2": torchmetrics.R2Score()}
    return firecaffe.Task(
        nn.functional.smooth_l1_loss, metrics, metric="far", higher_is_better=False
    )


PIXELS = TaskConfig(
    "segmentation",
    {"ignore_index": 255, "num_classes": 3},
    class_weights=[0.5, 1.0, 2.0],
    metrics=["mean_iou", "accuracy", "f1"],
)
RUNS: dict[str, tuple[TaskConfig, Any, Tensor]] = {
    "mean_iou": (PIXELS, Pixels, MASKS),
    "mae": (TaskConfig("regression", metrics=["mae", "r2", "spearman"]), numbers, NUMBERS),
    "auroc": (
        TaskConfig("multilabel", {"num_classes": 2}, metrics=["auroc", "f1"]),
        *(numbers, LABELS),
    ),
    "far": (TaskConfig(f"{__name__}:own", metrics=["far", "r2"]), numbers, NUMBERS),
}
"""By the metric that stands first."""
TRAIN, TEST = slice(0, 40), slice(40, 61)


def fit(folder: str) -> dict[str, dict[str, Any]]:
    """Every run's result, as result.json has it."""
    results = {}
    for name, (task, network, targets) in RUNS.items():
        recipe = Recipe(
            task=task,
            train=TrainConfig(24, 4, steps=4, seed=3, eval_batch_size=7),
            solver=SolverConfig(base_lr=0.05),
            run=RunConfig(folder=f"{folder}/{name}", tensorboard=False),
        )
        train, test = (TensorDataset(IMAGES[part], targets[part]) for part in (TRAIN, TEST))
        results[name] = firecaffe.train(recipe, network, train, test).to_dict()
    return results


def test_workers_change_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.shared(1, fit, str(tmp_path / "1"))
    # Each rank loads torchmetrics, which takes 2 s of a processor.
    for results in ranks.shared(2, fit, str(tmp_path / "2")):
        for name, row in alone.items():
            assert row["metric"] == name
            same = ["state_sha256", "weights_sha256", "test_loss", *row["metrics"]]
            assert [results[name][word] for word in same] == [row[word] for word in same]
