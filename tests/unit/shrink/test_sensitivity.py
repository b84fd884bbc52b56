"""Layers tried one by one, on a score that says what was done to them."""

import pytest
import torch
from torch import nn

from firecaffe.shrink.layer_sizes import BITS, KEEPS, Layer, layers_of, measure_layers


def network() -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(40, 25), nn.BatchNorm1d(25), nn.Linear(25, 8))
    with torch.no_grad():
        made.get_parameter("2.bias").zero_()
    return made


def test_each_level_is_tried_on_its_layer_alone_and_nothing_is_left() -> None:
    """The score is the number of kept weights of the first layer, less distinct values of the
    second: so each table is known.
    """
    made = network()
    first, second = made.get_parameter("0.weight"), made.get_parameter("2.weight")
    before = {name: each.clone() for name, each in made.state_dict().items()}

    def score() -> float:
        return int(first.count_nonzero()) - len(set(second.flatten().tolist()))

    found = measure_layers([Layer("0", [first]), Layer("2", [second])], score)
    assert [each.name for each in found] == ["0", "2"]
    assert [each.weights for each in found] == [1000, 200]
    assert found[0].keeps == {keep: 1000 - round(1000 * keep) for keep in KEEPS}
    assert found[0].bits == dict.fromkeys(BITS, 0)
    assert found[1].bits == {bits: min(2**bits, 200) - 200 for bits in BITS}
    assert all(torch.equal(each, before[name]) for name, each in made.state_dict().items())


def test_a_layer_keeps_its_largest_weights() -> None:
    made = network()
    weight = made.get_parameter("0.weight").detach()
    whole = float(weight.abs().sum())
    largest = float(weight.abs().flatten().topk(80).values.sum())
    found = measure_layers(
        [Layer("0", [nn.Parameter(weight)], [0.08], [])], lambda: float(weight.abs().sum())
    )
    assert found[0].keeps[0.08] == pytest.approx(whole - largest, rel=1e-5)


def test_biases_are_tried_if_a_scheme_names_them() -> None:
    """But for those that are all zero, as both the last layer's and fresh normalization's are."""
    made = network()
    assert [each.name for each in layers_of(made, False, False)] == ["0", "2"]
    pruned = layers_of(made, True, False)
    assert [each.name for each in pruned] == ["0", "2", "0.bias"]
    assert [bool(each.bits) for each in pruned] == [True, True, False]
    assert [bool(each.keeps) for each in layers_of(made, False, True)] == [True, True, False]
