"""A user's network by name, with first weights of a file and frozen layers, a user's optimizer, and
tasks that are no classification: the same bits on any number of workers, and all of it in the run's
records.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, TaskConfig, TrainConfig
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.data import TensorDataset
from firecaffe.errors import RecipeError
from firecaffe.models.weights import load_weights
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.run_table import other_work, read_run
from firecaffe.training.checks import preflight
from tests.kit.training import recipe_with
from tests.kit.worlds import NAMED, Trained, changed, checkpoint_of, end
from tests.unit.models import own_nets
from tests.unit.solvers import own_optimizers
from tests.world import Ranks

SHORT = "data.name=generated train.micro_batch_size=4 train.steps=3 train.device=cpu"
RECIPE = recipe_with(f"""
{SHORT} model.name={own_nets.PLACE}:Net model.args={{"width":5}} model.freeze=["stem.*","norm.*"]
train.global_batch_size=24 solver.base_lr=0.1
""")


def test_an_own_network_ends_in_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(own_nets.Net(1000, width=5).state_dict(), file)
    recipe = changed(RECIPE, model={"weights": str(file)})
    preflight(check_recipe(recipe), 3)
    alone, two = (trained(workers, recipe, NAMED) for workers in (1, 2))
    assert end(alone) == end(two)
    assert not other_work(read_run(alone.folder), read_run(two.folder))

    result = read_run_file(two.folder, "result.json")
    assert result["first_weights"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(result["first_weights"]["reshaped"]) == ["head.bias", "head.weight"]
    assert result["frozen_parameters"] == result["inventory"]["frozen"] == 4
    assert result["inventory"]["loss"] == "the mean of the samples"
    code = hashlib.sha256(Path(own_nets.__file__).read_bytes()).hexdigest()
    assert read_run_file(two.folder, "environment.json")["own_code"] == {"model": code}
    assert read_run_file(two.folder, "forecast.json")["workers"] == 2

    # The frozen layers are the file's to the last bit, statistics included; the head has moved.
    state = torch.load(file, weights_only=True)
    newest = next((alone.folder / "checkpoints").glob("step-*")) / "state.safetensors"
    network = own_nets.Net(10, width=5)
    load_weights(network, str(newest))
    for name, each in network.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(each, state[name]), name

    # A run's own recipe goes on with it, and needs the file no more.
    file.unlink()
    own = recipe_of(alone.folder / "recipe.toml")
    longer = changed(own, train={"steps": 4}, run=RunConfig())
    preflight(longer, 2, alone.folder)
    more = trained(2, longer, NAMED, alone.folder)
    assert (more.steps, more.identity_doubts) == (4, [])
    with pytest.raises(RecipeError, match=r"model\.weights.*not there"):
        preflight(longer, 2)


OPTIMIZER = recipe_with(f"""
{SHORT} model.name=lenet train.global_batch_size=12 solver.type={own_optimizers.PLACE}:Signs
solver.args={{"beta":0.9}} solver.base_lr=0.01 solver.lr_policy=step solver.gamma=0.5
solver.stepsize=2 checkpoint.every=2
""")


@pytest.mark.parametrize("name", ["Signs", "Noisy"])
def test_an_own_optimizer_ends_in_the_same_bits_and_is_resumed(trained: Trained, name: str) -> None:
    recipe = changed(OPTIMIZER, solver={"type": f"{own_optimizers.PLACE}:{name}"})
    preflight(check_recipe(recipe), 3)
    alone, three = (trained(workers, recipe, NAMED) for workers in (1, 3))
    on = trained(2, recipe, NAMED, checkpoint_of(three, 2))
    assert end(three) == end(on) == end(alone)
    assert alone.drifted_ranks == []
    assert set(read_run_file(three.folder, "environment.json")["own_code"]) == {"solver"}


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


def test_tasks_end_in_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.shared(1, fit, str(tmp_path / "1"))
    # Each rank loads torchmetrics, which takes 2 s of a processor.
    for results in ranks.shared(2, fit, str(tmp_path / "2")):
        for name, row in alone.items():
            assert row["metric"] == name
            same = ["state_sha256", "weights_sha256", "test_loss", *row["metrics"]]
            assert [results[name][word] for word in same] == [row[word] for word in same]
