"""The step and the memory of layouts: by data those of the forecast, in rows, by rows and by paths
by hand. What the latter send is counted in tests/ranks/test_split_parts.py.
"""

from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import NormalDist

import pytest
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.models.googlenet import Inception
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.config import ParallelConfig
from firecaffe.planner.chain import WHOLE, Unit, chain_of
from firecaffe.planner.cluster import Cluster, MeasuredStep, load_cluster
from firecaffe.planner.compute_time import layer_s, micro_batch
from firecaffe.planner.forecast import forecast
from firecaffe.planner.layouts import (
    LayerLayout,
    allows,
    layouts_of,
    layouts_of_recipe,
    through,
    words_of,
)
from firecaffe.planner.memory import on_device
from firecaffe.planner.recipe_layout import RecipeLayout, layout_cost
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.split_plans import data_layouts, dense_layouts, split_plans
from firecaffe.planner.split_step import SplitCost
from firecaffe.planner.worker_part import WEIGHTS, memory_of, part_of, rank_work, widest
from firecaffe.planner.workload import Workload


@cache
def chain_and_work(model: str, batch: int) -> tuple[tuple[Unit, ...], Workload]:
    work = workload_of_model(ModelConfig(model), None, batch, 8)
    return chain_of(ModelConfig(model), work), work


def cost_of(
    model: str, cluster: Cluster | str, workers: int, exchange: str = "ring", batch: int = 256
) -> SplitCost:
    chain, work = chain_and_work(model, batch)
    on = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return SplitCost(work, on, chain, workers, exchange)


@pytest.mark.parametrize(
    ("model", "cluster", "workers", "exchange"),
    [
        ("alexnet", "ethernet-10g", 4, "ring"),
        ("googlenet", "dgx1-p100", 8, "halving_doubling"),
        ("resnet18", "infiniband-fdr", 3, "tree"),
        ("lenet", "cpu-host", 2, "sharded_parameter_server"),
        ("vgg16", "dgx1-p100", 32, "double_tree"),
    ],
)
def test_by_data_it_is_the_forecast(model: str, cluster: str, workers: int, exchange: str) -> None:
    on = load_cluster(cluster)
    rows = (MeasuredStep(model, 8, 0.5, 0.01, 0.02),)
    on = replace(on, device=replace(on.device, measured=rows), lanes=2)
    cost = cost_of(model, on, workers, exchange)
    layouts = data_layouts(cost)
    step, row = cost.step(layouts), forecast(cost.work, on, workers, exchange)
    for word in ("step_s", "compute_s", "data_s", "exposed_communication_s"):
        assert getattr(step, word) == pytest.approx(getattr(row, word))
    assert step.activations_s == 0
    assert on_device(memory_of(cost.work, cost.chain, layouts), on.device) == row.memory_bytes
    (plan,) = split_plans(cost.work, on, cost.chain, workers, exchange, ["data"])
    assert plan.speedup == pytest.approx(row.speedup)
    assert plan.fits == row.fits


def test_workers_wait_for_each_other_at_every_exchange_of_activations() -> None:
    """LeNet's first fully-connected layer by neurons and its second by inputs, over two workers.

    A sum follows the second layer, and one the first layer backward. So a micro-batch has three
    runs of computing, and two end with a wait for the slower of two.
    """
    on, jitter = load_cluster("ethernet-10g"), 0.1
    clusters = (replace(on, device=replace(on.device, jitter=j)) for j in (0.0, jitter))
    still, shaken = (cost_of("lenet", cluster, 2, batch=64) for cluster in clusters)
    words = ParallelConfig(1, 2, {"ip1": "neurons", "ip2": "inputs"})
    layouts = layouts_of_recipe(still.chain, words, words.split, 2)
    waits_s = shaken.step(layouts).activations_s - still.step(layouts).activations_s
    times = {
        unit.name: still.computes_s(unit, layout)
        for unit, layout in zip(still.chain, layouts, strict=True)
    }
    first_s = sum(times[name][0] for name in ("conv1", "conv2", "ip1", "ip2"))
    second_s = times[WHOLE][0] + sum(sum(times[name][1]) for name in (WHOLE, "ip2", "ip1"))
    whole_s = first_s + second_s + sum(sum(times[name][1]) for name in ("conv1", "conv2"))
    later = NormalDist().inv_cdf((2 - 0.375) / (2 + 0.25))
    roots = sqrt(first_s / whole_s) + sqrt(second_s / whole_s)
    assert waits_s == pytest.approx(8 * whole_s * jitter * later * roots)


def test_a_chain_has_each_layer_once() -> None:
    for model in ("alexnet", "googlenet", "resnet18", "squeezenet1_1"):
        cost = cost_of(model, "titan", 1)
        assert [each for unit in cost.chain for each in unit.works] == [*cost.work.layers]
        kept = sum(each.kept_bytes for unit in cost.chain for each in unit.works)
        assert kept == cost.work.activation_bytes
        assert cost.chain[-1].name == WHOLE
    alexnet = cost_of("alexnet", "titan", 1).chain
    parts = {unit.name: [each.name for each in unit.works] for unit in alexnet}
    assert parts["features.0"] == ["features.0", "features.1"]
    assert parts["features.2"] == ["features.2", "features.3"]  # needs its neighbours' channels
    assert parts["classifier.0"] == [f"classifier.{n}" for n in range(3)]
    assert [unit.group_elements for unit in alexnet][2] == 2


def test_a_layer_that_is_called_twice_is_left_whole() -> None:
    config = ModelConfig("tests.unit.planner.test_parallel:Mixed")
    work = workload_of_model(config, (1, 8, 8), 8, 2)
    units = {unit.name: unit for unit in chain_of(config, work)}
    for name, layout, is_allowed in (
        ("first", LayerLayout(1, outputs=2), True),
        ("again", LayerLayout(1, outputs=2), False),
        ("again#2", LayerLayout(1, outputs=2), False),
        ("groups", LayerLayout(1, groups=4), True),
        ("groups", LayerLayout(1, groups=8), False),
        ("norm", LayerLayout(1, groups=8), True),
    ):
        assert allows(units[name], layout) == is_allowed


def test_parts_of_a_layer_and_layouts_of_all() -> None:
    cost = cost_of("alexnet", "titan", 4)
    unit = next(unit for unit in cost.chain if unit.name == "classifier.6")
    (part,) = part_of(unit, LayerLayout(1, outputs=2, inputs=2))
    assert (part.shapes, part.flops) == (((500, 2048), (500,)), unit.works[0].flops / 4)
    (part,) = part_of(unit, LayerLayout(1, outputs=3))  # the largest of 334, 333 and 333
    assert part.shapes == ((334, 4096), (334,))
    for workers in (1, 6, 8):
        layouts = layouts_of(workers, 4)
        assert len({*layouts}) == len(layouts)
        assert all(layout.workers == workers and layout.batch <= 4 for layout in layouts)


def one_weird_trick(cost: SplitCost, model: int, is_trick: bool = True) -> list[LayerLayout]:
    found = dense_layouts(cost, is_trick)
    return next(layouts for size, layouts in found if size == model)


def test_one_weird_trick_by_hand() -> None:
    """AlexNet on 4 workers: convolutions by data, fc6 by neurons, fc7 by inputs, fc8 by neurons."""
    cost = cost_of("alexnet", "ethernet-10g", 4)
    layouts = one_weird_trick(cost, 4)
    words = {u.name: words_of(u, each) for u, each in zip(cost.chain, layouts, strict=True)}
    assert words["features.0"] == words["features.12"] == words[WHOLE] == "batch 4"
    dense = [words[f"classifier.{n}"] for n in (0, 3, 6)]
    assert dense == ["neurons 4", "inputs 4", "neurons 4"]
    step = cost.step(layouts)
    conv = 4 * sum(unit.weights for unit in cost.chain if unit.name.startswith("features"))
    assert step.gradients_bytes == pytest.approx(2 * 3 / 4 * conv)
    # fc6: inputs gathered, their gradients summed. fc7: addends summed, each to its worker, and the
    # sums gathered for fc8; and so back. fc8: outputs for own samples, and back. The masks of the
    # dropout behind fc6 are bytes, of own samples for all parts.
    numbers = 2 * 9216 + 4 * 4096 + 2 * 1000 / 4 + 4096 / 4 / 4
    assert step.activations_bytes == pytest.approx(4 * 256 * 3 / 4 * numbers)
    assert step.update_s < cost.step(data_layouts(cost)).update_s / 2


def test_gradients_of_parts_are_summed_after_backward() -> None:
    """Two rows of two: with one weird trick nothing hides them, else backward does."""
    cost = cost_of("alexnet", "ethernet-10g", 4)
    trick, rows = (cost.step(one_weird_trick(cost, 2, is_trick)) for is_trick in (True, False))
    parts = [unit for unit in cost.chain if unit.is_dense]
    (layout,) = {each for each in one_weird_trick(cost, 2) if each.outputs == 2}
    sums_s = sum(cost.gradients_s(unit, layout) for unit in parts)
    assert trick.exposed_communication_s > sums_s
    assert trick.exposed_communication_s > rows.exposed_communication_s
    # Rows compute in common what is not split. Neurons, inputs, neurons send a sample's numbers of
    # docs/explanation/splitting.md, times 3/4.
    whole = cost.step(one_weird_trick(cost, 4, is_trick=False))
    alone = micro_batch(cost.work, cost.cluster.device, 8).compute_s * 32
    assert 0.6 * alone < whole.compute_s < alone
    assert whole.gradients_bytes == 0
    assert whole.activations_bytes == pytest.approx(4 * 256 * 3 / 4 * 35_816)
    # As the trainer asks, its workers divide the micro-batches: they exchange one each at a time.
    six = cost_of("alexnet", "ethernet-10g", 6)
    assert not [*dense_layouts(six, is_trick=True)]
    assert [*dense_layouts(six, is_trick=False)]


def test_memory_of_rows() -> None:
    cost = cost_of("alexnet", "ethernet-10g", 4)
    by_data = memory_of(cost.work, cost.chain, data_layouts(cost))
    trick = memory_of(cost.work, cost.chain, one_weird_trick(cost, 4))
    whole = cost.work.parameter_bytes
    conv = 4 * sum(unit.weights for unit in cost.chain if unit.name.startswith("features"))
    assert by_data["parameters"] == whole
    bias = 4 * 4096 * 3 / 4  # of the layer by inputs, which all have
    assert trick["parameters"] == pytest.approx(conv + (whole - conv) / 4 + bias)
    assert trick["gradients"] == trick["optimizer"] == trick["parameters"]
    # Eight micro-batches of each worker, of convolutions in one tree; of the parts in four.
    assert trick["sums"] == pytest.approx(3 * conv + 4 * 4 * (trick["parameters"] - conv))
    # Of one micro-batch of convolutions, and of four of the others: fc6's gathered input, its share
    # of a ReLU and a mask; fc7's share of inputs, and both; and fc8's gathered input.
    dense = (9216 + 2 * 1024) + (1024 + 2 * 4096) + 4096
    local = rank_work(cost.work, cost.chain, one_weird_trick(cost, 4))
    features = (u for u in cost.chain if u.name.startswith("features"))
    kept = sum(each.kept_bytes for unit in features for each in unit.works)
    assert local.activation_bytes == pytest.approx(kept + 4 * 4 * dense)


def test_the_widest_that_fits() -> None:
    memory = dict.fromkeys(WEIGHTS, 10 / len(WEIGHTS))
    memory |= {"activations": 3.0, "backward": 1.0, "allocator": 1.0, "library": 15.0}
    by = widest(memory, 100.0)
    assert 10 * by**2 + 5 * by + 15 == pytest.approx(100)
    assert widest(memory, 15.0) == 0
    assert widest(memory, 30.0) == pytest.approx(1)


CLUSTER = load_cluster("ethernet-10g")
CONV = "0"


def pooled() -> nn.Module:
    """11 rows, of which 9 are made, then 4."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(6, 5)),
    )


def block() -> nn.Module:
    """Paths of 4, 6, 3 and 5 channels; behind them one more that takes what is common."""
    widths = (4, 3, 6, 2, 3, 5)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1), Inception(8, widths, batch_norm=False), nn.ReLU()),
        *(nn.MaxPool2d(2), Fire(18, 4, 6), nn.Flatten(), nn.Linear(12 * 9, 5)),
    )


def planned(
    name: str, words: dict[str, str], workers: int, parts: int
) -> tuple[SplitCost, dict[str, tuple[Unit, LayerLayout]], Workload]:
    """images of 11 x 7, or 6 x 6."""
    config = ModelConfig(f"tests.unit.planner.test_split_step:{name}")
    work = workload_of_model(config, (3, 11, 7) if name == "pooled" else (3, 6, 6), 8, 2)
    config_words = ParallelConfig(1, workers, words, parts)
    own = layout_cost(config, work, RecipeLayout(config_words, words))
    cost = SplitCost(work, CLUSTER, own.chain, workers, "ring")
    layouts = layouts_of_recipe(own.chain, config_words, words, workers)
    found = {u.name: (u, each) for u, each in zip(own.chain, layouts, strict=True)}
    return cost, found, work


def test_rows_that_a_part_computes() -> None:
    """Of 9 rows 4 parts make 3, 2, 2 and 2; each is given two rows more. Of 4 they make one each,
    of three. A worker has two parts.
    """
    cost, units, work = planned("pooled", {CONV: "rows"}, 2, 4)
    unit, layout = units[CONV]
    assert [each.name for each in unit.works] == ["0", "1", "2"]
    assert [each.name for each in units["3"][0].works] == ["3", "4"]
    assert units["3"][1].copies == 2
    conv, relu, pool = unit.works
    image, made = 4 * 3 * 11 * 7, 4 * 6 * 9 * 5
    part = replace(
        conv, flops=conv.flops * 3 / 9, moved_bytes=image * 5 / 11 + made * 3 / 9, output_bytes=0
    )
    on = part_of(unit, layout.in_parts)
    assert on[0].moved_bytes == pytest.approx(part.moved_bytes)
    assert on[0].shapes == conv.shapes
    assert on[1].moved_bytes == pytest.approx(relu.moved_bytes * 3 / 9)
    assert on[2].moved_bytes == pytest.approx(made * 3 / 9 + pool.output_bytes / 4)
    forward_s, backward_s = cost.computes_s(unit, layout)
    times = [layer_s(each, work, CLUSTER.device, 2) for each in (part, *on[1:])]
    assert forward_s == pytest.approx(2 * sum(forward for forward, _ in times))
    assert sum(backward_s) == pytest.approx(2 * sum(backward for _, backward in times))


def test_what_a_worker_holds_by_rows() -> None:
    """All weights; its rows, 5 of 9 and 2 of 4; and the rows that its parts see: of the images 5
    and 4, of what the convolution has made twice 3.
    """
    cost, units, work = planned("pooled", {CONV: "rows"}, 2, 4)
    layouts = [layout for _, layout in units.values()]
    memory = memory_of(work, cost.chain, layouts)
    assert memory["parameters"] == memory["gradients"] == work.parameter_bytes
    assert memory["saving"] == 0
    made, pool = 6 * 9 * 5, 6 * 4 * 2
    # Copies of what the convolution and the pool see, the ReLU's output, and indices of 8 bytes.
    rows = (5 + 4) * 3 * 7 + 2 * 3 * 6 * 5 + made * 5 / 9 + 2 * pool * 2 / 4
    local = rank_work(work, cost.chain, layouts)
    assert local.activation_bytes == pytest.approx(4 * (rows + 6))  # and the last layer's input
    one = planned("pooled", {CONV: "rows"}, 1, 4)
    assert one[1][CONV][1].products == 4
    assert one[0].step([layout for _, layout in one[1].values()]).activations_s == 0


def test_rows_of_several_models_are_summed_in_their_columns() -> None:
    with pytest.raises(RecipeError, match="split: 0 makes 9 rows of 11, fewer than 10 parts"):
        planned("pooled", {CONV: "rows"}, 2, 10)
    config = ModelConfig("tests.unit.planner.test_split_step:pooled")
    work = workload_of_model(config, (3, 11, 7), 8, 2)
    words = ParallelConfig(0, 2, {CONV: "rows"}, 2)
    cost = layout_cost(config, work, RecipeLayout(words, words.split))
    (plan,) = cost.plans(CLUSTER, 4, "ring")
    (one,) = cost.plans(CLUSTER, 2, "ring")
    assert one.step.gradients_bytes == 0
    assert plan.step.gradients_bytes == work.parameter_bytes
    # Each model has half of the samples, and half as many sums of a convolution's gradients.
    assert plan.step.activations_bytes == one.step.activations_bytes / 2


def test_the_worker_with_most_paths_is_waited_for() -> None:
    """The path of 3 x 3 has most weights, so it is by itself if there are three parts or more."""
    cost, units, work = planned("block", {"1": "paths"}, 4, 4)
    unit, layout = units["1"]
    assert unit.paths is not None
    assert [len(each) for each in unit.paths.works] == [2, 4, 4, 3]
    assert [each.name for each in unit.works][-2:] == ["2", "3"]
    assert sum(unit.paths.sizes) == sum(
        each.numel() for each in block().get_submodule("1").parameters()
    )
    on = part_of(unit, layout)
    assert on[:4] == unit.paths.works[1]
    assert on[4].output_bytes == pytest.approx(unit.works[-2].output_bytes * 6 / 18)
    times = [layer_s(each, work, CLUSTER.device, 2) for each in on]
    assert cost.unit_s(unit, layout) == pytest.approx(4 * sum(map(sum, times)))
    own = rank_work(work, cost.chain, [each for _, each in units.values()])
    path = 3 * 8 + 3 + 6 * 3 * 9 + 6
    whole = work.parameter_bytes - 4 * sum(unit.paths.sizes)
    assert own.parameter_bytes == whole + 4 * path


def test_paths_of_parts() -> None:
    """Four parts on two workers are two paths each; what is common is everybody's."""
    _, units, _ = planned("block", {"1": "paths", "4": "paths"}, 2, 2)
    unit, layout = units["4"]
    assert unit.paths is not None
    assert unit.paths.common[0].name.startswith("4.squeeze")
    fire = block().get_submodule("4.squeeze")
    squeeze = sum(each.numel() for each in fire.parameters())
    expand = 6 * 4 * 9 + 6
    found = sum(sum(each.parameters_bytes) for each in part_of(unit, layout))
    assert found == 4 * (squeeze + expand)
    _, units, work = planned("block", {"1": "paths"}, 2, 4)
    unit, layout = units["1"]
    assert unit.paths is not None
    assert part_of(unit, layout)[:6] == (*unit.paths.works[0], *unit.paths.works[1])
    assert layout.products == 1
    one, units, _ = planned("block", {"1": "paths"}, 1, 4)
    whole = sum(sum(layer_s(each, work, CLUSTER.device, 2)) for each in units["1"][0].works)
    assert one.unit_s(*units["1"]) == pytest.approx(4 * whole)


def test_between_cuts_that_differ_all_have_the_whole() -> None:
    rows, copies = LayerLayout(2, rows=2), LayerLayout(2, copies=2)
    for after in (LayerLayout(2, inputs=2), LayerLayout(2, groups=2)):
        assert through(rows, after) == [rows, copies, after]
        assert through(LayerLayout(2, paths=2), after) == [LayerLayout(2, paths=2), copies, after]
    assert through(LayerLayout(2, groups=2), rows) == [LayerLayout(2, groups=2), copies, rows]
    for before, after in ((rows, rows), (rows, copies), (rows, LayerLayout(2, outputs=2))):
        assert through(before, after) == [before, after]
