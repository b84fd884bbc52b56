"""A recipe's own layout is priced as the ways of `plan --ways`; layers in stages: the cut against
every cut, turns exact or by hand, memory of what follows.
"""

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.stages import ORDERS
from firecaffe.planner.chain import chain_of
from firecaffe.planner.cluster import MeasuredStep, slower
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.recipe_layout import RecipeLayout, forecast_parallel, layout_cost
from firecaffe.planner.recipe_stages import crossings_of, works_of
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.split_plans import WAYS, SplitPlan, data_layouts, split_plans
from firecaffe.planner.split_step import SplitCost
from firecaffe.planner.stage_times import balanced, best_stages, turns
from firecaffe.planner.worker_part import memory_of
from firecaffe.planner.workload import Workload
from tests.kit.data_sheets import data_sheet
from tests.unit.parallel.in_stages import simulate
from tests.unit.planner.test_layouts import cost_of, dense

ALEXNET = ModelConfig("alexnet")
WORK = workload_of_model(ALEXNET, None, 256, 8)
CLUSTER = data_sheet("ethernet-10g")
TRICK = {"classifier.0": "inputs", "classifier.3": "neurons", "classifier.6": "inputs"}
"""As of one weird trick without a word for a layer."""


def own(words: ParallelConfig, workers: int, work: Workload = WORK) -> SplitPlan:
    return layout_cost(ALEXNET, work, RecipeLayout(words, words.split)).plans(
        CLUSTER, workers, "ring"
    )[0]


@pytest.mark.parametrize(("scheme", "way"), [("one_weird_trick",) * 2, ("none", "same_samples")])
def test_a_recipe_is_priced_as_the_way_that_it_is(scheme: str, way: str) -> None:
    (plan,) = split_plans(WORK, CLUSTER, chain_of(ALEXNET, WORK), 4, "ring", [way])
    words = ParallelConfig(0, plan.model, TRICK, plan.model, scheme)  # type: ignore[arg-type]
    recipe_plan = own(words, 4)
    assert (recipe_plan.step, recipe_plan.memory) == (plan.step, plan.memory)


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (ParallelConfig(0, 2, TRICK, 2), "all"),
        (ParallelConfig(0, 2, TRICK, 2, "one_weird_trick"), "features"),
        (ParallelConfig(stages=["classifier"]), "all"),
    ],
)
def test_an_update_in_shards_is_shared_by_those_that_sum(
    words: ParallelConfig, shared: str
) -> None:
    """Of Adam's two vectors a worker has its share; and all wait for the weights on their way back,
    which takes half as long as a sum.
    """
    work = replace(WORK, optimizer_vectors=2, num_classes=0)
    by_all, by_owners = (own(words, 8, replace(work, update_at=at)) for at in ("all", "shards"))
    whole, mine = by_all.memory["optimizer"], by_owners.memory["optimizer"]
    if words.split and shared == "all":
        assert mine == 2 * 4 * 9216 * 4096 / 2  # the largest part has one owner
    elif shared == "all":
        assert mine == pytest.approx(whole / 4, rel=0.001)  # rows are not cut
    else:  # parts of fully connected layers each worker of a column updates
        units = chain_of(ALEXNET, work)
        dense = [unit for unit in units if unit.name.startswith("classifier")]
        of_parts = sum(sum(call.parameters_bytes) for unit in dense for call in unit.works)
        assert of_parts < mine < whole
        # The largest convolution has one owner.
        assert mine - of_parts == pytest.approx(2 * 4 * 384 * 256 * 9, rel=0.01)
    assert by_owners.step.update_s < by_all.step.update_s
    if shared == "all":
        assert by_owners.step.exposed_communication_s > by_all.step.exposed_communication_s


def test_stages_whose_layers_are_split() -> None:
    """Two workers of a stage compute halves of its layers, exchange what they need of each other,
    and send on the whole.
    """
    names = ["features.8", "classifier"]
    whole = own(ParallelConfig(stages=names), 6)
    in_one = own(ParallelConfig(0, 1, TRICK, 1, stages=names), 6)
    assert (in_one.step, in_one.memory) == (whole.step, whole.memory)
    assert in_one.crossings == whole.crossings
    split = own(ParallelConfig(0, 2, TRICK, 2, stages=names), 12)
    assert split.model == 6
    # The last stage holds most, and nothing but them and their biases.
    assert split.memory["gradients"] == pytest.approx(whole.memory["gradients"] / 2, rel=0.01)
    assert split.step.activations_bytes > whole.step.activations_bytes
    assert split.step.gradients_bytes == pytest.approx(whole.step.gradients_bytes / 2, rel=0.01)
    with pytest.raises(RecipeError, match=r"9 workers with 3 stages of 2 workers"):
        own(ParallelConfig(0, 2, TRICK, 2, stages=names), 9)


def test_parts_of_a_worker_are_products_of_their_own() -> None:
    """Each has the overhead of its calls; nothing else differs."""
    few, many = (own(ParallelConfig(1, 2, TRICK, parts), 2) for parts in (2, 8))
    assert many.step.activations_s == few.step.activations_s
    more_s = many.step.compute_s - few.step.compute_s
    calls = sum(2 + 2 + 1 for _ in TRICK)  # of each layer at least, and of what goes with it
    assert more_s > 32 * 3 * calls * CLUSTER.device.overhead_s / 4
    one = own(ParallelConfig(1, 1, TRICK, 4), 1)
    whole = SplitCost(WORK, CLUSTER, chain_of(ALEXNET, WORK), 1, "ring")
    alone = whole.step(data_layouts(whole))
    assert one.step.compute_s > alone.compute_s
    assert one.step.activations_s == 0


def test_a_normalization_goes_on_with_the_parts_before_it() -> None:
    words = ParallelConfig(1, 2, {"features.0": "filters"}, 2)
    found = own(words, 2)
    names = [unit.name for unit in chain_of(ALEXNET, WORK)]
    layouts = dict(zip(names, found.layouts, strict=True))
    assert layouts["features.2"].groups == 2
    assert layouts["features.6"].copies == 2
    # Halos of four channels of 55 x 55, there and back; then the pool's outputs, there and back
    # for the next convolution: its gradient of the input is needed by parts alone.
    halos = 2 * 4 * 55 * 55
    gathered = 96 * 27 * 27
    assert found.step.activations_bytes == pytest.approx(4 * 256 * (halos + gathered) / 2)


def test_a_layer_that_is_not_priced_is_named() -> None:
    for word in ("rows", "filters"):
        with pytest.raises(RecipeError, match=rf"classifier\.0 by {word}"):
            own(ParallelConfig(1, 2, {"classifier.0": word}, 2), 2)


def test_the_band_of_a_forecast() -> None:
    words = ParallelConfig(0, 4, TRICK, 4, "one_weird_trick")
    layout = RecipeLayout(words, TRICK)
    row = forecast_parallel(ALEXNET, WORK, CLUSTER, layout, 4, "ring")
    assert row["step_low_s"] < row["step_s"] < row["step_high_s"]
    assert row["step_s"] == own(words, 4).step.step_s
    assert row["parallel"]["data"] == 1
    low = layout_cost(ALEXNET, WORK, layout).plans(slower(CLUSTER, 2.0, 1.0), 4, "ring")[0].step
    assert low.compute_s == pytest.approx(2 * row["compute_s"], rel=0.01)
    assert low.activations_s == row["activations_s"]


def test_measured_steps_scale_a_recipes_layout() -> None:
    row = MeasuredStep("alexnet", 8, 0.5, 0.01, 0.02)
    on = replace(CLUSTER, device=replace(CLUSTER.device, measured=(row,)))
    layout = RecipeLayout(ParallelConfig(stages=["features.8"]), {})
    step = layout_cost(ALEXNET, WORK, layout).plans(on, 2, "ring")[0].step
    assert step.compute_s < 32 * 0.5
    assert step.compute_s + step.activations_s > 32 * 0.5 / 2
    assert step.data_s == pytest.approx(32 * 0.01)


CROSSINGS = {
    "alexnet": {"features.8": 43_264, "classifier": 9_216},
    "vgg16": {"features.17": 200_704},
    "resnet50": {"layer3": 401_408},
    "googlenet": {"inception4a": 94_080, "inception5a": 244_608},
}
"""The table of docs/explanation/splitting.md; of GoogLeNet's with the inputs of its heads."""


def test_what_crosses_a_cut() -> None:
    for model, cuts in CROSSINGS.items():
        config = ModelConfig(model)
        work = workload_of_model(config, None, 8, 8)
        for name, numbers in cuts.items():
            (crossing,) = crossings_of(config, work, [name])
            assert (crossing.forward, crossing.backward) == (numbers, numbers), (model, name)


def test_stages_are_all_calls_in_order() -> None:
    first, second, third = works_of(WORK.layers, ["features.3", "classifier"])
    assert [*first, *second, *third] == [*WORK.layers]
    assert second[0].name == "features.3"
    assert third[0].name == "classifier.0"
    with pytest.raises(ValueError, match=r"features\.3x is not called"):
        works_of(WORK.layers, ["features.3x"])


def test_the_memory_and_bytes_of_stages() -> None:
    """Eight micro-batches through two stages."""
    work = workload_of_model(ALEXNET, None, 64, 8)
    plan = own(ParallelConfig(stages=["classifier"], pipeline="gpipe"), 2, work)
    stages = works_of(work.layers, ["classifier"])
    weights = [sum(sum(call.parameters_bytes) for call in calls) for calls in stages]
    assert plan.memory["parameters"] == max(weights)
    assert plan.memory["activations"] <= 8 * 8 * sum(call.output_bytes for call in stages[0])
    assert (plan.step.gradients_bytes, plan.step.activations_bytes) == (0, 4 * 64 * 9_216)
    assert 0.2 < plan.idle < 0.6  # the convolutions take most of the time


def test_of_auto_what_fits_comes_first_then_what_is_fast() -> None:
    words = ParallelConfig(0, 1, TRICK, 4, "auto")
    cost = layout_cost(ALEXNET, WORK, RecipeLayout(words, TRICK))
    every = cost.plans(CLUSTER, 4, "ring")
    assert [each.step.step_s for each in every] == sorted(each.step.step_s for each in every)
    assert {(each.words.model, each.words.scheme) for each in every if each.words} == {
        (1, "none"),
        *((size, scheme) for size in (2, 4) for scheme in ("none", "one_weird_trick")),
    }
    least = min(each.memory_bytes for each in every)
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=least))
    first, *others = cost.plans(small, 4, "ring")
    assert (first.memory_bytes, first.fits) == (least, True)
    assert not any(each.fits for each in others)
    # A convolution is split: one weird trick is not possible then.
    chosen = {"features.0": "filters"}
    words = ParallelConfig(0, 1, chosen, 4, "auto")
    found = layout_cost(ALEXNET, WORK, RecipeLayout(words, chosen)).plans(CLUSTER, 4, "ring")
    assert {each.words.scheme for each in found if each.words} == {"none"}


def test_the_cut_against_every_cut() -> None:
    draws = np.random.default_rng(2)
    for stages in (1, 2, 3, 6):
        computes_s, passes_s = draws.random(6), draws.random((stages, 6)) / 2

        def slowest(cuts: tuple[int, ...], own=computes_s, handed=passes_s) -> float:  # type: ignore[no-untyped-def]
            parts = enumerate(pairwise(cuts))
            return float(max(own[a:b].sum() + handed[k, a] for k, (a, b) in parts))

        every = [(0, *inner, 6) for inner in combinations(range(1, 6), stages - 1)]
        assert slowest(balanced(computes_s, passes_s)) == pytest.approx(min(map(slowest, every)))


def test_turns_by_hand() -> None:
    """Four equal layers in two stages, 8 micro-batches of 2: 9 turns, of which one is idle."""
    cost = cost_of([dense(name, 64, 64) for name in "abcd"], 2, batch=16, micro=2)
    found = best_stages(cost, 2)
    assert found.cuts == (0, 2, 4)
    assert found.idle == pytest.approx(1 / 9)
    layer_s = cost.unit_s(cost.chain[1], LayerLayout(1, copies=2)) / 8
    assert found.step.compute_s == pytest.approx(9 * 2 * layer_s)
    # Two samples of 64 numbers there, and their gradients back.
    assert found.step.activations_s == pytest.approx(9 * 2 * (4 * 2 * 64) / 1e9)
    assert found.step.activations_bytes == 4 * 16 * 64
    assert found.step.gradients_bytes == found.step.exposed_communication_s == 0


def test_stages_of_several_rows() -> None:
    cost = cost_of([dense(name, 64, 64) for name in "abcd"], 4, batch=16, micro=2)
    found = best_stages(cost, 2)
    assert found.idle == pytest.approx(1 / 5)
    assert found.step.gradients_bytes == 4 * 2 * 64 * 64  # 2 (2 - 1) / 2 of two layers
    assert found.step.exposed_communication_s > 0
    whole = memory_of(cost.work, cost.chain, [LayerLayout(4)] * 5)
    assert found.memory["parameters"] == whole["parameters"] / 2
    # The first stage keeps two layers' inputs of two micro-batches. It holds most, with gradients,
    # when the later layer's input is let go.
    assert found.memory["activations"] == (2 * 2 - 1) * 2 * (4 * 64)


def test_more_stages_than_layers() -> None:
    cost = cost_of([dense("a", 8, 8)], 2, batch=4)
    with pytest.raises(ValueError, match="2 stages of 1 layers"):
        best_stages(cost, 2)
    plans = split_plans(cost.work, cost.cluster, cost.chain, 2, "ring", [*WAYS])
    assert [each.name for each in plans] == ["data", "same_samples", "one_weird_trick", "layers"]
    fastest = min(plans, key=lambda each: each.step.step_s)
    assert fastest.step.step_s == plans[-1].step.step_s


@pytest.mark.parametrize("order", ORDERS)
def test_without_messages_it_is_the_exact_simulation(order: str) -> None:
    draws = np.random.default_rng(3)
    for stages, micro_batches in product((1, 2, 3, 4), (1, 3, 8)):
        forward, backward = draws.integers(1, 20, (2, stages)).tolist()
        actions = [ORDERS[order](stages, micro_batches, k) for k in range(stages)]
        none = [0.0] * (stages - 1)
        exact = simulate(actions, forward, backward)
        assert max(turns(actions, forward, backward, none, none)) == exact.length_s


@pytest.mark.parametrize(
    ("order", "stages", "micro_batches", "times_s", "there_s", "back_s", "ends_s"),
    [
        # Stage 0: forward to 1 and 2. The first comes at 1.5, the second at 2.5. Stage 1: forward
        # to 2.5 and 3.5, backward to 5.5 and 7.5. Their gradients come at 5.75 and 7.75: backward
        # of stage 0 to 7.75 and 9.75.
        ("gpipe", 2, 2, (1, 2), [0.5], [0.25], (9.75, 7.5)),
        # A slow link sets the pace: one comes in while another is computed. Messages come one after
        # the other, then the last forward and backward, and what goes back.
        ("gpipe", 2, 4, (1, 1), [10], [0], (1 + 4 * 10 + 1 + 4 + 1, 1 + 4 * 10 + 1 + 4)),
        # The middle stage sends on and back through one port, 3 s each. Stage 1: forward to 2 and
        # 3; its messages come at 5 and 8. Stage 2 ends backward of the first at 7, stage 1 at 8: it
        # goes back from 8 to 11. Its third forward ends at 9, and goes from 11 to 14; its second
        # backward, from 10 to 11, goes from 14 to 17. Stage 2 ends at 16, stage 1 at 17, which goes
        # to 20.
        ("1f1b", 3, 3, (1, 1), [0, 3], [3, 0], (21, 17, 16)),
    ],
    ids=["messages", "slow link", "one port"],
)
def test_turns_with_messages_by_hand(
    order: str,
    stages: int,
    micro_batches: int,
    times_s: tuple[float, float],
    there_s: list[float],
    back_s: list[float],
    ends_s: tuple[float, ...],
) -> None:
    """times_s: of forward and of backward, of each stage."""
    orders = [ORDERS[order](stages, micro_batches, k) for k in range(stages)]
    forward_s, backward_s = ([s] * stages for s in times_s)
    assert turns(orders, forward_s, backward_s, there_s, back_s) == [*ends_s]
