"""What the first round begins with, against the decomposition itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.scheme import Scheme
from firecaffe.shrink.start_network import ranks_of, with_ranks, write_start


def network() -> nn.Sequential:
    """Two layers, the first of rank 2."""
    torch.manual_seed(0)
    first = nn.Linear(30, 20)
    with torch.no_grad():
        first.weight.copy_(torch.randn(20, 2) @ torch.randn(2, 30))
    return nn.Sequential(first, nn.Linear(20, 10))


def scheme(**low_rank: dict[str, float]) -> Scheme:
    return Scheme("x", [], low_rank=low_rank)


def test_energy_finds_the_rank_that_is_there() -> None:
    assert ranks_of(scheme(energy={"0": 0.9999}), network()) == {"0": 2}


def test_a_layer_whose_two_would_be_larger_stays_whole() -> None:
    """Of rank 7 or more, 7 (20 + 10) weights are more than 200."""
    assert ranks_of(scheme(energy={"*": 0.9999}), network()) == {"0": 2}
    assert ranks_of(scheme(energy={"*": 0.9999, "0": 0.1}), network()) == {"0": 1}


def test_ranks_are_taken_as_they_are() -> None:
    assert ranks_of(scheme(rank={"*": 3, "1": 4}), network()) == {"0": 3, "1": 4}
    assert ranks_of(scheme(), network()) == {}
    with pytest.raises(RecipeError, match="'fc', which no Linear or Conv2d"):
        ranks_of(scheme(energy={"fc": 0.5}), network())


def test_the_file_holds_the_two_layers(tmp_path: Path) -> None:
    made = network()
    found = load_file(write_start(made, {"0": 2}, tmp_path))
    product = found["0.expand.weight"] @ found["0.reduce.weight"]
    whole = made.state_dict()
    assert torch.allclose(product, whole["0.weight"], atol=1e-5)
    assert torch.equal(found["1.weight"], whole["1.weight"])


def test_a_run_in_lower_rank_is_left_alone() -> None:
    recipe = Recipe(model=ModelConfig(weights="a", low_rank={"0": 3}))
    assert with_ranks(recipe, {}, "b") is recipe
    with pytest.raises(RecipeError, match=r"has model\.low_rank already"):
        with_ranks(recipe, {"0": 2}, "b")
    changed = with_ranks(Recipe(model=ModelConfig(weights="a")), {"0": 2}, "b").model
    assert (changed.low_rank, changed.weights) == ({"0": 2}, "b")
