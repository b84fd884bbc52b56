"""Layers: what each bears is measured, and what it keeps is chosen by it."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from firecaffe.shrink.layer_sizes import (
    BITS,
    FEWEST,
    KEEPS,
    Choice,
    LayerChoice,
    LayerSensitivity,
    SizedLayer,
    choose,
    estimated_bytes,
    layers_of,
    measure_layers,
)


def layer(name: str, weights: int, knee: float, bits: int = 3) -> LayerSensitivity:
    """A layer that loses a point at `knee`, and four times as much with each half of it; and as
    much with fewer than so many bits.
    """
    keeps = {keep: min(60.0, (knee / keep) ** 2) for keep in KEEPS}
    return LayerSensitivity(name, weights, keeps, {each: 60.0 * (each < bits) for each in BITS})


def size_of(layers: list[LayerSensitivity], choice: Choice) -> float:
    return sum(estimated_bytes(each.weights, choice[each.name]) for each in layers)


LAYERS = [layer("hard", 25_000, 0.3), layer("easy", 400_000, 0.02), layer("tiny", 500, 0.3)]


def test_the_estimate_is_the_entropy_of_where_and_what() -> None:
    """1,000 weights of which half are kept say so in 1,000 bits, and have 4 bits each."""
    half = (1000 + 500 * 4 + 32 * 16) / 8
    assert estimated_bytes(1000, LayerChoice(0.5, 4)) == pytest.approx(half)
    assert estimated_bytes(1000, LayerChoice(1.0, 8)) == pytest.approx((8000 + 32 * 256) / 8)
    assert estimated_bytes(1000, LayerChoice(1.0, 16)) == 2000  # each has its own value


def test_the_size_is_met_and_a_smaller_file_asks_more_of_every_layer() -> None:
    sizes = (60_000, 20_000, 7_000, 2_500, 150_000, 1_000)
    choices = {size: choose(LAYERS, size + 500, rest_bytes=500) for size in sizes}
    for size, choice in choices.items():
        assert size_of(LAYERS, choice) == pytest.approx(size, rel=0.01)
    assert choices[20_000]["easy"].keep < choices[20_000]["hard"].keep / 4
    for name in ("hard", "easy", "tiny"):
        keeps = [choices[size][name].keep for size in sizes[:4]]
        # The same part of all is taken where two prices are too far from each other.
        assert all(after < 1.1 * before for before, after in pairwise(keeps))
        assert keeps[-1] < 0.8 * keeps[0]


def test_below_all_that_was_tried_every_layer_keeps_a_few() -> None:
    """But for what is not to be pruned or shared, which stays whole."""
    biases = LayerSensitivity("ip1.bias", 500, {}, {})
    choice = choose([*LAYERS, biases], 1, rest_bytes=0)
    assert choice["tiny"].keep == FEWEST / 500
    assert 0 < choice["easy"].keep < min(KEEPS)
    assert choice["ip1.bias"] == LayerChoice(1.0, 16)


def test_a_small_layer_keeps_more_than_a_large_one_that_bears_the_same() -> None:
    """With a loss of (knee / keep)^2, and bytes that are nearly as the share, the best shares of
    two layers are as the third root of one over their sizes: 20^(1/3) is 2.7.
    """
    layers = [layer("small", 20_000, 0.05), layer("large", 400_000, 0.05)]
    choice = choose(layers, 8_000, rest_bytes=0)
    assert 2.2 < choice["small"].keep / choice["large"].keep < 3.2


def test_a_layer_has_as_few_bits_as_it_bears() -> None:
    layers = [layer("a", 10_000, 0.1, bits=5), layer("b", 10_000, 0.1, bits=3)]
    choice = choose(layers, 3_000, 0)
    assert (choice["a"].bits, choice["b"].bits) == (5, 3)


def falling(name: str, weights: int, losses: Callable[[float], float]) -> LayerSensitivity:
    """A layer that loses as much with each share that it keeps, and nothing with fewer bits."""
    return LayerSensitivity(
        name, weights, {keep: losses(keep) for keep in KEEPS}, dict.fromkeys(BITS, 0.0)
    )


def test_a_share_that_loses_less_than_a_larger_one_is_not_believed() -> None:
    """By chance a network may be better without weights that it needs."""
    other = layer("b", 10_000, 0.05)
    lucky = falling("a", 10_000, lambda keep: 20.0 * (keep > 0.4))
    known = falling("a", 10_000, lambda keep: 20.0)
    assert choose([lucky, other], 4_000, 0) == choose([known, other], 4_000, 0)


def test_a_layer_that_falls_to_chance_at_once_is_not_given_up_for_one_that_falls_slowly() -> None:
    """Though less of it loses nothing more, a keeps what it needs, and b gives way."""
    cliff = falling("a", 50_000, lambda keep: 0.1 if keep > 0.1 else 60.0)
    choice = choose([cliff, layer("b", 50_000, 0.1)], 1_500, 0)
    assert choice["b"].keep < 0.01 < 0.02 < choice["a"].keep


@pytest.mark.parametrize("size", [20_000, 9_000, 4_000, 2_000])
def test_no_layer_is_given_up_because_nothing_more_can_be_lost(size: float) -> None:
    """At the level of chance a layer loses the same, however little it keeps: of two like each
    other none keeps all and the other nothing.
    """
    layers = [falling(name, 50_000, lambda keep: 0.1 if keep > 0.1 else 80.0) for name in "ab"]
    choice = choose(layers, size, 0)
    assert choice["a"] == choice["b"]
    assert size_of(layers, choice) == pytest.approx(size, rel=0.01)


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(40, 25), nn.BatchNorm1d(25), nn.Linear(25, 8))
    with torch.no_grad():
        made.get_parameter("2.bias").zero_()
    return made


def test_each_level_is_tried_on_its_layer_alone_and_nothing_is_left() -> None:
    """The score is the number of kept weights of the first layer, less distinct values of the
    second: so each table is known.
    """
    made = two_layers()
    first, second = made.get_parameter("0.weight"), made.get_parameter("2.weight")
    before = {name: each.clone() for name, each in made.state_dict().items()}

    def score() -> float:
        return int(first.count_nonzero()) - len(set(second.flatten().tolist()))

    found = measure_layers([SizedLayer("0", [first]), SizedLayer("2", [second])], score)
    assert [each.name for each in found] == ["0", "2"]
    assert [each.weights for each in found] == [1000, 200]
    assert found[0].keeps == {keep: 1000 - round(1000 * keep) for keep in KEEPS}
    assert found[0].bits == dict.fromkeys(BITS, 0)
    assert found[1].bits == {bits: min(2**bits, 200) - 200 for bits in BITS}
    assert all(torch.equal(each, before[name]) for name, each in made.state_dict().items())


def test_a_layer_keeps_its_largest_weights() -> None:
    weight = two_layers().get_parameter("0.weight").detach().abs()
    (layer,) = measure_layers(
        [SizedLayer("0", [nn.Parameter(weight)], [0.08], [])], lambda: float(weight.sum())
    )
    lost = weight.sum() - weight.flatten().topk(80).values.sum()
    assert layer.keeps[0.08] == pytest.approx(float(lost), rel=1e-5)


def test_biases_are_tried_if_a_scheme_names_them() -> None:
    """But for those that are all zero, as both the last layer's and fresh normalization's are."""
    made = two_layers()
    assert [each.name for each in layers_of(made, False, False)] == ["0", "2"]
    pruned = layers_of(made, True, False)
    assert [each.name for each in pruned] == ["0", "2", "0.bias"]
    assert [bool(each.bits) for each in pruned] == [True, True, False]
    assert [bool(each.keeps) for each in layers_of(made, False, True)] == [True, True, False]
