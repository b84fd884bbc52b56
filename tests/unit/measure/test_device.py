"""What is fitted to a device's measured steps."""

from dataclasses import replace

import pytest

from firecaffe import DataConfig, ModelConfig, Recipe, TrainConfig
from firecaffe.measure.device import calibrated
from firecaffe.measure.step_times import StepTimes
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.compute_time import correction, micro_batch
from firecaffe.plan.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import check_recipe


def test_the_overhead_of_a_call_has_no_copies_of_gradients_in_it() -> None:
    """AlexNet's 61 million gradients are copied into buckets in each micro-batch, of any size."""
    recipe = Recipe(
        model=ModelConfig("alexnet"),
        data=DataConfig("benchmarks.made_up_images:images", args={"count": 8}),
        train=TrainConfig(global_batch_size=8, micro_batch_size=8),
    )
    work, cluster = workload_of(check_recipe(recipe)), load_cluster("cpu-host")
    device = replace(
        cluster.device, memory_bytes_per_s=5e9, efficiency=0.5, overhead_s=1e-4, measured=()
    )
    copies_s = 2 * work.parameter_bytes / (5e9 * 0.5)
    rows = [
        StepTimes(
            *(size, 1, 2 * (micro_batch(work, device, size).compute_s + copies_s,)),
            *((0.0, 0.0), (0.0, 0.0), 0),
        )
        for size in (8, 16, 32)
    ]
    start = replace(device, efficiency=0.4, overhead_s=1e-3)
    found = calibrated(replace(cluster, device=start), check_recipe(recipe), rows).device
    assert found.overhead_s == pytest.approx(1e-4, rel=0.01)
    assert found.efficiency == pytest.approx(0.5, rel=0.01)
    # A forecast still takes as long as what was measured.
    assert correction(work, found, 8) * micro_batch(
        work, replace(found, measured=()), 8
    ).compute_s == pytest.approx(rows[0].compute_s[0])
