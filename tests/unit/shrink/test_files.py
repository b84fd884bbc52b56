"""What the first round begins with, and what the file at the end holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from firecaffe.compression.fcz import read
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.attempt import ranks_of, with_ranks, write_network, write_start
from firecaffe.shrink.compress_network import CompressRequest, plan_compression
from firecaffe.shrink.scheme import Scheme, find_scheme
from firecaffe.training.given_parts import NOTHING
from firecaffe.training.load import Trained
from tests.kit.models_refused import refused


def network() -> nn.Sequential:
    """Two layers, the first of rank 2."""
    torch.manual_seed(0)
    first = nn.Linear(30, 20)
    with torch.no_grad():
        first.weight.copy_(torch.randn(20, 2) @ torch.randn(2, 30))
    return nn.Sequential(first, nn.Linear(20, 10))


# A layer whose two would be larger stays whole: of rank 7 or more, 7 (20 + 10) weights exceed 200.
RANKS: list[tuple[dict[str, dict[str, float]], dict[str, int]]] = [
    ({"energy": {"0": 0.9999}}, {"0": 2}),
    ({"energy": {"*": 0.9999}}, {"0": 2}),
    ({"energy": {"*": 0.9999, "0": 0.1}}, {"0": 1}),
    ({"rank": {"*": 3, "1": 4}}, {"0": 3, "1": 4}),
    ({}, {}),
]


@pytest.mark.parametrize(("low_rank", "ranks"), RANKS)
def test_ranks_are_found_by_energy_or_taken_as_they_are(
    low_rank: dict[str, dict[str, float]], ranks: dict[str, int]
) -> None:
    assert ranks_of(Scheme("x", [], low_rank=low_rank), network()) == ranks


def test_a_layer_that_is_not_there_is_said() -> None:
    with pytest.raises(RecipeError, match="'fc', which no Linear or Conv2d"):
        ranks_of(Scheme("x", [], low_rank={"energy": {"fc": 0.5}}), network())


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


def written(network: nn.Module, path: Path, **words: object) -> dict[str, np.ndarray]:
    trained = Trained(network.eval(), Recipe(), NOTHING, 1, "weights", [])
    write_network(trained, Scheme("x", [], **words), path)  # type: ignore[arg-type]
    with read(path) as file:
        return dict(file.tensors())


def test_in_32_bits_a_file_holds_the_very_numbers(tmp_path: Path) -> None:
    network = nn.Linear(30, 20)
    found = written(network, tmp_path / "a.fcz")
    for name, each in network.state_dict().items():
        assert np.array_equal(found[name], each.numpy())


def test_in_16_bits_biases_and_shared_values_are_rounded(tmp_path: Path) -> None:
    """Not weights that have a value each: these are not numbers of a codebook."""
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 10))
    with torch.no_grad():
        network.get_parameter("1.weight").copy_(0.1 * torch.randint(-2, 3, (10, 300)))
        network.get_parameter("1.bias")[:2] = torch.tensor([1e6, -1e-9])
        network.get_parameter("0.bias")[0] = -1e-9
    found = written(network, tmp_path / "a.fcz", biases=16)
    state = network.state_dict()
    assert np.array_equal(found["0.weight"], state["0.weight"].numpy())
    for name in ("0.bias", "1.weight"):
        assert np.array_equal(found[name], state[name].half().float().numpy() + np.float32(0))
    assert len(np.unique(found["1.weight"])) == 5
    assert not np.signbit(found["0.bias"][0])
    # A number that is too large for 16 bits keeps its tensor as it is.
    assert np.array_equal(found["1.bias"], state["1.bias"].numpy())


@pytest.mark.parametrize("normalization", ["keep", "fold"])
def test_normalization_is_folded_if_asked(tmp_path: Path, normalization: str) -> None:
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    network(torch.randn(64, 5))
    inputs = torch.randn(9, 5)
    before = network.eval()(inputs)
    found = written(network, tmp_path / "a.fcz", normalization=normalization)
    assert bool(found["1.running_mean"].any()) == (normalization == "keep")
    network.load_state_dict({name: torch.from_numpy(each) for name, each in found.items()})
    assert torch.allclose(network(inputs), before, atol=1e-6)


class Half(nn.Sequential):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * 28 * 28, num_classes))
        self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))


def test_a_type_that_a_file_has_not_is_said_before_the_rounds(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file(Half(10, 1).state_dict(), weights)
    model = ModelConfig(f"{__name__}:Half", weights=str(weights))
    recipe = Recipe(model=model, data=DataConfig("generated"))
    asked = CompressRequest(recipe, find_scheme("best"), None, tmp_path / "x.fcz", 1)
    with refused(RecipeError, ["narrow", "bfloat16"]):
        plan_compression(asked)
