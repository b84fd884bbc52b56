"""What the first round begins with, and what the file at the end holds."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from firecaffe.compression.fcz import read
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.attempt import (
    fold_normalization,
    ranks_of,
    with_ranks,
    write_network,
    write_start,
)
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


def test_outputs_agree_to_rounding_and_folding_twice_changes_nothing() -> None:
    torch.manual_seed(2)
    norm, plain = nn.BatchNorm2d(8, eps=1e-3), nn.BatchNorm1d(8, affine=False)
    with torch.no_grad():
        for each in (norm.weight, norm.bias, norm.running_mean, plain.running_mean):
            assert isinstance(each, Tensor)
            each.normal_()
        norm.running_var.uniform_(1e-4, 3)  # type: ignore[union-attr]
    untracked = nn.BatchNorm1d(8, track_running_stats=False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Flatten(), plain, untracked).eval()
    before, images = copy.deepcopy(net), torch.randn(5, 3, 3, 3)
    assert fold_normalization(net) == ["1"]
    # The last layer takes any shift away.
    torch.testing.assert_close(net[:4](images), before[:4](images), rtol=1e-5, atol=1e-5)
    after, state = copy.deepcopy(net.state_dict()), before.state_dict()
    changed = {name for name in state if not torch.equal(after[name], state[name])}
    assert changed == {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert not after["1.running_mean"].any()
    assert torch.equal(after["1.running_var"], torch.full((8,), 1 - 1e-3))
    fold_normalization(net)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, after[name], rtol=1e-7, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1.001e-5, 3e-7, 0.0])
def test_what_is_left_is_exactly_a_scale_and_a_shift(eps: float) -> None:
    norm = nn.BatchNorm2d(64, eps=eps).eval()
    norm.running_var.uniform_(0.1, 4)  # type: ignore[union-attr]
    fold_normalization(nn.Sequential(norm))
    images = torch.randn(2, 64, 7, 5)
    weight, bias = (each.detach().double()[:, None, None] for each in (norm.weight, norm.bias))
    expected = images.double() * weight + bias
    torch.testing.assert_close(norm(images).detach(), expected.float(), rtol=1e-7, atol=0)
    assert torch.equal(F.relu(norm(images)) > 0, expected > 0)


def test_layers_that_share_weight_and_bias_are_left() -> None:
    one, other, alone = (nn.BatchNorm1d(4) for _ in range(3))
    other.weight, other.bias = one.weight, one.bias
    net = nn.Sequential(one, nn.ReLU(), other, alone)
    net(torch.randn(16, 4) * 3 + 1)
    before, values = copy.deepcopy(net.eval()), torch.randn(5, 4)
    assert fold_normalization(net) == ["3"]
    torch.testing.assert_close(net(values), before(values))


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
