"""Numbers in 16 bits: which are rounded, and which stay."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from firecaffe.compression.fcz import read
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.attempt import write_network
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.load import Trained
from firecaffe.training.run_facts import NOTHING


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
