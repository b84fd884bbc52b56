"""The step and the memory of layouts: by data those of the forecast, in rows by hand."""

from dataclasses import replace

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.chain import WHOLE, Unit, chain_of
from firecaffe.plan.cluster import Cluster, MeasuredStep, load_cluster
from firecaffe.plan.compute_time import micro_batch
from firecaffe.plan.forecast import forecast
from firecaffe.plan.held import WEIGHTS, memory_of, part_of, widest
from firecaffe.plan.layouts import Layout, allows, layouts_of, words_of
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.split_plans import data_layouts, dense_layouts, split_plans
from firecaffe.plan.split_step import SplitCost


def cost_of(
    model: str, cluster: Cluster | str, workers: int, exchange: str = "ring", batch: int = 256
) -> SplitCost:
    config = ModelConfig(model)
    work = workload_of_model(config, None, batch, 8)
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return SplitCost(work, found, chain_of(config, work), workers, exchange)


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
    assert step.step_s == pytest.approx(row.step_s)
    assert step.compute_s == pytest.approx(row.compute_s)
    assert step.data_s == pytest.approx(row.data_s)
    assert step.exposed_communication_s == pytest.approx(row.exposed_communication_s)
    assert step.activations_s == 0
    assert memory_of(cost.work, cost.chain, layouts) == row.memory_bytes
    (plan,) = split_plans(cost.work, on, cost.chain, workers, exchange, ["data"])
    assert plan.speedup == pytest.approx(row.speedup)
    assert plan.fits == row.fits


def test_a_chain_has_each_layer_once() -> None:
    for model in ("alexnet", "googlenet", "resnet18", "squeezenet1_1"):
        cost = cost_of(model, "titan", 1)
        assert [each for unit in cost.chain for each in unit.works] == [*cost.work.layers]
        kept = sum(each.output_bytes for unit in cost.chain for each in unit.works)
        assert kept == cost.work.activation_bytes
        assert cost.chain[-1].name == WHOLE
    alexnet = cost_of("alexnet", "titan", 1).chain
    parts = {unit.name: [each.name for each in unit.works] for unit in alexnet}
    assert parts["features.0"] == ["features.0", "features.1"]
    assert parts["features.2"] == ["features.2", "features.3"]  # needs its neighbours' channels
    assert parts["classifier.0"] == [f"classifier.{n}" for n in range(3)]
    assert [unit.group_elements for unit in alexnet][2] == 2


def test_a_layer_that_is_called_twice_is_left_whole() -> None:
    config = ModelConfig("tests.unit.plan.test_parallel:Mixed")
    work = workload_of_model(config, (1, 8, 8), 8, 2)
    units = {unit.name: unit for unit in chain_of(config, work)}
    pair = Layout(1, outputs=2)
    assert allows(units["first"], pair)
    assert not allows(units["again"], pair)
    assert not allows(units["again#2"], pair)
    assert allows(units["groups"], Layout(1, groups=4))
    assert not allows(units["groups"], Layout(1, groups=8))
    assert allows(units["norm"], Layout(1, groups=8))


def test_parts_of_a_layer() -> None:
    cost = cost_of("alexnet", "titan", 4)
    unit = next(each for each in cost.chain if each.name == "classifier.6")
    (part,) = part_of(unit, Layout(1, outputs=2, inputs=2))
    assert part.shapes == ((500, 2048), (500,))
    assert part.flops == unit.works[0].flops / 4
    (part,) = part_of(unit, Layout(1, outputs=3))  # the largest of 334, 333 and 333
    assert part.shapes == ((334, 4096), (334,))


def one_weird_trick(cost: SplitCost, model: int) -> list[Layout]:
    found = dense_layouts(cost, is_trick=True)
    return next(layouts for size, layouts in found if size == model)


def by_name(chain: tuple[Unit, ...], layouts: list[Layout]) -> dict[str, str]:
    return {u.name: words_of(u, each) for u, each in zip(chain, layouts, strict=True)}


def test_one_weird_trick_by_hand() -> None:
    """AlexNet on 4 workers: convolutions by data, fc6 by neurons, fc7 by inputs, fc8 by neurons."""
    cost = cost_of("alexnet", "ethernet-10g", 4)
    layouts = one_weird_trick(cost, 4)
    words = by_name(tuple(cost.chain), layouts)
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
    trick = cost.step(one_weird_trick(cost, 2))
    rows = next(cost.step(each) for model, each in dense_layouts(cost, False) if model == 2)
    parts = [unit for unit in cost.chain if unit.is_dense]
    (layout,) = {each for each in one_weird_trick(cost, 2) if each.outputs == 2}
    sums_s = sum(cost.gradients_s(unit, layout) for unit in parts)
    assert trick.exposed_communication_s > sums_s
    assert trick.exposed_communication_s > rows.exposed_communication_s


def test_one_weird_trick_of_workers_who_divide_the_micro_batches() -> None:
    """As the trainer asks: they exchange one each at a time."""
    cost = cost_of("alexnet", "ethernet-10g", 6)
    assert not [*dense_layouts(cost, is_trick=True)]
    assert [*dense_layouts(cost, is_trick=False)]


def test_rows_compute_alike_what_is_not_split() -> None:
    cost = cost_of("alexnet", "ethernet-10g", 4)
    rows = next(layouts for model, layouts in dense_layouts(cost, is_trick=False) if model == 4)
    alone = micro_batch(cost.work, cost.cluster.device, 8).compute_s * 32
    whole = SplitCost(cost.work, cost.cluster, cost.chain, 4, "ring").step(rows)
    assert 0.6 * alone < whole.compute_s < alone
    assert whole.gradients_bytes == 0
    # Neurons, inputs, neurons: docs/parallel.md's numbers a sample, times 3/4.
    assert whole.activations_bytes == pytest.approx(4 * 256 * 3 / 4 * 35_816)


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
    # Of one micro-batch of convolutions, and of four of the others: fc6 with what it gathered and
    # its share of three outputs, fc7's addends, and fc8.
    dense = (9216 + 3 * 1024) + 3 * 4096 + (4096 + 250)
    features = (u for u in cost.chain if u.name.startswith("features"))
    kept = sum(each.output_bytes for unit in features for each in unit.works)
    assert trick["activations"] == pytest.approx(8 * (kept + 4 * 4 * dense))


def test_the_widest_that_fits() -> None:
    memory = dict.fromkeys(WEIGHTS, 10 / len(WEIGHTS))
    memory |= {"activations": 5.0, "library": 15.0}
    by = widest(memory, 100.0)
    assert 10 * by**2 + 5 * by + 15 == pytest.approx(100)
    assert widest(memory, 15.0) == 0
    assert widest(memory, 30.0) == pytest.approx(1)


def test_layouts_share_among_all() -> None:
    for workers in (1, 6, 8):
        found = layouts_of(workers, 4)
        assert len(set(found)) == len(found)
        assert all(each.workers == workers and each.batch <= 4 for each in found)
