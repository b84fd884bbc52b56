"""A recipe's own layout is priced as the ways of `plan --ways`, and its stages by their turns."""

from dataclasses import replace

import pytest

from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.chain import chain_of
from firecaffe.plan.cluster import MeasuredStep, load_cluster
from firecaffe.plan.of_parallel import OwnLayout, forecast_parallel, own_cost, slower
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.recipe_stages import crossings_of, works_of
from firecaffe.plan.split_plans import SplitPlan, data_layouts, split_plans
from firecaffe.plan.split_step import SplitCost

ALEXNET = ModelConfig("alexnet")
WORK = workload_of_model(ALEXNET, None, 256, 8)
CLUSTER = load_cluster("ethernet-10g")
TRICK = {"classifier.0": "inputs", "classifier.3": "neurons", "classifier.6": "inputs"}
"""As of one weird trick without a word for a layer."""


def own(words: ParallelConfig, workers: int, chosen: dict[str, str] | None = None) -> SplitPlan:
    layout = OwnLayout(words, words.split if chosen is None else chosen)
    return own_cost(ALEXNET, WORK, layout).plans(CLUSTER, workers, "ring")[0]


@pytest.mark.parametrize(("scheme", "way"), [("one_weird_trick",) * 2, ("none", "same_samples")])
def test_a_recipe_is_priced_as_the_way_that_it_is(scheme: str, way: str) -> None:
    (plan,) = split_plans(WORK, CLUSTER, chain_of(ALEXNET, WORK), 4, "ring", [way])
    words = ParallelConfig(0, plan.model, TRICK, plan.model, scheme)  # type: ignore[arg-type]
    found = own(words, 4)
    assert found.step == plan.step
    assert found.memory == plan.memory


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
    layout = OwnLayout(words, words.split)
    by_all, by_owners = (
        own_cost(ALEXNET, replace(work, update_at=each), layout).plans(CLUSTER, 8, "ring")[0]
        for each in ("all", "shards")
    )
    whole, mine = by_all.memory["optimizer"], by_owners.memory["optimizer"]
    if words.split and shared == "all":
        assert mine == 2 * 4 * 9216 * 4096 / 2  # the largest part has one owner
    elif shared == "all":
        assert mine == pytest.approx(whole / 4, rel=0.001)  # rows are not cut
    else:  # parts of fully connected layers each worker of a column updates
        of_parts = sum(
            sum(each.parameters_bytes)
            for unit in chain_of(ALEXNET, work)
            if unit.name.startswith("classifier")
            for each in unit.works
        )
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
    assert (in_one.step, in_one.memory, in_one.crossings) == (
        whole.step,
        whole.memory,
        whole.crossings,
    )
    split = own(ParallelConfig(0, 2, TRICK, 2, stages=names), 12)
    assert split.model == 6
    # The last stage holds most, and nothing but them and their biases.
    assert split.memory["gradients"] == pytest.approx(whole.memory["gradients"] / 2, rel=0.01)
    assert split.step.activations_bytes > whole.step.activations_bytes
    halved = pytest.approx(whole.step.gradients_bytes / 2, rel=0.01)
    assert split.step.gradients_bytes == halved
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


@pytest.mark.parametrize("word", ["rows", "filters"])
def test_a_layer_that_is_not_priced_is_named(word: str) -> None:
    chosen = {"classifier.0": word}
    with pytest.raises(RecipeError, match=rf"classifier\.0 by {word}, which the planner cannot"):
        own(ParallelConfig(1, 2, chosen, 2), 2)


def test_the_band_of_a_forecast() -> None:
    words = ParallelConfig(0, 4, TRICK, 4, "one_weird_trick")
    found = forecast_parallel(ALEXNET, WORK, CLUSTER, OwnLayout(words, TRICK), 4, "ring")
    assert found["step_low_s"] < found["step_s"] < found["step_high_s"]
    assert found["step_s"] == own(words, 4).step.step_s
    assert found["parallel"]["data"] == 1
    halved = slower(CLUSTER, 2.0, 1.0)
    low = own_cost(ALEXNET, WORK, OwnLayout(words, TRICK)).plans(halved, 4, "ring")[0].step
    assert low.compute_s == pytest.approx(2 * found["compute_s"], rel=0.01)
    assert low.activations_s == found["activations_s"]


def test_measured_steps_scale_a_recipes_layout() -> None:
    row = MeasuredStep("alexnet", 8, 0.5, 0.01, 0.02)
    on = replace(CLUSTER, device=replace(CLUSTER.device, measured=(row,)))
    layout = OwnLayout(ParallelConfig(stages=["features.8"]), {})
    found = own_cost(ALEXNET, WORK, layout).plans(on, 2, "ring")[0]
    assert found.step.compute_s < 32 * 0.5
    assert found.step.compute_s + found.step.activations_s > 32 * 0.5 / 2
    assert found.step.data_s == pytest.approx(32 * 0.01)


@pytest.mark.parametrize(
    ("model", "name", "numbers"),
    [
        ("alexnet", "features.8", 43_264),
        ("alexnet", "classifier", 9_216),
        ("vgg16", "features.17", 200_704),
        ("resnet50", "layer3", 401_408),
        ("googlenet", "inception4a", 94_080),
        ("googlenet", "inception5a", 244_608),
    ],
)
def test_what_crosses_a_cut(model: str, name: str, numbers: int) -> None:
    """The table of docs/pipeline.md; of GoogLeNet's with the inputs of its heads."""
    config = ModelConfig(model)
    (found,) = crossings_of(config, workload_of_model(config, None, 8, 8), [name])
    assert (found.forward, found.backward) == (numbers, numbers)


def test_stages_are_all_calls_in_order() -> None:
    first, second, third = works_of(WORK.layers, ["features.3", "classifier"])
    assert [*first, *second, *third] == [*WORK.layers]
    assert second[0].name == "features.3"
    assert third[0].name == "classifier.0"
    with pytest.raises(ValueError, match=r"features\.3x is not called"):
        works_of(WORK.layers, ["features.3x"])


def test_stages_by_hand() -> None:
    """Eight micro-batches through two stages of fully known times, without a band of jitter."""
    work = workload_of_model(ALEXNET, None, 64, 8)
    config = ParallelConfig(stages=["classifier"], pipeline="gpipe")
    found = own_cost(ALEXNET, work, OwnLayout(config, {})).plans(CLUSTER, 2, "ring")[0]
    first, last = works_of(work.layers, ["classifier"])
    weights = [sum(sum(each.parameters_bytes) for each in own) for own in (first, last)]
    assert found.memory["parameters"] == max(weights)
    kept = 8 * 8 * sum(each.output_bytes for each in first)
    assert found.memory["activations"] <= kept
    assert found.step.gradients_bytes == 0
    assert found.step.activations_bytes == 4 * 64 * 9_216
    assert 0.3 < found.idle < 0.6  # the convolutions take nearly all of the time


def test_of_auto_what_fits_comes_first_then_what_is_fast() -> None:
    words = ParallelConfig(0, 1, TRICK, 4, "auto")
    cost = own_cost(ALEXNET, WORK, OwnLayout(words, TRICK))
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
    found = own_cost(ALEXNET, WORK, OwnLayout(words, chosen)).plans(CLUSTER, 4, "ring")
    assert {each.words.scheme for each in found if each.words} == {"none"}
