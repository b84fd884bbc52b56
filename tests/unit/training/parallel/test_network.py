"""Which layers a recipe splits, by which words."""

import pytest
from torch import nn

from firecaffe import ParallelConfig
from firecaffe.errors import RecipeError
from firecaffe.models.known_networks import build_model
from firecaffe.training.parallel.split_network import chosen_layers

TRICK = ParallelConfig(0, 2, scheme="one_weird_trick")


def test_one_weird_trick_takes_fully_connected_layers_in_turns() -> None:
    alexnet = build_model("alexnet", num_classes=10)
    words = "inputs", "neurons", "inputs"
    named = zip((f"classifier.{number}" for number in (0, 3, 6)), words, strict=True)
    assert chosen_layers(alexnet, TRICK) == dict(named)
    widening = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert chosen_layers(widening, TRICK) == {"0": "neurons", "2": "inputs"}


def test_one_weird_trick_wants_a_fully_connected_layer() -> None:
    with pytest.raises(RecipeError, match=r"the network has no fully connected layer"):
        chosen_layers(nn.Sequential(nn.Conv2d(1, 2, 3)), TRICK)
    words = ParallelConfig(0, 2, {"0": "filters"}, scheme="one_weird_trick")
    with pytest.raises(RecipeError, match=r"has 0 by filters: one_weird_trick splits fully"):
        chosen_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), words)
