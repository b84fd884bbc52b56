"""A recipe's network by itself: its steps, what is fitted to them, and the look at its state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from firecaffe import DataConfig, ModelConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.data.dataset import tree_text
from firecaffe.errors import RecipeError
from firecaffe.generators import TORCH
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.inventory.findings import MEAN
from firecaffe.measure import step_times as measured_step
from firecaffe.measure.cluster_findings import calibrated
from firecaffe.measure.ranks_and_links import inventory_of
from firecaffe.measure.step_times import OPERATIONS, OTHER, StepTimes, type_of
from firecaffe.models import build_model
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.compute_time import correction, micro_batch
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight


def frozen_below(*arguments: object) -> nn.Module:
    """LeNet whose first layer is not trained, which would shift the numbers of all others."""
    network = build_model("lenet", 10, 1)
    first = next(network.children())
    first.requires_grad_(False)
    return network


def test_made_up_labels_are_of_any_network(tmp_path: Path) -> None:
    """Of one's own, whose outputs may be fewer than the thousand of such images."""
    data = DataConfig("folder", path=str(tmp_path / "none"), resize=64, crop=64)
    recipe = check_recipe(Recipe(data=data, model=ModelConfig("resnet18")))
    made = measured_step.dataset_of(recipe, 4)
    _, labels = made.batch(torch.arange(len(made)))
    assert labels.tolist() == [0] * 8


def test_the_ready_order_is_of_the_parameters_that_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[GradientReducer] = []

    class Kept(GradientReducer):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(measured_step, "build_network", frozen_below)
    monkeypatch.setattr(measured_step, "GradientReducer", Kept)
    recipe = check_recipe(
        Recipe(solver=SolverConfig(base_lr=1000.0))
    )  # diverges, which is no matter
    cpu = torch.device("cpu")
    timed = measured_step.time_steps(recipe, cpu, 2, 0.0, micro_batches=1)
    (reducer,) = made
    assert len(timed.compute_s) == measured_step.MIN_STEPS
    assert timed.inputs == tree_text(workload_of(recipe).layout.inputs)
    trained = [p for p in frozen_below().parameters() if p.requires_grad]
    assert [p.shape for p in reducer.parameters] == [p.shape for p in trained]
    assert all(p.grad is not None and p.grad.any() for p in reducer.parameters)


def test_the_overhead_of_a_call_has_no_copies_of_gradients_in_it() -> None:
    """AlexNet's 61 million gradients are copied into buckets in each micro-batch, of any size."""
    recipe = Recipe(
        model=ModelConfig("alexnet"),
        data=DataConfig("benchmarks.kit.made_up_images:images", args={"count": 8}),
        train=TrainConfig(global_batch_size=8, micro_batch_size=8),
    )
    work, cluster = workload_of(check_recipe(recipe)), load_cluster("cpu-host")
    device = replace(
        cluster.device, memory_bytes_per_s=5e9, efficiency=0.5, overhead_s=1e-4, measured=()
    )
    copies_s = 2 * work.parameter_bytes / (5e9 * 0.5)
    seconds = [micro_batch(work, device, size).compute_s + copies_s for size in (8, 16, 32)]
    rows = [
        StepTimes(size, 1, (compute_s,) * 2, (0.0,) * 2, (0.0,) * 2, 0)
        for size, compute_s in zip((8, 16, 32), seconds, strict=True)
    ]
    start = replace(device, efficiency=0.4, overhead_s=1e-3)
    found = calibrated(replace(cluster, device=start), check_recipe(recipe), rows).device
    assert found.overhead_s == pytest.approx(1e-4, rel=0.01)
    assert found.efficiency == pytest.approx(0.5, rel=0.01)
    # A forecast still takes as long as what was measured.
    plain_s = micro_batch(work, replace(found, measured=()), 8).compute_s
    assert correction(work, found, 8) * plain_s == pytest.approx(seconds[0])


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::convolution_backward", "convolution"),
        ("aten::mkldnn_linear", "fully connected"),
        ("aten::mkldnn_rnn_layer", OTHER),
        ("aten::mkldnn_rnn_layer_backward", OTHER),
    ],
)
def test_operations_of_onednn_are_of_their_layers(operation: str, kind: str) -> None:
    assert type_of(operation, OPERATIONS) == kind


UNUSUAL = "benchmarks.training.unusual.cases:"


def recipe_of(name: str) -> Recipe:
    train = TrainConfig(8, 4, steps=1, device="cpu")
    return Recipe(model=ModelConfig(name), data=DataConfig("generated"), train=train)


def test_a_network_of_ours() -> None:
    found = inventory_of(check_recipe(recipe_of("nin_small")), torch.device("cpu"))
    assert found.loss == MEAN
    assert found.changes.draws == [TORCH]
    assert found.repeats
    assert not found.doubts
    assert not found.notes
    assert len(found.lines) == 4


def in_evaluation() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Dropout()).eval()


def test_a_network_in_evaluation_mode_is_said_to_stay_in_it() -> None:
    made = recipe_of(f"{__name__}:in_evaluation")
    (note,) = inventory_of(check_recipe(made), torch.device("cpu")).notes
    assert "train()" in note


def test_what_no_training_keeps_is_known_before_a_rank_is_started() -> None:
    made = recipe_of(f"{UNUSUAL}complex_buffer")
    with pytest.raises(RecipeError, match="buffer phase is complex64"):
        preflight(check_recipe(made), 2)
    with pytest.raises(RecipeError, match="buffer phase is complex64"):
        inventory_of(check_recipe(made), torch.device("cpu"))
