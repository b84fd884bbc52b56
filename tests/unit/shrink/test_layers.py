"""Layers chosen by what each bears: a planted network whose answer is known."""

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.shrink.layers import (
    BITS,
    FEWEST,
    KEEPS,
    Choice,
    LayerChoice,
    LayerSensitivity,
    choose,
    estimated_bytes,
)


def layer(name: str, weights: int, knee: float) -> LayerSensitivity:
    """A layer that begins to lose at a share, the more the less is kept."""
    keeps = {keep: max(0.0, 40 * log2(knee / keep)) for keep in KEEPS}
    return LayerSensitivity(name, weights, keeps, {bits: 64 / 4**bits for bits in BITS})


def size_of(layers: list[LayerSensitivity], choice: Choice) -> float:
    return sum(estimated_bytes(each.weights, choice[each.name]) for each in layers)


LAYERS = [layer("hard", 25_000, 0.3), layer("easy", 400_000, 0.05), layer("tiny", 500, 0.6)]


def test_the_estimate_is_the_entropy_of_where_and_what() -> None:
    """1,000 weights of which half are kept say so in 1,000 bits, and have 4 bits each."""
    assert estimated_bytes(1000, LayerChoice(0.5, 4)) == pytest.approx(
        (1000 + 500 * 4 + 32 * 16) / 8
    )
    assert estimated_bytes(1000, LayerChoice(1.0, 8)) == pytest.approx((8000 + 32 * 256) / 8)


@settings(max_examples=60)
@given(st.floats(3_000, 200_000))
def test_the_size_is_met_and_hardly_undercut(size: float) -> None:
    choice = choose(LAYERS, size, rest_bytes=500)
    found = size_of(LAYERS, choice) + 500
    assert found <= size
    # Bits come whole, so a step of one of them may be left over.
    assert found >= 0.8 * size or all(each.bits == max(BITS) for each in choice.values())


def test_what_bears_more_keeps_less() -> None:
    choice = choose(LAYERS, 20_000, rest_bytes=0)
    assert choice["easy"].keep < choice["hard"].keep < choice["tiny"].keep
    assert choice["easy"].keep < 0.05


def test_a_smaller_file_asks_more_of_every_layer() -> None:
    found = [choose(LAYERS, size, 0) for size in (60_000, 20_000, 7_000, 2_500)]
    for name in ("hard", "easy", "tiny"):
        keeps = [choice[name].keep for choice in found]
        assert keeps == sorted(keeps, reverse=True)
        bits = [choice[name].bits for choice in found]
        assert bits == sorted(bits, reverse=True)


def test_below_all_that_was_tried_every_layer_keeps_a_few() -> None:
    choice = choose(LAYERS, 1, rest_bytes=0)
    assert choice["tiny"].keep == FEWEST / 500
    assert 0 < choice["easy"].keep < min(KEEPS)


def test_a_share_that_loses_less_than_a_larger_one_is_not_believed() -> None:
    """By chance a network may be better without weights that it needs."""
    lucky = dict.fromkeys(KEEPS, 0.0) | {0.5: 5.0}
    bits = dict.fromkeys(BITS, 0.0)
    layers = [LayerSensitivity("a", 10_000, lucky, bits), layer("b", 10_000, 0.5)]
    small, large = (choose(layers, size, 0)["a"].keep for size in (2_000, 9_000))
    assert large > 0.5 >= small


@pytest.mark.parametrize("size", [20_000, 9_000, 4_000, 2_000])
def test_sizes_within_a_plateau_are_met(size: float) -> None:
    """At the level of chance a layer loses the same, however little it keeps."""
    at_chance = {keep: 0.0 if keep > 0.1 else 80.0 for keep in KEEPS}
    layers = [LayerSensitivity("a", 100_000, at_chance, dict.fromkeys(BITS, 0.0))]
    assert size_of(layers, choose(layers, size, 0)) == pytest.approx(size, rel=0.01)
