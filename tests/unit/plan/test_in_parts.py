"""What a worker computes and holds of layers by rows and by paths, by hand. What they send is
counted in tests/ranks/test_planned_split.py.
"""

from dataclasses import replace

import pytest
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.googlenet import Inception
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.chain import Unit
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.compute_time import layer_s
from firecaffe.plan.held import memory_of, part_of, rank_work
from firecaffe.plan.layouts import Layout, layouts_of_words, through
from firecaffe.plan.of_parallel import OwnLayout, own_cost
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.split_step import SplitCost
from firecaffe.plan.workload import Workload

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
) -> tuple[SplitCost, dict[str, tuple[Unit, Layout]], Workload]:
    """images of 11 x 7, or 6 x 6."""
    config = ModelConfig(f"tests.unit.plan.test_in_parts:{name}")
    work = workload_of_model(config, (3, 11, 7) if name == "pooled" else (3, 6, 6), 8, 2)
    config_words = ParallelConfig(1, workers, words, parts)
    own = own_cost(config, work, OwnLayout(config_words, words))
    cost = SplitCost(work, CLUSTER, own.chain, workers, "ring")
    layouts = layouts_of_words(own.chain, config_words, words, workers)
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
    rows = 2 * made * 5 / 9 + pool * 2 / 4 + (5 + 4) * 3 * 7 + 2 * 3 * 6 * 5
    rest = 6 + 6 + 5  # the pool of all, flattened; and the last layer
    assert memory["activations"] == pytest.approx(4 * 2 * (rows + rest))
    one = planned("pooled", {CONV: "rows"}, 1, 4)
    assert one[1][CONV][1].products == 4
    assert one[0].step([layout for _, layout in one[1].values()]).activations_s == 0


def test_rows_of_several_models_are_summed_in_their_columns() -> None:
    config = ModelConfig("tests.unit.plan.test_in_parts:pooled")
    work = workload_of_model(config, (3, 11, 7), 8, 2)
    words = ParallelConfig(0, 2, {CONV: "rows"}, 2)
    cost = own_cost(config, work, OwnLayout(words, words.split))
    (plan,) = cost.plans(CLUSTER, 4, "ring")
    (one,) = cost.plans(CLUSTER, 2, "ring")
    assert one.step.gradients_bytes == 0
    assert plan.step.gradients_bytes == work.parameter_bytes
    # Each model has half of the samples, and half as many sums of a convolution's gradients.
    assert plan.step.activations_bytes == one.step.activations_bytes / 2


def test_too_few_rows_are_told() -> None:
    with pytest.raises(RecipeError, match="split: 0 makes 9 rows of 11, fewer than 10 parts"):
        planned("pooled", {CONV: "rows"}, 2, 10)


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
    rows, copies = Layout(2, rows=2), Layout(2, copies=2)
    for after in (Layout(2, inputs=2), Layout(2, groups=2)):
        assert through(rows, after) == [rows, copies, after]
        assert through(Layout(2, paths=2), after) == [Layout(2, paths=2), copies, after]
    assert through(Layout(2, groups=2), rows) == [Layout(2, groups=2), copies, rows]
    for before, after in ((rows, rows), (rows, copies), (rows, Layout(2, outputs=2))):
        assert through(before, after) == [before, after]
