"""Parameters that are not trained, and whose normalization keeps its statistics."""

import torch

from firecaffe.models.freeze import freeze
from tests.unit.models.own_nets import Net


def test_patterns_are_those_of_names() -> None:
    network = Net(3)
    freeze(network, ["stem.*", "*.bias"])
    trained = [name for name, each in network.named_parameters() if each.requires_grad]
    assert trained == ["norm.weight", "head.weight"]


def test_a_normalization_layer_that_is_frozen_whole_keeps_its_statistics() -> None:
    for patterns, changes in ((["norm.weight"], True), (["norm.*"], False), ([], True)):
        network = Net(3).train()
        freeze(network, patterns)
        network(torch.ones(2, 1, 5, 5))
        assert bool(network.norm.num_batches_tracked) == changes
        assert network.drop.training
